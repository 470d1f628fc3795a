"""Collectives that XLA has put where a rank passes over them: a program with them would stand still."""

from __future__ import annotations

from collections.abc import Mapping

from ppctl.errors import ConfigError
from ppctl.executors.collectives import collectives


def refuse_stuck(text: str, mesh: Mapping[str, int]) -> None:
    """Raise ConfigError for a compiled program in which a rank's branch has a collective that other ranks must join.

    In a collective-permute all devices of a program take part, whoever sends; in others those of a group do. XLA writes
    permutes where a divided dim is cut or rolled, such as by `jnp.split`.
    """
    found = [each for each in collectives(text, mesh) if each.is_at_most or each.times is None]
    stuck = [each for each in found if each.kind == "collective-permute" or "pp" in each.axes]
    if stuck and mesh["pp"] > 1:
        kinds = ", ".join(sorted({f"{each.kind} over {' and '.join(each.axes) or 'no axis'}" for each in stuck}))
        raise ConfigError(
            f"XLA divides this model over mesh.tp={mesh['tp']} with {sum(each.instructions for each in stuck)} "
            f"collectives ({kinds}) in which ranks take part that have no such task: executor=spmd is one program of "
            "all ranks. Use executor=mpmd, or let the model not cut or roll a dim that its sharding divides."
        )
