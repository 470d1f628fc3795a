"""The residual blocks of a transformer, as functions of their parameters.

Shape suffixes: B batch, T tokens, M = B*T, D d_model. Matrix products are two-dimensional, [M, in]
@ [in, out]: on CPU that is twice as fast as contracting with head dimensions in the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.config.groups.transformer_sizes import GATED, Architecture, LinearMap
from ppctl.model.experts.expert_layer import experts, new_experts
from ppctl.model.experts.router import tokens_of
from ppctl.model.fp8_products import product
from ppctl.model.layer_parts import BlockDropout, Params, new_maps, new_norm, normed, whole
from ppctl.model.lora import A, Lora, adapted_part
from ppctl.model.mlp import ACTIVATIONS
from ppctl.model.packed_sequences import Documents
from ppctl.model.parallel import StageAxes, gather, scatter
from ppctl.model.random_keys import Draw


def new_block(sizes: Architecture, draw: Draw) -> Params:
    """Return the initial parameters of a block, without adapters.

    If only some layers have experts, all have the parameters of both MLP and experts.
    """
    norm, form = partial(new_norm, sizes=sizes, draw=draw), sizes.attention_form
    block = {"attention_norm": norm(sizes.d_model)} | new_maps(form.maps, draw)
    for each in form.norms:
        block["attention"][each.path.rpartition("/")[2]] = norm(each.width)
    block |= {"mlp_norm": norm(sizes.d_model)} | new_maps(sizes.mlp_maps, draw)
    if any(sizes.has_experts):
        block |= new_experts(sizes, draw) | new_maps(sizes.shared_maps, draw)
    if sizes.traits.post_norms:
        names = ("attention_post_norm", "mlp_post_norm")
        block |= {name: norm(sizes.d_model) for name in names}
    return block


@dataclass(frozen=True)
class Block:
    """A pre-norm residual block of attention and an MLP (or experts), on a stage's axes.

    The MLP has an activation between two matrices; a third matrix may gate it (Shazeer 2020).
    """

    sizes: Architecture
    maps: Mapping[str, LinearMap]  # by path
    attend: Callable[..., jax.Array]  # see `GroupedQuery.__call__`
    axes: StageAxes
    lora: Lora | None = None
    has_experts: bool = False  # whether experts take the place of the MLP
    device: Any = None  # see `experts`
    imbalance: float | None = None  # see `experts`

    def __call__(
        self, params: Params, x_BTD: jax.Array, documents: Documents | None, drop: BlockDropout
    ) -> jax.Array:
        """Return the block's output [B, T, D] for this device's rows."""
        B, T, D = x_BTD.shape
        x_MD, axes = x_BTD.reshape(B * T, D), self.axes
        linear = partial(self._linear, params, drop)
        norm = lambda name, x: normed(params[name], x, self.sizes) if name in params else x  # noqa: E731
        # 1. attention
        own = gather(norm("attention_norm", x_MD), axes)
        attended = self.attend(params["attention"], linear, own, T * axes.row_parts, documents)
        mixed = scatter(attended, axes)
        x_MD = x_MD + drop.branch(norm("attention_post_norm", mixed), 0)
        # 2. the MLP, or experts
        own = norm("mlp_norm", x_MD)
        if self.has_experts:
            out = self._experts(params, linear, own, B, documents)
        else:
            out = self._mlp(linear, "mlp", own)
        x_MD = x_MD + drop.branch(norm("mlp_post_norm", out), 1)
        return x_MD.reshape(B, T, D)

    @property
    def _activation(self) -> Callable[[jax.Array], jax.Array]:
        name = self.sizes.activation
        return ACTIVATIONS[GATED.get(name, name)]

    def _linear(
        self,
        params: Params,
        drop: BlockDropout,
        path: str,
        x_M: jax.Array,
        columns: Callable = whole,
    ) -> jax.Array:
        """Return x W + b, plus an adapter's part if any. columns: selects columns of W and b."""
        for name in path.split("/"):
            params = params[name]
        times, each = jnp.matmul, self.maps[path]
        if self.sizes.linear_dtype is not None:
            times = product(each.divided or "outputs", ("tp",) if self.axes.tp > 1 else ())
        y_M = times(x_M, columns(params["kernel"]))
        if "bias" in params:
            y_M = y_M + columns(params["bias"])
        if A in params:
            assert self.lora is not None, "adapters have settings"
            x_M = drop.adapter_input(x_M, each)
            y_M = y_M + adapted_part(params, x_M, self.lora.scale, columns)
        return y_M

    def _mlp(self, linear: Callable[..., jax.Array], part: str, x_MD: jax.Array) -> jax.Array:
        x_MD, act = gather(x_MD, self.axes), self._activation
        up = linear(f"{part}/up", x_MD)
        hidden = act(linear(f"{part}/gate", x_MD)) * up if self.sizes.is_gated else act(up)
        return scatter(linear(f"{part}/down", hidden), self.axes)

    def _experts(
        self,
        params: Params,
        linear: Callable[..., jax.Array],
        x_MD: jax.Array,
        num_sequences: int,
        documents: Documents | None,
    ) -> jax.Array:
        out = experts(
            params,
            x_MD,
            self.sizes.moe,
            self._activation,
            self.axes,
            tokens_of(len(x_MD), num_sequences, documents, self.axes),
            device=self.device,
            imbalance=self.imbalance,
            is_counted=self.lora is None,
        )
        if self.sizes.moe.shared_width is None:
            return out
        shared = self._mlp(linear, "shared", x_MD)
        if self.sizes.moe.shared_gate:
            shared = shared * jax.nn.sigmoid(linear("shared_gate", x_MD))
        return out + shared
