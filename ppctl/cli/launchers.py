"""How a sweep runs and what it runs: options of `hydra/launcher` and `hydra/sweeper`, what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppctl.cli.choices import Setting, did_you_mean, settings_of, shown, wrong_option, wrong_value
from ppctl.config.sweep import Search, SideBySide, SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError


@dataclass
class Combinations:
    """hydra/sweeper=ppctl: a job for every combination of KEY=A,B,..."""

    params: dict[str, Any] | None = None  # KEY: VALUES, for a file that describes a sweep


LAUNCHERS: dict[str, type] = {"ppctl": SideBySide, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm}
SWEEPERS: dict[str, type] = {"ppctl": Combinations, "optuna": Search}
WAYS = {"hydra/launcher": LAUNCHERS, "hydra/sweeper": SWEEPERS}


def refuse_way(key: str, value: object, line: str, *, is_swept: bool, multirun: bool) -> None:
    """ConfigError for a way to run a sweep that there is not, or that is said where there is no sweep.

    line: the override as it was typed; value: its value, unless it has several.
    """
    way = way_of(key)
    if way is None:
        return
    if is_swept:
        raise ConfigError(f"{line}: a sweep runs in one way. Give {key} one value.")
    if key == way and str(value) not in WAYS[way]:
        raise ConfigError(
            f"{wrong_option(way, shown(value), WAYS[way])} Each job of a sweep is a process of its own, "
            "which other ones do not start."
        )
    if key.endswith("._target_"):
        raise ConfigError(f"{line}: choose {way}={' | '.join(WAYS[way])} instead.")
    if not multirun:
        raise ConfigError(f"{line} is for the jobs of a sweep. Add --multirun, or leave it out.")


def wrong_way(key: str, said: str | None, option: str) -> str:
    """What is wrong with a setting of a launcher or sweeper, of which this option was chosen."""
    way = way_of(key)
    assert way is not None, "other keys have other words"
    prefix = way.replace("/", ".")
    known = settings_of(prefix, WAYS[way][option])
    if key in known:
        return wrong_value(key, said, known)
    names = [name.rpartition(".")[2] for name in known]
    near = did_you_mean(key.rpartition(".")[2], names, f"{prefix}.")
    others = [name for name, cls in WAYS[way].items() if key in settings_of(prefix, cls)]
    elsewhere = f" It is one of {way}={' and '.join(others)}." if others else ""
    return f"{key} is not a setting of {way}={option}.{near}{elsewhere} (settings: {', '.join(names)})"


def way_help(way: str) -> Mapping[str, tuple[str, list[Setting]]]:
    """For each option of a way what it is, and its settings."""
    prefix = way.replace("/", ".")
    return {name: (str(cls.__doc__), [*settings_of(prefix, cls).values()]) for name, cls in WAYS[way].items()}


def way_of(key: str) -> str | None:
    """`hydra/launcher` for it and its settings, likewise `hydra/sweeper`; None for other keys."""
    return next((way for way in WAYS if key == way or key.startswith(f"{way.replace('/', '.')}.")), None)
