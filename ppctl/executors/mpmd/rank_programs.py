"""Programs that a rank runs once a step: prepare parameters, reduce gradients, join them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, ProgramId, transfer_entry
from ppctl.executors.mpmd.plan_tasks import Role
from ppctl.executors.outer_layers import keep
from ppctl.executors.parameter_layout import gather_shards, scatter_sums
from ppctl.model.layer_inputs import LayerInputs
from ppctl.model.random_keys import KEYS, SEED, example_keys
from ppctl.model.stack import flat_batch
from ppctl.model.trainable_parameters import is_none
from ppctl.schedule.mesh_axes import DATA_AXES

Tree = Any
NO_INPUTS = LayerInputs()


@dataclass(frozen=True)
class RankRole:
    """The stages of a rank, and its role in summing gradients of shared leaves of embed_head."""

    stages: tuple[Role, ...]
    num_layer_slots: int  # layers of the largest stage; others are padded to it
    shared: str | None = None  # "adds" (it sums all ranks' gradients) | "gives" (it sends its sums)
    vocab_parts: int = 0  # parts of embedding and head, one per rank; 0: undivided

    @property
    def has_first(self) -> bool:
        return any(role.is_first for role in self.stages)

    @property
    def has_head(self) -> bool:
        """Whether the rank has the head, or a part of it."""
        return bool(self.vocab_parts) or any(role.is_last for role in self.stages)

    @property
    def layer_in_slot(self) -> np.ndarray:
        """Layer number of each slot, int [V, 1, K]; -1 in padding.

        Numbers of equal layers start at 0 in each stage: only their sign is used.
        """
        slots = np.full((len(self.stages), 1, self.num_layer_slots), -1)
        for v, role in enumerate(self.stages):
            slots[v, 0, : role.num_layers] = np.arange(role.num_layers) + (role.first_layer or 0)
        return slots


def rank_roles(model: Model, placement: Placement, roles: tuple[Role, ...]) -> tuple[RankRole, ...]:
    """Return the role of each rank of a placement whose stages have these roles."""
    here: list[list[Role]] = [[] for _ in range(placement.num_ranks)]
    for role, rank in zip(roles, placement.rank_of, strict=True):
        here[rank].append(role)
    adds, last, parts = placement.rank_of[0], placement.rank_of[-1], model.axes.vocab_parts
    gives = set(range(len(here)) if parts else [last]) - {adds}
    shared: dict[int, str] = {}
    if gives and any(model.outer.shared):
        shared = {adds: "adds"} | dict.fromkeys(gives, "gives")
    number = placement.num_slots
    return tuple(
        RankRole(tuple(stages), number, shared.get(r), parts) for r, stages in enumerate(here)
    )


class StageSums(NamedTuple):
    """The size of a stage's sums of gradients, before and after padding to the largest stage."""

    num_layers: int
    num_layer_slots: int  # layers after padding


def reductions(ranks: tuple[RankRole, ...], roles: Sequence[Role]) -> list[ProgramId]:
    """Return for each stage the program that reduces its sums of gradients."""
    sums = (StageSums(role.num_layers, ranks[0].num_layer_slots) for role in roles)
    return [ProgramId("reduce", ("acc",), ("sum",), shape) for shape in sums]


