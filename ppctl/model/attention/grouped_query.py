"""Causal grouped-query attention with rotary positions, with its linear maps.

Shape suffixes: B batch, T tokens, M = B*T, S tokens attended to, D d_model, N query heads, G kv
heads, H width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.model.attention.attention_kernels import Kernel
from ppctl.model.layer_parts import Params, normed, whole
from ppctl.model.packed_sequences import Documents
from ppctl.model.parallel import StageAxes


@dataclass(frozen=True)
class GroupedQuery:
    """Attention of a layer (Su et al. 2021; Ainslie et al. 2023), on a stage's axes.

    With tp, a device has some of the heads: their columns of query, key and value, and their rows
    of out. If there are fewer kv heads than devices along tp, each device holds key and value
    whole, and computes the kv head that its queries read. Queries and keys may be normed (Henry et
    al. 2020): each head, with one scale that every device holds whole, or all heads together
    (OLMoE), with a scale divided like the heads.
    """

    sizes: Architecture
    mix: Kernel
    turn: Callable[[jax.Array], jax.Array]
    axes: StageAxes

    def __call__(
        self,
        params: Params,
        linear: Callable[..., jax.Array],
        x_MD: jax.Array,
        num_tokens: int,
        documents: Documents | None,
    ) -> jax.Array:
        """Return [M, D], this device's summand. x: all rows, sequences of num_tokens tokens."""
        # 1. this device's heads
        sizes, tp, width = self.sizes, self.axes.tp, self.sizes.head_width
        num_heads, num_kv_heads = sizes.num_heads // tp, max(1, sizes.kv_heads // tp)
        of_kv_head, of_all_heads = whole, sizes.traits.whole_qk_norm
        if sizes.kv_heads < tp:
            first = jax.lax.axis_index("tp") * sizes.kv_heads // tp * width
            take = partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=-1)
            of_kv_head = partial(take, start_index=first)
        mean_of_parts = partial(jax.lax.pmean, axis_name="tp") if tp > 1 else whole

        def heads(name: str, number: int, columns: Callable = whole) -> jax.Array:
            found = linear(f"attention/{name}", x_MD, columns)
            norm = params.get(f"{name}_norm")
            if norm is not None and of_all_heads:
                norm = {"scale": columns(norm["scale"])}
                # the mean of devices' means is exact: each device has equally many columns, and
                # equally many devices hold each kv head
                found = normed(norm, found, sizes, mean_of_parts)
            found = found.reshape(-1, num_tokens, number, width)
            return found if norm is None or of_all_heads else normed(norm, found, sizes)

        # 2. attention. Its backward reads the turned queries and keys. The backward of a rotation
        # reads no values, so without norms only the turned queries and keys need saving
        kept = whole if "query_norm" in params else partial(checkpoint_name, name="saved")
        q_BTNH = kept(self.turn(heads("query", num_heads)))
        k_BSGH = kept(self.turn(heads("key", num_kv_heads, of_kv_head)))
        v_BSGH = heads("value", num_kv_heads, of_kv_head)
        documents_BT = None if documents is None else documents.index_BT
        mixed = self.mix(q_BTNH, k_BSGH, v_BSGH, documents_BT).reshape(x_MD.shape[0], -1)
        return linear("attention/out", mixed)
