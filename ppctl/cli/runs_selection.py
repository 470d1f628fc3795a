"""The columns and the order of `ppctl runs`, from `--columns` and `--sort`."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ppctl.cli.choices import did_you_mean
from ppctl.errors import ConfigError
from ppctl.reports.recorded_settings import setting_names, setting_text, setting_value
from ppctl.reports.run_files import RunSummary, disk_bytes
from ppctl.reports.terminal_output import age_text, decimal_text, iso_text, size_text

DESCENDING = ":desc"
NEWEST = "age"  # column that orders the list without `--sort`
USUAL = ("status", "step", "loss", "eval_loss", "mesh", "schedule", "lr", "age")
LEAST = ("lr", "schedule", "mesh", "age", "eval_loss")  # usual columns that make room first
ALIASES = {"lr": "optim.lr"}


class Column(NamedTuple):
    """A column of the table. Runs without a value, or with NaN, are last in either order."""

    name: str
    value: Callable[[RunSummary], Any]  # sort key
    text: Callable[[RunSummary, float], str]  # text, given the current time in seconds since 1970


Order = tuple[Column, bool]  # (sort column, whether descending)


_COLUMNS = (
    Column("run", lambda run: run.name, lambda run, _: run.name),
    Column("status", lambda run: run.status, lambda run, _: run.status),
    Column("step", lambda run: run.step, lambda run, _: run.steps_text),
    Column(
        "loss",
        lambda run: run.loss,
        lambda run, _: _number_text(run.loss) if run.is_finite else "not finite",
    ),
    Column(
        "eval_loss",
        lambda run: run.eval_loss,
        lambda run, _: f"{_number_text(run.eval_loss)} {run.eval_note}".strip(),
    ),
    Column("age", lambda run: -run.recorded_s, lambda run, now_s: age_text(now_s - run.recorded_s)),
    Column("started", lambda run: run.started_s, lambda run, _: iso_text(run.started_s) or ""),
    Column(
        "size", lambda run: disk_bytes(run.path), lambda run, _: size_text(disk_bytes(run.path))
    ),
    Column("active", lambda run: run.recorded_s, lambda run, _: iso_text(run.recorded_s) or ""),
)
OWN_COLUMNS = {column.name: column for column in _COLUMNS}


def column_of(name: str) -> Column:
    """Return the built-in column `name`, or a column of the setting `name`."""
    key = ALIASES.get(name, name)
    if key in OWN_COLUMNS:
        return OWN_COLUMNS[key]

    def value(run: RunSummary) -> Any:
        with suppress(KeyError):
            return setting_value(run.config, key)
        return None

    return Column(name, value, lambda run, now_s: setting_text(run.config, key) or "")


def ordered(runs: Sequence[RunSummary], orders: Sequence[Order]) -> list[RunSummary]:
    """Return runs sorted by the first order; the next ones break ties."""
    rows = list(runs)
    for column, is_descending in reversed(orders):
        known = [run for run in rows if _is_known(column.value(run))]
        unknown = [run for run in rows if not _is_known(column.value(run))]
        known.sort(key=lambda run: _sort_key(column.value(run)), reverse=is_descending)
        rows = known + unknown
    return rows


def _number_text(loss: float | None) -> str:
    return "" if loss is None else decimal_text(loss)


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _sort_key(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))


def columns_of(words: str | None, runs: Sequence[RunSummary]) -> list[Column]:
    """Return the columns that `--columns` names, after the run's name; None: the usual columns.

    +A,B adds A and B to the usual columns. Usual columns that are empty for all runs are left out.
    ConfigError for a setting that no run has.
    """
    names = words.removeprefix("+").split(",") if words else []
    chosen = [_column("--columns", name.strip(), runs) for name in names]
    usual = [column_of(name) for name in USUAL] if words is None or words.startswith("+") else []
    filled = [each for each in usual if any(each.text(run, 0.0) for run in runs)]
    return list({each.name: each for each in (OWN_COLUMNS["run"], *filled, *chosen)}.values())


def least_of(words: str | None) -> list[str]:
    """Return the columns that a narrow terminal leaves out first: not those that words names."""
    return [name for name in LEAST if name not in (words or "").lstrip("+").split(",")]


def orders_of(words: str | None, runs: Sequence[RunSummary]) -> list[Order]:
    """Return the orders that `--sort` names, then the run's name; None: newest record first.

    ConfigError for a setting that no run has.
    """
    orders = [
        (_column("--sort", name.removesuffix(DESCENDING), runs), name.endswith(DESCENDING))
        for name in map(str.strip, (NEWEST if words is None else words).split(","))
    ]
    return [*orders, (OWN_COLUMNS["run"], False)]


def _column(option: str, name: str, runs: Sequence[RunSummary]) -> Column:
    own, key = (*OWN_COLUMNS, *ALIASES), ALIASES.get(name, name)
    is_known = key in OWN_COLUMNS or any(setting_text(run.config, key) for run in runs)
    if runs and not is_known:
        known = dict.fromkeys([*own, *(each for run in runs for each in setting_names(run.config))])
        raise ConfigError(
            f"{option} {name}: no run has such a setting.{did_you_mean(name, known)} "
            f"({', '.join(own)}, or any setting)"
        )
    return column_of(name)
