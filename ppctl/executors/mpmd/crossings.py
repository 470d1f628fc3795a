"""Moves of values between ranks of other sizes, or of several processes.

A leaf moves by a route. The rows of an activation lie in the order of a rank's devices, so a rank
of other sizes cuts them anew. Between processes one program over the devices of both ranks sends
units by permutes, in rounds; ranks of equal sizes need one round.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from ppctl.executors.device_mesh import is_mine
from ppctl.executors.mpmd.transfers import (
    Part,
    each_its_own,
    from_shards,
    local_shards,
    local_zeros,
    parts_of,
)

Tree = Any
PAIR = "pair"  # mesh axis of the devices of sender and receiver, in this order
TURN: Part = (), np.dtype("int32")


class Hop(NamedTuple):
    """The send of a unit, a piece of a part: from a sender's device to a receiver's."""

    sender: int
    sent: int  # number of the unit in the sender's part
    receiver: int
    received: int  # number of the unit in the receiver's part


class Route(NamedTuple):
    """The rounds of a leaf's move. A device sends and receives at most one unit in a round."""

    rounds: tuple[tuple[Hop, ...], ...]
    num_sent: int = 1  # units in a sender's part
    num_received: int = 1  # units in a receiver's part


class Crossing(NamedTuple):
    """The identity of a program that moves a value. parts, arrived: of a device of either rank."""

    parts: tuple[Part, ...]
    arrived: tuple[Part, ...]
    route: Route
    sender: int
    receiver: int


def direct(number: int) -> Route:
    """Return the route between `number` devices and their counterparts."""
    return Route((tuple(Hop(i, 0, i, 0) for i in range(number)),))


def copies(num_senders: int, num_receivers: int) -> Route:
    """Return the route of a value that all devices of both sides hold whole.

    >>> [len(hops) for hops in copies(2, 3).rounds]
    [2, 1]
    """
    hops = [Hop(i % num_senders, 0, i, 0) for i in range(num_receivers)]
    firsts = range(0, num_receivers, num_senders)
    return Route(tuple(tuple(hops[i : i + num_senders]) for i in firsts))


def rows(senders: np.ndarray, receivers: np.ndarray) -> Route:
    """Return the route of rows that are cut anew. Arguments: places, as `row_places` returns.

    >>> route = rows(np.arange(2)[None], np.arange(3)[None])
    >>> route.num_sent, route.num_received, [len(hops) for hops in route.rounds]
    (3, 2, [2, 2, 2])
    """
    n, m = senders.shape[1], receivers.shape[1]
    units = math.lcm(n, m)
    sent, received = units // n, units // m
    rounds: list[list[Hop]] = [[] for _ in range(max(sent, received))]
    for lane, from_lane in enumerate(senders):
        for unit in range(units):
            i, j = unit // sent, unit // received
            hop = Hop(int(from_lane[i]), unit % sent, int(receivers[lane, j]), unit % received)
            rounds[unit % len(rounds)].append(hop)
    return Route(tuple(map(tuple, rounds)), sent, received)


def row_places(mesh: Mesh, *, divides_rows: bool) -> np.ndarray:
    """Return the places in `devices.flat` of a rank, [lanes, parts], in the order of their rows.

    A lane is a place along cp, and along tp unless tp divides rows: its values, which may be
    summands, meet those of the same lane only.
    """
    sizes = mesh.shape
    places = np.arange(mesh.size).reshape(-1, sizes["tp"], sizes["cp"])
    lanes = places.transpose(2, 0, 1) if divides_rows else places.transpose(1, 2, 0)
    return lanes.reshape(sizes["cp"] * (1 if divides_rows else sizes["tp"]), -1)


# in one process


def recut(
    route: Route, sender: Mesh, receiver: Mesh, there: jax.ShapeDtypeStruct
) -> Callable[[jax.Array], tuple[jax.Array]]:
    """Return the call that moves an activation of one process; there: its sharded shape there.

    On CPU the caller waits for the value, so that the programs here do not wait: XLA limits the
    programs in flight (`ProgramsUnderWay`).
    """
    # 1. the pieces of each receiving device, in order: (sender, its first unit, its last unit)
    of_receiver: dict[int, list[Hop]] = {}
    for hop in sorted((hop for hops in route.rounds for hop in hops), key=lambda hop: hop.received):
        of_receiver.setdefault(hop.receiver, []).append(hop)
    pieces = {}
    for j, hops in of_receiver.items():
        runs = groupby(hops, lambda hop: (hop.sender, hop.sent - hop.received))
        found = [(sender.devices.flat[i], [*run]) for (i, _), run in runs]
        pieces[receiver.devices.flat[j]] = [(d, run[0].sent, run[-1].sent) for d, run in found]
    assert isinstance(there.sharding, NamedSharding), "a mesh of devices"
    shape, sharding = there.sharding.shard_shape(there.shape), there.sharding
    waits = sender.devices.flat[0].platform == "cpu"

    # 2. the call
    def run(value: jax.Array) -> tuple[jax.Array]:
        if waits:
            value.block_until_ready()
        parts, arrived = local_shards(value), {}
        for device, of_device in pieces.items():
            cut = [_cut(parts[d], route.num_sent, *units) for d, *units in of_device]
            arrived[device] = _joined(jax.device_put(cut, device), shape)
        return (from_shards(there.shape, sharding, arrived),)

    return run


