"""Multi-layer perceptron for regression on the stack protocol.

Shape suffixes: B batch, I inputs, D width, O targets; C this device's columns of D, D/tp of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.model.architecture import ACTIVATIONS
from ppctl.model.parallel import WHOLE, StageAxes, column, on_first, own_part, row
from ppctl.model.stack import Stack, Tree


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
    """Return the stack activation(x W + b), num_layers times, between two linear maps.

    For regression: inputs [B, input_dim], targets [B, target_dim], floating; x: [B, d_model].
    activation: of ACTIVATIONS. The loss is the squared error, one a target value, in at least
    float32. dtype: of the parameters, drawn by He et al. (2015). KeyError for another activation.

    axes: how a stage is divided; a divided stack has the functions of one device (`Stack.divided`).
    The embedding's matrix is divided in columns, those of layers and head in rows. So x is divided
    by its columns, [B, d_model/tp], and a layer sums and scatters once; without sequence
    parallelism all devices hold all of x. ConfigError for sizes that tp does not divide, and for
    cp.
    """
    _check_divides(axes, d_model)
    model = _Mlp(input_dim, d_model, target_dim, ACTIVATIONS[activation], dtype, axes)
    # how tp divides the parameters
    vector = P("tp") if axes.divides_rows else P()
    embed_head = {
        "embed": {"kernel": P(None, *vector), "bias": vector},
        "head": {"kernel": P("tp"), "bias": P()},
    }
    sharding = {"embed_head": embed_head, "layers": {"kernel": P("tp"), "bias": vector}}
    sizes = {"num_layers": num_layers, "d_model": d_model, "activation": activation}
    sizes |= {"input_dim": input_dim, "target_dim": target_dim, "dtype": dtype}
    return Stack(
        *(num_layers, model.init_embed_head, model.init_layer),
        *(model.embed, model.layer, model.head),
        mixes_examples=False,
        outputs=model.outputs,
        divided=lambda axes: mlp(**sizes, axes=axes),
        sharding=None if axes.tp == 1 else sharding,
    )


@dataclass(frozen=True, eq=False)
class _Mlp:
    """The functions of a `Stack`, as one device computes them."""

    input_dim: int
    d_model: int
    target_dim: int
    act: Callable[[jax.Array], jax.Array]
    dtype: jnp.dtype
    axes: StageAxes

    @property
    def _all_hold_all(self) -> StageAxes:
        return replace(self.axes, sequence_parallel=False)

    def _linear(self, num_in: int, num_out: int, key: jax.Array) -> Tree:
        how = {"kernel_init": nnx.initializers.he_normal(), "param_dtype": self.dtype}
        module = nnx.Linear(num_in, num_out, **how, rngs=nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def init_layer(self, key: jax.Array, _: jax.Array) -> Tree:
        return self._linear(self.d_model, self.d_model, key)

    def init_embed_head(self, key: jax.Array) -> Tree:
        embed, head = jax.random.split(key)
        return {
            "embed": self._linear(self.input_dim, self.d_model, embed),
            "head": self._linear(self.d_model, self.target_dim, head),
        }

    def embed(self, embed_head: Tree, inputs_BI: jax.Array) -> jax.Array:
        params = embed_head["embed"]
        inputs_BI = inputs_BI.astype(params["kernel"].dtype)
        if not self.axes.divides_rows:
            return self.act(inputs_BI @ params["kernel"] + params["bias"])
        x_BC = column(inputs_BI, params["kernel"], self._all_hold_all)
        return self.act(x_BC + params["bias"])

    def _columns(self, x: jax.Array) -> jax.Array:
        """Return this device's columns x_BC of x between layers."""
        return x if self.axes.divides_rows else own_part(x, self.axes)

    def layer(self, params: Tree, x: jax.Array) -> jax.Array:
        return self.act(row(self._columns(x), params["kernel"], self.axes, dim=1) + params["bias"])

    def outputs(self, embed_head: Tree, x: jax.Array) -> jax.Array:
        head = embed_head["head"]
        return row(self._columns(x), head["kernel"], self._all_hold_all) + head["bias"]

    def head(
        self, embed_head: Tree, x: jax.Array, targets_BO: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        predictions_BO = self.outputs(embed_head, x)
        wide = jnp.promote_types(predictions_BO.dtype, jnp.float32)
        errors_BO = predictions_BO.astype(wide) - targets_BO
        loss, number = jnp.square(errors_BO).sum(), jnp.asarray(errors_BO.size, errors_BO.dtype)
        return on_first(loss, self.axes), on_first(number, self.axes)  # all devices know all errors


def _check_divides(axes: StageAxes, d_model: int) -> None:
    """Raise ConfigError for a width that tp does not divide, and for cp."""
    if axes.cp > 1:
        raise ConfigError(
            f"mesh.cp={axes.cp} divides sequences, and model=mlp has rows of numbers. Use "
            "mesh.cp=1, and more of mesh.dp."
        )
    if d_model % axes.tp:
        fitting = ", ".join(str(n) for n in range(1, axes.tp) if d_model % n == 0)
        raise ConfigError(
            f"model.d_model={d_model} is not a multiple of mesh.tp={axes.tp}: each device has as "
            f"many columns of x. Use mesh.tp={fitting}, or another width."
        )
