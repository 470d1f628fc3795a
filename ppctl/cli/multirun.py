"""`--multirun`: the jobs of a sweep, composed and checked before any of them starts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from ppctl.cli.hydra_extensions import CONFIG
from ppctl.cli.sweep_composition import Check, SweepRequest, one_value
from ppctl.config.groups.sweep_settings import Launcher, Search, SideBySide, Sweeper
from ppctl.errors import ConfigError
from ppctl.launch.sweep.sweep_jobs import Job, Sweep


def compose_sweep(
    loader: ConfigLoader, overrides: list[str], words: list[str], check: Check
) -> Sweep:
    """Return the checked sweep of overrides; `check` converts a job's composed config.

    ConfigError for an unknown setting, or without a key of several values.
    """
    # 1. the settings of the sweep itself
    multirun = RunMode.MULTIRUN
    common = loader.load_configuration(CONFIG, [*overrides, "hydra.mode=MULTIRUN"], multirun)
    launcher = cast("Launcher", OmegaConf.to_object(common.hydra.launcher))
    sweeper = cast("Sweeper", OmegaConf.to_object(common.hydra.sweeper))
    parsed = OverridesParser.create().parse_overrides(list(common.hydra.overrides.task))
    by_key = {each.get_key_element(): each for each in parsed}
    request = SweepRequest(loader, common, by_key, words, check)
    if not request.varied:
        raise ConfigError(
            "--multirun runs every combination of KEY=A,B,..., but nothing here has several "
            "values. Give some, or leave it out."
        )
    # 2. its jobs, or the study that chooses them
    directory = Path(common.hydra.sweep.dir)
    jobs: list[Job] = []
    study = None
    if isinstance(sweeper, Search):
        sweeper.check()
        _require("optuna", "hydra/sweeper=optuna", "optuna")
        from ppctl.cli.optuna_sweeper import study_of

        study = study_of(request, sweeper, directory)
    else:
        jobs = [request.job(index, each) for index, each in enumerate(combinations(by_key))]
    # 3. the launcher
    launcher.check()
    if not isinstance(launcher, SideBySide):
        _require("submitit", "hydra/launcher=submitit_slurm", "slurm")
    as_json, settings = "--json" in words, OmegaConf.to_yaml(common)
    return Sweep(words[0], directory, jobs, launcher, as_json, settings, study)


def combinations(by_key: Mapping[str, Override]) -> list[list[str]]:
    """Return the overrides of every combination of values, the last key's changing fastest."""
    return [list(words) for words in itertools.product(*(_each(*item) for item in by_key.items()))]


def _each(key: str, override: Override) -> list[str]:
    """Return the override for each of its values."""
    if not override.is_sweep_override():
        return [one_value(key, override)]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: a sweep over {key} needs a list of values: {key}=a,b. Or "
            "let values be chosen: hydra/sweeper=optuna."
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _require(package: str, choice: str, extra: str) -> None:
    if find_spec(package) is None:
        remedy = f"Install it: pip install 'ppctl[{extra}]'."
        raise ConfigError(f"{choice}: {package} is not installed. {remedy}")
