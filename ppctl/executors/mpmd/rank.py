"""The programs that a rank runs once a step: parameters are made ready, gradients reduced stage by stage, then joined.

These programs communicate over all axes of the rank's submesh; tasks over tp and cp, and where they gather layers fsdp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ppctl.executors.auto_axes import dim_of, in_manual, is_spec, shifted
from ppctl.executors.compiler_preset import CompilerPreset
from ppctl.executors.layout import Layout, gather_shards, scatter_sums
from ppctl.executors.mesh import DATA_AXES, RANK_AXES
from ppctl.executors.mpmd.part_tasks import joined, run_part
from ppctl.executors.mpmd.plan import Key, PlanEntry, ProgramId, transfer_entry
from ppctl.executors.mpmd.task_plan import JOINS, TASKS, Role
from ppctl.executors.mpmd.tasks import Model, drop_device_dim, is_none, run_task
from ppctl.model.trainable import trained_part
from ppctl.schedule.ir import PART_KINDS

Tree = Any
SHARED = ("given", "given_there", "shared_sum", "shared")  # values that hold gradients of shared leaves


@dataclass(frozen=True)
class RankRole:
    """The stages of a rank, and how the gradients of leaves are summed that embedding and head, or all parts, share."""

    stages: tuple[Role, ...]
    num_layer_slots: int  # of a chunk in the staged form: its layers and padding
    shared: str | None = None  # others have sums of them too: "adds" (this rank, those of all) | "gives"
    has_part: bool = False  # of embedding and head, as all ranks have where they are divided over these

    @property
    def has_first(self) -> bool:
        return any(role.is_first for role in self.stages)

    @property
    def has_last(self) -> bool:
        return any(role.is_last for role in self.stages)


def rank_roles(model: Model, layout: Layout, roles: tuple[Role, ...]) -> tuple[RankRole, ...]:
    """Return the role of each rank of a layout whose stages have these roles."""
    here: list[list[Role]] = [[] for _ in range(layout.mesh.shape["pp"])]
    for role, rank in zip(roles, layout.rank_of, strict=True):
        here[rank].append(role)
    adds, last, has_part = layout.rank_of[0], layout.rank_of[-1], model.own_ends is not None
    gives = set(range(len(here)) if has_part else [last]) - {adds}
    shared = {adds: "adds"} | dict.fromkeys(gives, "gives") if any(model.shared) and gives else {}
    num_layer_slots = int(layout.counts.max())
    return tuple(
        RankRole(tuple(stages), num_layer_slots, shared.get(rank), has_part) for rank, stages in enumerate(here)
    )


class StageSums(NamedTuple):
    """The sums of gradients of a stage: its layers, and how many a chunk has in the staged form, with padding."""

    num_layers: int
    num_layer_slots: int


def reductions(ranks: tuple[RankRole, ...], roles: Sequence[Role]) -> list[ProgramId]:
    """Return for each stage the program that reduces its sums of gradients."""
    sums = (StageSums(role.num_layers, ranks[0].num_layer_slots) for role in roles)
    return [ProgramId("reduce", ("acc",), ("sum",), shape) for shape in sums]


def rank_entries(
    layout: Layout, ranks: tuple[RankRole, ...], *, with_grads: bool
) -> tuple[list[PlanEntry], list[PlanEntry]]:
    """Return the entries before the tasks, from ("params", rank), and after them, to ("grads", rank).

    Gradients of shared leaves go from the ranks that give them to the one that adds, and the whole sum back, as
    ("shared", rank).
    """
    before, after, back = [], [], []
    givers = [r for r, here in enumerate(ranks) if here.shared == "gives"]
    adds = layout.rank_of[0]
    for r, here in sorted(enumerate(ranks), key=lambda each: each[1].shared == "adds"):  # the one that adds is last
        stages = [s for s, rank in enumerate(layout.rank_of) if rank == r]
        of_ends = ["in"] * here.has_first + ["out"] * here.has_last
        held = ["ends"] * here.has_part + [f"ends_{end}" for end in of_ends]
        sums_of_ends: list[Key] = [("acc_ends", r)] * here.has_part + [(f"acc_{end}", r) for end in of_ends]
        writes: list[Key] = [*(("w", s) for s in stages), *((name, r) for name in held)]
        writes += [("losses", r)] * (here.has_last or here.has_part)
        writes += [*(("acc", s) for s in stages), *sums_of_ends] if with_grads else []
        before.append((r, rank_entry("prepare", here, r, [("params", r)], writes)))
        sums: list[Key] = [*(("sum", s) for s in stages), *sums_of_ends]
        if here.shared == "gives":
            after.append(rank_entry("finish", here, r, sums, [("grads", r), ("given", r)]))
            after.append(transfer_entry(r, ("given", r), adds, ("given_there", r)))
        elif here.shared == "adds":
            reads = [*sums, *(("given_there", giver) for giver in givers)]
            after.append(rank_entry("finish", here, r, reads, [("grads", r), ("shared_sum",)]))
            back += [transfer_entry(r, ("shared_sum",), giver, ("shared", giver)) for giver in givers]
        else:
            after.append(rank_entry("finish", here, r, sums, [("grads", r)]))
    return [entry for _, entry in sorted(before, key=lambda each: each[0])], [*after, *back] if with_grads else []


def rank_entry(kind: str, here: RankRole, rank: int, reads: Sequence[Key], writes: Sequence[Key]) -> PlanEntry:
    """Return the entry of a program of a whole rank, from these values to those."""
    names = lambda keys: tuple(key[0] for key in keys)  # noqa: E731
    return PlanEntry(ProgramId(kind, names(reads), names(writes), here), rank, tuple(reads), tuple(writes))


def prepare_rank(model: Model, here: RankRole, program: ProgramId, specs: Tree, params: Tree) -> tuple:
    """Return the values that the tasks of a rank start from.

    They are parameters in the compute dtype, layer by layer, whole unless tasks gather them, and sums of zero.
    `params` are the rank's: {"ends": None where not used, "layers": [V, 1, K, ...]}, sharded by `specs`.
    """
    leaves = jax.tree.leaves(params)
    master = leaves[0].dtype
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros((1, *a.shape), master), tree)  # noqa: E731
    shards = jax.tree.map(lambda a: a.astype(model.dtype), params)
    ends = in_manual(gather_shards, shards["ends"], specs["ends"], model.auto)

    def stages(layers: Tree) -> list[Any]:
        take = lambda *index: jax.tree.map(lambda a: a[index], layers)  # noqa: E731
        return [
            take(v, 0, slice(role.num_layers))
            if role.num_layers > model.unroll
            else [take(v, 0, k) for k in range(role.num_layers)]
            for v, role in enumerate(here.stages)
        ]

    whole = lambda: stages(in_manual(gather_shards, shards["layers"], specs["layers"], model.auto))  # noqa: E731
    by_embedding, by_head = model.uses
    found: dict[str, list] = {
        "w": whole() if model.layer_specs is None else stages(shards["layers"]),
        "acc": [zeros(model.trained_layers(each)) for each in jax.eval_shape(whole)],
    }
    if here.has_part:
        found["ends"], found["acc_ends"] = [ends], [zeros(model.trained_ends(ends))]
        found["losses"] = [tuple(jnp.zeros((1, *a.shape), a.dtype) for a in model.losses)]
    if here.has_first:
        found["ends_in"] = [model.keep(ends, by_embedding)]
        found["acc_in"] = [zeros(model.trained_ends(found["ends_in"][0]))]
    if here.has_last:
        found["ends_out"] = [of_head] = [model.keep(ends, by_head)]
        found["losses"] = [tuple(jnp.zeros((1, *a.shape), a.dtype) for a in model.losses)]
        found["acc_out"] = [zeros(model.trained_ends(of_head))]
    return tuple(found[name].pop(0) for name in program.writes)


def reduce_stage(model: Model, sums: StageSums, specs: Tree, axes: tuple[str, ...], acc: Any) -> tuple[Tree]:
    """Return a stage's sums of gradients over its devices, [layer slots, ...], sharded as its layers are by `specs`.

    axes: those that devices sum over.
    """
    reduced = lambda sums, specs: scatter_sums(sums, specs, axes)  # noqa: E731
    return (in_manual(reduced, _stacked(model, sums.num_layer_slots, acc), specs, model.auto),)


def finish_rank(
    model: Model, here: RankRole, program: ProgramId, specs: Tree, axes: tuple[str, ...], *values: Any
) -> tuple:
    """Return a rank's gradients, summed over its devices and sharded as its parameters; not yet divided by the number.

    axes: those that devices sum over.
    Those of its stages come reduced; embedding and head are summed here, the sums of both in a tied leaf as one.
    The rank that adds has the others' sums of shared leaves too; these leave them None in their gradients.
    """
    v = dict(zip(program.reads, values, strict=True))
    chunks = [value for name, value in zip(program.reads, values, strict=True) if name == "sum"]
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, None], *chunks)
    ends = model.keep(model.ends, (False,) * len(model.shared))
    for part in (v.get("acc_in"), v.get("acc_out"), v.get("acc_ends")):
        if part is not None:
            ends = jax.tree.map(_plus, ends, drop_device_dim(part), is_leaf=is_none)
    reduced = lambda grads, specs: scatter_sums(grads, specs, axes)  # noqa: E731
    grads = {"ends": in_manual(reduced, ends, model.trained_ends(specs["ends"]), model.auto), "layers": layers}
    if here.shared is None:
        return (grads,)
    own = [leaf for leaf, is_shared in zip(_leaves(grads["ends"]), model.shared, strict=True) if is_shared]
    if here.shared == "gives":
        return grads | {"ends": model.keep(grads["ends"], tuple(not each for each in model.shared))}, own
    given = [value for name, value in zip(program.reads, values, strict=True) if name == "given_there"]
    total = [sum(leaves[1:], leaves[0]) for leaves in zip(own, *given, strict=True)]
    return grads | {"ends": with_shared(model, grads["ends"], total)}, total


def with_shared(model: Model, ends: Tree, shared: list[Any]) -> Tree:
    """Return `ends` (embedding and head) with these values for the shared leaves."""
    rest = iter(shared)
    leaves = [next(rest) if is_shared else a for a, is_shared in zip(_leaves(ends), model.shared, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(model.ends), leaves)


def _leaves(ends: Tree) -> list[Any]:
    return jax.tree.leaves(ends, is_leaf=is_none)


def _plus(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    return a if b is None else b if a is None else a + b


def _stacked(model: Model, num_layer_slots: int, acc: Any) -> Tree:
    """Return the sums of a stage's layers, [num_layer_slots, ...], zero where it has fewer."""
    if isinstance(acc, list):
        none = jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), model.trained_layers(model.layer))
        acc = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), none, *acc)
    else:
        acc = drop_device_dim(acc)
    return jax.tree.map(lambda a: jnp.pad(a, [(0, num_layer_slots - len(a))] + [(0, 0)] * (a.ndim - 1)), acc)


