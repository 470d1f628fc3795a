"""The programs of ranks and of tasks: functions of one device, PartitionSpecs, donated arguments.

Functions are traced inside shard_map over the submesh of a rank. Tasks communicate over the axes
that divide the stage, and over fsdp if they gather its layers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.fused_tasks import FusedTasks, run_fused
from ppctl.executors.mpmd.plan_tasks import FORWARD, JOINS, TASKS, TOTAL, Role
from ppctl.executors.mpmd.plan_values import value_kind
from ppctl.executors.mpmd.rank_programs import (
    RankRole,
    StageSums,
    drop_device_dim,
    finish_rank,
    prepare_rank,
    reduce_stage,
    without_shared,
)
from ppctl.executors.outer_layers import keep
from ppctl.executors.parameter_layout import BATCH
from ppctl.executors.stage.slot_programs import LayerSlots
from ppctl.model.random_keys import KEYS
from ppctl.model.stack import log_sums_of_parts
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.ir import PART_KINDS
from ppctl.schedule.mesh_axes import RANK_AXES

Tree = Any


class ProgramLibrary:
    """The function, PartitionSpecs and donated arguments of each program.

    state_specs: specs of the state, by role of the rank. once: by kind, functions of the programs
    that run after the gradients, such as the update. whole_arrays: kinds of programs that see a
    rank's whole arrays, as XLA divides them.
    """

    def __init__(
        self,
        model: Model,
        state_specs: Mapping[RankRole, Tree],
        *,
        is_one_device: bool = False,  # whether a rank has one device
        once: Mapping[str, Callable[..., tuple]] | None = None,
        whole_arrays: Sequence[str] = (),
    ):
        self.model, self.state_specs, self.is_one_device = model, state_specs, is_one_device
        self.once, self.auto, self.whole_arrays = once or {}, model.auto, whole_arrays
        self.device_axes = tuple(axis for axis in RANK_AXES if axis not in model.auto)

    def auto_axes(self, program: ProgramId) -> tuple[str, ...]:
        """Return the axes XLA divides a program over; for `whole_arrays`, all of a rank's axes."""
        if program.kind in self.whole_arrays:
            return RANK_AXES
        is_task = program.kind in TASKS or isinstance(program.shape, FusedTasks)
        return self.auto if is_task else ()

    def specs(self, program: ProgramId, name: str, role: Role | StageSums | None = None) -> Tree:
        """Return the spec of a value of a program: a tree, or one spec for all its leaves.

        role: of the stage, for its layers and their sums.
        """
        form, model = value_kind(name).form, self.model
        if form in ("number", "batch"):
            return P() if form == "number" else BATCH
        if form == "sum":
            return self._sum_specs
        if form in ("part", "activation", "sums"):
            return P(self.device_axes)
        if form not in ("state", "grads", "shared"):
            return self._weight_specs(form, role)
        state = self.state_specs[program.shape]
        if form == "state":
            return state["params" if name == "mean_grads" else name.removeprefix("next_")]
        if form == "shared":
            return keep(state["params"]["embed_head"], model.outer.shared)
        specs = trained_part(state["params"], model.stack.options.trainable)
        if program.shape.shared != "gives":
            return specs
        return specs | {"embed_head": without_shared(model, specs["embed_head"])}

    def all_specs(self, program: ProgramId, names: Sequence[str]) -> list[Tree]:
        """Return the specs of all values that a program reads, or of all that it writes."""
        shape = program.shape
        if isinstance(shape, FusedTasks):
            found = shape.by_name(self.all_specs)
            return [found[name] for name in names]
        stages = shape.stages if isinstance(shape, RankRole) else (shape,)
        layers = {name: iter(stages) for name in ("w", "acc")}
        return [self.specs(program, n, next(layers[n]) if n in layers else None) for n in names]

    def _weight_specs(self, form: str, role: Role | StageSums | None) -> Tree:
        """Return the specs of layers or of embedding and head as tasks get them, or of sums."""
        model, is_sum = self.model, form.endswith("sums")
        if is_sum and not self.auto:
            return P(self.device_axes)
        if role is None:
            # declared replicated once gathered, even if tp or another axis divides it
            specs = P()
            if self.auto:
                specs = model.outer.extended(model.auto_specs["embed_head"], P(), P())
            trained = model.outer.trained
        else:
            one = model.auto_specs["layers"] if self.auto else model.layer_specs
            if one is None:
                return P()
            one = model.inputs.extended(one, P(), P())
            stacked, number = jax.tree.map(lambda spec: P(None, *spec), one), role.num_layers
            specs = stacked if number > model.unroll else [one] * number
            trained = model.trained_weights
        if not is_sum:
            return specs
        return jax.tree.map(lambda spec: P(self.device_axes, *spec), trained(specs))

    @property
    def _sum_specs(self) -> Tree:
        """The specs of a stage's reduced sums of gradients, stacked."""
        layers = next(iter(self.state_specs.values()))["params"]["layers"]
        staged = self.model.trained_weights(self.model.inputs.extended(layers, P(), P()))
        return jax.tree.map(lambda spec: P(*spec[2:]), staged)

    def function(self, program: ProgramId) -> Callable[..., tuple]:
        """Return a program's function of one device, from values read to values written."""
        model, shape = self.model, program.shape
        if program.kind == "prepare":
            return partial(prepare_rank, model, shape, program, self.state_specs[shape]["params"])
        if program.kind == "reduce":
            return partial(reduce_stage, model, shape, self._sum_specs, self.device_axes)
        if program.kind == "finish":
            specs = self.state_specs[shape]["params"]
            return partial(finish_rank, model, shape, program, specs, self.device_axes)
        if program.kind in JOINS:
            return partial(joined, program.kind)
        if program.kind in self.once:
            return partial(self.once[program.kind], program)
        if isinstance(shape, FusedTasks):
            return partial(run_fused, program, [self.function(each) for each in shape.programs])

        def task(*values: Any) -> tuple:
            named = zip(program.reads, values, strict=True)
            v = {name: drop_device_dim(a) if is_summed(name) else a for name, a in named}
            if program.kind in PART_KINDS:
                found = run_part(model, program.kind, v)
            else:
                found = run_task(model, program.kind, shape, v)
            written = ((name, found[name]) for name in program.writes)
            return tuple(add_device_dim(a) if is_summed(name) else a for name, a in written)

        return task

    def donated(self, program: ProgramId) -> tuple[str, ...]:
        """Return the names of the read values whose memory is reused for written values."""
        if isinstance(program.shape, FusedTasks):
            of = lambda part, names: [name in self.donated(part) for name in names]  # noqa: E731
            found = program.shape.by_name(of)
            return tuple(name for name, is_donated in found.items() if is_donated)
        if program.kind in ("prepare", "reduce"):
            return ()
        # the sums of a single chunk, or on a single device, become the gradients unchanged
        if program.kind == "finish":
            passed = (program.reads.count("sum") == 1) * ("sum",)
            passed += self.is_one_device * ("acc_embed_head",)
            return tuple(name for name in passed if name in program.reads)
        replaced = [name for name in program.reads if name in program.writes]
        if program.kind == "F":
            replaced += ["x"] * ("x" in program.reads)
        elif program.kind in ("B", "I"):
            replaced += ["gy"] * ("gy" in program.reads and "gx" in program.writes)
        return tuple(replaced)


