"""The columns of a list of runs, by which it may be ordered: its usual ones, and any setting."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ppctl.reports.recorded_settings import setting_text, setting_value
from ppctl.reports.run_files import RunSummary
from ppctl.reports.terminal_output import age_text, iso_text

USUAL = ("status", "step", "loss", "eval_loss", "mesh", "schedule", "lr", "age")
ALIASES = {"lr": "optim.lr"}


class Column(NamedTuple):
    """A column of the table. Runs without a value, or with NaN, are last in either order."""

    name: str
    value: Callable[[RunSummary], Any]  # to be ordered by
    text: Callable[[RunSummary, float], str]  # at a time, in seconds since 1970


Order = tuple[Column, bool]  # that runs are ordered by, and whether descending

_COLUMNS = (
    Column("run", lambda run: run.name, lambda run, _: run.name),
    Column("status", lambda run: run.status, lambda run, _: run.status),
    Column("step", lambda run: run.step, lambda run, _: steps_text(run)),
    Column(
        "loss",
        lambda run: run.loss,
        lambda run, _: _number_text(run.loss) if run.is_finite else "not finite",
    ),
    Column("eval_loss", lambda run: run.eval_loss, lambda run, _: _number_text(run.eval_loss)),
    Column("age", lambda run: -run.recorded_s, lambda run, now_s: age_text(now_s - run.recorded_s)),
    Column("started", lambda run: run.started_s, lambda run, _: iso_text(run.started_s) or ""),
    Column("active", lambda run: run.recorded_s, lambda run, _: iso_text(run.recorded_s) or ""),
)
OWN_COLUMNS = {column.name: column for column in _COLUMNS}


def column_of(name: str) -> Column:
    """Return a column of the list's own, or that of a setting."""
    key = ALIASES.get(name, name)
    if key in OWN_COLUMNS:
        return OWN_COLUMNS[key]

    def value(run: RunSummary) -> Any:
        with suppress(KeyError):
            return setting_value(run.config, key)
        return None

    return Column(name, value, lambda run, now_s: setting_text(run.config, key) or "")


def ordered(runs: Sequence[RunSummary], orders: Sequence[Order]) -> list[RunSummary]:
    """Return runs by the first order, those alike in it by the next one."""
    rows = list(runs)
    for column, is_descending in reversed(orders):
        known = [run for run in rows if _is_known(column.value(run))]
        unknown = [run for run in rows if not _is_known(column.value(run))]
        known.sort(key=lambda run: _sort_key(column.value(run)), reverse=is_descending)
        rows = known + unknown
    return rows


def steps_text(run: RunSummary) -> str:
    """Return steps as in `3 of 10`."""
    return f"{run.step} of {'?' if run.num_steps is None else run.num_steps}"


def _number_text(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _sort_key(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))
