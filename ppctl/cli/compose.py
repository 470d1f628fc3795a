"""Hydra's side of the command line: overrides in, a checked `Config` out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppctl import config as settings
from ppctl.cli.choices import DRAWN, DRAWN_COSTS
from ppctl.cli.faults import SWEEP_DIR, check_costs, check_keys, check_names, explain, parse_override, refuse
from ppctl.cli.plugins import CONFIG, Composed, config_loader, load_one, register
from ppctl.config import Config, ScheduleConfig
from ppctl.config.files import ROOT
from ppctl.config.schedule_from_config import settled
from ppctl.errors import ConfigError

if TYPE_CHECKING:
    from ppctl.launch.sweep.jobs import Sweep


def compose_drawing(overrides: list[str], flags: list[str]) -> ScheduleConfig:
    """Return the checked request of `ppctl schedule`. Raises ConfigError for whatever is wrong.

    Only the parts that a schedule depends on are converted and checked; a recipe may leave others incomplete.
    """
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        refuse(override, multirun=False, drawing=True)
    is_chosen = any(o.key_or_group == "costs" and isinstance(o.value(), str) for o in parsed)
    chosen = [] if is_chosen else [f"costs={DRAWN_COSTS}"]
    with _in_one_line(parsed), config_loader(_config_dir(flags)) as loader:
        composed = load_one(loader, [*chosen, *overrides])
        check_keys(composed.config)
        check_names(*composed)
        parts: dict[str, Any] = {part: OmegaConf.to_object(composed.config[part]) for part in DRAWN}
        check_costs(parts["costs"], drawing=True)
        config = ScheduleConfig(**parts)
    config.schedule = settled(config.schedule)
    config.check()
    return config


def compose(overrides: list[str], flags: list[str], words: list[str]) -> Config | Sweep | None:
    """Return the checked request, that of a sweep, or None when `flags` ask Hydra to show something (--cfg, --info).

    `words` start the command line of a sweep's job. Raises ConfigError for whatever is wrong.
    """
    multirun = "--multirun" in flags
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        refuse(override, multirun=multirun, drawing=False)
    overrides = [
        text.replace(SWEEP_DIR, "run.dir", 1) if text.startswith(f"{SWEEP_DIR}=") else text for text in overrides
    ]
    with _in_one_line(parsed):
        if {"--cfg", "--info"} & {*flags}:
            _run_hydra([*flags, *overrides])
            return None
        with config_loader(_config_dir(flags)) as loader:
            if not multirun:
                return checked(load_one(loader, overrides))
            from ppctl.cli.sweeps import compose_sweep

            return compose_sweep(loader, overrides, words, checked)


def checked(composed: Composed) -> Config:
    """Return a composed config as dataclasses. Raises ConfigError for what it cannot be."""
    check_keys(composed.config)
    check_names(*composed)
    parts: dict[str, Any] = {str(part): OmegaConf.to_object(node) for part, node in composed.config.items()}
    check_costs(parts["costs"], drawing=False)
    config = Config(**parts)
    config.schedule = settled(config.schedule)
    settings.check(config)
    return config


def _config_dir(flags: list[str]) -> Path | None:
    return Path(flags[flags.index("--config-dir") + 1]) if "--config-dir" in flags else None


@contextmanager
def _in_one_line(parsed: list[Override]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors in the body into ConfigErrors."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        # ValueError and OSError: what Hydra raises for a malformed or unreadable file of the user's
        raise ConfigError(explain(error, parsed)) from error


# --- what Hydra itself prints ----------------------------------------------------------------------------------------


def _run_hydra(argv: list[str]) -> None:
    """Let Hydra print what its flags in `argv` ask for: a config, where it comes from, candidates for the shell."""
    register()
    with _as_if_typed(argv):
        hydra.main(config_path=str(ROOT / "conf"), config_name=CONFIG, version_base="1.3")(_never)()


def _never(_config: object) -> None:
    raise AssertionError("these flags run nothing")


@contextmanager
def _as_if_typed(argv: list[str]) -> Iterator[None]:
    """Set what Hydra reads: sys.argv, and HYDRA_FULL_ERROR, without which it hands no exception on."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["ppctl", *argv], "1"
    try:
        yield
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


def print_candidates(line: str) -> None:
    """Print for bash what may follow `line`, which starts with the program's name and has no command."""
    os.environ["COMP_LINE"] = line
    # A half-typed line is often wrong, and the prompt is no place for an error.
    with suppress(HydraException, OmegaConfBaseException, ValueError, SystemExit):
        _run_hydra(["--shell-completion", "query=bash"])


def print_completion_script() -> None:
    """Print what bash evaluates to complete ppctl's command lines."""
    _run_hydra(["--shell-completion", "install=bash"])
