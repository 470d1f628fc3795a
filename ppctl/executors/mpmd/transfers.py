"""Arrays made of each device's part, to move values between submeshes of several processes.

A process sees only the shards of its devices. A program may need values from different submeshes,
or values that differ between ranks. Then each device gives its part as its copy of an array that is
declared replicated; inside shard_map each device sees its part.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

Tree = Any
Device = Any
Part = tuple[tuple[int, ...], np.dtype]  # shape and dtype of a device's part of an array


def local_shards(a: jax.Array) -> dict[Device, jax.Array]:
    """Return the shards of an array on this process's devices."""
    return {shard.device: shard.data for shard in a.addressable_shards}


def from_shards(
    shape: tuple[int, ...], sharding: NamedSharding, parts: Mapping[Device, jax.Array]
) -> jax.Array:
    """Return the array made of these parts; parts of devices outside its mesh are ignored."""
    assert isinstance(sharding.mesh, Mesh), "a mesh of devices"
    here = [parts[device] for device in sharding.mesh.devices.flat if device in parts]
    return jax.make_array_from_single_device_arrays(shape, sharding, here)


def each_its_own(mesh: Mesh, parts: Mapping[Device, jax.Array]) -> jax.Array:
    """Return an array, declared replicated, whose copy on each device is the device's part."""
    return from_shards(next(iter(parts.values())).shape, NamedSharding(mesh, P()), parts)


def local_zeros(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> dict[Device, jax.Array]:
    """Return zeros on each device of a mesh in this process, as parts of an array."""
    mine = (device for device in mesh.devices.flat if device.process_index == jax.process_index())
    return {device: jax.device_put(np.zeros(shape, dtype), device) for device in mine}


# from submesh to submesh


def copy_across(sender: Mesh, receiver: Mesh, there: Tree, value: Tree) -> tuple[Tree]:
    """Return a copy of a value on a receiver of equal sizes in the same processes.

    there: its sharded shapes. Each device sends its part.
    """
    counterpart = dict(zip(sender.devices.flat, receiver.devices.flat, strict=True))

    def one(a: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
        assert isinstance(to.sharding, NamedSharding), "a mesh of devices"
        parts = {
            counterpart[device]: jax.device_put(part, counterpart[device])
            for device, part in local_shards(a).items()
        }
        return from_shards(to.shape, to.sharding, parts)

    return (jax.tree.map(one, value, there),)


def resized(there: Tree, value: Tree) -> tuple[Tree]:
    """Return a copy of a value of one process on a receiver of other sizes, which pads other dims.

    Divided arrays pass through the host, so the caller waits for them.
    """

    def one(a: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
        assert isinstance(to.sharding, NamedSharding), "a mesh of devices"
        if a.sharding.is_fully_replicated and to.sharding.is_fully_replicated:
            copy, devices = a.addressable_shards[0].data, to.sharding.device_set
            return from_shards(to.shape, to.sharding, {d: jax.device_put(copy, d) for d in devices})
        whole = np.zeros(to.shape, to.dtype)
        held = tuple(slice(min(sizes)) for sizes in zip(a.shape, to.shape, strict=True))
        whole[held] = np.asarray(a)[held]
        return jax.device_put(whole, to.sharding)

    return (jax.tree.map(one, value, there),)


# an activation on a receiver of other sizes: rows lie in the order of devices, so they are cut anew


class Piece(NamedTuple):
    """A piece of the rows of an activation: elements `start` to `stop` of a sender's part."""

    sender: Device
    start: int
    stop: int


def row_places(mesh: Mesh, *, divides_rows: bool) -> np.ndarray:
    """Return the places in `devices.flat` of a rank, [lanes, parts], in the order of their rows.

    A lane is a place along cp, and along tp unless tp divides rows: its values, which may be
    summands, meet those of the same lane only.
    """
    sizes = mesh.shape
    places = np.arange(mesh.size).reshape(-1, sizes["tp"], sizes["cp"])
    lanes = places.transpose(2, 0, 1) if divides_rows else places.transpose(1, 2, 0)
    return lanes.reshape(sizes["cp"] * (1 if divides_rows else sizes["tp"]), -1)


def pieces_of(
    sender: Mesh, receiver: Mesh, divides_rows: tuple[bool, bool], part_size: int
) -> dict[Device, tuple[Piece, ...]]:
    """Return the pieces that form the part of each receiving device, in order.

    divides_rows: whether tp divides rows on either side. part_size: elements of a sender's part.
    """
    senders, receivers = (
        mesh.devices.ravel()[row_places(mesh, divides_rows=divides)]
        for mesh, divides in zip((sender, receiver), divides_rows, strict=True)
    )
    size, found = part_size * senders.shape[1] // receivers.shape[1], {}
    for (lane, j), device in np.ndenumerate(receivers):
        first, last = j * size, (j + 1) * size
        found[device] = tuple(
            Piece(
                senders[lane, i],
                max(first - i * part_size, 0),
                min(last - i * part_size, part_size),
            )
            for i in range(first // part_size, -(-last // part_size))
        )
    return found


def recut(
    pieces: Mapping[Device, Sequence[Piece]], there: jax.ShapeDtypeStruct, value: jax.Array
) -> tuple[jax.Array]:
    """Return an activation of one process on the receivers of `pieces`; there: its shape there.

    On CPU the caller waits for the value, so that the programs here do not wait: XLA limits the
    programs in flight (`ProgramsUnderWay`).
    """
    if next(iter(pieces)).platform == "cpu":
        value.block_until_ready()
    assert isinstance(there.sharding, NamedSharding), "a mesh of devices"
    parts, shape, arrived = local_shards(value), there.sharding.shard_shape(there.shape), {}
    for device, of_device in pieces.items():
        cut = [_cut(parts[each.sender], each.start, each.stop) for each in of_device]
        arrived[device] = _joined(jax.device_put(cut, device), shape)
    return (from_shards(there.shape, there.sharding, arrived),)


@partial(jax.jit, static_argnums=(1, 2))
def _cut(part: jax.Array, start: int, stop: int) -> jax.Array:
    return part.reshape(-1)[start:stop]


@partial(jax.jit, static_argnums=1)
def _joined(pieces: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate(pieces).reshape(shape)


def parts_of(shapes: Tree) -> tuple[Part, ...]:
    """Return the shape and dtype of one device's shard of each leaf of a value."""
    return tuple((a.sharding.shard_shape(a.shape), a.dtype) for a in jax.tree.leaves(shapes))


# over the whole mesh


def from_holder(
    mesh: Mesh,
    axis: str,
    holder: int,
    parts: Mapping[Device, jax.Array],
    spec: P,
    sharding: NamedSharding,
) -> jax.Array:
    """Return an array of this sharding with the values at index `holder` of a mesh axis.

    parts: each device's shard by `spec`; shards at other indices are ignored.
    """
    return _spread(mesh, axis, holder, spec, sharding)(each_its_own(mesh, parts))


@cache
def _spread(
    mesh: Mesh, axis: str, holder: int, spec: P, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    def spread(part: jax.Array) -> jax.Array:
        is_held = jax.lax.axis_index(axis) == holder
        return jax.lax.psum(jnp.where(is_held, part, jnp.zeros_like(part)), axis)

    whole = jax.shard_map(spread, mesh=mesh, in_specs=P(), out_specs=spec, check_vma=False)
    return jax.jit(whole, out_shardings=sharding)
