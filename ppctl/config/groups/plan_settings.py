"""The settings of `ppctl plan`, some of which `ppctl tune` and `rehearse` take too."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppctl.config.field_checks import above_zero, tokens
from ppctl.errors import ConfigError

TOPOLOGY = re.compile(r"\w+:\d+(x\d+){1,2}")


@dataclass
class Plan:
    """The programs that `ppctl plan` compiles, the memory of a device, and a page to write."""

    # compile the train step too, for the compiler's plan of memory; None: with plan.topology
    compile: bool | None = None
    # devices to compile for: TPUs, v5e:16x16; GPUs, hosts x GPUs a host, h100:2x8
    topology: str | None = None
    # and tune: memory of a device; None: as hardware or the device states
    memory_gib: float | None = None
    # and tune: to train on; adds days, device-hours and energy; None: only a step
    tokens: float | None = None
    html: str | None = None  # and rehearse: file of a self-contained page for browsers

    def check(self) -> None:
        above_zero("plan.memory_gib", self.memory_gib)
        tokens("plan.tokens", self.tokens)
        if self.topology is not None and TOPOLOGY.fullmatch(self.topology) is None:
            raise ConfigError(
                f"plan.topology={self.topology} is not a topology. Write the kind of chip and its "
                "number each way (v5e:4x4, v5p:2x2x2); of GPUs hosts x GPUs of a host (h100:2x8)."
            )

    @property
    def compiles(self) -> bool:
        """Whether to compile: as requested, by default only for a topology."""
        return self.topology is not None if self.compile is None else self.compile

    @property
    def only_predicts_topology(self) -> bool:
        """Whether a topology is only predicted for, without a compiler of its devices."""
        return self.topology is not None and not self.compiles

    @property
    def topology_shape(self) -> tuple[int, ...]:
        """The chips of the topology each way; of GPUs the hosts and the GPUs of a host.

        >>> Plan(topology="h100:2x8").topology_shape
        (2, 8)
        """
        assert self.topology is not None
        return tuple(map(int, self.topology.partition(":")[2].split("x")))
