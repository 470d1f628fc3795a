"""The partition that `ppctl plan` proposes: faster by simulation, and it fits in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.executors.tree_bytes import tree_bytes
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.cut_layers import cut, improved
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.partition.partition_costs import Layers, Memory, fitting
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.pipeline import Pipeline

Tree = Any
LARGEST_RATIO = 0.99  # of the requested partition's time: a proposal is at least 1% faster
TASKS_SIMULATED = 2_000_000  # by all simulations together, a few CPU seconds each million
MOST_SIMULATIONS = 1000


@dataclass(frozen=True)
class Proposal:
    """A partition and its time over the requested one's; above 1 only where that does not fit."""

    partition: tuple[int, ...]  # layers of each stage
    time_ratio: float


def propose(pipe: Pipeline, limit_bytes: int | None) -> Proposal | None:
    """Return the fastest partition found, if 1% faster than the requested one, or if only it fits.

    Costs of layers, embedding and head are their FLOPs; memory counts with executor=mpmd, where it
    differs by rank. None if nothing is better, or a simulation would take too long.
    """
    schedule, requested = pipe.schedule, pipe.partition
    most = min(MOST_SIMULATIONS, TASKS_SIMULATED // sum(map(len, schedule.ranks)))
    if not pipe.execution.is_pipelined or not most:
        return None
    relative = pipe.relative_costs
    layers = Layers(relative.layers, embed_s=relative.embed, head_s=relative.head)
    memory, fits = None, lambda _: True
    if limit_bytes is not None and pipe.execution.dispatches_tasks:
        layers, memory = _with_memory(pipe, layers, limit_bytes)
        fits = fitting(layers, schedule.rank_of, memory)
    try:
        first = cut(layers, schedule.rank_of, memory)
    except ConfigError:
        return None  # nothing fits
    seconds = _makespan(pipe)
    starts = [p for p in (requested, first) if fits(p)]
    best = improved(min(starts, key=seconds), seconds, max_tried=most, fits=fits)
    ratio = seconds(best) / seconds(requested)
    if ratio > LARGEST_RATIO and fits(requested):
        return None
    return Proposal(tuple(map(len, best)), ratio)


def _makespan(pipe: Pipeline) -> Callable[[Partition], float]:
    """Return a function: the makespan of a partition, in units of a forward through a layer."""
    costs, ticks, schedule = pipe.task_costs, pipe.ticks, pipe.schedule
    relative = pipe.relative_costs

    def seconds(partition: Partition) -> float:
        units = relative.of_stages(partition)
        each = [[costs.seconds(kind, 0, 1) * n for n in units] for kind in "FIW"]
        of_stages = Costs(tuple(each[0]), tuple(each[1]), tuple(each[2]))
        if ticks is not None:
            return ticks.makespan_s(of_stages)
        return simulate(schedule, of_stages).makespan_s

    return seconds


def _with_memory(pipe: Pipeline, layers: Layers, limit_bytes: int) -> tuple[Layers, Memory]:
    """Return layers with their bytes on an executor=mpmd rank, and the stashes in flight."""
    model, shards, state = pipe.model, pipe.mesh.shape["fsdp"], pipe.states.natural
    moments = tree_bytes(state["optimizer"]) / tree_bytes(state["params"])

    def held(tree: Tree) -> float:
        computed = sum(a.size for a in jax.tree.leaves(tree)) * jnp.dtype(model.dtype).itemsize
        return float(round(tree_bytes(tree) * (1 + moments) / shards) + computed + tree_bytes(tree))

    stash = tree_bytes(model.stage.stash_shapes([model.layer]))
    n = layers.num_layers
    embed, head = (model.keep(model.embed_head, used) for used in model.uses)
    layers = replace(
        layers,
        layer_bytes=(held(model.layer),) * n,
        activation_bytes=(float(stash),) * n,
        embed_bytes=held(embed),
        head_bytes=held(head),
    )
    return layers, Memory((float(limit_bytes),) * pipe.schedule.num_ranks, in_flight(pipe.schedule))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return each stage's number of microbatches in flight at the peak of its rank.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> in_flight(one_f_one_b(3, 8))
    (3, 2, 1)
    """
    most: dict[int, int] = {}
    for tasks in schedule.ranks:
        live: Counter[int] = Counter()
        peak = 0
        for task in tasks:
            live[task.stage] += {"F": 1, "I": 0}.get(task.kind, -1)
            if live.total() > peak:
                peak = live.total()
                most |= live
    return tuple(most.get(stage, 0) for stage in range(schedule.num_stages))