# tasks


def _microbatch_of(v: dict[str, Any], name: str) -> Tree:
    """Return microbatch v["m"] of this device's examples of "inputs", "targets" or "keys"."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, v["m"], 0, False), v[name])


def _embedded(model: Model, v: dict[str, Any]) -> jax.Array:
    """Return the embedding of a microbatch, or its summand from a part of the vocabulary."""
    return model.outer.embed(_embed_head(model, v), _microbatch_of(v, "inputs"), v.get("part"))


def _keys(v: dict[str, Any]) -> jax.Array | None:
    return _microbatch_of(v, KEYS) if KEYS in v else None


def _embed_head(model: Model, v: dict[str, Any]) -> Tree:
    """Return the parameters of embedding and head with the keys of a microbatch, if they have."""
    return model.outer.with_keys(v["embed_head"], _keys(v))


def _with_embedding(model: Model, v: dict[str, Any], gx: jax.Array) -> Tree:
    """Return the sums of gradients with the embedding's gradient added."""
    inputs, total = _microbatch_of(v, "inputs"), v["acc_embed_head"]
    return model.outer.add_embedding(_embed_head(model, v), inputs, gx, total, v.get("part"))


def _with_head(
    model: Model, v: dict[str, Any], y: jax.Array
) -> tuple[jax.Array | None, dict[str, Any]]:
    """Return (gradient of y, sums of losses and gradients); evaluations: (None, losses)."""
    args = _embed_head(model, v), y, _microbatch_of(v, "targets")
    known = (v["all_log_sums"], v["logits"], v["part"]) if "part" in v else ()
    add = partial(jax.tree.map, lambda total, a: total + jnp.asarray(a, total.dtype), v["losses"])
    if "acc_embed_head" not in v:
        return None, {"losses": add(model.outer.head(*args, *known))}
    gy, total, losses = model.outer.add_head(*args, v["acc_embed_head"], *known)
    return gy, {"losses": add(losses), "acc_embed_head": total}


