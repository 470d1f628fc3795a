"""The programs of tasks on one device, traced inside shard_map over the submesh of a rank.

Tasks communicate over the axes that divide the stage, and over fsdp, if they gather its
layers. Values are of this device's examples, sums of gradients its own. Sums, stashes and pending
values have a leading axis of length 1 here, and one entry a device outside.
"""

from __future__ import annotations

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


def _input(model: Model, v: dict[str, Any], role: Role) -> jax.Array:
    """Return a stage's input, embedded on the first one."""
    if not role.is_first:
        return v["x"]
    return model.stack.embed(model.fill(v["embed_head_in"]), _microbatch_of(model, v, "inputs"))


def _embed_grad(model: Model, v: dict[str, Any], gx: jax.Array) -> Tree:
    """Return acc_in with the gradient of the embedding added."""
    embed = lambda embed_head, inputs: model.stack.embed(model.fill(embed_head), inputs)  # noqa: E731
    total, which = drop_device_dim(v["acc_in"]), model.stack.trains("embed_head")
    inputs = _microbatch_of(model, v, "inputs")
    return add_device_dim(add_embedding_grad(embed, v["embed_head_in"], inputs, gx, total, which))


def _loss(model: Model, v: dict[str, Any], y: jax.Array) -> Tree:
    """Return losses with the loss of y added."""
    head = model.stack.head(model.fill(v["embed_head_out"]), y, _microbatch_of(model, v, "targets"))
    return add_to_sums(v["losses"], head)


def _head(model: Model, v: dict[str, Any], y: jax.Array) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """Return (gradient of y, (losses with the loss of y, acc_out with the head's gradient))."""
    head = lambda embed_head, y, targets: model.stack.head(model.fill(embed_head), y, targets)  # noqa: E731
    total, which = drop_device_dim(v["acc_out"]), model.stack.trains("embed_head")
    targets = _microbatch_of(model, v, "targets")
    gy, total, loss, number = add_head_grads(head, v["embed_head_out"], y, targets, total, which)
    return gy, (add_to_sums(v["losses"], (loss, number)), add_device_dim(total))


def add_to_sums(total: Tree, update: Tree) -> Tree:
    """Add `update` to a sum; only the sum has a leading axis."""
    return jax.tree.map(lambda t, u: t + jnp.asarray(u, t.dtype)[None], total, update)


def add_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)


def drop_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], tree)


def run_task(model: Model, kind: str, role: Role, v: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a task of this kind writes, by name, from those that it reads."""
    # 1. a forward
    first = role.first_layer
    numbers = None if first is None else range(first, first + role.num_layers)
    keys = _microbatch_of(model, v, KEYS) if KEYS in v else None
    stage = model.evaluation_stage if keys is None else model.stage
    w = model.inputs.with_keys(v["w"], keys)
    args = w, None if numbers is None else LayerSlots(numbers=numbers)
    out: dict[str, Any] = {}
    if kind in (FORWARD, "F"):
        out["y"], stash = stage.forward(*args, _input(model, v, role))
        if kind == "F":
            out["stash"] = add_device_dim(stash)
        if role.is_last and kind == "F":
            out["gy"], (out["losses"], out["acc_out"]) = _head(model, v, out["y"])
        elif role.is_last:
            out["losses"] = _loss(model, v, out["y"])
        return out
    # 2. weight gradients
    if kind == "W":
        out["acc"] = stage.weight_grad(*args, drop_device_dim(v["pending"]), v["acc"])
        return out
    # 3. a backward, whole or of the input
    stash = _input(model, v, role) if stage.keeps_input else drop_device_dim(v["stash"])
    has_head = stage.keeps_input and role.is_last
    cotangent = lambda y: _head(model, v, y) if has_head else (v["gy"], (None, None))  # noqa: E731
    if kind == "B":
        found = stage.backward(*args, stash, cotangent, v["acc"])
        out["gx"], out["acc"], (out["losses"], out["acc_out"]) = found
    else:
        found = stage.input_grad(*args, stash, cotangent)
        out["gx"], pending, (out["losses"], out["acc_out"]) = found
        out["pending"] = add_device_dim(pending)
    if role.is_first:
        out["acc_in"] = _embed_grad(model, v, out["gx"])
    return out


# a rank's part of a divided vocabulary


def run_part(model: Model, kind: str, v: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a task E, S, T or G writes, by name, from those that it reads."""
    parts, embed_head, part = model.parts, v["embed_head"], v["part"]
    which = model.stack.trains("embed_head")
    assert parts is not None, "a model whose vocabulary is divided has parts"
    if kind == "S":
        sums, logits = parts.log_sums(embed_head, v["last_y"], part)
        return {"own_log_sums": sums, "logits": add_device_dim(logits)}
    embed = lambda embed_head, inputs: parts.embed(embed_head, inputs, part)  # noqa: E731
    if kind == "E":
        return {"own_x": embed(embed_head, _microbatch_of(model, v, "inputs"))}
    if kind == "G":
        inputs, total = _microbatch_of(model, v, "inputs"), drop_device_dim(v["acc_embed_head"])
        total = add_embedding_grad(embed, embed_head, inputs, v["first_gx"], total, which)
        return {"acc_embed_head": add_device_dim(total)}
    targets = _microbatch_of(model, v, "targets")
    known = v["all_log_sums"], drop_device_dim(v["logits"]), part
    head = lambda embed_head, y, targets: parts.head(embed_head, y, targets, *known)  # noqa: E731
    if "acc_embed_head" not in v:
        return {"losses": add_to_sums(v["losses"], head(embed_head, v["last_y"], targets))}
    total = drop_device_dim(v["acc_embed_head"])
    gy, total, loss, number = add_head_grads(head, embed_head, v["last_y"], targets, total, which)
    losses = add_to_sums(v["losses"], (loss, number))
    return {"own_gy": gy, "losses": losses, "acc_embed_head": add_device_dim(total)}


def joined(kind: str, *parts: jax.Array) -> tuple[jax.Array]:
    """Return the log sums of all parts, or the parts' sum, added in at least float32."""
    if kind != TOTAL:
        return (log_sums_of_parts(jnp.stack(parts)),)
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    return (sum(part.astype(wide) for part in parts).astype(parts[0].dtype),)  # pyright: ignore[reportAttributeAccessIssue]
