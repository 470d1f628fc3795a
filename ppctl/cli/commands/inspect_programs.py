"""Which programs `ppctl inspect` shows: those of inspect.stage and inspect.task."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.plan import PlanEntry
from ppctl.schedule.ir import Schedule
from ppctl.schedule.remat import Remat


def _kind(op: PlanEntry) -> str:
    """Return the name by which inspect.task calls a program."""
    assert op.program is not None, "a move has no program"
    return op.program.kind if op.task is None else op.task.kind


def chosen(config: Config, schedule: Schedule, ops: Sequence[PlanEntry]) -> set[PlanEntry] | None:
    """Return the entries that inspect.stage and inspect.task name; None: all. ConfigError where there is none."""
    request = config.inspect
    if request.stage is None and request.task is None:
        return None
    if request.stage is not None and request.stage >= schedule.num_stages:
        raise ConfigError(
            f"inspect.stage={request.stage}: {schedule.name} on {schedule.num_ranks} ranks has stages 0 to "
            f"{schedule.num_stages - 1}."
        )
    run = [op for op in ops if op.program is not None]
    if request.stage is not None:
        rank = schedule.rank_of[request.stage]
        run = [op for op in run if (op.rank == rank if op.task is None else op.task.stage == request.stage)]
    found = run if request.task is None else [op for op in run if _kind(op) == request.task]
    if not found:
        where = "" if request.stage is None else f" of stage {request.stage} and its rank"
        last = schedule.num_stages - 1
        left = request.task == "F" and Remat.of(config.executor.remat).keeps_input_only and request.stage == last
        why = " With executor.remat=full the last stage's forward is left to its backward." if left else ""
        kinds = ", ".join(dict.fromkeys(map(_kind, run)))
        raise ConfigError(f"inspect.task={request.task} is no program{where}.{why} Use one of {kinds}.")
    return set(found)
