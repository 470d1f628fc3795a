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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from ppctl.executors.device_mesh import is_mine

Tree = Any
Device = Any
Part = tuple[tuple[int, ...], np.dtype]  # shape and dtype of a device's part of an array
PAIR = "pair"  # mesh axis of sender and receiver
TURN: Part = (), np.dtype("int32")


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


def pair_mesh(sender: Mesh, receiver: Mesh) -> Mesh:
    """Return the mesh of both submeshes, [2, *submesh shape]: index 0 is the sender."""
    devices = np.stack([sender.devices, receiver.devices])
    return Mesh(devices, (PAIR, *sender.axis_names), axis_types=(AxisType.Auto,) * devices.ndim)


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

    It passes through the host, so the caller waits for the value.
    """

    def one(a: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
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


def row_devices(mesh: Mesh, *, divides_rows: bool) -> np.ndarray:
    """Return the devices of a rank, [lanes, parts], in the order of the rows that they hold.

    A lane is a place along cp, and along tp unless tp divides rows: its values, which may be
    summands, meet those of the same lane only.
    """
    sizes = mesh.shape
    devices = mesh.devices.reshape(-1, sizes["tp"], sizes["cp"])
    lanes = devices.transpose(2, 0, 1) if divides_rows else devices.transpose(1, 2, 0)
    return lanes.reshape(sizes["cp"] * (1 if divides_rows else sizes["tp"]), -1)


def pieces_of(
    senders: np.ndarray, receivers: np.ndarray, part_size: int
) -> dict[Device, tuple[Piece, ...]]:
    """Return the pieces that form the part of each receiving device, in order.

    senders, receivers: `row_devices`. part_size: elements of a sender's part.
    """
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
    """Return an activation of one process on the receivers of `pieces`; there: its shape there."""
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


@cache
def lower_crossing(
    submesh: AbstractMesh, parts: tuple[Part, ...], platform: str
) -> jax.stages.Lowered:
    """Return the lowered program (turn, *parts) -> (next turn, *parts), sender to receiver."""
    types = (AxisType.Auto,) * (1 + len(submesh.axis_names))
    pair = AbstractMesh((2, *submesh.axis_sizes), (PAIR, *submesh.axis_names), axis_types=types)

    def cross(turn: jax.Array, *sent: jax.Array) -> tuple[jax.Array, ...]:
        return turn + 1, *(jax.lax.ppermute(part, PAIR, [(0, 1)]) for part in sent)

    whole = jax.shard_map(cross, mesh=pair, in_specs=P(), out_specs=P(), check_vma=False)
    sharding = NamedSharding(pair, P())
    shapes = [jax.ShapeDtypeStruct(*part, sharding=sharding) for part in (TURN, *parts)]
    return jax.jit(whole).trace(*shapes).lower(lowering_platforms=(platform,))


def crossing(
    compiled: Callable[..., Sequence], sender: Mesh, receiver: Mesh, shapes: Tree, there: Tree
) -> Callable[..., tuple]:
    """Return the call (sender's turn, receiver's turn, value) -> (next turns, received value).

    compiled: the compiled program of `lower_crossing`. shapes: sharded shapes of the sent value.
    there: shardings at the receiver. The turn and value of a side are None if this process has no
    device of that side.
    """
    # 1. shapes and shardings; receivers pass zeros in place of parts, one for each shape
    pair, sends, receives = pair_mesh(sender, receiver), is_mine(sender), is_mine(receiver)
    parts = parts_of(shapes)
    blank = {part: local_zeros(receiver, *part) if receives else {} for part in set(parts)}
    turn_of = [NamedSharding(m, P()) if is_mine(m) else None for m in (sender, receiver)]
    sizes = [a.shape for a in jax.tree.leaves(shapes)]
    shardings, treedef = jax.tree.flatten(there)

    # 2. the call
    def run(sender_turn: jax.Array | None, receiver_turn: jax.Array | None, value: Tree) -> tuple:
        turns = [each for each in (sender_turn, receiver_turn) if each is not None]
        turn = {device: a for each in turns for device, a in local_shards(each).items()}
        sent = map(local_shards, jax.tree.leaves(value)) if sends else [{} for _ in parts]
        given = [blank[part] | of_sender for part, of_sender in zip(parts, sent, strict=True)]
        next_turn, *received = compiled(*(each_its_own(pair, a) for a in (turn, *given)))
        turn = local_shards(next_turn)
        next_turns = (None if each is None else from_shards((), each, turn) for each in turn_of)
        if not receives:
            return *next_turns, None
        arrived = map(from_shards, sizes, shardings, map(local_shards, received))
        return *next_turns, jax.tree.unflatten(treedef, arrived)

    return run


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
