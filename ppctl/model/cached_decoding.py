"""A transformer that reads tokens piece by piece and caches keys and values.

Shape suffixes: B batch, T tokens of a piece, S cached positions, N query heads, G kv heads, R =
N/G, H width of a head, D d_model, V vocabulary. Sequences of different lengths are aligned at their
ends: row b's first token is at position starts[b], and earlier positions are never attended to.
Rotary attention depends only on differences of positions, so a sequence may start anywhere.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.config.groups.rope_settings import Rope
from ppctl.model.attention.attention_kernels import Kernel, Mix
from ppctl.model.attention.attention_scores import Scoring, attend
from ppctl.model.attention.rotary_positions import Rotate, rotate_at
from ppctl.model.layer_inputs import LayerInputs
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import Stack, Tree

Cache = list[Any]  # (keys, values) [B, S, G, H] of each layer, listed by stage


class Piece(NamedTuple):
    """The positions of a piece of tokens."""

    first: jax.Array  # position of the piece's first token
    starts_B: jax.Array  # position of the first token of each row's sequence


class _Attention:
    """Attention of a piece of tokens to the cached tokens and to itself.

    `Decoder._stage` sets `piece`, and `layer` to a layer's cache, before it traces the layer;
    `_attend` replaces `layer` with the updated cache.
    """

    layer: tuple[jax.Array, jax.Array]
    piece: Piece

    def __init__(self, num_positions: int):
        self.num_positions = num_positions

    def mix(self, axes: StageAxes, scoring: Scoring) -> Kernel:
        del axes
        return partial(self._attend, scoring)

    def rotate(self, x_BTNH: jax.Array, rope: Rope, axes: StageAxes = WHOLE) -> jax.Array:
        del axes
        return rotate_at(x_BTNH, rope, self.piece.first, self.num_positions)

    def _attend(
        self,
        scoring: Scoring,
        q_BTNH: jax.Array,
        k_BTGH: jax.Array,
        v_BTGH: jax.Array,
        documents_BT: None = None,
    ) -> jax.Array:
        del documents_BT
        first, starts_B = self.piece
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        k_BSGH, v_BSGH = self.layer = write(self.layer[0], k_BTGH), write(self.layer[1], v_BTGH)
        T, S = q_BTNH.shape[1], k_BSGH.shape[1]
        # distance in tokens from each key to each query
        behind_TS = (first + jnp.arange(T))[:, None] - jnp.arange(S)
        is_attended_TS = behind_TS >= 0
        if scoring.window is not None:
            is_attended_TS &= behind_TS < scoring.window
        is_attended_BTS = is_attended_TS & (jnp.arange(S) >= starts_B[:, None, None])
        return attend(q_BTNH, k_BSGH, v_BSGH, is_attended_BTS[:, None], scoring)


class Decoder:
    """A transformer that decodes with a cache, its layers placed on devices by stage.

    make: function from attention and rotary positions to the transformer. params:
    {"embed_head", "layers": [L, ...]} in model order, on any device; each stage's parameters are
    copied to its device in `dtype`. devices: the device of each stage, in order. num_positions: S,
    tokens of prompt and continuation together. cached: see `AttentionForm`.
    """

    def __init__(
        self,
        make: Callable[[Mix, Rotate], Stack],
        params: Tree,
        devices: Sequence[Any],
        num_positions: int,
        cached: tuple[tuple[int, ...], ...],
        dtype: jnp.dtype,
    ):
        # 1. the model
        self.devices, self.num_positions = devices, num_positions
        self.cached, self.dtype = cached, dtype
        self._attention = _Attention(num_positions)
        self._stack = make(self._attention.mix, self._attention.rotate)
        # 2. parameters on devices
        num_layers, num_stages = self._stack.num_layers, len(devices)
        bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
        self._layers_of = [range(*pair) for pair in pairwise(bounds)]
        computed = lambda tree: LayerInputs().computed(tree, dtype, self._stack.uncast)  # noqa: E731
        of_layer = lambda l: params | {"layers": jax.tree.map(lambda a: a[l], params["layers"])}  # noqa: E731
        layer = lambda l: computed(of_layer(l) | {"embed_head": {}})["layers"]  # noqa: E731
        pairs = zip(self._layers_of, devices, strict=True)
        self._layers = [[jax.device_put(layer(l), d) for l in layers] for layers, d in pairs]
        embed_head, ends = computed(params | {"layers": {}})["embed_head"], {0, num_stages - 1}
        self._embed_head = [
            jax.device_put(embed_head, d) if s in ends else None for s, d in enumerate(devices)
        ]
        # 3. programs of stages
        program = partial(jax.jit, donate_argnums=1)
        self._stages = [program(partial(self._stage, s)) for s in range(num_stages)]

    def empty(self, batch: int) -> Cache:
        """Return an empty cache for `batch` sequences."""
        shapes = [(batch, self.num_positions, *each) for each in self.cached]

        def of_layer(device: Any) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(each, self.dtype, device=device) for each in shapes)

        pairs = zip(self._layers_of, self.devices, strict=True)
        return [[of_layer(device) for _ in layers] for layers, device in pairs]

    def read(
        self, tokens_BT: jax.Array, cache: Cache, first: int, starts_B: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Return (logits after the last token [B, V], the new cache). The old cache is donated.

        first: position of the first of these tokens. starts_B: see `Piece`.
        """
        x, kept = tokens_BT, []
        for s, device in enumerate(self.devices):
            piece = Piece(jnp.int32(first), jax.device_put(starts_B, device))
            params, x = (self._embed_head[s], self._layers[s]), jax.device_put(x, device)
            x, of_stage = self._stages[s](params, cache[s], x, piece)
            kept.append(of_stage)
        return x, kept

    def _stage(
        self,
        s: int,
        params: tuple[Tree, Sequence[Tree]],
        kept: Sequence,
        x: jax.Array,
        piece: Piece,
    ) -> tuple[jax.Array, list]:
        """Return (output of the stage, its new cache); the last stage outputs last-token logits.

        kept: the cached (keys, values) of each layer of the stage. x: token ids for the first
        stage, else the activation from the stage before.
        """
        embed_head, layers = params
        self._attention.piece = piece
        if s == 0:
            x = self._stack.outer[0](embed_head, x)
        now = []
        for l, layer, of_layer in zip(self._layers_of[s], layers, kept, strict=True):
            self._attention.layer = of_layer
            x = self._stack.layer_of(l)(layer, x)
            now.append(self._attention.layer)
        if s < len(self.devices) - 1:
            return x, now
        assert self._stack.options.outputs is not None, "transformers have outputs"
        return self._stack.options.outputs(embed_head, x[:, -1:])[:, 0], now
