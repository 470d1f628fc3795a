"""`--multirun`: the jobs of a sweep, composed and checked before any of them starts."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ppctl.cli.faults import check_keys
from ppctl.cli.launchers import Combinations
from ppctl.cli.plugins import Composed, load_common, load_job
from ppctl.config import Config
from ppctl.config.sweep import Search, SideBySide, SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError, PpctlError
from ppctl.launch.sweep.jobs import Job, Sweep

Check = Callable[[Composed], Config]


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as requested, which makes a job of a job's overrides."""

    loader: ConfigLoader
    common: DictConfig
    by_key: Mapping[str, Override]  # the last override of each key
    words: list[str]  # that start a job's command line
    check: Check

    @property
    def varied(self) -> list[str]:
        """The keys that have several values."""
        return [key for key, override in self.by_key.items() if override.is_sweep_override()]

    def fixed(self) -> list[str]:
        """Return the overrides that all jobs share."""
        return [one_value(key, override) for key, override in self.by_key.items() if not override.is_sweep_override()]

    def job(self, index: int, overrides: list[str]) -> Job:
        """Return the job of these overrides; settings that are impossible together refuse it, unknown ones the sweep.

        Raises:
            ConfigError: There is no such setting.
        """
        composed = load_job(self.loader, self.common, overrides)
        check_keys(composed.config)
        parsed = OverridesParser.create().parse_overrides(overrides)
        swept = [each for each in parsed if each.get_key_element() in self.varied]
        texts = [one_value(each.get_key_element(), each) for each in swept]
        has_own_dir = any(each.key_or_group == "run.dir" for each in swept)
        top = Path(composed.config.run.dir if has_own_dir else self.common.run.dir)
        run_dir = top if has_own_dir else top / _directory_name(texts)
        config = refusal = None
        try:
            config = self.check(composed)
            config.run.dir = str(run_dir)
        except PpctlError as error:
            refusal = " ".join(str(error).split())
        values = {each.key_or_group: each.value() for each in swept}
        return Job(index, tuple(texts), values, (*self.words, *overrides), run_dir, config, refusal)


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

        study = study_of(sweeper, request.by_key, request.fixed(), directory, request.job)
    document = OmegaConf.to_yaml(common)
    return Sweep(words[0], directory, jobs, launcher.jobs or 1, "--json" in words, document, submit, study)


def combinations(by_key: Mapping[str, Override]) -> list[list[str]]:
    """Return the overrides of every combination of values, the last key's values changing fastest."""
    return [list(words) for words in itertools.product(*(_each(*item) for item in by_key.items()))]


def one_value(key: str, override: Override) -> str:
    """Return KEY=VALUE as one types it."""
    return f"{key}={override.get_value_element_as_str()}"


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


def _directory_name(swept: list[str]) -> str:
    """Return a job's directory below the sweep's; odd or long names get a hash."""
    job = ",".join(swept)
    name = re.sub(r"[^\w=.,+-]", "_", job)[:150]
    return name if name == job else f"{name}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"
