"""The programs of a rank's part of the vocabulary on one device, traced as those of its stages (`mpmd.tasks`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.mpmd.task_plan import TOTAL
from ppctl.executors.mpmd.tasks import Model, add_device_dim, add_to_sums, drop_device_dim
from ppctl.executors.stage.embedding_head import add_embedding_grad, add_head_grads
from ppctl.model.stack import log_sums_of_parts

Tree = Any


def run_part(model: Model, kind: str, v: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a task E, S, T or G writes, by name, from those that it reads."""
    parts, ends, part, of_ends = model.stack.parts, v["ends"], v["part"], model.stack.trains("ends")
    assert parts is not None, "a model whose vocabulary is divided has parts"
    if kind == "S":
        sums, logits = parts.log_sums(ends, v["last_y"], part)
        return {"own_log_sums": sums, "logits": add_device_dim(logits)}
    embed = lambda ends, inputs: parts.embed(ends, inputs, part)  # noqa: E731
    if kind == "E":
        return {"own_x": embed(ends, model.microbatch_of(v["inputs"], v["m"]))}
    if kind == "G":
        inputs, total = model.microbatch_of(v["inputs"], v["m"]), drop_device_dim(v["acc_ends"])
        return {"acc_ends": add_device_dim(add_embedding_grad(embed, ends, inputs, v["first_gx"], total, of_ends))}
    targets, known = model.microbatch_of(v["targets"], v["m"]), (v["all_log_sums"], drop_device_dim(v["logits"]), part)
    head = lambda ends, y, targets: parts.head(ends, y, targets, *known)  # noqa: E731
    if "acc_ends" not in v:
        return {"losses": add_to_sums(v["losses"], head(ends, v["last_y"], targets))}
    total = drop_device_dim(v["acc_ends"])
    gy, total, loss, number = add_head_grads(head, ends, v["last_y"], targets, total, of_ends)
    losses = add_to_sums(v["losses"], (loss, number))
    return {"own_gy": gy, "losses": losses, "acc_ends": add_device_dim(total)}


def joined(kind: str, *parts: jax.Array) -> tuple[jax.Array]:
    """Return what is made of the values of all parts: their sum in at least float32, in their dtype, or log sums."""
    if kind != TOTAL:
        return (log_sums_of_parts(jnp.stack(parts)),)
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    return (sum(part.astype(wide) for part in parts).astype(parts[0].dtype),)  # pyright: ignore[reportAttributeAccessIssue]
