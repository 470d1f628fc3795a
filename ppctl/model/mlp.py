"""Multi-layer perceptron for regression on the stack protocol.

Shape suffixes: B batch, I inputs, D width, O targets; C this device's columns of D, D/tp of them.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.model.parallel import WHOLE, StageAxes, column, on_first, own_part, row
from ppctl.model.stack import Stack, Tree

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "gelu": jax.nn.gelu}


def mlp(
    *,
    num_layers: int,
    d_model: int,
    activation: str,
    input_dim: int,
    target_dim: int,
    dtype: jnp.dtype,
    axes: StageAxes = WHOLE,
) -> Stack:
    """Return the stack activation(x W + b), num_layers times, between two linear maps; for regression.

    inputs: [B, input_dim], targets: [B, target_dim], floating; x: [B, d_model]. activation: relu | tanh | gelu.
    The loss is the squared error, one a target value, in at least float32. dtype: of the parameters, drawn by He et al.
    (2015). KeyError for another activation.

    axes: how a stage is divided; the functions of a divided one are those of one device (`Stack.divided`). The
    embedding's matrix is divided in columns, those of the layers and of the head in rows. So x is divided by its
    columns, [B, d_model/tp], and a layer sums and scatters once; without sequence parallelism all devices hold all of
    x. ConfigError for sizes that tp does not divide, and for cp.
    """
    given = {name: value for name, value in locals().items() if name != "axes"}
    _check_divides(axes, d_model)
    act = ACTIVATIONS[activation]
    he = nnx.initializers.he_normal()
    all_hold_all = replace(axes, sequence_parallel=False)

    def linear(num_in: int, num_out: int, key: jax.Array) -> Tree:
        module = nnx.Linear(num_in, num_out, kernel_init=he, param_dtype=dtype, rngs=nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def init_layer(key: jax.Array, _: jax.Array) -> Tree:
        return linear(d_model, d_model, key)

    def init_ends(key: jax.Array) -> Tree:
        embed_key, head_key = jax.random.split(key)
        return {"embed": linear(input_dim, d_model, embed_key), "head": linear(d_model, target_dim, head_key)}

    def embed(ends: Tree, inputs_BI: jax.Array) -> jax.Array:
        params = ends["embed"]
        inputs_BI = inputs_BI.astype(params["kernel"].dtype)
        if not axes.divides_rows:
            return act(inputs_BI @ params["kernel"] + params["bias"])
        return act(column(inputs_BI, params["kernel"], all_hold_all) + params["bias"])  # [B, C]

    def columns(x: jax.Array) -> jax.Array:
        """Return x_BC, this device's columns, of x as it is between layers."""
        return x if axes.divides_rows else own_part(x, axes)

    def layer(params: Tree, x: jax.Array) -> jax.Array:
        return act(row(columns(x), params["kernel"], axes, dim=1) + params["bias"])

    def outputs(ends: Tree, x: jax.Array) -> jax.Array:
        return row(columns(x), ends["head"]["kernel"], all_hold_all) + ends["head"]["bias"]

    def head(ends: Tree, x: jax.Array, targets_BO: jax.Array) -> tuple[jax.Array, jax.Array]:
        predictions_BO = outputs(ends, x)
        errors_BO = predictions_BO.astype(jnp.promote_types(predictions_BO.dtype, jnp.float32)) - targets_BO
        loss, number = jnp.square(errors_BO).sum(), jnp.asarray(errors_BO.size, errors_BO.dtype)
        return on_first(loss, axes), on_first(number, axes)  # all devices know all errors

    def divided(axes: StageAxes) -> Stack:
        return mlp(**given, axes=axes)

    vector = P("tp") if axes.divides_rows else P()
    ends = {"embed": {"kernel": P(None, *vector), "bias": vector}, "head": {"kernel": P("tp"), "bias": P()}}
    sharding = {"ends": ends, "layers": {"kernel": P("tp"), "bias": vector}}
    return Stack(
        *(num_layers, init_ends, init_layer, embed, layer, head),
        mixes_examples=False,
        outputs=outputs,
        divided=divided,
        sharding=None if axes.tp == 1 else sharding,
    )


def _check_divides(axes: StageAxes, d_model: int) -> None:
    """Raise ConfigError for a width that tp does not divide, and for sequences to divide, which there are not."""
    if axes.cp > 1:
        raise ConfigError(
            f"mesh.cp={axes.cp} divides sequences, and model=mlp has rows of numbers. Use mesh.cp=1, and more of "
            "mesh.dp."
        )
    if d_model % axes.tp:
        fitting = ", ".join(str(n) for n in range(1, axes.tp) if d_model % n == 0)
        raise ConfigError(
            f"model.d_model={d_model} is not a multiple of mesh.tp={axes.tp}: each device has as many columns of x. "
            f"Use mesh.tp={fitting}, or another width."
        )
