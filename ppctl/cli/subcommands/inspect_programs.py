"""The programs that inspect.task names."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.dispatch_plan import PlanEntry
from ppctl.schedule.ir import Schedule
from ppctl.schedule.remat import Remat


def _kind(op: PlanEntry) -> str:
    """Return a program's kind in inspect.task."""
    assert op.program is not None, "a move has no program"
    return op.program.kind if op.task is None else op.task.kind


def chosen(config: Config, schedule: Schedule, ops: Sequence[PlanEntry]) -> set[PlanEntry] | None:
    """Return the entries that inspect.task names; None: all. ConfigError for no such program."""
    # 1. those of the stage
    stage, kind = config.inspect.stage_and_kind
    if stage is None and kind is None:
        return None
    if stage is not None and stage >= schedule.num_stages:
        raise ConfigError(
            f"inspect.task={config.inspect.task}: {schedule.name} on {schedule.num_ranks} ranks "
            f"has stages 0 to {schedule.num_stages - 1}."
        )
    run = [op for op in ops if op.program is not None]
    if stage is not None:
        rank = schedule.rank_of[stage]
        run = [op for op in run if (op.rank == rank if op.task is None else op.task.stage == stage)]
    # 2. those of the kind
    found = run if kind is None else [op for op in run if _kind(op) == kind]
    if not found:
        why, is_last = "", stage == schedule.num_stages - 1
        if kind == "F" and is_last and Remat.of(config.executor.remat).keeps_input_only:
            why = " With executor.remat=full the last stage's forward is left to its backward."
        where = "" if stage is None else f" of stage {stage} and its rank"
        kinds = ", ".join(dict.fromkeys(map(_kind, run)))
        raise ConfigError(
            f"inspect.task={config.inspect.task} is no program{where}.{why} Use one of {kinds}."
        )
    return set(found)
