"""The time of a pipeline's step: by given op times, and measured."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ppctl.planner.cost.op_times import OpTimes, StepTime, costs_of_stages, step_time
from ppctl.planner.cost.piece_timing import Timing, median, timed
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import BASELINE, build
from ppctl.schedule.partition.partition import stage_costs
from ppctl.schedule.simulator import Timeline
from ppctl.schedule.timeline import timeline_at
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.pipeline import Pipeline

STEPS = 5  # that are timed, after one that warms up


def time_of(pipe: Pipeline, op_times: OpTimes, costs: Costs | None = None) -> StepTime:
    """Return the seconds of a train step; costs: of the stages' tasks, None: by op_times."""
    if not pipe.execution.is_pipelined:
        alone = build(BASELINE, 1, pipe.schedule.num_microbatches)
        whole = costs_of_stages(op_times, [pipe.stack.num_layers], keeps_input=False)
        return step_time(op_times, alone, None, whole, 1)
    return step_time(op_times, pipe.schedule, pipe.ticks, *as_run(pipe, op_times, costs))


def timeline_of(pipe: Pipeline, op_times: OpTimes, costs: Costs | None = None) -> Timeline:
    """Return when each task of a step runs, by the rules of `time_of`, without per-step overhead.

    Not for executor=reference, which has no stages.
    """
    of_stages, copies = as_run(pipe, op_times, costs)
    return timeline_at(pipe.schedule, pipe.ticks, of_stages, op_times.capacity / copies)


def as_run(pipe: Pipeline, op_times: OpTimes, costs: Costs | None = None) -> tuple[Costs, int]:
    """Return (costs of each stage's tasks, those given if any; number of a rank's devices)."""
    copies = pipe.mesh.size // pipe.mesh.shape["pp"]
    if costs is not None:
        return costs, copies
    layers, schedule = None if pipe.stack.are_alike else pipe.relative_costs.layers, pipe.schedule
    sizes = stage_costs(pipe.partition, embed=0.0, head=0.0, layers=layers)
    how = {"split": schedule.is_split, "num_parts": schedule.num_parts}
    keeps_input = pipe.execution.remat.keeps_input_only
    return costs_of_stages(op_times, sizes, keeps_input=keeps_input, **how), copies


def examples_of_device(job: TrainingJob) -> dict[str, jax.Array]:
    """Return a device's share of a batch of the job's data: {"inputs", "targets"}."""
    model = job.pipe.model
    number = model.num_microbatches * model.microbatch["inputs"].shape[0]
    batch = next(job.data.batches(rows=range(number)))
    return {name: jnp.asarray(batch[name], a.dtype) for name, a in model.microbatch.items()}


def run_steps(job: TrainingJob, count: int = STEPS) -> Timing:
    """Return the medians of `count` train steps on a batch of the job's data; compiles."""
    engine = job.pipe.engine
    engine.compile(evaluate=False)
    state, batch = engine.new_state(), engine.put(next(job.data.batches()))
    measured = []
    for _ in range(count + 1):
        (state, _), seconds = timed(partial(engine.step, state, batch))
        measured.append(seconds)
    return median(measured[1:])


def out_of_memory(error: Exception) -> str | None:
    """Return how a compiler or device reports too little memory; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    return " ".join(str(error).split("\n")[0].split()).removeprefix("RESOURCE_EXHAUSTED: ")
