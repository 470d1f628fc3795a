"""`tune.schedules=[auto]`: schedules searched for the best layouts of families, in the memory that there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ppctl import config as settings
from ppctl.config import Config
from ppctl.errors import ConfigError, ScheduleError
from ppctl.model.stack import Stack
from ppctl.planner.as_planned import Planned, predicted_of, request_of, request_with, with_prediction
from ppctl.planner.candidate import Candidate
from ppctl.planner.memory import GIB
from ppctl.planner.predict import JobPrediction
from ppctl.planner.searched_schedule import SearchedSchedule
from ppctl.planner.step_runs import as_run
from ppctl.planner.step_time import layout_of, op_times_of
from ppctl.schedule.remat import Remat
from ppctl.training.job import TrainingJob

AUTO = settings.Auto().name
NUM_LAYOUTS = 2  # whose schedule is searched: each takes tens of CPU seconds
NUM_CAPS = 3  # tried for one: where a schedule needs more than there is, as planned, the next has as much less
DIGITS = 5  # of a cap, as one types it


def with_searched(
    config: Config, stack: Stack, rows: Sequence[Planned], limit_bytes: int
) -> tuple[list[Planned], tuple[SearchedSchedule, ...]]:
    """Return the searched schedules that fit, as layouts, and what was found for each layout that was asked.

    rows: layouts of families that fit, fastest first. Of those with a pipeline the first few are asked, one of each
    number of ranks and microbatches and each remat. A schedule no better than one of the rows is no layout of its own.
    """
    asked: dict[tuple[int, int, str], Candidate] = {}
    for row, _ in rows:
        if row.mesh.pp > 1:
            asked.setdefault((row.mesh.pp, row.num_microbatches, row.remat), row)
    found = list[SearchedSchedule]()
    more = list[Planned]()
    for layout in list(asked.values())[:NUM_LAYOUTS]:
        planned, searched = _searched(config, stack, layout, limit_bytes, rows[0][0])
        found.append(searched)
        if planned is not None and not any(planned[0].is_like(row) for row, _ in rows):
            more.append(planned)
    return more, tuple(found)


def _searched(
    config: Config, stack: Stack, layout: Candidate, limit_bytes: int, best: Candidate
) -> tuple[Planned | None, SearchedSchedule]:
    """Return the searched schedule of a layout, None where there is none that fits, and what was found."""
    said = SearchedSchedule(layout, best)
    if not config.executor.IN_TICKS and "whole" in (config.tune.vocab or ("whole",)):
        layout = replace(layout, vocab="whole")  # under a cap, ranks that run freely wait for the others' parts
    cap_bytes = limit_bytes - _temporaries(config, stack, layout)
    for _ in range(NUM_CAPS):
        cap_gib = _rounded_down(cap_bytes / GIB)
        if cap_gib <= 0:
            return None, replace(said, why_not="its temporaries leave no room for a schedule.")
        schedule = settings.Auto(
            num_microbatches=layout.num_microbatches, max_memory_gib=cap_gib, max_chunks=config.tune.max_chunks
        )
        try:
            request = request_with(config, layout, schedule, settings.Balanced())
            job, predicted = predicted_of(request, stack)
        except (ConfigError, ScheduleError) as error:
            return None, replace(said, why_not=str(error))
        found = _candidate(layout, job, predicted)
        if found.total_bytes <= limit_bytes:
            return (found, request), replace(said, found=found, choice=job.choice)
        held_bytes = job.choice.held_bytes if job.choice is not None else None
        assert held_bytes is not None, "bytes are capped"
        cap_bytes = held_bytes - (found.total_bytes - limit_bytes)
    return None, replace(
        said, why_not=f"as planned it needs more than there is, with each of the {NUM_CAPS} caps that were tried."
    )


def _temporaries(config: Config, stack: Stack, layout: Candidate) -> int:
    """Return what a layout's tasks need in addition to what ranks hold, on the rank where that is most.

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
    pipe, before = job.pipe, layout.time
    op_times = op_times_of(job, job.config.costs)
    costs, _ = as_run(pipe, op_times)
    partition = tuple(map(len, pipe.partition))
    found = with_prediction(
        replace(
            layout,
            family=AUTO,
            num_chunks=pipe.schedule.num_chunks,
            partition=partition,
            rank_of=tuple(pipe.schedule.rank_of),
            stage_s=tuple(tuple(costs.seconds(kind, s, 1) for kind in "FBIW") for s in range(len(partition))),
        ),
        predicted,
    )
    again_s = Remat.of(layout.remat).recomputed_layers(partition) * op_times.layer.forward_s
    recomputed = again_s * layout.num_microbatches * layout_of(pipe).rank_devices / found.time.tasks_s
    sent = layout.sent_fraction * before.tasks_s / found.time.tasks_s  # by the same layers
    return replace(found, recomputed_fraction=recomputed, sent_fraction=sent)
