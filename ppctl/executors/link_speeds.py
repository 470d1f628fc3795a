"""Latency and bandwidth between devices, measured with the collectives that training uses.

Two devices exchange a message repeatedly inside one program (`ppermute` both ways, as pipeline
ranks do), so that the times exclude the host and the start of a program.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Device = Any  # jax.Device

# (float32 of a message, exchanges of a run); odd numbers, so that contents change places
SMALL, LARGE = (1, 65), (1 << 20, 9)
RUNS = 5  # timed runs after a warm-up; the median counts


@dataclass(frozen=True)
class MeasuredLink:
    """The measured exchange between two devices. Ids are those of `jax.Device`."""

    first: int
    second: int
    latency_s: float  # seconds of a message of 4 bytes, one way
    bytes_per_s: float  # bytes a second of a message of 4 MiB, each way at the same time
    is_right: bool  # received equals sent


def probe_devices(devices: Sequence[Device], most: int = 16) -> list[Device]:
    """Return up to `most` devices: all, the first of each process, or the first of one process."""
    if len(devices) <= most:
        return list(devices)
    firsts = {device.process_index: device for device in reversed(devices)}
    return [firsts[i] for i in sorted(firsts)] if len(firsts) > 1 else list(devices[:most])


def measure_link(a: Device, b: Device) -> MeasuredLink:
    """Measure the link between two devices; their processes call this in the same order."""
    mesh = Mesh(np.array([a, b]), ("pair",), axis_types=(AxisType.Auto,))
    latency_s, right = _exchanges(mesh, *SMALL)
    large_s, large_right = _exchanges(mesh, *LARGE)
    moving_s = max(large_s - latency_s, 1e-9)
    return MeasuredLink(a.id, b.id, latency_s, LARGE[0] * 4 / moving_s, right and large_right)


def _exchanges(mesh: Mesh, length: int, number: int) -> tuple[float, bool]:
    """Return (seconds of one exchange of float32 [length], whether contents changed places)."""

    def local(x: jax.Array) -> jax.Array:
        swap = lambda _, x: jax.lax.ppermute(x, "pair", [(0, 1), (1, 0)])  # noqa: E731
        return jax.lax.fori_loop(0, number, swap, x)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("pair"), out_specs=P("pair")))
    numbers = np.repeat(np.arange(2, dtype=np.float32), length)
    sent = _placed(mesh, P("pair"), numbers)
    seconds, received = _timed(run, sent)
    wanted, shards = numbers[::-1], received.addressable_shards
    right = all(np.array_equal(shard.data, wanted[shard.index]) for shard in shards)
    return seconds / number, right


def _placed(mesh: Mesh, spec: P, numbers: np.ndarray) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(
        numbers.shape, sharding, numbers.__getitem__, dtype=numbers.dtype
    )


def _timed(run: Callable[..., Any], sent: jax.Array) -> tuple[float, jax.Array]:
    """Return (median seconds of a run, its result)."""
    received = jax.block_until_ready(run(sent))
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        received = jax.block_until_ready(run(sent))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), received
