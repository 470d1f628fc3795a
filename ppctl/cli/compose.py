"""Hydra's side of the command line: overrides in, a checked `Config` out."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppctl import config as settings
from ppctl.cli.choices import DRAWN, DRAWN_COSTS
from ppctl.cli.faults import check_costs, check_keys, check_names, explain, parse_override, refuse
from ppctl.cli.plugins import Asked, Request, register
from ppctl.config import Config, ScheduleConfig
from ppctl.config.files import ROOT
from ppctl.config.schedule_from_config import settled
from ppctl.config.sweep import SideBySide, SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError, PpctlError
from ppctl.launch.sweep.jobs import Job, Sweep


def compose_drawing(overrides: list[str], flags: list[str]) -> ScheduleConfig:
    """The checked request of `ppctl schedule`. Raises ConfigError for whatever is wrong.

    Only the parts that a schedule depends on are converted and checked; a recipe may leave others incomplete.
    """
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        refuse(override, multirun=False, drawing=True)
    is_chosen = any(o.key_or_group == "costs" and isinstance(o.value(), str) for o in parsed)
    chosen = [] if is_chosen else [f"costs={DRAWN_COSTS}"]
    register()
    request = Request()
    with _in_one_line(parsed):
        _run_hydra(request, [*flags, *chosen, *overrides])
        assert request.composed is not None
        check_keys(request.composed)
        check_names(request.composed, request.choices)
        parts: dict[str, Any] = {part: OmegaConf.to_object(request.composed[part]) for part in DRAWN}
        check_costs(parts["costs"], drawing=True)
        config = ScheduleConfig(**parts)
    config.schedule = settled(config.schedule)
    config.check()
    return config


def compose(overrides: list[str], flags: list[str], words: list[str]) -> Config | Sweep | None:
    """The checked request, that of a sweep, or None when `flags` asked Hydra for something else (--cfg, --info).

    `words` start a sweep's job on a command line. Raises ConfigError for whatever is wrong.
    """
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        refuse(override, multirun="--multirun" in flags, drawing=False)
    register()
    request = Request()
    with _in_one_line(parsed):
        _run_hydra(request, [*flags, *overrides])
        if request.sweep is not None:
            return _sweep(request.sweep, request, words)
        return None if request.composed is None else _checked(request.composed, request.choices)


def _checked(composed: DictConfig, choices: dict[str, Any]) -> Config:
    check_keys(composed)
    check_names(composed, choices)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    check_costs(config.costs, drawing=False)
    config.schedule = settled(config.schedule)
    settings.check(config)
    return config


def _sweep(common: DictConfig, request: Request, words: list[str]) -> Sweep:
    """The checked sweep; settings that are impossible together are one job's fault, unknown ones that of all."""
    launcher = OmegaConf.to_object(common.hydra.launcher)
    assert isinstance(launcher, SideBySide | SubmititLocal | SubmititSlurm)
    launcher.check()
    submit = None if isinstance(launcher, SideBySide) else launcher
    directory = Path(common.hydra.sweep.dir)
    make = lambda index, asked: _job(index, asked, words, Path(common.run.dir))  # noqa: E731
    jobs = [make(index, asked) for index, asked in enumerate(request.jobs)]
    study = None
    searched = request.searched
    if submit is not None:
        _needs("submitit", f"hydra/launcher=submitit_{submit.cluster}", "slurm")
    if searched is not None:
        searched.search.check()
        _needs("optuna", "hydra/sweeper=optuna", "optuna")
        from ppctl.launch.sweep.study import Study

        compose = searched.compose
        study = Study(
            searched.search, searched.space, searched.fixed, directory, lambda index, said: make(index, compose(said))
        )
        found = [sample.config for sample in study.samples() if sample.config is not None]
        if searched.search.metric == "eval_loss" and not all(config.run.eval_every for config in found):
            raise ConfigError(
                "hydra.sweeper.metric=eval_loss: run.eval_every=null evaluates nothing. Set run.eval_every."
            )
    document = OmegaConf.to_yaml(common)
    return Sweep(words[0], directory, jobs, launcher.jobs or 1, "--json" in words, document, submit, study)


def _job(index: int, asked: Asked, words: list[str], top: Path) -> Job:
    check_keys(asked.composed)
    swept = [f"{each.get_key_element()}={each.get_value_element_as_str()}" for each in asked.swept]
    has_own = any(each.key_or_group == "run.dir" for each in asked.swept)
    run_dir = Path(asked.composed.run.dir) if has_own else top / _directory_name(swept)
    config = refusal = None
    try:
        config = _checked(asked.composed, asked.choices)
        config.run.dir = str(run_dir)
    except PpctlError as error:
        refusal = " ".join(str(error).split())
    values = {each.key_or_group: each.value() for each in asked.swept}
    return Job(index, tuple(swept), values, (*words, *asked.overrides), run_dir, config, refusal)


def _needs(package: str, said: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{said} needs {package}, which is not installed. Install it: pip install 'ppctl[{extra}]'.")


def _directory_name(swept: list[str]) -> str:
    """A job's directory below the sweep's; odd or long names get a hash."""
    job = ",".join(swept)
    name = re.sub(r"[^\w=.,+-]", "_", job)[:150]
    return name if name == job else f"{name}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


@contextmanager
def _in_one_line(parsed: list[Override]) -> Iterator[None]:
    """Hydra's and OmegaConf's errors in here become ConfigErrors."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        # ValueError and OSError: what Hydra raises for a malformed or unreadable file of the user's
        raise ConfigError(explain(error, parsed)) from error


def _run_hydra(request: Request, argv: list[str]) -> None:
    with _as_if_typed(argv):
        hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")(request)()


@contextmanager
def _as_if_typed(argv: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and hands exceptions on only when HYDRA_FULL_ERROR is set."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["ppctl", *argv], "1"
    try:
        yield
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


def completions(line: str) -> None:
    """Prints for bash what may follow `line`, which starts with the program's name and has no command."""
    register()
    os.environ["COMP_LINE"] = line
    # A half-typed line is often wrong, and the prompt is no place for an error.
    with suppress(HydraException, OmegaConfBaseException, ValueError, SystemExit):
        _run_hydra(Request(), ["--shell-completion", "query=bash"])


def completion_script() -> None:
    """Prints what bash evaluates to complete ppctl's command lines."""
    register()
    _run_hydra(Request(), ["--shell-completion", "install=bash"])
