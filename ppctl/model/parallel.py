"""A model divided inside a stage: over tp its weights, over cp the tokens of a sequence.

Functions of one device, for authors of a model's collectives (`DividedStack`): `ppctl.parallel`.
With tp of 1 they communicate nothing, so one text serves a model whole and divided. All follow one
rule, which is also JAX's for transposes: *the model's result is the sum over devices of each one's
result*. So a loss is a device's part of it, the gradient of a parameter that all devices hold whole
is the sum over them, and that of a shard is the device's own.

Activations between layers are [batch, tokens, ...] on every device. With sequence parallelism
(Korthikanti et al. 2022) each device along tp holds its part of their rows, batch and tokens taken
together; otherwise each holds all. Tokens lie over cp in zig-zag order: of 2*cp pieces of a
sequence, device c holds pieces c and 2*cp-1-c, so that causal attention is equal work on each.
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
    """The devices that divide a stage: a field for each axis inside one, such as tp and cp.

    vocab_parts: of embedding and head, divided over the pipeline's ranks by their vocabulary, on
    top of tp; 0: not over ranks. See `VocabularyParts`. context: how attention gets the keys and
    values of other devices along cp, gather | ring.
    """

    sequence_parallel: bool = True
    vocab_parts: int = 0
    context: str = "gather"

    @classmethod
    def of(cls, sizes: Mapping[str, int], **how: Any) -> Self:
        """Return the axes inside a stage of a mesh of these sizes; how: the other fields."""
        return cls(**{name: sizes.get(name, 1) for name in STAGE_AXES}, **how)

    @property
    def divided(self) -> dict[str, int]:
        """The sizes of the axes that divide the stage."""
        return {name: n for name in STAGE_AXES if (n := getattr(self, name)) > 1}

    @property
    def text(self) -> str:
        """The same as one types it, after mesh=."""
        return " ".join(f"mesh.{name}={size}" for name, size in self.divided.items())

    @property
    def num_devices(self) -> int:
        return prod(self.divided.values())

    @property
    def need_a_model(self) -> bool:
        """Whether only models that say how can be divided so: more than examples is divided."""
        return bool(self.vocab_parts or self.divided.keys() - set(DATA_AXES))

    def parts(self, axes: Iterable[str]) -> int:
        """Return the number of parts of a dim that is divided over some axes, "pp": by vocabulary.

        >>> StageAxes(tp=2, vocab_parts=4).parts(("pp", "tp"))
        8
        """
        return prod(size for name, size in self.sizes if name in axes)

    @property
    def divides_rows(self) -> bool:
        """Whether devices along tp hold parts of the rows of activations."""
        return self.sequence_parallel and self.tp > 1

    @property
    def row_parts(self) -> int:
        """The number of devices that divide the rows of activations."""
        return self.tp if self.divides_rows else 1

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes, as traces need them."""
        ranks = (("pp", self.vocab_parts),) if self.vocab_parts else ()
        return *ranks, *((name, getattr(self, name)) for name in STAGE_AXES)

    def padded(self, num_tokens: int) -> int:
        """Return the tokens of a sequence with padding, so that all devices have equally many.

        >>> [axes.padded(131) for axes in (StageAxes(tp=2, cp=2), StageAxes(tp=4), StageAxes(cp=2))]
        [132, 132, 132]
        """
        rows = self.row_parts
        unit = self.cp * lcm(2, rows) if self.cp > 1 else rows  # two pieces a device with cp
        return -(-num_tokens // unit) * unit


WHOLE = StageAxes()


def gather(rows: jax.Array, axes: StageAxes) -> jax.Array:
    """Return all rows [M, ...] from the parts [M/tp, ...] of devices along tp, if divided."""
    return jax.lax.all_gather(rows, "tp", tiled=True) if axes.divides_rows else rows


def scatter(rows: jax.Array, axes: StageAxes) -> jax.Array:
    """Return the sum of `rows` [M, ...] over tp: each device's part [M/tp, ...], or all of it."""
    if axes.divides_rows:
        return jax.lax.psum_scatter(rows, "tp", tiled=True)
    return jax.lax.psum(rows, "tp") if axes.tp > 1 else rows


def column(rows: jax.Array, w: jax.Array, axes: StageAxes) -> jax.Array:
    """Return [M, out/tp]: all rows times this device's columns w [in, out/tp] of a matrix.

    rows: [M/tp, in] with sequence parallelism, else [M, in].
    """
    return gather(rows, axes) @ w


def row(rows: jax.Array, w: jax.Array, axes: StageAxes) -> jax.Array:
    """Return the sum over tp of rows [M, in/tp] @ w, this device's rows [in/tp, out]: `scatter`.

    That is [M/tp, out] with sequence parallelism, else [M, out].
    """
    return scatter(rows @ w, axes)


def own_part(a: jax.Array, axes: StageAxes, dim: int = -1) -> jax.Array:
    """Return this device's part [..., n/tp, ...] along `dim` of an equal array on all devices."""
    if axes.tp == 1:
        return a
    size = a.shape[dim] // axes.tp
    return jax.lax.dynamic_slice_in_dim(a, shard_of(size, "tp", axes.tp), size, dim % a.ndim)


def shard_of(size: int, name: str, divided_by: int) -> jax.Array:
    """Return the first of this device's `size` entries of a dim divided over an axis, else 0."""
    return jax.lax.axis_index(name) * size if divided_by > 1 else jnp.int32(0)


def own_tokens(a: jax.Array, axes: StageAxes, dim: int = 1, fill: Any = 0) -> jax.Array:
    """Return this device's tokens along `dim` of a whole sequence, padded with `fill`."""
    padding = axes.padded(a.shape[dim]) - a.shape[dim]
    if padding:
        widths = [(0, padding if d == dim else 0) for d in range(a.ndim)]
        a = jnp.pad(a, widths, constant_values=fill)
    return a if axes.cp == 1 else own_pieces(a, axes.cp, dim)


def own_pieces(a: jax.Array, cp: int, dim: int) -> jax.Array:
    """Return device c's pieces c and 2*cp-1-c of the 2*cp along `dim`."""
    size, c = a.shape[dim] // (2 * cp), jax.lax.axis_index("cp")
    take = lambda piece: jax.lax.dynamic_slice_in_dim(a, piece * size, size, dim)  # noqa: E731
    return jnp.concatenate([take(c), take(2 * cp - 1 - c)], dim)


def on_first(value: jax.Array, axes: StageAxes) -> jax.Array:
    """Return a value on the first device along tp, zero on the others: it counts once."""
    return jnp.where(jax.lax.axis_index("tp") == 0, value, 0) if axes.tp > 1 else value


def folded_keys(keys: jax.Array, numbers: Any) -> jax.Array:
    """Return random keys with numbers folded in; their shapes broadcast."""
    keys, numbers = jnp.broadcast_arrays(keys, jnp.asarray(numbers, jnp.uint32))
    flat = jax.vmap(jax.random.fold_in)(keys.reshape(-1), numbers.reshape(-1))
    return flat.reshape(keys.shape)


def token_keys(key: jax.Array, num_tokens: int, axes: StageAxes = WHOLE) -> jax.Array:
    """Return the keys of this device's tokens, [examples, num_tokens], from those of examples.

    num_tokens: of the activation, [examples, num_tokens, ...], on a device of a divided stage. A
    token's key depends on its position in the sequence.
    """
    num_examples, of_cp = len(key), num_tokens * axes.row_parts
    places = jnp.arange(num_examples * of_cp)
    if axes.divides_rows:
        places = own_part(places, axes)
    examples, positions = jnp.divmod(places, of_cp)
    if axes.cp > 1:
        positions = own_pieces(jnp.arange(of_cp * axes.cp), axes.cp, 0)[positions]
    return folded_keys(key[examples], positions).reshape(num_examples, num_tokens)
