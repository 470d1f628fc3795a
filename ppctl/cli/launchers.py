"""Where a sweep's jobs run and how they are chosen: options of `hydra/launcher` and `hydra/sweeper`, and faults."""

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
SWEEP_GROUPS = {"hydra/launcher": LAUNCHERS, "hydra/sweeper": SWEEPERS}


def refuse_sweep_setting(key: str, value: object, line: str, *, is_swept: bool, multirun: bool) -> None:
    """Raise ConfigError for an option or setting of a sweep that there is not, or where there is no sweep.

    line: the override as it was typed; value: its value, unless it has several.
    """
    group = sweep_group_of(key)
    if group is None:
        return
    if is_swept:
        raise ConfigError(f"{line}: a sweep runs in one way. Give {key} one value.")
    if key == group and str(value) not in SWEEP_GROUPS[group]:
        raise ConfigError(
            f"{wrong_option(group, shown(value), SWEEP_GROUPS[group])} Each job of a sweep is a process of its own, "
            "which other ones do not start."
        )
    if key.endswith("._target_"):
        raise ConfigError(f"{line}: choose {group}={' | '.join(SWEEP_GROUPS[group])} instead.")
    if not multirun:
        raise ConfigError(f"{line} is for the jobs of a sweep. Add --multirun, or leave it out.")


def wrong_sweep_setting(key: str, line: str | None, option: str) -> str:
    """Return what is wrong with a setting of a launcher or sweeper, of which this option was chosen."""
    group = sweep_group_of(key)
    assert group is not None, "other keys have other words"
    prefix = group.replace("/", ".")
    known = settings_of(prefix, SWEEP_GROUPS[group][option])
    if key in known:
        return wrong_value(key, line, known)
    names = [name.rpartition(".")[2] for name in known]
    near = did_you_mean(key.rpartition(".")[2], names, f"{prefix}.")
    others = [name for name, cls in SWEEP_GROUPS[group].items() if key in settings_of(prefix, cls)]
    elsewhere = f" It is one of {group}={' and '.join(others)}." if others else ""
    return f"{key} is not a setting of {group}={option}.{near}{elsewhere} (settings: {', '.join(names)})"


def sweep_group_help(group: str) -> Mapping[str, tuple[str, list[Setting]]]:
    """Return for each option of a group what it is, and its settings."""
    prefix = group.replace("/", ".")
    return {name: (str(cls.__doc__), [*settings_of(prefix, cls).values()]) for name, cls in SWEEP_GROUPS[group].items()}


def sweep_group_of(key: str) -> str | None:
    """Return `hydra/launcher` for it and its settings, likewise `hydra/sweeper`; None for other keys."""
    return next(
        (group for group in SWEEP_GROUPS if key == group or key.startswith(f"{group.replace('/', '.')}.")), None
    )
