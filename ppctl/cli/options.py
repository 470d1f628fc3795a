"""The command line's own options: everything that is not GROUP=OPTION or SETTING=VALUE."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ppctl.cli.choices import did_you_mean
from ppctl.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ppctl", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-i", "--info", choices=["config", "defaults", "defaults-tree", "plugins", "searchpath"])
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options and overrides in `words`, in any order; ConfigError for options that there are not."""
    options, unknown = _parser().parse_known_intermixed_args(words)
    refuse_unknown(unknown, general_options())
    modes = [f"--{name}" for name in ("cfg", "info", "multirun") if getattr(options, name)]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other.")
    if options.resolve and options.cfg is None:
        raise ConfigError("--resolve only goes with --cfg.")
    return options


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError if there are unknown options."""
    if unknown:
        bad = unknown[0].partition("=")[0]
        raise ConfigError(f"{bad} is not an option.{did_you_mean(bad, known)} ({', '.join(known)})")


def hydra_flags(options: argparse.Namespace) -> list[str]:
    """Return the options that are Hydra's."""
    flags = ["--multirun"] * options.multirun + ["--resolve"] * options.resolve
    for name in ("cfg", "info", "config_dir"):
        if getattr(options, name) is not None:
            flags += [f"--{name.replace('_', '-')}", getattr(options, name)]
    return flags


def job_flags(options: argparse.Namespace) -> list[str]:
    """Return the options that each job of a sweep shares with the sweep."""
    return ["--json"] * options.json + (["--config-dir", options.config_dir] if options.config_dir else [])


def general_options() -> list[str]:
    """Return every option of a command that composes a config, for completion and for what looks like it."""
    return [name for action in _parser()._actions for name in action.option_strings]