@partial(jax.jit, static_argnums=(1, 2, 3))
def _cut(part: jax.Array, number: int, first: int, last: int) -> jax.Array:
    return part.reshape(number, -1)[first : last + 1].reshape(-1)


@partial(jax.jit, static_argnums=1)
def _joined(pieces: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate(pieces).reshape(shape)


# between processes


def union(sender: Mesh, receiver: Mesh) -> Mesh:
    """Return the mesh of the devices of both ranks, those of the sender first."""
    devices = np.concatenate([sender.devices.ravel(), receiver.devices.ravel()])
    return Mesh(devices, (PAIR,), axis_types=(AxisType.Auto,))


@cache
def lower_crossing(
    num_senders: int,
    num_devices: int,
    parts: tuple[Part, ...],
    arrived: tuple[Part, ...],
    route: Route,
    platform: str,
) -> jax.stages.Lowered:
    """Return the lowered program (turn, *parts) -> (next turn, *arrived parts).

    num_devices: of sender and receiver. parts, arrived: of a device of the sender, the receiver.
    """
    pair = AbstractMesh((num_devices,), (PAIR,), axis_types=(AxisType.Auto,))

    def table(default: int, entries: Mapping[int, int]) -> jax.Array:
        values = np.full(num_devices, default)
        values[list(entries)] = list(entries.values())
        return jnp.asarray(values)[jax.lax.axis_index(PAIR)]

    def places_of(hops: Sequence[Hop]) -> list[tuple[int, int]]:
        return [(hop.sender, num_senders + hop.receiver) for hop in hops]

    def moved(part: jax.Array, there: Part) -> jax.Array:
        if route.num_sent == route.num_received == len(route.rounds) == 1:
            return jax.lax.ppermute(part, PAIR, places_of(route.rounds[0]))
        units = part.reshape(route.num_sent, part.size // route.num_sent)
        found = jnp.zeros((route.num_received, units.shape[1]), part.dtype)
        for hops in route.rounds:
            sent = table(0, {hop.sender: hop.sent for hop in hops})
            unit = jax.lax.ppermute(units[sent], PAIR, places_of(hops))
            at = table(-1, {num_senders + hop.receiver: hop.received for hop in hops})
            found = jnp.where(jnp.arange(route.num_received)[:, None] == at, unit, found)
        return found.reshape(there[0])

    def cross(turn: jax.Array, *sent: jax.Array) -> tuple[jax.Array, ...]:
        return turn + 1, *map(moved, sent, arrived)

    whole = jax.shard_map(cross, mesh=pair, in_specs=P(), out_specs=P(), check_vma=False)
    sharding = NamedSharding(pair, P())
    shapes = [jax.ShapeDtypeStruct(*part, sharding=sharding) for part in (TURN, *parts)]
    return jax.jit(whole).trace(*shapes).lower(lowering_platforms=(platform,))


def crossing(
    compiled: Callable[..., Sequence], sender: Mesh, receiver: Mesh, shapes: Tree, there: Tree
) -> Callable[..., tuple]:
    """Return the call (sender's turn, receiver's turn, value) -> (next turns, received value).

    compiled: the compiled program of `lower_crossing`. shapes, there: sharded shapes of the value
    at the sender and at the receiver. The turn and value of a side are None if this process has no
    device of that side.
    """
    # 1. shapes and shardings; receivers pass zeros in place of parts, one for each shape
    pair, sends, receives = union(sender, receiver), is_mine(sender), is_mine(receiver)
    parts = parts_of(shapes)
    blank = {part: local_zeros(receiver, *part) if receives else {} for part in set(parts)}
    turn_of = [NamedSharding(m, P()) if is_mine(m) else None for m in (sender, receiver)]
    leaves, treedef = jax.tree.flatten(there)
    sizes, shardings = [a.shape for a in leaves], [a.sharding for a in leaves]

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
