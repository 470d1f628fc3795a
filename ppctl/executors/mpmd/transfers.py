"""Arrays made of each device's part, to move values between submeshes of several processes.

A process sees only the shards of its devices. A program may need values from different submeshes,
or values that differ between ranks. Then each device gives its part as its copy of an array that is
declared replicated; inside shard_map each device sees its part.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

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
