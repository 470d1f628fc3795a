"""The user's metrics: means of functions of the outputs and targets of each example or token.

In a step the head sums the metrics as it sums the number of losses. So their means are right for
any schedule, microbatch count and mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.model.random_keys import names_key, without_key
from ppctl.model.stack import Stack
from ppctl.training.pipeline.user_code import call_user_code

Tree = Any
Metric = Callable[[Tree, Tree], Any]  # outputs, {"targets"} -> values, or (values, weights)
RESERVED = ("loss", "grad_norm", "lr", "number", "counts")  # names already used by a step's numbers


def with_metrics(
    stack: Stack, metrics: Mapping[str, Metric], shapes: Mapping[str, Any], dtype: jnp.dtype
) -> Stack:
    """Return the model with a head that also sums metrics: see `ppctl.model.stack.divisor`.

    shapes: shapes of a batch. dtype: compute dtype. ConfigError for a wrong name, a model without
    outputs, or a metric that fails or does not return a value for each example.
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

    # 2. the head, checked on shapes
    def head(
        embed_head: Tree, x: jax.Array, targets: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Tree]:
        given = {"key": key} if names_key(stack.head) else {}
        loss, number = stack.head(embed_head, x, targets, **given)
        found = outputs(*jax.lax.stop_gradient((embed_head, x)))
        sums = {n: metric_sums(n, f, found, targets, dtype) for n, f in metrics.items()}
        return loss, {"number": number} | sums

    embed_head = stack.param_shapes["embed_head"]
    x = jax.eval_shape(stack.outer[0], embed_head, shapes["inputs"])
    jax.eval_shape(head, embed_head, x, shapes["targets"])
    return replace(stack, head=head if names_key(stack.head) else without_key(head))


def metric_sums(
    name: str,
    metric: Metric,
    outputs: Tree,
    targets: jax.Array,
    dtype: jnp.dtype,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum of a metric's values, sum of weights), in at least float32.

    valid: booleans [examples], whether each example counts; None: all do. ConfigError for a metric
    that fails or does not return a value for each example.
    """
    call = partial(metric, outputs, {"targets": targets})
    found = call_user_code(f"metric {name}", 'metric(outputs, {"targets"})', call)
    values, weights = found if isinstance(found, tuple) and len(found) == 2 else (found, 1)
    values, number = jnp.asarray(values), len(targets)
    if values.shape[:1] != (number,):
        raise ConfigError(
            f"metric {name} returns the shape {values.shape} for {number} examples. Return a value "
            f"for each example or token, [{number}, ...], not their mean."
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    weights = jnp.broadcast_to(jnp.asarray(weights, wide), values.shape)
    if valid is not None:
        weights = jnp.where(valid.reshape(-1, *(1,) * (values.ndim - 1)), weights, 0)
    return jnp.where(weights == 0, 0, values.astype(wide) * weights).sum(), weights.sum()
