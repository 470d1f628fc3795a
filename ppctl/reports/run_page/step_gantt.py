"""The step of a run, rank by rank: when each task ran if that was measured, and its simulation."""

from collections.abc import Sequence
from pathlib import Path

from ppctl.config.schedule_from_config import Pipeline
from ppctl.errors import PpctlError
from ppctl.reports import measured_timeline_file as timelines
from ppctl.reports.charts.html_charts import charts_html, too_many_tasks
from ppctl.reports.charts.schedule_drawing import Drawing, drawing_of_timeline
from ppctl.schedule.simulator import timeline_at

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


def step_html(run_dir: Path, pipeline: Pipeline | str) -> str:
    """Return the step of a run: charts below each other on one time axis, or none; and notes.

    pipeline: by the run's settings, or why that is unknown.
    """
    notes: list[str] = []
    measured = _measured(run_dir, pipeline, notes)
    if measured:
        return charts_html(measured, notes)
    if isinstance(pipeline, str):
        return charts_html((), [*notes, pipeline])
    if reason := too_many_tasks(sum(map(len, pipeline.schedule.ranks))):
        return charts_html((), [*notes, reason])
    timeline = timeline_at(pipeline.schedule, pipeline.ticks, pipeline.costs)
    notes += [HOW, UNITS] if pipeline.ticks is None else [HOW, UNITS, LOCKSTEP]
    return charts_html([drawing_of_timeline(f"{pipeline.label}, ideal", timeline)], notes)


def _measured(run_dir: Path, pipeline: Pipeline | str, notes: list[str]) -> Sequence[Drawing]:
    """Return the step that run.timeline measured or the profiler traced, and its simulation."""
    timed = run_dir / "timeline" / timelines.FILES[0]
    traced = run_dir / "profile" / timelines.TASKS_FILE
    label = "the schedule" if isinstance(pipeline, str) else pipeline.label
    for file in filter(Path.is_file, (timed, traced)):
        ticks, explained = None, [MEANS]
        try:
            if file == timed:
                timeline, which = timelines.read_timeline(file, label), "one step"
                how = "run.timeline=true"
            elif isinstance(pipeline, str) or pipeline.ticks is None:
                continue
            else:
                timeline, num_steps = timelines.read_profile(file, pipeline.schedule)
                which = f"the median one of {num_steps} traced steps, first device of each rank"
                how, ticks, explained = "run.profile=N", pipeline.ticks, [LOCKSTEP, MEANS]
        except (OSError, ValueError, PpctlError) as error:
            line = str(error).partition("\n")[0].rstrip(".")
            notes.append(f"{file} cannot be drawn: {line}.")
            continue
        if reason := too_many_tasks(len(timeline.start_s)):
            notes.append(f"{reason} It is in {file.parent}.")
            continue
        notes += [f"Measured: {which} ({how}).", *explained]
        return timelines.measured_and_simulated(timeline, ticks, label)
    return ()
