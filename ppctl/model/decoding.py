"""A transformer read piece by piece: keys and values of the tokens so far are kept, so that each is computed once.

Shape suffixes: B batch, T tokens of a piece, S positions that are kept, N query heads, G kv heads, R = N/G, H width of
a head, D d_model, V vocabulary. Sequences of different lengths end together: row b's first token is at position
starts[b], what is before it is never attended to. Rotary positions are of differences alone, so it does not matter
where a sequence starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.attention import Kernel
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.rotary import Rope, rotate_at
from ppctl.model.scoring import NEVER, Scoring
from ppctl.model.stack import Stack, Tree

Mix = Callable[[StageAxes, Scoring], Kernel]
Rotate = Callable[..., jax.Array]
Cache = list[Any]  # of each stage, of each of its layers: (keys, values) [B, S, G, H]


class Piece(NamedTuple):
    """Where a piece of tokens is."""

    first: jax.Array  # position of its first token
    starts_B: jax.Array  # of each row's first token


class _Attention:
    """Attention of a piece, over what a layer has kept and itself. `layer` and `piece` are those being traced."""

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

    def _attend(self, scoring: Scoring, q_BTNH: jax.Array, k_BTGH: jax.Array, v_BTGH: jax.Array) -> jax.Array:
        first, starts_B = self.piece
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        k_BSGH, v_BSGH = self.layer = write(self.layer[0], k_BTGH), write(self.layer[1], v_BTGH)
        B, T, N, H = q_BTNH.shape
        S, G = k_BSGH.shape[1:3]
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        q_BTGRH = q_BTNH.reshape(B, T, G, N // G, H)
        scores_BGRTS = jnp.einsum("BTGRH,BSGH->BGRTS", q_BTGRH, k_BSGH, preferred_element_type=wide)
        scores_BGRTS = scoring.capped(scores_BGRTS * scoring.scale_of(H))
        behind_TS = (first + jnp.arange(T))[:, None] - jnp.arange(S)  # how far a key is behind a query
        is_attended_TS = behind_TS >= 0
        if scoring.window is not None:
            is_attended_TS &= behind_TS < scoring.window
        is_attended_BTS = is_attended_TS & (jnp.arange(S) >= starts_B[:, None, None])
        scores_BGRTS = jnp.where(is_attended_BTS[:, None, None], scores_BGRTS, NEVER)
        weights_BGRTS = jax.nn.softmax(scores_BGRTS).astype(v_BSGH.dtype)
        return jnp.einsum("BGRTS,BSGH->BTGRH", weights_BGRTS, v_BSGH).reshape(B, T, N, H)


class Decoder:
    """A transformer with parameters on devices, each of which has the layers of one stage.

    make: the transformer with attention and rotary positions that are given. params: {"ends", "layers": [L, ...]}, in
    natural order, anywhere; those of a stage are copied to its device, in `dtype`. devices: one a stage, in order.
    num_positions: S, of each sequence, prompt and continuation together. kv_shape: (G, H).
    """

    def __init__(
        self,
        make: Callable[[Mix, Rotate], Stack],
        params: Tree,
        devices: Sequence[Any],
        num_positions: int,
        kv_shape: tuple[int, int],
        dtype: jnp.dtype,
    ):
        self.devices, self.num_positions, self.kv_shape, self.dtype = devices, num_positions, kv_shape, dtype
        self._attention = _Attention(num_positions)
        self._stack = make(self._attention.mix, self._attention.rotate)
        num_layers, last = self._stack.num_layers, len(devices) - 1
        bounds = [num_layers * stage // len(devices) for stage in range(len(devices) + 1)]
        self._layers_of = [range(*pair) for pair in pairwise(bounds)]
        place = lambda tree, device: jax.tree.map(lambda a: jax.device_put(jnp.asarray(a, dtype), device), tree)  # noqa: E731
        layer = lambda l: jax.tree.map(lambda a: a[l], params["layers"])  # noqa: E731
        pairs = zip(self._layers_of, devices, strict=True)
        self._layers = [[place(layer(l), device) for l in layers] for layers, device in pairs]
        self._ends = [place(params["ends"], d) if s in (0, last) else None for s, d in enumerate(devices)]
        self._stages = [
            jax.jit(partial(self._stage, s), donate_argnums=2, static_argnames="wants_all") for s in range(len(devices))
        ]

    def empty(self, batch: int) -> Cache:
        """Return the cache of sequences of which nothing was read yet."""
        shape = batch, self.num_positions, *self.kv_shape
        make = lambda device: tuple(jnp.zeros(shape, self.dtype, device=device) for _ in range(2))  # noqa: E731
        return [[make(device) for _ in layers] for layers, device in zip(self._layers_of, self.devices, strict=True)]

    def read(
        self, tokens_BT: jax.Array, cache: Cache, first: int, starts_B: jax.Array, *, wants_all: bool = False
    ) -> tuple[jax.Array, Cache]:
        """Return the logits behind the last token [B, V], or each (wants_all) [B, T, V], and the cache with them.

        The cache that is given must not be used again. first + T <= num_positions.
        """
        x, kept = tokens_BT, []
        for s, device in enumerate(self.devices):
            piece = Piece(jnp.int32(first), jax.device_put(starts_B, device))
            x, of_stage = self._stages[s](
                self._ends[s], self._layers[s], cache[s], jax.device_put(x, device), piece, wants_all=wants_all
            )
            kept.append(of_stage)
        return x, kept

    def _stage(
        self, s: int, ends: Tree, layers: Sequence[Tree], kept: Sequence, x: jax.Array, piece: Piece, *, wants_all: bool
    ) -> tuple[jax.Array, list]:
        self._attention.piece = piece
        if s == 0:
            x = self._stack.embed(ends, x)
        now = []
        for l, layer, of_layer in zip(self._layers_of[s], layers, kept, strict=True):
            self._attention.layer = of_layer
            x = self._stack.layer_of(l)(layer, x)
            now.append(self._attention.layer)
        if s < len(self.devices) - 1:
            return x, now
        assert self._stack.outputs is not None, "of a transformer"
        logits = self._stack.outputs(ends, x if wants_all else x[:, -1:])
        return (logits if wants_all else logits[:, 0]), now
