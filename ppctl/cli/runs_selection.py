"""The columns and the order of the list of `ppctl runs`: `--columns` and `--sort` as values."""

from collections.abc import Sequence

from ppctl.cli.choices import did_you_mean
from ppctl.errors import ConfigError
from ppctl.reports.recorded_settings import setting_names, setting_text
from ppctl.reports.run_files import RunSummary
from ppctl.reports.runs_columns import ALIASES, OWN_COLUMNS, USUAL, Column, Order, column_of

DESCENDING = ":desc"
NEWEST = "age"  # the order without `--sort`


def columns_of(words: str | None, runs: Sequence[RunSummary]) -> list[Column]:
    """Return the columns of `--columns`, the name of the run first; +A,B: after the usual ones.

    Usual columns that are empty for all runs are left out. ConfigError for a setting of no run.
    """
    names = words.removeprefix("+").split(",") if words else []
    chosen = [_column("--columns", name.strip(), runs) for name in names]
    usual = [column_of(name) for name in USUAL] if words is None or words.startswith("+") else []
    filled = [each for each in usual if any(each.text(run, 0.0) for run in runs)]
    return list({each.name: each for each in (OWN_COLUMNS["run"], *filled, *chosen)}.values())


def orders_of(words: str | None, runs: Sequence[RunSummary]) -> list[Order]:
    """Return the order of `--sort`, by default the newest record first; ConfigError as above."""
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
