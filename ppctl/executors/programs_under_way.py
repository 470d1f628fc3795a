"""The limit on dispatched programs that have not ended."""

from collections import deque
from typing import TypeVar

import jax
from jax.sharding import Mesh

from ppctl.executors.described_devices import is_described
from ppctl.executors.device_mesh import processes

T = TypeVar("T")
MOST_STARTED = 32  # programs in flight per device that XLA allows on CPU


class ProgramsUnderWay:
    """The programs of a mesh that were dispatched and may not have ended.

    On CPU, XLA starts each device's part of a program in a thread of a small pool, where it waits
    if MOST_STARTED programs of the device are in flight. Those wait for collectives, whose other
    devices find no thread: all wait forever. So at most half as many are dispatched at once, if
    this process has several devices of the mesh. Other platforms have no limit.
    """

    def __init__(self, mesh: Mesh):
        is_cpu = mesh.devices.flat[0].platform == "cpu" and not is_described(mesh)
        self.is_limited = is_cpu and processes(mesh).count(jax.process_index()) > 1
        self.results = deque[jax.Array]()

    def add(self, result: jax.Array) -> None:
        """Add a program by a result that stays valid; wait for the oldest if there are too many."""
        if self.is_limited:
            self.results.append(result)
            if len(self.results) > MOST_STARTED // 2:
                self.results.popleft().block_until_ready()

    def ended(self, results: T) -> T:
        """Return results of a program that is not added, after its end if there is a limit."""
        return jax.block_until_ready(results) if self.is_limited else results
