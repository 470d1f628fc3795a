"""The programs of tasks on one device, traced inside shard_map over the submesh of a rank.

Tasks communicate over the axes that divide the stage, and over fsdp, if they gather its
layers. Values are of this device's examples, sums of gradients its own. Sums, stashes and pending
values have a leading axis of length 1 here, and one entry a device outside.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.plan_tasks import FORWARD, TOTAL, Role
from ppctl.executors.stage.layer_programs import add_embedding_grad, add_head_grads
from ppctl.executors.stage.stage import LayerSlots
from ppctl.model.random_keys import KEYS
from ppctl.model.stack import log_sums_of_parts

Tree = Any


def _microbatch_of(model: Model, v: dict[str, Any], name: str) -> Tree:
    """Return microbatch v["m"] of this device's examples of "inputs", "targets" or "keys"."""

    def one(a: jax.Array) -> jax.Array:
        batch = a.reshape(model.num_microbatches, -1, *a.shape[1:])
        return jax.lax.dynamic_index_in_dim(batch, v["m"], 0, False)

    return jax.tree.map(one, v[name])


def _embedded(model: Model, v: dict[str, Any]) -> jax.Array:
    """Return the embedding of a microbatch, by a rank's part of the vocabulary its summand."""
    return _embed(model, v)(v["embed_head"], _microbatch_of(model, v, "inputs"))


def _embed(model: Model, v: dict[str, Any]) -> Callable[[Tree, Tree], jax.Array]:
    """Return the embedding as a function of a rank's parameters and inputs."""
    if (parts := model.parts) is not None:
        return lambda embed_head, inputs: parts.embed(embed_head, inputs, v["part"])
    return lambda embed_head, inputs: model.stack.embed(model.fill(embed_head), inputs)


def _with_embedding(model: Model, v: dict[str, Any], gx: jax.Array) -> Tree:
    """Return the sums of gradients with that of the embedding."""
    total, which = drop_device_dim(v["acc_embed_head"]), model.stack.trains("embed_head")
    args = v["embed_head"], _microbatch_of(model, v, "inputs"), gx, total, which
    return add_device_dim(add_embedding_grad(_embed(model, v), *args))


def _with_head(
    model: Model, v: dict[str, Any], y: jax.Array
) -> tuple[jax.Array | None, dict[str, Any]]:
    """Return (gradient of y, sums by name with loss and gradients); (None, losses) to evaluate."""
    # 1. the head, or a rank's part of it
    parts, targets = model.parts, _microbatch_of(model, v, "targets")
    if parts is not None:
        known = v["all_log_sums"], drop_device_dim(v["logits"]), v["part"]
        head = lambda embed_head, y, targets: parts.head(embed_head, y, targets, *known)  # noqa: E731
    else:
        head = lambda embed_head, y, targets: model.stack.head(model.fill(embed_head), y, targets)  # noqa: E731
    # 2. its loss and gradients
    args = v["embed_head"], y, targets
    if "acc_embed_head" not in v:
        return None, {"losses": add_to_sums(v["losses"], head(*args))}
    total, which = drop_device_dim(v["acc_embed_head"]), model.stack.trains("embed_head")
    gy, total, loss, number = add_head_grads(head, *args, total, which)
    losses = add_to_sums(v["losses"], (loss, number))
    return gy, {"losses": losses, "acc_embed_head": add_device_dim(total)}


def add_to_sums(total: Tree, update: Tree) -> Tree:
    """Add `update` to a sum; only the sum has a leading axis."""
    return jax.tree.map(lambda t, u: t + jnp.asarray(u, t.dtype)[None], total, update)


def add_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)


def drop_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], tree)


def run_task(model: Model, kind: str, role: Role, v: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a stage's task of this kind writes, by name, from those it reads."""
    # 1. a forward
    first = role.first_layer
    numbers = None if first is None else range(first, first + role.num_layers)
    keys = _microbatch_of(model, v, KEYS) if KEYS in v else None
    stage = model.evaluation_stage if keys is None else model.stage
    w = model.inputs.with_keys(v["w"], keys)
    args = w, None if numbers is None else LayerSlots(numbers=numbers)
    if kind in (FORWARD, "F"):
        y, stash = stage.forward(*args, _embedded(model, v) if role.is_first else v["x"])
        gy, sums = _with_head(model, v, y) if role.is_last else (None, {})
        return sums | {"y": y, "gy": gy, "stash": add_device_dim(stash)}
    # 2. weight gradients
    if kind == "W":
        return {"acc": stage.weight_grad(*args, drop_device_dim(v["pending"]), v["acc"])}
    # 3. a backward, whole or of the input
    if not stage.keeps_input:
        stash = drop_device_dim(v["stash"])
    else:
        stash = _embedded(model, v) if role.is_first else v["x"]
    has_head = stage.keeps_input and role.is_last
    cotangent = lambda y: _with_head(model, v, y) if has_head else (v["gy"], {})  # noqa: E731
    if kind == "B":
        gx, acc, sums = stage.backward(*args, stash, cotangent, v["acc"])
        out = sums | {"gx": gx, "acc": acc}
    else:
        gx, pending, sums = stage.input_grad(*args, stash, cotangent)
        out = sums | {"gx": gx, "pending": add_device_dim(pending)}
    if role.is_first:
        out["acc_embed_head"] = _with_embedding(model, v | sums, gx)
    return out


def run_part(model: Model, kind: str, v: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a task E, S, T or G of a rank's part of the vocabulary writes."""
    if kind == "E":
        return {"own_x": _embedded(model, v)}
    if kind == "S":
        assert model.parts is not None, "a model whose vocabulary is divided has parts"
        sums, logits = model.parts.log_sums(v["embed_head"], v["last_y"], v["part"])
        return {"own_log_sums": sums, "logits": add_device_dim(logits)}
    if kind == "T":
        gy, sums = _with_head(model, v, v["last_y"])
        return sums | {"own_gy": gy}
    return {"acc_embed_head": _with_embedding(model, v, v["first_gx"])}


def joined(kind: str, *parts: jax.Array) -> tuple[jax.Array]:
    """Return the log sums of all parts, or the parts' sum, added in at least float32."""
    if kind != TOTAL:
        return (log_sums_of_parts(jnp.stack(parts)),)
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    return (sum(part.astype(wide) for part in parts).astype(parts[0].dtype),)  # pyright: ignore[reportAttributeAccessIssue]
