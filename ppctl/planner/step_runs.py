"""A step of a request: what it takes by given prices, and what it takes when it is run."""

from __future__ import annotations

import statistics
import time

import jax

from ppctl.planner.op_times import Prices, StepTime, stage_costs, step_time
from ppctl.planner.step_timeline import step_timeline
from ppctl.planner.timing import Timing
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.partition.partition import stage_costs as stage_worth
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulate import Timeline
from ppctl.training.engines import Engine
from ppctl.training.job import Parts, relative_costs_of

STEPS = 5  # that are timed, after one that warms up


def time_of(parts: Parts, prices: Prices) -> StepTime:
    """Seconds of a train step by these prices."""
    if parts.config.executor.name == "reference":
        alone = build("gpipe", 1, parts.config.schedule.num_microbatches)
        return step_time(prices, alone, None, stage_costs(prices, [parts.stack.num_layers], keeps_input=False), 1)
    return step_time(prices, parts.schedule, parts.ticks, *as_run(parts, prices), masked=_is_masked(parts))


def timeline_of(parts: Parts, prices: Prices) -> Timeline:
    """When each task of a step runs, as `time_of` prices it; what runs once stands outside. Not of the reference."""
    return step_timeline(prices, parts.schedule, parts.ticks, *as_run(parts, prices), masked=_is_masked(parts))


def as_run(parts: Parts, prices: Prices) -> tuple[Costs, int]:
    """The costs of each stage's tasks, and how many pipelines run at the same time."""
    partition, mesh = parts.states.layout.partition, parts.config.mesh
    layers = None if parts.stack.are_alike else relative_costs_of(parts.config, parts.stack, parts.data).layers
    sizes = stage_worth(partition, embed=0.0, head=0.0, layers=layers)
    keeps_input = Remat.of(parts.config.executor.remat).keeps_input_only
    return stage_costs(prices, sizes, keeps_input=keeps_input, split=parts.schedule.is_split), mesh.dp * mesh.fsdp


def _is_masked(parts: Parts) -> bool:
    return parts.ticks is not None and parts.config.executor.idle == "compute"


def run_steps(engine: Engine, parts: Parts, count: int = STEPS) -> Timing:
    """Medians of `count` train steps; compiles."""
    engine.compile(evaluate=False)
    state, batch = engine.new_state(), engine.put(next(parts.data.batches()))
    taken = []
    for _ in range(count + 1):
        cpu, wall = time.process_time(), time.perf_counter()
        state, _ = running = engine.step(state, batch)
        jax.block_until_ready(running)
        taken.append(Timing(time.perf_counter() - wall, time.process_time() - cpu))
    return Timing(*map(statistics.median, zip(*taken[1:], strict=True)))
