"""The jobs of a sweep, made from its overrides."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from ppctl.cli.fault_messages import check_keys
from ppctl.cli.hydra_extensions import Composed, load_job
from ppctl.config import Config
from ppctl.errors import ConfigError, PpctlError
from ppctl.launch.sweep.sweep_jobs import Job

Check = Callable[[Composed], Config]


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as composed, which makes jobs of overrides."""

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
        shared = ((key, o) for key, o in self.by_key.items() if not o.is_sweep_override())
        return [one_value(key, override) for key, override in shared]

    def job(self, index: int, overrides: list[str]) -> Job:
        """Return the job of these overrides, with a refusal if they are impossible together.

        ConfigError for unknown settings.
        """
        composed = load_job(self.loader, self.common, overrides)
        check_keys(composed.config)
        parsed = OverridesParser.create().parse_overrides(overrides)
        swept = [each for each in parsed if each.get_key_element() in self.varied]
        texts = [one_value(each.get_key_element(), each) for each in swept]
        has_own_dir = any(each.key_or_group == "run.dir" for each in swept)
        top = Path(composed.config.run.dir if has_own_dir else self.common.run.dir)
        run_dir = top if has_own_dir else top / _directory_name(texts)
        config, refusal, kind = None, None, ConfigError.kind
        try:
            config = self.check(composed)
            config.run.dir = str(run_dir)
        except PpctlError as error:
            refusal, kind = " ".join(str(error).split()), error.kind
        values = {each.key_or_group: each.value() for each in swept}
        words = (*self.words, *overrides)
        return Job(index, tuple(texts), values, words, run_dir, config, refusal, kind)


def one_value(key: str, override: Override) -> str:
    """Return KEY=VALUE as one types it."""
    return f"{key}={override.get_value_element_as_str()}"


def _directory_name(swept: list[str]) -> str:
    """Return a job's directory below the sweep's; odd or long names get a hash."""
    job = ",".join(swept)
    name = re.sub(r"[^\w=.,+-]", "_", job)[:150]
    return name if name == job else f"{name}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"
