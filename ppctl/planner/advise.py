"""What `ppctl plan` proposes: layers on stages that take less time, by simulation, and fit where memory is limited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.executors.stage.flops import RelativeCosts
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.cut import cut, improved
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.partition.work import Layers, Memory, fitting
from ppctl.schedule.simulate import simulate
from ppctl.training.job import Parts, relative_costs_of

Tree = Any
WORTH_IT = 0.99  # of the time that the partition asked for takes
TASKS_PRICED = 2_000_000  # by all simulations together, a few CPU seconds each million
MOST_PRICES = 1000


@dataclass(frozen=True)
class Proposal:
    """Another partition, and its time over that of the one asked for, where that fits; else over 1."""

    partition: tuple[int, ...]  # layers of each stage
    time_ratio: float


def propose(parts: Parts, limit_bytes: int | None) -> Proposal | None:
    """The fastest partition found, if it takes at least 1% less time than the one asked for, or fits and that does not.

    Layers count what FLOPs make of them, embedding and head too; memory counts with executor=mpmd, where each rank
    has its own. None where nothing is better, or a simulation would take too long.
    """
    schedule, asked = parts.schedule, parts.states.layout.partition
    max_prices = min(MOST_PRICES, TASKS_PRICED // sum(map(len, schedule.ranks)))
    if parts.config.executor.name == "reference" or not max_prices:
        return None
    worth = relative_costs_of(parts.config, parts.stack, parts.data)
    layers = Layers(worth.layers, embed_s=worth.embed, head_s=worth.head)
    memory, fits = None, lambda _: True
    if limit_bytes is not None and parts.config.executor.name == "mpmd":
        layers, memory = _with_memory(parts, layers, limit_bytes)
        fits = fitting(layers, schedule.rank_of, memory)
    try:
        first = cut(layers, schedule.rank_of, memory)
    except ConfigError:
        return None  # nothing fits
    price = _price(parts, worth)
    starts = [p for p in (asked, first) if fits(p)]
    best = improved(min(starts, key=price), price, max_prices=max_prices, fits=fits)
    ratio = price(best) / price(asked)
    if ratio > WORTH_IT and fits(asked):
        return None
    return Proposal(tuple(map(len, best)), ratio)


def _price(parts: Parts, worth: RelativeCosts) -> Callable[[Partition], float]:
    """The makespan of a partition, in units of a forward through a layer."""
    costs, ticks, schedule = task_costs(parts.config.executor.remat), parts.ticks, parts.schedule

    def price(partition: Partition) -> float:
        units = worth.of_stages(partition)
        forward, input_grad, weight_grad = (tuple(costs.seconds(kind, 0, 1) * n for n in units) for kind in "FIW")
        priced = Costs(forward, input_grad, weight_grad)
        return simulate(schedule, priced).makespan_s if ticks is None else ticks.makespan_s(priced)

    return price


def _with_memory(parts: Parts, layers: Layers, limit_bytes: int) -> tuple[Layers, Memory]:
    """The layers with what they hold on a rank of executor=mpmd: state, weights and sums; and stashes in flight."""
    model = parts.model
    shards = parts.config.mesh.fsdp
    moments = tree_bytes(parts.states.natural["optimizer"]) / tree_bytes(parts.states.natural["params"])

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
    return layers, Memory((float(limit_bytes),) * parts.schedule.num_ranks, in_flight(parts.schedule))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, how many microbatches it holds activations of when its rank holds most.

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
