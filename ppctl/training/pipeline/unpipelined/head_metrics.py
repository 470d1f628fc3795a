"""Metrics of a user: means of functions of the outputs and targets of each example or token.

In a step the head sums them with the number of losses, so that they are right for any schedule,
microbatch count and mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.model.stack import Stack
from ppctl.training.pipeline.user_code import call_user_code

Tree = Any
Metric = Callable[[Tree, Tree], Any]  # outputs, {"targets"} -> values, or (values, weights)
RESERVED = ("loss", "grad_norm", "lr", "number", "counts")  # numbers of a step


def with_metrics(
    stack: Stack, metrics: Mapping[str, Metric], shapes: Mapping[str, Any], dtype: jnp.dtype
) -> Stack:
    """Return a model whose head counts metrics: see `ppctl.model.stack.divisor`.

    shapes: of a batch; dtype: of compute. ConfigError for a wrong name, a model without outputs, or
    a metric that fails or has no value for each example.
    """
    # 1. checks
    outputs = stack.options.outputs
    if not metrics:
        return stack
    if outputs is None:
        raise ConfigError("metrics need the outputs of the model. Give the Stack outputs=...")
    for name, metric in metrics.items():
        if name in RESERVED or not isinstance(name, str) or not callable(metric):
            raise ConfigError(
                f"metrics has {name!r}: {type(metric).__name__}. Give functions by names other "
                f"than {', '.join(RESERVED)}."
            )

    # 2. the head, tried on shapes
    def head(embed_head: Tree, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, Tree]:
        loss, number = stack.head(embed_head, x, targets)
        found = outputs(*jax.lax.stop_gradient((embed_head, x)))
        sums = {n: metric_sums(n, f, found, targets, dtype) for n, f in metrics.items()}
        return loss, {"number": number} | sums

    embed_head = stack.param_shapes["embed_head"]
    x = jax.eval_shape(stack.embed, embed_head, shapes["inputs"])
    jax.eval_shape(head, embed_head, x, shapes["targets"])
    return replace(stack, head=head)


def metric_sums(
    name: str,
    metric: Metric,
    outputs: Tree,
    targets: jax.Array,
    dtype: jnp.dtype,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of a metric's values by their weights, sum of weights), in at least float32.

    valid: which examples count; None: all. ConfigError for a metric that fails, or returns no value
    for each example.
    """
    call = partial(metric, outputs, {"targets": targets})
    found = call_user_code(f"metric {name}", 'metric(outputs, {"targets"})', call)
    values, weights = found if isinstance(found, tuple) and len(found) == 2 else (found, 1)
    values, number = jnp.asarray(values), len(targets)
    if values.shape[:1] != (number,):
        raise ConfigError(
            f"metric {name} returns the shape {values.shape} for {number} examples. Return a value "
            f"for each example or token, [{number}, ...], without their mean."
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    weights = jnp.broadcast_to(jnp.asarray(weights, wide), values.shape)
    if valid is not None:
        weights = jnp.where(valid.reshape(-1, *(1,) * (values.ndim - 1)), weights, 0)
    return jnp.where(weights == 0, 0, values.astype(wide) * weights).sum(), weights.sum()
