"""Advice against a schedule at given costs, for the families' records."""

from __future__ import annotations

from ppctl.errors import ConfigError
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulate import simulate


def where_slower(schedule: Schedule, rival: Schedule, costs: Costs, why: str, remedy: str) -> str | None:
    """Return a line with both makespans and the remedy where `schedule` takes longer than `rival`, else None."""
    try:
        own_s, rival_s = simulate(schedule, costs).makespan_s, simulate(rival, costs).makespan_s
    except ConfigError:  # costs of each of another number of stages
        return None
    if own_s <= rival_s:
        return None
    return (
        f"{schedule.name} takes {own_s / rival_s:.2f} times as long as {rival.name} {why} "
        f"({own_s:.4g} s against {rival_s:.4g} s). Use {remedy}."
    )
