"""A model divided inside a stage: its weights over tp, the tokens of a sequence over cp.

`ppctl.parallel` has functions that run on each device, for models with custom collectives
(`DividedStack`). With tp=1 they do not communicate, so the same code serves the whole and the
divided model. All follow one rule, which is also JAX's for transposes: *the model's result
is the sum of the devices' results*. So each device returns its summand of a loss. If all devices
hold a parameter whole, its gradient is the sum over devices. The gradient of a shard is computed by
its device.

Activations between layers are [batch, tokens, ...] on every device. With sequence parallelism
(Korthikanti et al. 2022) each device along tp holds a part of the rows, batch and tokens flattened;
otherwise each holds all rows. Tokens are divided over cp in zig-zag order: device c holds pieces c
and 2*cp-1-c of a sequence's 2*cp pieces, so that all devices do equal work in causal attention.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, Self

import jax
import jax.numpy as jnp

from ppctl.schedule.mesh_axes import DATA_AXES, STAGE_AXES, axes_record

Tree = Any


@dataclass(frozen=True)
class StageAxes(axes_record(STAGE_AXES, is_frozen=True)):
    """The mesh axes that divide a stage. Each axis, such as tp or cp, is a field with its size.

    sequence_parallel: whether tp divides the rows of activations. vocab_parts: number of pipeline
    ranks that divide embedding and head by vocabulary, on top of tp; 0: undivided
    (`VocabularyParts`). context: gather | ring, the way attention gets the keys and values of other
    devices along cp.
    """

    sequence_parallel: bool = True
    vocab_parts: int = 0
    context: str = "gather"

    @classmethod
    def of(cls, sizes: Mapping[str, int], **how: Any) -> Self:
        """Return the axes inside a stage, with the sizes of a mesh. how: the other fields."""
        return cls(**{name: sizes.get(name, 1) for name in STAGE_AXES}, **how)

    @property
    def divided(self) -> dict[str, int]:
        """Return the sizes, above 1, of the axes that divide the stage."""
        return {name: n for name in STAGE_AXES if (n := getattr(self, name)) > 1}

    @property
    def text(self) -> str:
        """Return the axes in `divided` as settings, such as "mesh.tp=2 mesh.cp=2"."""
        return " ".join(f"mesh.{name}={size}" for name, size in self.divided.items())

    @property
    def num_devices(self) -> int:
        return prod(self.divided.values())

    @property
    def need_a_model(self) -> bool:
        """Return whether axes divide more than examples, so that the model must support them."""
        return bool(self.vocab_parts or self.divided.keys() - set(DATA_AXES))

    def parts(self, axes: Iterable[str]) -> int:
        """Return the number of parts of a dim divided over these axes; "pp" counts vocab_parts.

        >>> StageAxes(tp=2, vocab_parts=4).parts(("pp", "tp"))
        8
        """
        return prod(size for name, size in self.sizes if name in axes)

    @property
    def divides_rows(self) -> bool:
        """Return whether devices along tp hold parts of the rows of activations."""
        return self.sequence_parallel and self.tp > 1

    @property
    def row_parts(self) -> int:
        """Return the number of devices that divide the rows of activations."""
        return self.tp if self.divides_rows else 1

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return (name, size) of each axis in a stage, and of pp if it divides the vocabulary."""
        ranks = (("pp", self.vocab_parts),) if self.vocab_parts else ()
        return *ranks, *((name, getattr(self, name)) for name in STAGE_AXES)

    def padded(self, num_tokens: int) -> int:
        """Return the number of tokens of a sequence after padding to equal parts.

        >>> [axes.padded(131) for axes in (StageAxes(tp=2, cp=2), StageAxes(tp=4), StageAxes(cp=2))]
        [132, 132, 132]
        """
        rows = self.row_parts
        unit = self.cp * lcm(2, rows) if self.cp > 1 else rows  # with cp, a device has two pieces
        return -(-num_tokens // unit) * unit


WHOLE = StageAxes()


def gather(rows: jax.Array, axes: StageAxes) -> jax.Array:
    """Return all rows [M, ...], gathered over tp from parts [M/tp, ...] if tp divides rows."""
    return jax.lax.all_gather(rows, "tp", tiled=True) if axes.divides_rows else rows


def scatter(rows: jax.Array, axes: StageAxes) -> jax.Array:
    """Return rows [M, ...] summed over tp; if tp divides rows, this device's part [M/tp, ...]."""
    if axes.divides_rows:
        return jax.lax.psum_scatter(rows, "tp", tiled=True)
    return jax.lax.psum(rows, "tp") if axes.tp > 1 else rows


def column(rows: jax.Array, w: jax.Array, axes: StageAxes) -> jax.Array:
    """Return all rows times this device's columns of a matrix, [M, out/tp].

    rows: [M/tp, in] with sequence parallelism, else [M, in]. w: the columns, [in, out/tp].
    """
    return gather(rows, axes) @ w


def row(rows: jax.Array, w: jax.Array, axes: StageAxes) -> jax.Array:
    """Return rows @ w summed over tp: [M/tp, out] with sequence parallelism, else [M, out].

    rows: [M, in/tp]. w: this device's rows of a matrix, [in/tp, out].
    """
    return scatter(rows @ w, axes)


def own_part(a: jax.Array, axes: StageAxes, dim: int = -1) -> jax.Array:
    """Return this device's part [..., n/tp, ...] along `dim` of an array that is whole over tp."""
    if axes.tp == 1:
        return a
    size = a.shape[dim] // axes.tp
    return jax.lax.dynamic_slice_in_dim(a, shard_of(size, "tp", axes.tp), size, dim % a.ndim)


def shard_of(size: int, name: str, divided_by: int) -> jax.Array:
    """Return the offset of this device's shard of `size` entries along mesh axis `name`.

    divided_by: size of the axis; if 1, the offset is 0.
    """
    return jax.lax.axis_index(name) * size if divided_by > 1 else jnp.int32(0)


def own_tokens(a: jax.Array, axes: StageAxes, dim: int = 1, fill: Any = 0) -> jax.Array:
    """Return this device's tokens of whole sequences along `dim`, first padded with `fill`."""
    padding = axes.padded(a.shape[dim]) - a.shape[dim]
    if padding:
        widths = [(0, padding if d == dim else 0) for d in range(a.ndim)]
        a = jnp.pad(a, widths, constant_values=fill)
    return a if axes.cp == 1 else own_pieces(a, axes.cp, dim)


def own_pieces(a: jax.Array, cp: int, dim: int) -> jax.Array:
    """Return pieces c and 2*cp-1-c of the 2*cp pieces along `dim`, on device c."""
    size, c = a.shape[dim] // (2 * cp), jax.lax.axis_index("cp")
    take = lambda piece: jax.lax.dynamic_slice_in_dim(a, piece * size, size, dim)  # noqa: E731
    return jnp.concatenate([take(c), take(2 * cp - 1 - c)], dim)


def whole_sequences(a: jax.Array, axes: StageAxes, num_tokens: int) -> jax.Array:
    """Return whole sequences [B, num_tokens, ...] from each device's tokens: undo `own_tokens`."""
    if axes.cp > 1:
        first, second = jnp.split(jax.lax.all_gather(a, "cp"), 2, axis=2)
        a = jnp.concatenate([*first, *second[::-1]], axis=1)
    return a[:, :num_tokens]


def on_first(value: jax.Array, axes: StageAxes) -> jax.Array:
    """Return the value on the first device along tp, else 0: a sum over tp then counts it once."""
    return jnp.where(jax.lax.axis_index("tp") == 0, value, 0) if axes.tp > 1 else value


def folded_keys(keys: jax.Array, numbers: Any) -> jax.Array:
    """Return random keys with numbers folded in; their shapes broadcast."""
    keys, numbers = jnp.broadcast_arrays(keys, jnp.asarray(numbers, jnp.uint32))
    flat = jax.vmap(jax.random.fold_in)(keys.reshape(-1), numbers.reshape(-1))
    return flat.reshape(keys.shape)


def token_keys(key: jax.Array, num_tokens: int, axes: StageAxes = WHOLE) -> jax.Array:
    """Return the keys of this device's tokens, [examples, num_tokens].

    A token's key depends on its example's key and on its position in the sequence.

    Args:
        key: Keys of the examples, [examples].
        num_tokens: Tokens of a sequence in this device's activation [examples, num_tokens, ...].
        axes: The axes that divide the stage.
    """
    num_examples, of_cp = len(key), num_tokens * axes.row_parts
    places = jnp.arange(num_examples * of_cp)
    if axes.divides_rows:
        places = own_part(places, axes)
    examples, positions = jnp.divmod(places, of_cp)
    if axes.cp > 1:
        positions = own_pieces(jnp.arange(of_cp * axes.cp), axes.cp, 0)[positions]
    return folded_keys(key[examples], positions).reshape(num_examples, num_tokens)
