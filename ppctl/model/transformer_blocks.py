"""The residual blocks of a transformer, as functions of their parameters.

Shape suffixes: B batch, T tokens, M = B*T, S tokens attended to, D d_model, N query heads, G kv
heads, H width of a head. Matrix products are two-dimensional, [M, in] @ [in, out]: on CPU that is
twice as fast as contracting with head dimensions in the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers

from ppctl.config.groups.transformer_sizes import GATED, Architecture
from ppctl.model.activations import ACTIVATIONS
from ppctl.model.attention.attention_kernels import Kernel
from ppctl.model.experts.expert_layer import experts, new_experts
from ppctl.model.experts.router import tokens_of
from ppctl.model.fp8_products import product
from ppctl.model.lora import A, Lora, adapted_part
from ppctl.model.packed_sequences import Documents
from ppctl.model.parallel import StageAxes, gather, scatter
from ppctl.model.random_keys import Draw
from ppctl.model.transformer_dropout import BlockDropout

Params = dict[str, Any]
ROW_MAPS = ("out", "down")  # linear maps whose inputs tp divides; of the others, the outputs
FP8_MAPS = ("query", "key", "value", "up", "gate", *ROW_MAPS)  # maps that linear_dtype applies to
# their matrices in a layer, and the dim that a scale of `fp8_products` sums up
FP8_WEIGHTS = {
    f"{part}/{name}/kernel": -1 if name in ROW_MAPS else -2
    for part in ("attention", "mlp", "shared")
    for name in FP8_MAPS
}


def _all(a: jax.Array) -> jax.Array:
    return a


def new_norm(width: int, sizes: Architecture, draw: Draw) -> Params:
    return {
        "scale": draw(
            initializers.zeros if sizes.traits.norm_plus_one else initializers.ones, width
        )
    }


def new_block(sizes: Architecture, draw: Draw) -> Params:
    """Return the initial parameters of a block, without adapters."""
    norm = partial(new_norm, sizes=sizes, draw=draw)

    def linear(num_in: int, num_out: int, use_bias: bool = False) -> Params:
        kernel = {"kernel": draw(initializers.lecun_normal(), num_in, num_out)}
        return kernel | {"bias": draw(initializers.zeros, num_out)} if use_bias else kernel

    # 1. attention
    D, H, traits = sizes.d_model, sizes.head_width, sizes.traits
    bias = traits.qkv_bias
    block, attention = {"attention_norm": norm(D)}, {"query": linear(D, sizes.num_heads * H, bias)}
    attention |= {name: linear(D, sizes.kv_heads * H, bias) for name in ("key", "value")}
    attention |= {"out": linear(sizes.num_heads * H, D)}
    if traits.qk_norm or traits.whole_qk_norm:
        widths = (sizes.num_heads * H, sizes.kv_heads * H) if traits.whole_qk_norm else (H, H)
        attention |= {"query_norm": norm(widths[0]), "key_norm": norm(widths[1])}
    # 2. the MLP, or experts; if only some layers have experts, all have the parameters of both
    block |= {"attention": attention, "mlp_norm": norm(D)}

    def mlp(width: int) -> Params:
        names = ("up", "gate") if sizes.is_gated else ("up",)
        return {name: linear(D, width) for name in names} | {"down": linear(width, D)}

    if not all(sizes.has_experts):
        block |= {"mlp": mlp(sizes.hidden_width)}
    if any(sizes.has_experts):
        block |= new_experts(sizes, draw)
        if sizes.moe.shared_width is not None:
            block |= {"shared": mlp(sizes.moe.shared_width)}
        if sizes.moe.shared_gate:
            block |= {"shared_gate": linear(D, 1)}
    if traits.post_norms:
        block |= {"attention_post_norm": norm(D), "mlp_post_norm": norm(D)}
    return block


def normed(
    params: Params,
    x: jax.Array,
    sizes: Architecture,
    parts: Callable[[jax.Array], jax.Array] = _all,
) -> jax.Array:
    """Return the RMSNorm of x, in at least float32; with norm_plus_one (Gemma) times 1 + scale.

    parts: function from the mean square over this device's columns to that over all columns.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = params["scale"].astype(wide.dtype) + (1 if sizes.traits.norm_plus_one else 0)
    mean_square = parts(jnp.square(wide).mean(-1, keepdims=True))
    return (wide * (jax.lax.rsqrt(mean_square + sizes.norm_eps) * scale)).astype(x.dtype)


