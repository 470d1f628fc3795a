"""The command line's own options: everything that is not GROUP=OPTION or SETTING=VALUE."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ppctl.cli.choices import did_you_mean
from ppctl.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Options of a command, anywhere among its words, with --help and --json among them.

    words: the attribute of all other words. Errors are ConfigErrors.
    """

    def __init__(self, prog: str, words: str = "words"):
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)
        self.add_argument(words, nargs="*")
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--json", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options in `words`. ConfigError for unknown ones."""
        options, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            bad, known = unknown[0].partition("=")[0], self.names()
            near = did_you_mean(bad, known)
            raise ConfigError(f"{bad} is not an option.{near} ({', '.join(known)})")
        return options

    def read_directory(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the same of a command that reads one directory, `source`."""
        options = self.read(words)
        if not options.help:
            if len(options.words) != 1:
                found = " ".join(options.words) or "none"
                raise ConfigError(f"{self.prog} takes one directory to read, not {found}.")
            [options.source] = options.words
        return options

    def names(self) -> list[str]:
        """Return every option, for completion and messages."""
        return [name for action in self._actions for name in action.option_strings]


def _parser() -> Parser:
    parser = Parser("ppctl", "overrides")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(
        "-i", "--info", choices=["config", "defaults", "defaults-tree", "plugins", "searchpath"]
    )
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options and overrides in `words`, in any order. ConfigError for wrong options."""
    options = _parser().read(words)
    modes = [f"--{name}" for name in ("cfg", "info", "multirun") if getattr(options, name)]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other.")
    if options.resolve and options.cfg is None:
        raise ConfigError("--resolve only goes with --cfg.")
    return options


def hydra_flags(options: argparse.Namespace) -> list[str]:
    """Return the options that are Hydra's."""
    flags = ["--multirun"] * options.multirun + ["--resolve"] * options.resolve
    for name in ("cfg", "info", "config_dir"):
        if getattr(options, name) is not None:
            flags += [f"--{name.replace('_', '-')}", getattr(options, name)]
    return flags


def job_flags(options: argparse.Namespace) -> list[str]:
    """Return the options that each job of a sweep shares with the sweep."""
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    return ["--json"] * options.json + config_dir


def general_options() -> list[str]:
    """Return every option of a command that composes a config."""
    return _parser().names()
