"""What a list of runs shows, is ordered by and chooses by: columns of its own, and any setting."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ppctl.reports.run_files import BROKEN_OFF, NO_END, NOT_STARTED, RUNNING, RunSummary
from ppctl.reports.run_settings import setting_text, setting_value
from ppctl.reports.run_status import FAILED, FINISHED, INTERRUPTED
from ppctl.reports.terminal import age_text, iso_text

STATUSES = (RUNNING, FINISHED, INTERRUPTED, FAILED, BROKEN_OFF, NO_END, NOT_STARTED)
USUAL = ("status", "step", "loss", "eval_loss", "mesh", "schedule", "lr", "age")
ALIASES = {"lr": "optim.lr"}
COMMA = re.compile(r",(?![^\[]*\])")  # not in a list: 3,[2,1] are two values


class Column(NamedTuple):
    """A column of the table. Runs of which its value is None, or no number, are last in either order."""

    name: str
    value: Callable[[RunSummary], Any]  # to be ordered by
    text: Callable[[RunSummary, float], str]  # at a time, in seconds since 1970


class Order(NamedTuple):
    """One column that runs are ordered by."""

    column: Column
    is_descending: bool


class Condition(NamedTuple):
    """Chooses runs: those that have one of these values."""

    name: str  # status, or a setting
    texts: tuple[str, ...]  # of values, as one types them

    def holds(self, run: RunSummary) -> bool:
        """Return whether the run has one of the values."""
        if self.name == "status":
            return run.status in self.texts
        try:
            value = setting_value(run.config, self.name)
        except KeyError:
            return False
        return any(is_value(value, text) for text in self.texts)

    @property
    def text(self) -> str:
        """The condition as one types it."""
        return f"{self.name}={','.join(self.texts)}"


OWN_COLUMNS = {
    column.name: column
    for column in (
        Column("run", lambda run: run.name, lambda run, now_s: run.name),
        Column("status", lambda run: run.status, lambda run, now_s: run.status),
        Column("step", lambda run: run.step, lambda run, now_s: steps_text(run)),
        Column("loss", lambda run: run.loss, lambda run, now_s: _loss_text(run)),
        Column(
            "eval_loss",
            lambda run: run.eval_loss,
            lambda run, now_s: "" if run.eval_loss is None else f"{run.eval_loss:.4f}",
        ),
        Column("age", lambda run: -run.recorded_s, lambda run, now_s: age_text(now_s - run.recorded_s)),
        Column("started", lambda run: run.started_s, lambda run, now_s: iso_text(run.started_s) or ""),
        Column("active", lambda run: run.recorded_s, lambda run, now_s: iso_text(run.recorded_s) or ""),
    )
}


def column_of(name: str) -> Column:
    """Return a column of the list's own, or that of a setting."""
    key = ALIASES.get(name, name)
    if key in OWN_COLUMNS:
        return OWN_COLUMNS[key]

    def value(run: RunSummary) -> Any:
        try:
            return setting_value(run.config, key)
        except KeyError:
            return None

    return Column(name, value, lambda run, now_s: setting_text(run.config, key) or "")


def ordered(runs: Sequence[RunSummary], orders: Sequence[Order]) -> list[RunSummary]:
    """Return runs by the first order, those alike in it by the next one."""
    found = list(runs)
    for column, is_descending in reversed(orders):
        known = [run for run in found if _is_known(column.value(run))]
        others = [run for run in found if not _is_known(column.value(run))]
        found = sorted(known, key=lambda run: _sort_key(column.value(run)), reverse=is_descending) + others
    return found


def is_value(value: Any, text: str) -> bool:
    """Return whether a text, as one types it, means a value of a setting.

    >>> is_value(0.001, "1e-3"), is_value(None, "null"), is_value([3, 2], "[3, 2]"), is_value("1f1b", "'1f1b'")
    (True, True, True, True)
    """
    text = text.strip()
    if isinstance(value, bool) or value is None:
        return text.lower() == ("null" if value is None else str(value).lower())
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    if isinstance(value, list):
        texts = COMMA.split(text[1:-1]) if text.strip("[] ") else []
        is_list = text.startswith("[") and text.endswith("]") and len(texts) == len(value)
        return is_list and all(map(is_value, value, texts))
    return text in (str(value), f"'{value}'", f'"{value}"')


def steps_text(run: RunSummary) -> str:
    """Return steps as in `3 of 10`."""
    return f"{run.step} of {'?' if run.num_steps is None else run.num_steps}"


def _loss_text(run: RunSummary) -> str:
    if not run.is_finite:
        return "not finite"
    return "" if run.loss is None else f"{run.loss:.4f}"


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _sort_key(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))
