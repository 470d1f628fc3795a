"""The partition that `ppctl plan` proposes: faster by simulation, and it fits in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.tree_bytes import tree_bytes
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.cut_layers import improved
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.pipeline import Pipeline

Tree = Any
LARGEST_RATIO = 0.99  # of the requested partition's time: a proposal is at least 1% faster
TASKS_SIMULATED = 2_000_000  # by all simulations together, a few CPU seconds each million
MOST_SIMULATIONS = 1000
MOST_MOVES = 20_000  # towards a partition that fits


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
    # 1. a partition that fits: the balanced one, or the nearest to it by moves of layers
    over_bytes = _over_bytes(pipe, limit_bytes)

    def fits(partition: Partition) -> bool:
        return over_bytes(partition) == 0

    first = pipe.relative_costs.balanced(schedule.rank_of)
    if not fits(first):
        first = improved(first, over_bytes, max_tried=MOST_MOVES)
    starts = [each for each in (requested, first) if fits(each)]
    if not starts:
        return None
    # 2. the fastest that fits
    seconds = _makespan(pipe)
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


def _over_bytes(pipe: Pipeline, limit_bytes: int | None) -> Callable[[Partition], float]:
    """Return a function: the bytes of a partition above the limits of all ranks of executor=mpmd.

    Counted are the state of layers, embedding and head, and the stashes in flight.
    """
    if limit_bytes is None or not pipe.execution.dispatches_tasks:
        return lambda partition: 0.0
    model, shards, state = pipe.model, pipe.mesh.shape["fsdp"], pipe.states.natural
    moments = tree_bytes(state["optimizer"]) / tree_bytes(state["params"])

    def held(tree: Tree) -> float:
        computed = sum(a.size for a in jax.tree.leaves(tree)) * jnp.dtype(model.dtype).itemsize
        return float(round(tree_bytes(tree) * (1 + moments) / shards) + computed + tree_bytes(tree))

    stash, layer = tree_bytes(model.stage.stash_shapes([model.layer])), held(model.layer)
    of_layers = [layer + number * stash for number in in_flight(pipe.schedule)]
    embed, head = (held(model.keep(model.embed_head, used)) for used in model.uses)

    def over_bytes(partition: Partition) -> float:
        sizes = [len(held) * each for held, each in zip(partition, of_layers, strict=True)]
        sizes[0] += embed
        sizes[-1] += head
        of_ranks = (sum(sizes[s] for s in stages) for stages in pipe.schedule.stages_of)
        return sum(max(0.0, size - limit_bytes) for size in of_ranks)

    return over_bytes


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
