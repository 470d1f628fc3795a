"""`--multirun`: the jobs of a sweep, composed and checked before any of them starts."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ppctl.cli.compose import CONFIG, checked, composing, options_of, without_hydra
from ppctl.cli.fault_messages import check_keys
from ppctl.cli.text_settings import TextSource, as_typed
from ppctl.config.groups.command_settings import Launcher, Search, SideBySide, Sweeper
from ppctl.errors import ConfigError, PpctlError
from ppctl.launch.sweep.sweep_jobs import Job, Sweep, check_finished

MOST_JOBS = 2**16  # maximum jobs of a sweep


@dataclass(frozen=True)
class SweepRequest:
    """A composed sweep, which makes jobs from overrides."""

    loader: ConfigLoader
    common: DictConfig
    by_key: Mapping[str, Override]  # last override of each key
    words: list[str]  # first words of a job's command line

    @property
    def varied(self) -> dict[str, Override]:
        """The overrides with several values, by key."""
        return {key: each for key, each in self.by_key.items() if each.is_sweep_override()}

    def job(self, index: int, overrides: list[str]) -> Job:
        """Return the job with these overrides; if they do not fit together, its `refusal` says why.

        ConfigError for unknown settings.
        """
        parsed = OverridesParser.create().parse_overrides(overrides)
        TextSource.chosen = options_of(parsed)
        composed = without_hydra(self.loader.load_sweep_config(self.common, overrides))
        check_keys(composed.config)
        swept = [each for each in parsed if each.get_key_element() in self.varied]
        texts = [_as_typed(each) for each in swept]
        has_own_dir = any(each.key_or_group == "run.dir" for each in swept)
        top = Path(composed.config.run.dir if has_own_dir else self.common.run.dir)
        run_dir = top if has_own_dir else top / _directory_name(",".join(texts))
        config, refusal = None, None
        try:
            config = checked(composed)
            config.run.dir = str(run_dir)
            if self.words[0] == "train":
                check_finished(run_dir, config)
        except PpctlError as error:
            config, refusal = None, error
        values = {each.key_or_group: each.value() for each in swept}
        words = (*self.words, *overrides)
        recipe = None if words[0] != "tune" or config is None else config.tune.recipe
        if config is not None and recipe is not None and "tune.recipe" not in values:
            config.tune.recipe = f"{recipe}-{index}"  # a separate file for each job
            words += (f"tune.recipe={config.tune.recipe}",)
        return Job(index, values, " ".join(texts), run_dir, words, config, refusal)


def compose_sweep(overrides: list[str], config_dir: str | None, words: list[str]) -> Sweep:
    """Return the checked sweep of overrides; `words` are the first words of a job's command line.

    ConfigError for any fault, or if no key has several values.
    """
    with composing(overrides, config_dir, multirun=True) as loader:
        return _sweep(loader, [*map(as_typed, overrides)], words)


def _sweep(loader: ConfigLoader, overrides: list[str], words: list[str]) -> Sweep:
    # 1. the settings of the sweep itself
    multirun = RunMode.MULTIRUN
    common = loader.load_configuration(CONFIG, [*overrides, "hydra.mode=MULTIRUN"], multirun)
    launcher = cast("Launcher", OmegaConf.to_object(common.hydra.launcher))
    sweeper = cast("Sweeper", OmegaConf.to_object(common.hydra.sweeper))
    parsed = OverridesParser.create().parse_overrides(list(common.hydra.overrides.task))
    by_key = {each.get_key_element(): each for each in parsed}
    request = SweepRequest(loader, common, by_key, words)
    if not request.varied:
        raise ConfigError(
            "--multirun runs every combination of KEY=A,B,..., but no setting has several "
            "values. Add some, or leave out --multirun."
        )
    # 2. the jobs, or the study that chooses them
    directory = Path(common.run.dir)
    jobs: list[Job] = []
    study = None
    if isinstance(sweeper, Search):
        sweeper.check()
        _require("optuna", "hydra/sweeper=optuna", "optuna")
        from ppctl.cli.optuna_sweeper import OptunaStudy, distribution

        fixed = [one_value(*each) for each in by_key.items() if each[0] not in request.varied]
        space = {key: distribution(each) for key, each in request.varied.items()}
        study = OptunaStudy(sweeper, space, fixed, directory, request.job)
        study.samples()  # raises for a wrong value now, not when its job is composed
    else:
        number = 1
        for each in request.varied.values():
            if not each.is_discrete_sweep():
                raise ConfigError(
                    f"{each.input_line}: a sweep needs a list of values. Use KEY=a,b, or let "
                    "Optuna choose values: hydra/sweeper=optuna."
                )
            values = each.value()
            values = values.range() if isinstance(values, RangeSweep) else each.sweep_iterator()
            number *= sum(1 for _ in islice(values, MOST_JOBS + 1))
            if number > MOST_JOBS:
                more = f"{each.input_line}: a sweep of more than {MOST_JOBS:,} jobs"
                raise ConfigError(f"{more}. Use fewer values.")
        combinations = BasicSweeper.split_arguments(parsed, None)[0]
        jobs = [request.job(index, each) for index, each in enumerate(combinations)]
    # 3. the launcher
    launcher.check()
    if not isinstance(launcher, SideBySide):
        _require("submitit", "hydra/launcher=submitit_slurm", "slurm")
    return Sweep(words[0], directory, jobs, launcher, "--json" in words, study)


def one_value(key: str, override: Override) -> str:
    """Return KEY=VALUE as Hydra reads it."""
    return f"{key}={override.get_value_element_as_str()}"


def _as_typed(override: Override) -> str:
    """Return KEY=VALUE without the quotes that `as_typed` added."""
    key = override.get_key_element()
    plain, quoted = f"{key}={override.value()}", one_value(key, override)
    return plain if as_typed(plain) == quoted else quoted


def _directory_name(job: str) -> str:
    """Return a directory name for `job`, with a hash if characters are replaced or cut."""
    name = re.sub(r"[^\w=.,+-]", "_", job)[:150]
    return name if name == job else f"{name}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


def _require(package: str, choice: str, extra: str) -> None:
    if find_spec(package) is None:
        remedy = f"Install it: pip install 'ppctl[{extra}]'."
        raise ConfigError(f"{choice}: {package} is not installed. {remedy}")
