"""The settings of the local launcher."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ppctl.config.checks import at_least
from ppctl.errors import ConfigError


@dataclass
class Launch:
    """Local processes of `ppctl train`, started and watched by the command, which loads no JAX itself."""

    processes: int = 1  # local processes that share the mesh's devices evenly
    max_restarts: int = 0  # times that a crashed run starts again by itself, from its newest checkpoint
    crash_grace_s: float = 5.0  # seconds after a process crashed until the others are killed
    exit_grace_s: float = 60.0  # seconds after a process ended in order until the others are killed

    @property
    def is_used(self) -> bool:
        return self.processes > 1 or self.max_restarts > 0

    def check(self) -> None:
        at_least("launch.processes", self.processes, 1)
        at_least("launch.max_restarts", self.max_restarts, 0)
        for key in ("crash_grace_s", "exit_grace_s"):
            at_least(f"launch.{key}", getattr(self, key), 0)
            if self.processes == 1 and getattr(self, key) != getattr(Launch, key):
                raise ConfigError(
                    f"launch.{key}={getattr(self, key)} is for the other processes, but launch.processes=1 has none. "
                    "Use launch.processes=2 or more, or leave it out."
                )


def not_launched() -> list[str]:
    """Return the overrides that make any request launch nothing."""
    return [f"launch.{field.name}={field.default}" for field in fields(Launch)]
