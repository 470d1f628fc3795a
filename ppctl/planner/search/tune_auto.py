"""`tune.schedules=[auto]`: schedules searched, within memory, for the families' best layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppctl import config as settings
from ppctl.config import Config
from ppctl.errors import ConfigError, ScheduleError
from ppctl.model.stack import Stack
from ppctl.planner.cost.predict_step import JobPrediction
from ppctl.planner.cost.rank_memory import GIB
from ppctl.planner.cost.step_time import as_run, layout_of, op_times_of
from ppctl.planner.search.layout_candidate import Candidate, stage_seconds
from ppctl.planner.search.planned_layouts import (
    Planned,
    predicted_of,
    request_of,
    request_with,
    with_prediction,
)
from ppctl.schedule.remat import Remat
from ppctl.schedule.search.auto_choice import NO_GAP, Choice
from ppctl.training.pipeline.job import TrainingJob

AUTO = settings.Auto().name
NUM_LAYOUTS = 2  # whose schedule is searched: each takes tens of CPU seconds
# tried for one: where a schedule needs more than there is, as planned, the next has as much less
NUM_CAPS = 3
DIGITS = 5  # of a cap, as one types it


@dataclass(frozen=True)
class SearchedSchedule:
    """The result of schedule=auto for a family's layout: its layout and choice, or why none."""

    layout: Candidate
    best: Candidate  # of the layouts of families, which it is compared with
    found: Candidate | None = None
    choice: Choice | None = None
    why_not: str | None = None

    @property
    def text(self) -> str:
        """The step, the gain, and the gap to the bound, in a line."""
        about = f"schedule=auto, {words_of(self.layout, schedule='')}"
        if self.found is None or self.choice is None:
            return f"{about}: {self.why_not}"
        saved, gain = self.saved_s / self.best.time.total_s, "no shorter than"
        if saved > NO_GAP:
            gain = f"{self.saved_s:.4g} s ({saved:.1%}) shorter than"
        has_parts = self.found.vocab == "parallel"
        order = "With embedding and head whole its order is" if has_parts else "It is"
        best = f"the best layout of a family ({words_of(self.best)})"
        found = f"{self.found.time.total_s:.4g} s, {gain} {best}. {order} {self.choice.summary}"
        return f"{about}: {found}."

    @property
    def saved_s(self) -> float:
        """The seconds by which the step is shorter."""
        assert self.found is not None, "there is something to compare"
        return self.best.time.total_s - self.found.time.total_s


def words_of(layout: Candidate, schedule: str | None = None) -> str:
    """Return mesh, schedule (that of the layout by default), microbatches and remat of a layout."""
    family = "" if layout.mesh.pp == 1 else f" {layout.family}"
    mesh = settings.Mesh(*layout.mesh).text
    schedule = family if schedule is None else schedule
    return f"mesh={mesh}{schedule}, {layout.num_microbatches} microbatches, remat={layout.remat}"


def with_searched(
    config: Config, stack: Stack, rows: Sequence[Planned], limit_bytes: float
) -> tuple[list[Planned], tuple[SearchedSchedule, ...]]:
    """Return (layouts with searched schedules that fit, the results of all searches).

    rows: layouts of families that fit, fastest first. Searched are the first few with a pipeline,
    one for each number of ranks and microbatches and each remat. A schedule no better than one of
    the rows is left out.
    """
    bases: dict[tuple[int, int, str], Candidate] = {}
    for row, _ in rows:
        if row.mesh.pp > 1:
            bases.setdefault((row.mesh.pp, row.num_microbatches, row.remat), row)
    found, more = list[SearchedSchedule](), list[Planned]()
    for layout in list(bases.values())[:NUM_LAYOUTS]:
        planned, searched = _searched(config, stack, layout, limit_bytes, rows[0][0])
        found.append(searched)
        if planned is not None and not any(planned[0].is_like(row) for row, _ in rows):
            more.append(planned)
    return more, tuple(found)


def _searched(
    config: Config, stack: Stack, layout: Candidate, limit_bytes: float, best: Candidate
) -> tuple[Planned | None, SearchedSchedule]:
    """Return a layout's searched schedule (None if none fits) and what was found."""
    # 1. the cap on memory: the limit without temporaries
    result, most_chunks = SearchedSchedule(layout, best), config.tune.max_chunks
    if not config.executor.IN_TICKS and "whole" in (config.tune.vocab or ("whole",)):
        # under a cap, ranks that run freely wait for the others' parts
        layout = replace(layout, vocab="whole")
    cap_bytes = limit_bytes - _temporaries(config, stack, layout)

    # 2. search; if the found schedule is too large as planned, lower the cap by the excess
    for _ in range(NUM_CAPS):
        cap_gib = _rounded_down(cap_bytes / GIB)
        if cap_gib <= 0:
            return None, replace(result, why_not="its temporaries leave no room for a schedule.")
        schedule = settings.Auto(max_memory_gib=cap_gib, max_chunks=most_chunks)
        schedule = replace(schedule, num_microbatches=layout.num_microbatches)
        try:
            request = request_with(config, layout, schedule, settings.Balanced())
            job, predicted = predicted_of(request, stack)
        except (ConfigError, ScheduleError) as error:
            return None, replace(result, why_not=str(error))
        found = _candidate(layout, job, predicted)
        if found.total_bytes <= limit_bytes:
            return (found, request), replace(result, found=found, choice=job.choice)
        held_bytes = job.choice.held_bytes if job.choice is not None else None
        assert held_bytes is not None, "bytes are capped"
        cap_bytes = held_bytes - (found.total_bytes - limit_bytes)
    why_not = f"no schedule found fits as planned ({NUM_CAPS} memory caps tried)."
    return None, replace(result, why_not=why_not)


def _temporaries(config: Config, stack: Stack, layout: Candidate) -> int:
    """Return what a layout's tasks need in addition to what ranks hold, on the rank where that is
    most.

    The update, when all that microbatches hold is gone, takes no room from the tasks.
    """
    _, found = predicted_of(request_of(config, layout), stack)
    return max(of_rank.get("temporaries", 0) for of_rank in found.memory)


def _rounded_down(number: float) -> float:
    """Return a number with a few digits, no larger.

    >>> _rounded_down(59.328173), _rounded_down(0.0012345678)
    (59.328, 0.0012345)
    """
    if number <= 0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(number))
    return math.floor(number * 10**digits) / 10**digits


def _candidate(layout: Candidate, job: TrainingJob, predicted: JobPrediction) -> Candidate:
    """Return the layout with the schedule that was found."""
    pipe, schedule, partition = job.pipe, job.pipe.schedule, tuple(map(len, job.pipe.partition))
    op_times = op_times_of(job)
    costs, _ = as_run(pipe, op_times)
    found = replace(
        with_prediction(layout, predicted),
        family=AUTO,
        num_chunks=schedule.num_chunks,
        partition=partition,
        rank_of=tuple(schedule.rank_of),
        stage_s=stage_seconds(costs, len(partition)),
    )
    again_s = Remat.of(layout.remat).recomputed_layers(partition) * op_times.layer.forward_s
    all_s = again_s * layout.num_microbatches * layout_of(pipe).rank_devices
    return replace(found, recomputed_fraction=all_s / found.time.tasks_s)
