"""`--multirun`: the jobs of a sweep, composed and checked before any of them starts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ppctl.cli.launchers import Combinations
from ppctl.cli.plugins import load_common
from ppctl.cli.sweep_request import Check, SweepRequest, one_value
from ppctl.config.sweep import Search, SideBySide, SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError
from ppctl.launch.sweep.jobs import Job, Sweep


def compose_sweep(loader: ConfigLoader, overrides: list[str], words: list[str], check: Check) -> Sweep:
    """Return the checked sweep that overrides ask for; `check` makes a job's config of what was composed.

    Raises:
        ConfigError: An unknown setting, or nothing that has several values.
    """
    common = load_common(loader, overrides)
    launcher = OmegaConf.to_object(common.hydra.launcher)
    sweeper = OmegaConf.to_object(common.hydra.sweeper)
    assert isinstance(launcher, SideBySide | SubmititLocal | SubmititSlurm)
    assert isinstance(sweeper, Combinations | Search)
    request = SweepRequest(loader, common, _by_key(common, sweeper.params), words, check)
    if not request.varied:
        raise ConfigError(
            "--multirun runs every combination of KEY=A,B,..., but nothing here has several values. "
            "Give some, or leave it out."
        )
    submit = study = None
    jobs: list[Job] = []
    if isinstance(sweeper, Combinations):
        jobs = [request.job(index, words) for index, words in enumerate(combinations(request.by_key))]
    launcher.check()
    if not isinstance(launcher, SideBySide):
        _require("submitit", f"hydra/launcher=submitit_{launcher.cluster}", "slurm")
        from ppctl.launch.sweep.submitit_jobs import Submission

        submit = Submission(launcher)
    directory = Path(common.hydra.sweep.dir)
    if isinstance(sweeper, Search):
        sweeper.check()
        _require("optuna", "hydra/sweeper=optuna", "optuna")
        from ppctl.cli.searches import study_of

        study = study_of(request, sweeper, directory)
    document = OmegaConf.to_yaml(common)
    return Sweep(words[0], directory, jobs, launcher.jobs or 1, "--json" in words, document, submit, study)


def combinations(by_key: Mapping[str, Override]) -> list[list[str]]:
    """Return the overrides of every combination of values, the last key's values changing fastest."""
    return [list(words) for words in itertools.product(*(_each(*item) for item in by_key.items()))]


def _by_key(common: DictConfig, params: Mapping[str, object] | None) -> dict[str, Override]:
    """Return the last override of each key; `params` are those of a file that describes a sweep."""
    texts = [f"{key}={value}" for key, value in (params or {}).items()] + list(common.hydra.overrides.task)
    return {override.get_key_element(): override for override in OverridesParser.create().parse_overrides(texts)}


def _each(key: str, override: Override) -> list[str]:
    """Return the override for each of its values."""
    if not override.is_sweep_override():
        return [one_value(key, override)]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: a sweep over {key} needs a list of values: {key}=a,b. Or let values be chosen: "
            "hydra/sweeper=optuna."
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _require(package: str, choice: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{choice} needs {package}, which is not installed. Install it: pip install 'ppctl[{extra}]'."
        )
