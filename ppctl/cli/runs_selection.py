"""The columns and the order of the list of `ppctl runs`: `--columns` and `--sort` as values."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.cli.choices import all_settings, nearest
from ppctl.errors import ConfigError
from ppctl.reports.recorded_settings import setting_names, setting_value
from ppctl.reports.run_files import RunSummary
from ppctl.reports.runs_columns import ALIASES, OWN_COLUMNS, USUAL, Column, Order, column_of

DESCENDING = ":desc"
NEWEST = "age"  # the order without `--sort`


def columns_of(words: str | None, runs: Sequence[RunSummary]) -> list[Column]:
    """Return the columns of `--columns`, the name of the run first; +A,B: after the usual ones.

    Usual columns that are empty for all runs are left out. ConfigError for a setting of no run.
    """
    names = _named(words.removeprefix("+")) if words else []
    chosen = [_column("--columns", name, runs) for name in names]
    usual = [column_of(name) for name in USUAL] if words is None or words.startswith("+") else []
    filled = [each for each in usual if any(each.text(run, 0.0) for run in runs)]
    return list({each.name: each for each in (OWN_COLUMNS["run"], *filled, *chosen)}.values())


def orders_of(words: str | None, runs: Sequence[RunSummary]) -> list[Order]:
    """Return the order of `--sort`, by default the newest record first; ConfigError as above."""
    orders = [
        Order(_column("--sort", name.removesuffix(DESCENDING), runs), name.endswith(DESCENDING))
        for name in _named(NEWEST if words is None else words)
    ]
    return [*orders, Order(OWN_COLUMNS["run"], is_descending=False)]


def _column(option: str, name: str, runs: Sequence[RunSummary]) -> Column:
    key = ALIASES.get(name, name)
    if key not in OWN_COLUMNS:
        _check_setting(option, key, runs)
    return column_of(name)


def _check_setting(option: str, name: str, runs: Sequence[RunSummary]) -> None:
    """Raise ConfigError for a setting that none of the runs has, if there are runs."""
    if not runs or any(_has(run, name) for run in runs):
        return
    own = (*OWN_COLUMNS, *ALIASES)
    of_runs = (each for run in runs for each in setting_names(run.config))
    known = list(dict.fromkeys([*own, *of_runs]))
    last = {each.rpartition(".")[2]: each for each in reversed(known)}
    alike = nearest(name.rpartition(".")[2], last, cutoff=0.75)
    near = [*nearest(name, known), *(last[each] for each in alike)]
    hint = f" Did you mean {near[0]}?" if near else ""
    if name in all_settings():
        raise ConfigError(f"{option} {name}: none of the runs has this setting.{hint}")
    raise ConfigError(
        f"{option} {name}: no run has such a setting.{hint} ({', '.join(own)}, or any setting)"
    )


def _named(words: str) -> list[str]:
    return [name.strip() for name in words.split(",")]


def _has(run: RunSummary, name: str) -> bool:
    try:
        setting_value(run.config, name)
    except KeyError:
        return False
    return True
