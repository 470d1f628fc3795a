"""Hydra's side of the command line: overrides in, a checked `Config` out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppctl import config as settings
from ppctl.cli.choices import DRAWN, DRAWN_COSTS
from ppctl.cli.faults import check_costs, check_keys, check_names, explain, parse_override, refuse
from ppctl.cli.plugins import Request, register
from ppctl.config import Config, ScheduleConfig
from ppctl.config.files import ROOT
from ppctl.errors import ConfigError
from ppctl.request import settled


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
    request = Request([])
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


def compose(overrides: list[str], flags: list[str], words: list[str]) -> Config | int:
    """The checked request, or an exit code when `flags` ask Hydra for something else (--cfg, --info, --multirun).

    `words` start a sweep's job on a command line. Raises ConfigError for whatever is wrong.
    """
    parsed = [parse_override(text) for text in overrides]
    for override in parsed:
        refuse(override, multirun="--multirun" in flags, drawing=False)
    register()
    request = Request(words)
    try:
        with _in_one_line(parsed):
            _run_hydra(request, [*flags, *overrides])
            if request.composed is None:
                return _summary(request.jobs)
            check_keys(request.composed)
            check_names(request.composed, request.choices)
            config = OmegaConf.to_object(request.composed)
    except SystemExit as stop:  # a signal ended the sweep
        _summary(request.jobs)
        return int(stop.code or 0)
    assert isinstance(config, Config)
    check_costs(config.costs, drawing=False)
    config.schedule = settled(config.schedule)
    settings.check(config)
    return config


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


def _summary(jobs: list[tuple[str, int, float]]) -> int:
    """1 if a job failed, else 0; prints one line for each job."""
    for job, code, seconds in jobs:
        print(
            f"ppctl: {'done' if code == 0 else f'exit code {code}':>12}  {seconds:7.1f} s  job {job}", file=sys.stderr
        )
    return int(any(code for _, code, _ in jobs))


def completions(line: str) -> None:
    """Prints for bash what may follow `line`, which starts with the program's name and has no command."""
    register()
    os.environ["COMP_LINE"] = line
    # A half-typed line is often wrong, and the prompt is no place for an error.
    with suppress(HydraException, OmegaConfBaseException, ValueError, SystemExit):
        _run_hydra(Request([]), ["--shell-completion", "query=bash"])


def completion_script() -> None:
    """Prints what bash evaluates to complete ppctl's command lines."""
    register()
    _run_hydra(Request([]), ["--shell-completion", "install=bash"])