@dataclass(frozen=True)
class Block:
    """A pre-norm residual block of attention and an MLP (or experts), on a stage's axes.

    Attention is causal and grouped-query, with rotary positions (Su et al. 2021; Ainslie et al.
    2023). With tp, a device has some of the heads: their columns of query, key and value, and their
    rows of out. If there are fewer kv heads than devices along tp, each device holds key and value
    whole, and computes the kv head that its queries read. Queries and keys may be normed (Henry et
    al. 2020): each head, with one scale that every device holds whole, or all heads together
    (OLMoE), with a scale divided like the heads. The MLP has an activation between two matrices; a
    third matrix may gate it (Shazeer 2020).
    """

    sizes: Architecture
    mix: Kernel
    turn: Callable[[jax.Array], jax.Array]
    axes: StageAxes
    lora: Lora | None = None
    has_experts: bool = False  # whether experts take the place of the MLP
    device: Any = None  # see `experts`
    imbalance: float | None = None  # see `experts`

    @property
    def _activation(self) -> Callable[[jax.Array], jax.Array]:
        name = self.sizes.activation
        return ACTIVATIONS[GATED.get(name, name)]

    def __call__(
        self, params: Params, x_BTD: jax.Array, documents: Documents | None, drop: BlockDropout
    ) -> jax.Array:
        """Return the block's output [B, T, D] for this device's rows."""
        B, T, D = x_BTD.shape
        x_MD = x_BTD.reshape(B * T, D)
        norm = lambda name, x: normed(params[name], x, self.sizes) if name in params else x  # noqa: E731
        num_tokens = T * self.axes.row_parts
        own = norm("attention_norm", x_MD)
        mixed = self._attention(params["attention"], own, num_tokens, documents, drop)
        x_MD = x_MD + drop.branch(norm("attention_post_norm", mixed), 0)
        own = norm("mlp_norm", x_MD)
        if self.has_experts:
            out = self._experts(params, own, B, documents, drop)
        else:
            out = self._mlp(params["mlp"], own, drop)
        x_MD = x_MD + drop.branch(norm("mlp_post_norm", out), 1)
        return x_MD.reshape(B, T, D)

    def _attention(
        self,
        params: Params,
        x_MD: jax.Array,
        num_tokens: int,
        documents: Documents | None,
        drop: BlockDropout,
    ) -> jax.Array:
        # 1. this device's heads
        sizes, tp, width = self.sizes, self.axes.tp, self.sizes.head_width
        traits = sizes.traits
        num_heads, num_kv_heads = sizes.num_heads // tp, max(1, sizes.kv_heads // tp)
        of_kv_head = _all
        if sizes.kv_heads < tp:
            first = jax.lax.axis_index("tp") * sizes.kv_heads // tp * width
            take = partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=-1)
            of_kv_head = partial(take, start_index=first)
        x_MD = gather(x_MD, self.axes)
        mean_of_parts = partial(jax.lax.pmean, axis_name="tp") if tp > 1 else _all

        def heads(name: str, number: int, columns: Callable = _all) -> jax.Array:
            found = self._linear(params, name, x_MD, drop, columns)
            norm = params.get(f"{name}_norm")
            if norm is not None and traits.whole_qk_norm:
                norm = {"scale": columns(norm["scale"])}
                # the mean of devices' means is exact: each device has equally many columns, and
                # equally many devices hold each kv head
                found = normed(norm, found, sizes, mean_of_parts)
            found = found.reshape(-1, num_tokens, number, width)
            return found if norm is None or traits.whole_qk_norm else normed(norm, found, sizes)

        # 2. attention. Its backward reads the turned queries and keys. The backward of a rotation
        # reads no values, so without norms only the turned queries and keys need saving
        kept = (
            _all
            if traits.qk_norm or traits.whole_qk_norm
            else partial(checkpoint_name, name="saved")
        )
        q_BTNH = kept(self.turn(heads("query", num_heads)))
        k_BSGH = kept(self.turn(heads("key", num_kv_heads, of_kv_head)))
        v_BSGH = heads("value", num_kv_heads, of_kv_head)
        documents_BT = None if documents is None else documents.index_BT
        mixed = self.mix(q_BTNH, k_BSGH, v_BSGH, documents_BT).reshape(x_MD.shape[0], -1)
        return scatter(self._linear(params, "out", mixed, drop), self.axes)

    def _mlp(self, params: Params, x_MD: jax.Array, drop: BlockDropout) -> jax.Array:
        x_MD, act = gather(x_MD, self.axes), self._activation
        up = self._linear(params, "up", x_MD, drop)
        is_gated = "gate" in params
        hidden = act(self._linear(params, "gate", x_MD, drop)) * up if is_gated else act(up)
        return scatter(self._linear(params, "down", hidden, drop), self.axes)

    def _experts(
        self,
        params: Params,
        x_MD: jax.Array,
        num_sequences: int,
        documents: Documents | None,
        drop: BlockDropout,
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
        if "shared" not in params:
            return out
        shared = self._mlp(params["shared"], x_MD, drop)
        if "shared_gate" in params:
            shared = shared * jax.nn.sigmoid(self._linear(params, "shared_gate", x_MD, drop))
        return out + shared

    def _product(self, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Return the matrix product of a linear map: in 8 bits if its sizes say so."""
        if self.sizes.linear_dtype is None or name not in FP8_MAPS:
            return jnp.matmul
        tp = ("tp",) if self.axes.tp > 1 else ()
        return product("inputs" if name in ROW_MAPS else "outputs", tp)

    def _linear(
        self,
        block: Params,
        name: str,
        x_MD: jax.Array,
        drop: BlockDropout,
        columns: Callable = _all,
    ) -> jax.Array:
        """Return x W + b, plus an adapter's part if any. columns: selects columns of W and b."""
        params = block[name]
        found = self._product(name)(x_MD, columns(params["kernel"]))
        if "bias" in params:
            found = found + columns(params["bias"])
        if A in params:
            assert self.lora is not None, "adapters have settings"
            x_MD = drop.adapter_input(x_MD, name)
            found = found + adapted_part(params, x_MD, self.lora.scale, columns)
        return found