def is_summed(name: str) -> bool:
    return value_kind(name).form.endswith("sums")


def add_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)


def run_task(model: Model, kind: str, role: Role, v: dict[str, Any]) -> dict[str, Any]:
    """Return by name the values that a stage's task writes; v: the values that it reads."""
    # 1. the stage's arguments, then a forward
    first = role.first_layer
    numbers = None if first is None else range(first, first + role.num_layers)
    keys = _keys(v)
    stage = model.evaluation_stage if keys is None else model.stage
    w = model.inputs.with_keys(v["w"], keys)
    args = w, None if numbers is None else LayerSlots(numbers=numbers)
    if kind in (FORWARD, "F"):
        y, stash = stage.forward(*args, _embedded(model, v) if role.is_first else v["x"])
        gy, sums = _with_head(model, v, y) if role.is_last else (None, {})
        return sums | {"y": y, "gy": gy, "stash": stash}
    # 2. weight gradients
    if kind == "W":
        return {"acc": stage.weight_grad(*args, v["pending"], v["acc"])}
    # 3. a backward, whole or of the input
    stash = v.get("stash")
    if stage.keeps_input:
        stash = _embedded(model, v) if role.is_first else v["x"]
    has_head = stage.keeps_input and role.is_last
    cotangent = lambda y: _with_head(model, v, y) if has_head else (v["gy"], {})  # noqa: E731
    if kind == "B":
        gx, acc, sums = stage.backward(*args, stash, cotangent, v["acc"])
        out = sums | {"gx": gx, "acc": acc}
    else:
        gx, pending, sums = stage.input_grad(*args, stash, cotangent)
        out = sums | {"gx": gx, "pending": pending}
    if role.is_first:
        out["acc_embed_head"] = _with_embedding(model, v | sums, gx)
    return out


def run_part(model: Model, kind: str, v: dict[str, Any]) -> dict[str, Any]:
    """Return by name the values that a vocabulary part's task (E, S, T or G) writes."""
    if kind == "E":
        return {"own_x": _embedded(model, v)}
    if kind == "S":
        assert model.parts is not None, "a model whose vocabulary is divided has parts"
        sums, logits = model.parts.log_sums(v["embed_head"], v["last_y"], v["part"])
        return {"own_log_sums": sums, "logits": logits}
    if kind == "T":
        gy, sums = _with_head(model, v, v["last_y"])
        return sums | {"own_gy": gy}
    return {"acc_embed_head": _with_embedding(model, v, v["first_gx"])}


def joined(kind: str, *parts: jax.Array) -> tuple[jax.Array]:
    """Return the combined log sums of all parts, or the parts' sum, added in at least float32."""
    if kind != TOTAL:
        return (log_sums_of_parts(jnp.stack(parts)),)
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    return (sum(part.astype(wide) for part in parts).astype(parts[0].dtype),)  # pyright: ignore[reportAttributeAccessIssue]
