"""The step of a run, rank by rank: when each task ran if that was measured, and its simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.config import Schedule as Settings
from ppctl.config.schedule_from_config import Pipeline
from ppctl.errors import PpctlError
from ppctl.reports import measured_timeline_file as timelines
from ppctl.reports.charts.html_charts import charts_html
from ppctl.reports.charts.schedule_drawing import Drawing, drawing_of_timeline
from ppctl.schedule.ir import Schedule
from ppctl.schedule.timeline import timeline_at

MOST_TASKS = 150_000  # 64 ranks of 2 chunks, 512 microbatches: 3 MB, measured and predicted
HOW = (
    "Not measured. With executor=mpmd, run.timeline=true times every task of one step; with "
    "executor=spmd, run.profile=N traces them."
)
UNITS = "Ideal: stages that all cost the same; a forward through 1/p of the model counts as 1 s."
MEANS = (
    "The simulation takes each stage's measured means, so the difference is order, transfers and "
    "waits."
)
LOCKSTEP = "Simulated: ticks in lockstep, each as long as its slowest rank."


class Picture(NamedTuple):
    """Charts below each other on one time axis, or none; and notes."""

    drawings: Sequence[Drawing]
    notes: Sequence[str]

    @property
    def html(self) -> str:
        """Return the notes, and the charts below them."""
        return charts_html(self.drawings, self.notes)


def picture(run_dir: Path, pipeline: Pipeline | str) -> Picture:
    """Return the step of a run; `pipeline`: by its settings, or why that is unknown."""
    notes: list[str] = []
    measured = _timed(run_dir, pipeline, notes) or _traced(run_dir, pipeline, notes)
    if measured:
        return Picture(measured, notes)
    if isinstance(pipeline, str):
        return Picture((), [*notes, pipeline])
    timeline = timeline_at(pipeline.schedule, pipeline.ticks, pipeline.costs)
    notes += [HOW, UNITS] if pipeline.ticks is None else [HOW, UNITS, LOCKSTEP]
    return Picture([drawing_of_timeline(f"{pipeline.label}, ideal", timeline)], notes)


def too_large(schedule: Settings, num_ranks: int) -> str | None:
    """Return the line in place of a chart of too many tasks, else None; from settings only."""
    num_chunks = getattr(schedule, "num_chunks", 2 * getattr(schedule, "num_waves", 1))
    number = schedule.num_microbatches
    if 3 * num_ranks * number * max(1, num_chunks // 2) <= MOST_TASKS:
        return None
    size = f"{num_ranks} ranks, {number:,} microbatches"
    return f"Too large to be drawn here: {size}. Use `ppctl schedule show ... --out step.html`."


def _timed(run_dir: Path, pipeline: Pipeline | str, notes: list[str]) -> Sequence[Drawing]:
    """Return the step that run.timeline measured, and its simulation."""
    file = run_dir / "timeline" / timelines.FILES[0]
    if not file.is_file():
        return ()
    label = "the schedule" if isinstance(pipeline, str) else pipeline.label
    try:
        timeline = timelines.read_timeline(file, label)
    except (OSError, ValueError, PpctlError) as error:
        notes.append(f"{file} cannot be drawn: {_line(error)}.")
        return ()
    if not _is_small(timeline.schedule, file.with_name(timelines.FILES[2]), notes):
        return ()
    notes += ["Measured: one step (run.timeline=true).", MEANS]
    return timelines.measured_and_simulated(timeline)


def _traced(run_dir: Path, pipeline: Pipeline | str, notes: list[str]) -> Sequence[Drawing]:
    """Return a step that the profiler traced, and its simulation."""
    file = run_dir / "profile" / timelines.TASKS_FILE
    if isinstance(pipeline, str) or pipeline.ticks is None or not file.is_file():
        return ()
    if not _is_small(pipeline.schedule, file, notes):
        return ()
    try:
        timeline, num_steps = timelines.read_profile(file, pipeline.schedule)
    except (OSError, ValueError, PpctlError) as error:
        notes.append(f"{file} cannot be drawn: {_line(error)}.")
        return ()
    which = "one traced step" if num_steps == 1 else f"the median one of {num_steps} traced steps"
    measured = f"Measured: {which} (run.profile=N), on the first device of each rank."
    notes += [measured, LOCKSTEP, MEANS]
    return timelines.measured_and_simulated(timeline, pipeline.ticks, pipeline.label)


def _is_small(schedule: Schedule, file: Path, notes: list[str]) -> bool:
    num_tasks = sum(map(len, schedule.ranks))
    if num_tasks > MOST_TASKS:
        notes.append(f"Measured, but too large to be drawn here ({num_tasks:,} tasks): see {file}.")
    return num_tasks <= MOST_TASKS


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
