"""Prices corrected by a step: pieces timed alone miss what a whole program adds, and what its caches take away.

One small step of the same executor, mesh, schedule and size of microbatch is run, with fewer layers. By as much as it
takes more or less than its own prediction, all prices are scaled. What a step costs beside its tasks grows with layers
and microbatches alike (memory is touched for the first time, caches overflow), so that too small a step misleads: with
2 layers of 16 it was 7% to 17% short, with 2 microbatches of 8 up to 14% long, as it is now within 8%. Two small steps
could tell tasks from their layers, but a line through two noisy points misses a distant third one by several times the
noise.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf

from ppctl.config import Config, Csv, Uniform
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.planner.op_times import Piece, Prices
from ppctl.planner.step_runs import run_steps, time_of
from ppctl.planner.timing import Timing
from ppctl.training.job import Parts, assemble

LEAST_LAYERS, MOST_LAYERS = 2, 8  # of a stage of the small step
SHARE = 4  # between: one layer in four
WAVES = 8  # its microbatches at most, over the ranks


def small_request(parts: Parts) -> Config | None:
    """The request of the small step; None where a smaller one would be another schedule."""
    config, schedule = parts.config, parts.schedule
    if isinstance(config.schedule, Csv):
        return None
    number = min(schedule.num_microbatches, WAVES * schedule.num_ranks)
    rows = parts.model.microbatch["inputs"].shape[0] * config.mesh.dp * config.mesh.fsdp
    sizes = [len(layers) for layers in parts.states.layout.partition]
    if config.executor.name == "reference":
        sizes = [parts.stack.num_layers]
    layers = min(max(LEAST_LAYERS, -(-max(sizes) // SHARE)), MOST_LAYERS)
    return replace(
        config,
        model=replace(config.model, num_layers=len(sizes) * layers),
        schedule=replace(config.schedule, num_microbatches=number),
        data=replace(config.data, batch_size=rows * number),
        partition=Uniform(),
    )


def small_step(parts: Parts) -> dict[str, Timing]:
    """What the small step takes, run here."""
    request = small_request(parts)
    if request is None:
        return {}
    small = assemble(request)
    return {"small": run_steps(small.engine, small)}


def corrected(parts: Parts, prices: Prices, taken: Timing) -> Prices:
    """Prices by which the small step takes what it took, in seconds and, where devices share cores, in CPU seconds.

    `prices` are those of the small step but for once_s and once_cpu_s, which are this request's.
    """
    request = small_request(parts)
    assert request is not None, "it was run"
    small = assemble(request)
    share = _state_bytes(small) / _state_bytes(parts)
    time = time_of(small, prices)
    longer = (taken.wall_s - share * prices.once_s) / time.pipeline_s
    busier = (taken.cpu_s - share * prices.once_cpu_s) / (time.work_s * prices.cores)
    if longer <= 0 or (prices.capacity < inf and busier <= 0):
        return prices  # nothing of the small step is left to its tasks
    scaled = _scaled(prices, longer)
    return scaled if prices.capacity == inf else replace(scaled, cores=prices.cores * busier / longer)


def _state_bytes(parts: Parts) -> int:
    """One device's share of the parameters."""
    return shard_bytes(parts.states.staged["params"])


def _scaled(prices: Prices, factor: float) -> Prices:
    """All prices of tasks and transfers times a factor."""
    pieces = {
        name: Piece(*(getattr(piece, field.name) * factor for field in fields(Piece)))
        for name, piece in (("embed", prices.embed), ("layer", prices.layer), ("head", prices.head))
    }
    return replace(prices, **pieces, task_s=prices.task_s * factor, hop_s=prices.hop_s * factor)