def rank_entries(
    rank_of: tuple[int, ...],
    ranks: tuple[RankRole, ...],
    *,
    with_grads: bool,
    inputs: LayerInputs = NO_INPUTS,
) -> tuple[list[PlanEntry], list[PlanEntry]]:
    """Return (entries before the tasks, entries after the tasks).

    Entries before read ("params", rank); entries after write ("grads", rank). Gradients of shared
    leaves go from the ranks that give them to the one that adds. Their sum goes back as ("shared",
    rank).
    """
    before, after, back = {}, [], []
    givers = [r for r, here in enumerate(ranks) if here.shared == "gives"]
    adds = rank_of[0]
    # the adding rank comes last, after the transfers of the sums that it adds
    for r, here in sorted(enumerate(ranks), key=lambda each: each[1].shared == "adds"):
        stages = [s for s, rank in enumerate(rank_of) if rank == r]
        # 1. before the tasks: parameters and sums of zero
        has_any = here.has_first or here.has_head
        acc: list[Key] = [("acc_embed_head", r)] * has_any
        writes: list[Key] = [*(("w", s) for s in stages), *[("embed_head", r)] * has_any]
        writes += [("losses", r)] * here.has_head
        writes += [*(("acc", s) for s in stages), *acc] if with_grads else []
        reads: list[Key] = [("params", r)]
        if inputs.need_keys:
            reads.append(("layer_numbers", r))
        if inputs.divisors is not None and with_grads:
            reads += [("inputs", r), ("targets", r)]
        if inputs.need_keys and with_grads:
            reads += [(SEED, r), ("step", r)]
            writes.append((KEYS, r))
        before[r] = rank_entry("prepare", here, r, reads, writes)
        # 2. after the tasks: gradients; moves of shared leaves' sums to the adding rank, and back
        reads = [*(("sum", s) for s in stages), *acc]
        writes = [("grads", r)]
        if here.shared == "gives":
            writes.append(("given", r))
        elif here.shared == "adds":
            reads += [("given_there", giver) for giver in givers]
            writes.append(("shared_sum",))
            back = [
                transfer_entry(r, ("shared_sum",), giver, ("shared", giver)) for giver in givers
            ]
        writes += [("attached", r)] * bool(inputs.names)
        after.append(rank_entry("finish", here, r, reads, writes))
        if here.shared == "gives":
            after.append(transfer_entry(r, ("given", r), adds, ("given_there", r)))
    return [before[r] for r in sorted(before)], [*after, *back] if with_grads else []


def rank_entry(
    kind: str, here: RankRole, rank: int, reads: Sequence[Key], writes: Sequence[Key]
) -> PlanEntry:
    """Return the entry of a program of a whole rank."""
    names = lambda keys: tuple(key[0] for key in keys)  # noqa: E731
    program = ProgramId(kind, names(reads), names(writes), here)
    return PlanEntry(program, rank, tuple(reads), tuple(writes))


def prepare_rank(
    model: Model, here: RankRole, program: ProgramId, specs: Tree, *values: Any
) -> tuple:
    """Return the first values of a rank's tasks: parameters in the compute dtype, zero sums.

    values: those of `program.reads`. The rank's parameters are {"embed_head": None for unused
    leaves, "layers": [V, 1, K, ...]}, sharded by `specs`. Layers are gathered, unless tasks gather
    them.
    """
    # 1. the rank's parameters in the compute dtype
    v = dict(zip(program.reads, values, strict=True))
    place, total = 1, partial(jax.lax.psum, axis_name=DATA_AXES)
    if "targets" in v:
        batch = flat_batch({name: v[name] for name in ("inputs", "targets")})
        place = model.inputs.places(batch, total, model.master)
    params = model.computed_params(v["params"], v.get("layer_numbers"), place)
    outer_specs, layers = model.outer.extended(specs["embed_head"], P(), P()), params["layers"]
    embed_head = gather_shards(params["embed_head"], outer_specs)
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros((1, *a.shape), model.master), tree)  # noqa: E731

    def stages(layers: Tree) -> list[Any]:
        take = lambda *index: jax.tree.map(lambda a: a[index], layers)  # noqa: E731
        count = [role.num_layers for role in here.stages]
        return [
            take(v, 0, slice(n)) if n > model.unroll else [take(v, 0, k) for k in range(n)]
            for v, n in enumerate(count)
        ]

    of_layers = model.inputs.extended(specs["layers"], P(), P())
    whole = lambda: stages(model.gather_layers(layers, of_layers))  # noqa: E731
    # 2. the values by name, and the sums of their gradients
    found: dict[str, list] = {
        "w": whole() if model.layer_specs is None else stages(layers),
        "acc": [zeros(model.trained_weights(each)) for each in jax.eval_shape(whole)],
        "embed_head": [embed_head],
        "acc_embed_head": [zeros(model.outer.trained(embed_head))],
        "losses": [jax.tree.map(lambda a: jnp.zeros((1, *a.shape), a.dtype), model.outer.losses)],
    }
    if KEYS in program.writes:
        device, devices = jax.lax.axis_index(DATA_AXES), jax.lax.axis_size(DATA_AXES)
        first = (jnp.arange(model.num_microbatches) * devices + device) * model.num_examples
        numbers = first[:, None] + jnp.arange(model.num_examples)
        found[KEYS] = [example_keys(v[SEED], v["step"], numbers)]
    return tuple(found[name].pop(0) for name in program.writes)


