"""A step of a request: what it takes by given prices, and what it takes when it is run."""

from __future__ import annotations

import statistics
import time

import jax

from ppctl.assemble import Parts
from ppctl.engine import Engine
from ppctl.plan.prices import Prices, StepTime, stage_costs, step_time
from ppctl.runtime.timing import Taken
from ppctl.schedule.registry import build

STEPS = 5  # that are timed, after one that warms up


def time_of(parts: Parts, prices: Prices) -> StepTime:
    """Seconds of a train step by these prices."""
    config, sizes = parts.config, [len(layers) for layers in parts.states.layout.partition]
    if config.executor.name == "reference":
        alone = build("gpipe", 1, config.schedule.num_microbatches)
        return step_time(prices, alone, None, stage_costs(prices, [sum(sizes)], keeps_input=False), copies=1)
    costs = stage_costs(prices, sizes, keeps_input=config.executor.remat == "full", split=is_split(parts))
    masked = parts.ticks is not None and config.executor.idle == "compute"
    return step_time(prices, parts.schedule, parts.ticks, costs, config.mesh.dp * config.mesh.fsdp, masked=masked)


def is_split(parts: Parts) -> bool:
    """Whether the schedule splits backwards into I and W."""
    return any(task.kind == "I" for tasks in parts.schedule.ranks for task in tasks)


def run_steps(engine: Engine, parts: Parts, count: int = STEPS) -> Taken:
    """Medians of `count` train steps; compiles."""
    engine.compile(evaluate=False)
    state, batch = engine.new_state(), engine.put(next(parts.data.batches()))
    taken = []
    for _ in range(count + 1):
        cpu, wall = time.process_time(), time.perf_counter()
        state, _ = running = engine.step(state, batch)
        jax.block_until_ready(running)
        taken.append(Taken(time.perf_counter() - wall, time.process_time() - cpu))
    return Taken(*map(statistics.median, zip(*taken[1:], strict=True)))
