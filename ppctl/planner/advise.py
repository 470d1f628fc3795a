"""The partition that `ppctl plan` proposes: it takes less time, by simulation, and fits where memory is limited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.cut import cut, improved
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.partition.work import Layers, Memory, fitting
from ppctl.schedule.simulate import simulate
from ppctl.training.pipeline import Pipeline

Tree = Any
LARGEST_RATIO = 0.99  # of the requested partition's time: what a proposal takes at most
TASKS_SIMULATED = 2_000_000  # by all simulations together, a few CPU seconds each million
MOST_SIMULATIONS = 1000


@dataclass(frozen=True)
class Proposal:
    """A partition, and its time over that of the requested one; above 1 only where that does not fit."""

    partition: tuple[int, ...]  # layers of each stage
    time_ratio: float


def propose(pipe: Pipeline, limit_bytes: int | None) -> Proposal | None:
    """Return the fastest partition found, if it takes at least 1% less time than the requested one, or only it fits.

    Layers, embedding and head cost what their FLOPs say; memory counts with executor=mpmd, where each rank has its own.
    None where nothing is better, or a simulation would take too long.
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
        forward, input_grad, weight_grad = (tuple(costs.seconds(kind, 0, 1) * n for n in units) for kind in "FIW")
        of_stages = Costs(forward, input_grad, weight_grad)
        return simulate(schedule, of_stages).makespan_s if ticks is None else ticks.makespan_s(of_stages)

    return seconds


def _with_memory(pipe: Pipeline, layers: Layers, limit_bytes: int) -> tuple[Layers, Memory]:
    """Return the layers with their memory on a rank of executor=mpmd (state, weights, sums), and stashes in flight."""
    model = pipe.model
    shards = pipe.mesh.shape["fsdp"]
    moments = tree_bytes(pipe.states.natural["optimizer"]) / tree_bytes(pipe.states.natural["params"])

    def held(tree: Tree) -> float:
        computed = sum(a.size for a in jax.tree.leaves(tree)) * jnp.dtype(model.dtype).itemsize
        return float(round(tree_bytes(tree) * (1 + moments) / shards) + computed + tree_bytes(tree))

    stash = tree_bytes(model.stage.stash_shapes([model.layer]))
    n = layers.num_layers
    embed, head = (model.keep(model.ends, used) for used in model.uses)
    layers = replace(
        layers,
        layer_bytes=(held(model.layer),) * n,
        activation_bytes=(float(stash),) * n,
        embed_bytes=held(embed),
        head_bytes=held(head),
    )
    return layers, Memory((float(limit_bytes),) * pipe.schedule.num_ranks, in_flight(pipe.schedule))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage how many microbatches it holds activations of when its rank holds most.

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
