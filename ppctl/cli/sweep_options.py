"""The options of `hydra/launcher` and `hydra/sweeper`, and messages on wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

from ppctl.cli.choices import Setting, did_you_mean, settings_of, wrong_option, wrong_value
from ppctl.config.changed_settings import shown
from ppctl.config.groups.sweep_settings import Combinations, Search, SideBySide, SubmititSlurm
from ppctl.errors import ConfigError

LAUNCHERS: dict[str, type] = {"ppctl": SideBySide, "submitit_slurm": SubmititSlurm}
SWEEPERS: dict[str, type] = {"ppctl": Combinations, "optuna": Search}
SWEEP_GROUPS = {"hydra/launcher": LAUNCHERS, "hydra/sweeper": SWEEPERS}


def refuse_sweep_setting(
    key: str, value: object, line: str, *, is_swept: bool, multirun: bool
) -> None:
    """Raise ConfigError for an unknown option or setting of a sweep, or one without a sweep.

    line: the override as typed; value: its value, unless it has several.
    """
    group = sweep_group_of(key)
    if group is None:
        return
    if is_swept:
        raise ConfigError(f"{line}: a sweep runs in one way. Give {key} one value.")
    if key == group and str(value) not in SWEEP_GROUPS[group]:
        fault = wrong_option(group, shown(value), SWEEP_GROUPS[group])
        raise ConfigError(f"{fault} Others cannot start the processes of jobs.")
    if key.endswith("._target_"):
        raise ConfigError(f"{line}: choose {group}={' | '.join(SWEEP_GROUPS[group])} instead.")
    if not multirun:
        raise ConfigError(f"{line} is for the jobs of a sweep. Add --multirun, or leave it out.")


def wrong_sweep_setting(key: str, line: str | None, option: str) -> str:
    """Return the message on a wrong setting of the chosen option of a launcher or sweeper."""
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
    all_names = ", ".join(names)
    return f"{key} is not a setting of {group}={option}.{near}{elsewhere} (settings: {all_names})"


def sweep_group_help(group: str) -> Mapping[str, tuple[str, list[Setting]]]:
    """Return the docstring and the settings of each option of a group."""
    prefix = group.replace("/", ".")
    return {
        name: (str(cls.__doc__), [*settings_of(prefix, cls).values()])
        for name, cls in SWEEP_GROUPS[group].items()
    }


def sweep_group_of(key: str) -> str | None:
    """Return the group of an option's or a setting's key; None for other keys."""
    for group in SWEEP_GROUPS:
        if key == group or key.startswith(f"{group.replace('/', '.')}."):
            return group
    return None