class GradientPrograms:
    """The function, the PartitionSpecs and the donated arguments of every program up to the gradients."""

    def __init__(
        self,
        model: Model,
        param_specs: dict[RankRole, Tree],
        sum_axes: tuple[str, ...] = RANK_AXES,
        *,
        is_one_device: bool = False,  # whether a rank is
    ):
        self.model, self.param_specs, self.sum_axes, self.is_one_device = model, param_specs, sum_axes, is_one_device
        self.device_axes = tuple(axis for axis in RANK_AXES if axis not in model.auto)

    def specs(self, program: ProgramId, name: str) -> Tree:
        """Return the spec of a value that a program reads or writes: a tree, or one for all its leaves."""
        if name == "params":
            return self.param_specs[program.shape]
        if name == "grads":
            specs = trained_part(self.param_specs[program.shape], self.model.stack.trainable)
            if program.shape.shared != "gives":
                return specs
            return specs | {"ends": self.model.keep(specs["ends"], tuple(not each for each in self.model.shared))}
        if name in SHARED:
            specs = _leaves(self.param_specs[program.shape]["ends"])
            return [spec for spec, is_shared in zip(specs, self.model.shared, strict=True) if is_shared]
        if name in ("inputs", "targets"):
            return P(DATA_AXES)
        if name == "sum":
            return self._sum_specs
        # parameters are gathered: each device has its own shard over tp, or all have the same
        return P() if name in ("ends_in", "ends_out", "ends", "m", "part") else P(self.device_axes)

    def all_specs(self, program: ProgramId, names: Sequence[str]) -> list[Tree]:
        """Return the specs of all values that a program reads, or of all that it writes."""
        roles = iter(program.shape.stages if isinstance(program.shape, RankRole) else (program.shape,))
        return [self._layers_specs(next(roles)) if name == "w" else self.specs(program, name) for name in names]

    def _layers_specs(self, role: Role) -> Tree:
        """Return the specs of a stage's layers as tasks are given them."""
        one = self.model.layer_specs
        if one is None:
            return P()
        return self._stacked_specs if role.num_layers > self.model.unroll else [one] * role.num_layers

    @property
    def _stacked_specs(self) -> Tree:
        """Return the specs of the layers of a stage, stacked, as they lie over fsdp and tp."""
        staged = next(iter(self.param_specs.values()))["layers"]
        return jax.tree.map(lambda spec: P(*spec[2:]), staged, is_leaf=is_spec)

    @property
    def _sum_specs(self) -> Tree:
        """Return those of the sums of a stage's gradients, once they are reduced."""
        return self.model.trained_layers(self._stacked_specs)

    def divided_dims(self, program: ProgramId, name: str, value: Tree) -> Sequence[int | None] | None:
        """Return the dim of each leaf of a value that XLA divides over tp; None: as the program's operations leave it.

        value: its shapes. Of parameters and their sums it is that of the parameter, behind the dims before it. What
        passes between stages is whole on every device.
        """
        del program
        leaves = jax.tree.leaves(value)
        if name in ("stash", "pending"):
            return None
        if not leaves:
            return ()
        if name in ("w", "acc", "sum"):
            specs, shapes = self.model.auto_specs["layers"], self.model.layer
            if name != "w":
                specs, shapes = map(self.model.trained_layers, (specs, shapes))
        elif name in ("ends_in", "ends_out", "acc_in", "acc_out"):
            used = self.model.uses[name in ("ends_out", "acc_out")]
            specs, shapes = (self.model.keep(tree, used) for tree in (self.model.auto_specs["ends"], self.model.ends))
            if name.startswith("acc"):
                specs, shapes = map(self.model.trained_ends, (specs, shapes))
        else:
            return [None] * len(leaves)
        one = [*zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(shapes), strict=True)]
        of_leaves = one * (len(leaves) // len(one))  # of each layer in turn, where they are not stacked
        return [shifted(dim_of(spec), a.ndim - whole.ndim) for (spec, whole), a in zip(of_leaves, leaves, strict=True)]

    def function(self, program: ProgramId) -> Callable[..., tuple]:
        """Return the function of one device of a program, from values in the order of its reads to those it writes."""
        model, shape = self.model, program.shape
        if program.kind == "prepare":
            return partial(prepare_rank, model, shape, program, self.param_specs[shape])
        if program.kind == "reduce":
            return partial(reduce_stage, model, shape, self._sum_specs, self.sum_axes)
        if program.kind == "finish":
            return partial(finish_rank, model, shape, program, self.param_specs[shape], self.sum_axes)

        if program.kind in JOINS:
            return partial(joined, program.kind)

        def task(*values: Any) -> tuple:
            v = dict(zip(program.reads, values, strict=True))
            is_part = program.kind in PART_KINDS
            found = run_part(model, program.kind, v) if is_part else run_task(model, program.kind, shape, v)
            return tuple(found[name] for name in program.writes)

        return task

    def donated(self, program: ProgramId) -> tuple[str, ...]:
        """Return the values read whose memory a value written takes over."""
        if program.kind in ("prepare", "reduce"):
            return ()
        if program.kind == "finish":
            return self._passed_on(program)
        replaced = [name for name in program.reads if name in program.writes]
        if program.kind == "F":
            replaced += ["x"] * ("x" in program.reads)
        elif program.kind in ("B", "I"):
            replaced += ["gy"] * ("gy" in program.reads and "gx" in program.writes)
        return tuple(replaced)

    def _passed_on(self, program: ProgramId) -> tuple[str, ...]:
        """Return the sums that become gradients as they are: otherwise `finish` would copy them.

        Those of several chunks are stacked, those of several devices added up, and so are two of a tied leaf.
        """
        names = ["sum"] if program.reads.count("sum") == 1 else []
        if self.is_one_device:
            tied = any(a and b for a, b in zip(*self.model.uses, strict=True))
            ends = [name for name in ("acc_in", "acc_out", "acc_ends") if name in program.reads]
            names += ends[:1] if tied else ends
        return tuple(names)

    def preset(self, program: ProgramId) -> CompilerPreset:
        """Return the compiler's preset for a program, on CPU."""
        if program.kind == "prepare":
            return "once"
        return "quick" if program.kind in TASKS and not self.model.remat.recomputes else "full"
