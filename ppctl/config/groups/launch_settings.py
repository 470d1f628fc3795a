"""The settings of the local launcher."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ppctl.config.field_checks import at_least


@dataclass
class Launch:
    """Local processes of `ppctl train`, which the command starts and watches without JAX."""

    processes: int = 1  # local processes that share the mesh's devices evenly
    max_restarts: int = 0  # restarts of a crashed run from its newest checkpoint

    @property
    def is_used(self) -> bool:
        return self.processes > 1 or self.max_restarts > 0

    def check(self) -> None:
        at_least("launch.processes", self.processes, 1)
        at_least("launch.max_restarts", self.max_restarts, 0)


def not_launched() -> list[str]:
    """Return the overrides that make any request launch nothing."""
    return [f"launch.{field.name}={field.default}" for field in fields(Launch)]
