"""What `ppctl runs` is to show, by which order and of which runs: `--columns`, `--sort` and `--filter` as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppctl.cli.choices import all_settings, did_you_mean, nearest
from ppctl.errors import ConfigError
from ppctl.reports.run_files import RunSummary
from ppctl.reports.run_settings import setting_names, setting_value
from ppctl.reports.runs_columns import (
    ALIASES,
    COMMA,
    OWN_COLUMNS,
    STATUSES,
    USUAL,
    Column,
    Condition,
    Order,
    column_of,
)

DESCENDING = ":desc"
NEWEST = "age"  # the order without `--sort`


def columns_of(words: str | None, runs: Sequence[RunSummary], shown: Sequence[RunSummary]) -> list[Column]:
    """Return the columns that `--columns` names, the name of the run first; +A,B: after the usual ones.

    The usual ones are without those that are empty for all that are shown. ConfigError for what none of the runs has.
    """
    chosen = [_column("--columns", name, runs) for name in _named(words.removeprefix("+"))] if words else []
    usual = [column_of(name) for name in USUAL] if words is None or words.startswith("+") else []
    filled = [each for each in usual if any(each.text(run, 0.0) for run in shown)]
    return list({each.name: each for each in (OWN_COLUMNS["run"], *filled, *chosen)}.values())


def orders_of(words: str | None, runs: Sequence[RunSummary]) -> list[Order]:
    """Return the order that `--sort` names; without it the newest record first. ConfigError for what no run has."""
    orders = [
        Order(_column("--sort", name.removesuffix(DESCENDING), runs), name.endswith(DESCENDING))
        for name in _named(NEWEST if words is None else words)
    ]
    return [*orders, Order(OWN_COLUMNS["run"], is_descending=False)]


def conditions_of(words: Iterable[str], runs: Sequence[RunSummary]) -> list[Condition]:
    """Return what each `--filter` says. ConfigError for what is no status and no setting that a run has."""
    return [_condition(text, runs) for text in words]


def _condition(text: str, runs: Sequence[RunSummary]) -> Condition:
    name, equals, values = text.partition("=")
    name = ALIASES.get(name.strip(), name.strip())
    if not equals or name == "status":
        return Condition("status", tuple(_status(each, text) for each in (values if equals else text).split(",")))
    _check_setting("--filter", name, runs, own=("status",))
    return Condition(name, tuple(COMMA.split(values)))


def _status(word: str, text: str) -> str:
    plain = " ".join(word.replace("-", " ").replace("_", " ").split()).lower()
    if plain in STATUSES:
        return plain
    shown = [status.replace(" ", "-") for status in STATUSES]
    hint = did_you_mean(word, shown)
    raise ConfigError(f"--filter {text}: {word!r} is no status, nor SETTING=VALUE.{hint} (status: {', '.join(shown)})")


def _column(option: str, name: str, runs: Sequence[RunSummary]) -> Column:
    key = ALIASES.get(name, name)
    if key not in OWN_COLUMNS:
        _check_setting(option, key, runs, own=(*OWN_COLUMNS, *ALIASES))
    return column_of(name)


def _check_setting(option: str, name: str, runs: Sequence[RunSummary], *, own: Iterable[str]) -> None:
    """Raise ConfigError for a setting that none of the runs has; of no runs anything is taken."""
    if not runs or any(_has(run, name) for run in runs):
        return
    known = list(dict.fromkeys([*own, *(each for run in runs for each in setting_names(run.config))]))
    last = {each.rpartition(".")[2]: each for each in reversed(known)}
    near = [*nearest(name, known), *(last[each] for each in nearest(name.rpartition(".")[2], last, cutoff=0.75))]
    hint = f" Did you mean {near[0]}?" if near else ""
    if name in all_settings():
        raise ConfigError(f"{option} {name}: none of the runs has this setting.{hint}")
    raise ConfigError(f"{option} {name}: no run has such a setting.{hint} ({', '.join(own)}, or any setting)")


def _named(words: str) -> list[str]:
    return [name.strip() for name in words.split(",")]


def _has(run: RunSummary, name: str) -> bool:
    try:
        setting_value(run.config, name)
    except KeyError:
        return False
    return True
