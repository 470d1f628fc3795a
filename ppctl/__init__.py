"""Pipeline-parallel training in JAX."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("stage_boundary", "Network"):  # JAX is started by those who use them alone
        from ppctl.model import network

        return getattr(network, name)
    raise AttributeError(f"module 'ppctl' has no attribute {name!r}")