def reduce_stage(
    model: Model, sums: StageSums, specs: Tree, axes: tuple[str, ...], acc: Any
) -> tuple[Tree]:
    """Return a stage's gradients summed over `axes`, [layer slots, ...], sharded by `specs`."""
    return (scatter_sums(_stacked(model, sums.num_layer_slots, acc), specs, axes),)


def finish_rank(
    model: Model,
    here: RankRole,
    program: ProgramId,
    specs: Tree,
    axes: tuple[str, ...],
    *values: Any,
) -> tuple:
    """Return a rank's gradients, summed over `axes`, sharded as parameters.

    They are not yet divided by the number of losses.

    On the rank that adds, gradients of shared leaves include the sums of the ranks that give, and
    are also the second result. On a rank that gives they are None, and its sums are the second
    result. Attached losses (of layers, of embedding and head), if any, are the last result.
    """
    # 1. the layers, stacked by chunk
    named = list(zip(program.reads, values, strict=True))
    chunks, given = ([v for n, v in named if n == name] for name in ("sum", "given_there"))
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, None], *chunks)
    inputs = model.inputs
    layers, losses = inputs.separate(layers)
    # 2. embedding and head, summed
    embed_head = model.outer.trained(model.outer.extended(specs["embed_head"], P(), P()))
    acc, of_outer = dict(named).get("acc_embed_head"), {}
    if acc is not None:
        embed_head = scatter_sums(drop_device_dim(acc), embed_head, axes)
        of_outer = inputs.outer.separate(embed_head)[1]
    embed_head = inputs.outer.separate(embed_head)[0]  # None for leaves not on this rank
    attached = ((losses, of_outer),) if inputs.names else ()
    if here.shared is None:
        return {"embed_head": embed_head, "layers": layers}, *attached
    # 3. the leaves that ranks share
    own, rest = keep(embed_head, model.outer.shared), without_shared(model, embed_head)
    if here.shared == "gives":
        return {"embed_head": rest, "layers": layers}, own, *attached
    total = jax.tree.map(lambda a, *others: sum(others, a), own, *given)
    grads = {"embed_head": with_shared(rest, total), "layers": layers}
    return grads, total, *attached


def without_shared(model: Model, embed_head: Tree) -> Tree:
    """Return embedding and head with None for the shared leaves."""
    return keep(embed_head, tuple(not each for each in model.outer.shared))


def with_shared(embed_head: Tree, shared: Tree) -> Tree:
    """Return embedding and head with its None leaves filled from `shared`."""
    fill = lambda a, b: b if a is None else a  # noqa: E731
    return jax.tree.map(fill, embed_head, shared, is_leaf=is_none)


def drop_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], tree)


def _stacked(model: Model, num_layer_slots: int, acc: Any) -> Tree:
    """Return a stage's sums as arrays [num_layer_slots, ...], padded with zeros."""
    if isinstance(acc, list):
        zero = lambda a: jnp.zeros((0, *a.shape), a.dtype)  # noqa: E731
        held = model.with_inputs(model.held["layers"])
        none = jax.tree.map(zero, model.trained_weights(held))
        acc = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), none, *acc)
    else:
        acc = drop_device_dim(acc)
    widths = lambda a: [(0, num_layer_slots - len(a))] + [(0, 0)] * (a.ndim - 1)  # noqa: E731
    return jax.tree.map(lambda a: jnp.pad(a, widths(a)), acc)
