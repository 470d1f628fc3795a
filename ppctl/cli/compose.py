"""Hydra's side of the command line: overrides in, a checked `Config` out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppctl import config as settings
from ppctl.cli import fault_messages as faults
from ppctl.cli.choices import DRAWN
from ppctl.cli.fault_messages import parse_override
from ppctl.cli.hydra_extensions import Composed, config_loader, load_one
from ppctl.config import Config, ScheduleConfig
from ppctl.config.schedule_from_config import settled
from ppctl.errors import ConfigError

if TYPE_CHECKING:
    from ppctl.launch.sweep.sweep_jobs import Sweep


def compose_drawing(overrides: list[str], flags: list[str]) -> ScheduleConfig:
    """Return the checked request of `ppctl schedule`. ConfigError for whatever is wrong.

    Only the parts that a schedule depends on are converted and checked; a recipe may leave others
    incomplete.
    """
    with _loader(overrides, flags, drawing=True) as loader:
        composed = load_one(loader, overrides)
        faults.check_keys(composed.config)
        faults.check_names(*composed)
        parts: dict[str, Any] = {part: OmegaConf.to_object(composed.config[part]) for part in DRAWN}
    config = ScheduleConfig(parts["mesh"], settled(parts["schedule"]), parts["costs"])
    config.check()
    return config


def compose(overrides: list[str], flags: list[str], words: list[str]) -> Config | Sweep:
    """Return the checked request, or that of a sweep; flags: --multirun, --config-dir DIR.

    `words` start the command line of a sweep's job. ConfigError for whatever is wrong.
    """
    with _loader(overrides, flags) as loader:
        if "--multirun" not in flags:
            return checked(load_one(loader, overrides))
        from ppctl.cli.multirun import compose_sweep

        return compose_sweep(loader, overrides, words, checked)


def checked(composed: Composed) -> Config:
    """Return a composed config as checked dataclasses. ConfigError for whatever is wrong."""
    faults.check_keys(composed.config)
    faults.check_names(*composed)
    parts: Any = {part: OmegaConf.to_object(node) for part, node in composed.config.items()}
    if parts.pop("costs") != settings.Costs():
        raise ConfigError(f"costs of a recipe: {faults.ASSUMED}")
    config = Config(**parts)
    config.schedule = settled(config.schedule)
    settings.check(config)
    return config


@contextmanager
def _loader(
    overrides: list[str], flags: list[str], *, drawing: bool = False
) -> Iterator[ConfigLoader]:
    """Yield Hydra's loader for checked overrides; its errors in the body become ConfigErrors."""
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        faults.refuse(override, multirun="--multirun" in flags, drawing=drawing)
    config_dir = flags[flags.index("--config-dir") + 1] if "--config-dir" in flags else None
    try:
        with config_loader(None if config_dir is None else Path(config_dir)) as loader:
            yield loader
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        # ValueError and OSError: what Hydra raises for a malformed or unreadable file of the user's
        raise ConfigError(faults.explain(error, parsed)) from error
