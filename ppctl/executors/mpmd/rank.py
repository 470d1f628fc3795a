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
from ppctl.executors.mpmd.plan import TASKS, Key, PlanEntry, ProgramId, Role, transfer_entry
from ppctl.executors.mpmd.tasks import Model, drop_device_dim, is_none, run_task
from ppctl.model.trainable import trained_part

Tree = Any


@dataclass(frozen=True)
class RankRole:
    """The stages of a rank, and how its part of a leaf that embedding and head share is summed."""

    stages: tuple[Role, ...]
    num_layer_slots: int  # of a chunk in the staged form: its layers and padding
    tied: str | None = None  # the other part is elsewhere: "embedding" (this rank adds both) | "head"

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
    first, last = layout.rank_of[0], layout.rank_of[-1]
    tied = {first: "embedding", last: "head"} if any(model.tied) and first != last else {}
    num_layer_slots = int(layout.counts.max())
    return tuple(RankRole(tuple(stages), num_layer_slots, tied.get(rank)) for rank, stages in enumerate(here))


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

    A tied leaf's gradient goes from the head's rank to the embedding's, and the whole sum back, as ("tied", rank).
    """
    before, after = [], []
    for r, here in enumerate(ranks):
        stages = [s for s, rank in enumerate(layout.rank_of) if rank == r]
        writes: list[Key] = [("w", s) for s in stages]
        of_ends: list[Key] = [("acc_in",)] * here.has_first + [("acc_out",)] * here.has_last
        sums: list[Key] = [*(("sum", s) for s in stages), *of_ends]
        writes += [("ends_in",)] * here.has_first + [("ends_out",)] * here.has_last
        writes += [("losses",)] * here.has_last
        writes += [*(("acc", s) for s in stages), *of_ends] if with_grads else []
        before.append(rank_entry("prepare", here, r, [("params", r)], writes))
        if here.tied == "head":
            to = layout.rank_of[0]
            after.insert(0, rank_entry("finish", here, r, sums, [("grads", r), ("tied_head",)]))
            after.insert(1, transfer_entry(r, ("tied_head",), to, ("tied", to)))
        elif here.tied == "embedding":
            back = layout.rank_of[-1]
            after.append(rank_entry("finish", here, r, [*sums, ("tied", r)], [("grads", r), ("tied_sum",)]))
            after.append(transfer_entry(r, ("tied_sum",), back, ("tied", back)))
        else:
            after.append(rank_entry("finish", here, r, sums, [("grads", r)]))
    return before, after if with_grads else []


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
    if here.has_first:
        found["ends_in"] = [model.keep(ends, by_embedding)]
        found["acc_in"] = [zeros(model.trained_ends(found["ends_in"][0]))]
    if here.has_last:
        found["ends_out"] = [of_head] = [model.keep(ends, by_head)]
        head = lambda ends, x, targets: model.stack.head(model.fill(ends), x, targets)  # noqa: E731
        sums = jax.eval_shape(head, of_head, model.x, model.microbatch["targets"])
        found["losses"] = [tuple(jnp.zeros((1, *a.shape), a.dtype) for a in sums)]
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
    Those of its stages come reduced; embedding and head are summed here, the parts of a tied leaf as one.
    The embedding's rank adds the head's sums of tied leaves; the head's leaves them None in its gradients.
    """
    v = dict(zip(program.reads, values, strict=True))
    chunks = [value for name, value in zip(program.reads, values, strict=True) if name == "sum"]
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, None], *chunks)
    ends = model.keep(model.ends, (False,) * len(model.tied))
    for part in (v.get("acc_in"), v.get("acc_out")):
        if part is not None:
            ends = jax.tree.map(_plus, ends, drop_device_dim(part), is_leaf=is_none)
    reduced = lambda grads, specs: scatter_sums(grads, specs, axes)  # noqa: E731
    grads = {"ends": in_manual(reduced, ends, model.trained_ends(specs["ends"]), model.auto), "layers": layers}
    if here.tied is None:
        return (grads,)
    tied = [leaf for leaf, is_tied in zip(_leaves(grads["ends"]), model.tied, strict=True) if is_tied]
    if here.tied == "head":
        return grads | {"ends": model.keep(grads["ends"], tuple(not is_tied for is_tied in model.tied))}, tied
    tied = [here_sum + there for here_sum, there in zip(tied, v["tied"], strict=True)]
    return grads | {"ends": with_tied(model, grads["ends"], tied)}, tied


def with_tied(model: Model, ends: Tree, tied: list[Any]) -> Tree:
    """Return `ends` (embedding and head) with these values for the tied leaves."""
    rest = iter(tied)
    leaves = [next(rest) if is_tied else a for a, is_tied in zip(_leaves(ends), model.tied, strict=True)]
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

    def __init__(self, model: Model, param_specs: dict[RankRole, Tree], sum_axes: tuple[str, ...] = RANK_AXES):
        self.model, self.param_specs, self.sum_axes = model, param_specs, sum_axes
        self.device_axes = tuple(axis for axis in RANK_AXES if axis not in model.auto)

    def specs(self, program: ProgramId, name: str) -> Tree:
        """Return the spec of a value that a program reads or writes: a tree, or one for all its leaves."""
        if name == "params":
            return self.param_specs[program.shape]
        if name == "grads":
            specs = trained_part(self.param_specs[program.shape], self.model.stack.trainable)
            if program.shape.tied != "head":
                return specs
            return specs | {"ends": self.model.keep(specs["ends"], tuple(not tied for tied in self.model.tied))}
        if name.startswith("tied"):
            specs = _leaves(self.param_specs[program.shape]["ends"])
            return [spec for spec, tied in zip(specs, self.model.tied, strict=True) if tied]
        if name in ("inputs", "targets"):
            return P(DATA_AXES)
        if name == "sum":
            return self._sum_specs
        # parameters are gathered: each device has its own shard over tp, or all have the same
        return P() if name in ("ends_in", "ends_out", "m") else P(self.device_axes)

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

        def task(*values: Any) -> tuple:
            found = run_task(model, program.kind, shape, dict(zip(program.reads, values, strict=True)))
            return tuple(found[name] for name in program.writes)

        return task

    def donated(self, program: ProgramId) -> tuple[str, ...]:
        """Return the values read whose memory a value written takes over."""
        if program.kind in ("prepare", "reduce", "finish"):
            return ()
        replaced = [name for name in program.reads if name in program.writes]
        if program.kind == "F":
            replaced += ["x"] * ("x" in program.reads)
        elif program.kind in "BI":
            replaced += ["gy"] * ("gy" in program.reads and "gx" in program.writes)
        return tuple(replaced)

    def preset(self, program: ProgramId) -> CompilerPreset:
        """Return the compiler's preset for a program, on CPU."""
        if program.kind == "prepare":
            return "once"
        return "quick" if program.kind in TASKS and not self.model.remat.recomputes else "full"
