"""The settings of `ppctl plan` and of `ppctl rehearse`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ppctl.config.checks import at_least, tokens
from ppctl.errors import ConfigError

TOPOLOGY = re.compile(r"\w+:\d+(x\d+){1,2}")


@dataclass
class Plan:
    """The programs that `ppctl plan` compiles, the memory of a device, and a page to write."""

    compile: bool | None = None  # compile the train step too, for the compiler's plan of memory; None: for a topology
    topology: str | None = None  # compile for TPUs that are not here: v5e:16x16; or GPUs, hosts x GPUs a host: h100:2x8
    memory_gib: float | None = None  # memory of a device; None: as the device itself states
    tokens: float | None = None  # to train on: shows days, device-hours and energy; None: only a step
    html: str | None = None  # write the plan to this file too, as a page for browsers that loads nothing

    def check(self) -> None:
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:  # written so that NaN fails
            raise ConfigError(f"plan.memory_gib={self.memory_gib} is not a size. Use a number above 0.")
        tokens("plan.tokens", self.tokens)
        if self.topology is None:
            return
        if TOPOLOGY.fullmatch(self.topology) is None:
            raise ConfigError(
                f"plan.topology={self.topology} is not a topology. Write the kind of chip and how many there are each "
                "way: v5e:4x4, v6e:16x16, v5p:2x2x2; of GPUs the hosts and the GPUs of a host: h100:2x8."
            )

    @property
    def compiles(self) -> bool:
        """Return whether a compiler is asked: as requested, else where there is a topology to compile for."""
        return self.topology is not None if self.compile is None else self.compile

    @property
    def only_predicts_topology(self) -> bool:
        """Return whether a topology is predicted for and not compiled for, which takes no compiler of its devices."""
        return self.topology is not None and not self.compiles

    @property
    def topology_shape(self) -> tuple[int, ...]:
        """Return the chips of the topology each way; of GPUs the hosts and the GPUs of a host.

        >>> Plan(topology="h100:2x8").topology_shape
        (2, 8)
        """
        assert self.topology is not None
        return tuple(map(int, self.topology.partition(":")[2].split("x")))


@dataclass
class Rehearse:
    """How often `ppctl rehearse` runs each rank on the one device, and a page to write."""

    runs: int = 5  # of a step of each rank, after one that warms up; the median counts
    html: str | None = None  # write the rehearsal to this file too, as a page for browsers that loads nothing

    def check(self) -> None:
        at_least("rehearse.runs", self.runs, 1)
