"""One rank's ticks of executor=spmd on one device: the program that it runs in the pipeline, with nothing sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from ppctl.executors.mpmd.rank import RankRole
from ppctl.executors.spmd.program import rank_arrays, spmd_of_rank
from ppctl.planner.rank_on_device import RankTimes, staged_layers
from ppctl.planner.stand_ins import alone
from ppctl.planner.timing import Timing, median, random_like, timed_at_once
from ppctl.schedule.ticks import Ticks
from ppctl.training.engines.make import tick_options
from ppctl.training.job import TrainingJob


def time_in_ticks(
    job: TrainingJob, rank: int, here: RankRole, batch: Mapping[str, Any], runs: int, copies: int
) -> Timing:
    """Return the seconds of the rank's ticks when so many copies of it run at the same time; medians."""
    pipe, model = job.pipe, job.pipe.model
    assert pipe.ticks is not None, "executor=spmd runs in ticks"
    device = pipe.mesh.devices.flat[0]
    params = jax.device_put(random_like({"ends": model.ends, "layers": staged_layers(model, here)}), device)
    arguments = (params, jax.device_put(dict(batch), device), *rank_arrays(pipe.layout, pipe.ticks, rank))
    options = tick_options(pipe.layout, pipe.execution, model.dtype)
    function = alone(spmd_of_rank(model.stack, pipe.layout, pipe.ticks, options), model.axes)
    program = jax.jit(function).lower(*arguments).compile(dict(pipe.execution.xla_flags) or None)
    calls = [lambda: program(*arguments)] * copies
    return median([timed_at_once(calls) for _ in range(runs + 1)][1:])


def in_ticks(times: RankTimes, whole: Timing, ticks: Ticks, *, is_masked: bool) -> RankTimes:
    """Return the times of a rank whose ticks take `whole`; its tasks as long as they are to each other.

    is_masked: ranks compute in ticks without a task, too (executor.idle=compute).
    """
    ran_s = _masked_s(times, ticks) if is_masked else times.tasks.wall_s
    task_s = {which: seconds * whole.wall_s / ran_s for which, seconds in times.task_s.items()}
    return replace(times, tasks=whole, task_s=task_s)


def _masked_s(times: RankTimes, ticks: Ticks) -> float:
    """Return the seconds of all that a rank computes where every tick has a forward, a backward or both."""
    kinds = {kind: [s for (_, its), s in times.task_s.items() if its == kind] for kind in ("F", "B")}
    each = {kind: sum(seconds) / max(1, len(seconds)) for kind, seconds in kinds.items()}
    segments = ticks.segments(apart=True)
    return sum((at.stop - at.start) * (f * each["F"] + b * each["B"]) for at, f, b in segments)
