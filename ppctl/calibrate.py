"""Prices corrected by a step: pieces timed alone miss what a whole program adds, and what its caches take away.

One small step of the same executor, mesh, schedule and size of microbatch is run, with few layers and microbatches. By
as much as it takes more or less than its own prediction, all prices are scaled. Two small steps could tell tasks from
their layers, but a line through two noisy points misses a distant third one by several times the noise.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf

from ppctl.assemble import Parts, assemble
from ppctl.config import Config, Csv, Uniform
from ppctl.plan.prices import Piece, Prices
from ppctl.runtime.memory import shard_bytes
from ppctl.runtime.timing import Taken
from ppctl.step import run_steps, time_of

LAYERS = 2  # of a stage of the small step
WAVES = 2  # its microbatches, over the ranks


def small_request(parts: Parts) -> Config | None:
    """The request of the small step; None where a smaller one would be another schedule."""
    config, schedule = parts.config, parts.schedule
    if isinstance(config.schedule, Csv):
        return None
    number = min(schedule.num_microbatches, WAVES * schedule.num_ranks)
    rows = parts.model.microbatch["inputs"].shape[0] * config.mesh.dp * config.mesh.fsdp
    stages = 1 if config.executor.name == "reference" else schedule.num_stages
    return replace(
        config,
        model=replace(config.model, num_layers=stages * LAYERS),
        schedule=replace(config.schedule, num_microbatches=number),
        data=replace(config.data, batch_size=rows * number),
        partition=Uniform(),
    )


def small_step(parts: Parts) -> dict[str, Taken]:
    """What the small step takes, run here."""
    request = small_request(parts)
    if request is None:
        return {}
    small = assemble(request)
    return {"small": run_steps(small.engine, small)}


def corrected(parts: Parts, prices: Prices, taken: Taken) -> Prices:
    """Prices by which the small step takes what it took.

    `prices` are those of the small step but for once_s and once_cpu_s, which are this request's. Simulated devices
    share cores: there CPU seconds are compared, else seconds.
    """
    request = small_request(parts)
    assert request is not None, "it was run"
    small = assemble(request)
    share = _state_bytes(small) / _state_bytes(parts)
    time = time_of(small, prices)
    if prices.capacity == inf:
        return _scaled(prices, (taken.wall_s - share * prices.once_s) / time.pipeline_s)
    return _scaled(prices, (taken.cpu_s - share * prices.once_cpu_s) / (time.work_s * prices.cores))


def _state_bytes(parts: Parts) -> int:
    """One device's share of the parameters."""
    return shard_bytes(parts.states.staged["params"])


def _scaled(prices: Prices, factor: float) -> Prices:
    """All prices of tasks and transfers times a factor; as they are where none of the small step is left to them."""
    if factor <= 0:
        return prices
    pieces = {
        name: Piece(*(getattr(piece, field.name) * factor for field in fields(Piece)))
        for name, piece in (("embed", prices.embed), ("layer", prices.layer), ("head", prices.head))
    }
    return replace(prices, **pieces, task_s=prices.task_s * factor, hop_s=prices.hop_s * factor)
