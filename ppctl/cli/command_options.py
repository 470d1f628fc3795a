"""The command line's own options: everything that is not GROUP=OPTION or SETTING=VALUE."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from ppctl.cli.choices import did_you_mean
from ppctl.cli.commands import COMMANDS
from ppctl.cli.example_commands import examples_of
from ppctl.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Options of a command, anywhere among its words, with --json and --help among them.

    usage: the words after `ppctl COMMAND`; notes: printed after the first line of the help; words:
    the attribute of the words that are no options, nargs of them. Errors are ConfigErrors.
    """

    def __init__(
        self,
        command: str,
        usage: str,
        *,
        notes: str = "",
        words: str = "words",
        nargs: str | None = "*",
    ):
        lines = examples_of(command)
        examples_text = "\n".join(["Examples:", *(f"  {line}" for line in lines)])
        super().__init__(
            prog=f"ppctl {command}",
            usage=f"ppctl {command} {usage}",
            description=f"ppctl {command}: {COMMANDS[command]}.\n\n{notes}".rstrip(),
            epilog=examples_text if lines else None,
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=22, width=110
            ),
            add_help=False,
            allow_abbrev=False,
        )
        self.add_argument(words, nargs=nargs, metavar=words.upper(), help=argparse.SUPPRESS)
        self.add_argument("-h", "--help", action="store_true", help="print this text")
        about = 'print the result as JSON; an error as {"error": {"kind", "message", "remedy"}}'
        self.add_argument("--json", action="store_true", help=about)

    def error(self, message: str) -> NoReturn:
        write = f" Write {self.usage}." if "are required" in message else ""
        raise ConfigError(f"{message}.{write}")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options in `words`. ConfigError for unknown ones."""
        known = [name for action in self._actions for name in action.option_strings]
        names = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
        self._refuse([name for name in names if name not in known], known)  # before missing ones
        options, unknown = self.parse_known_intermixed_args(words)
        self._refuse(unknown, known)
        return options

    def _refuse(self, unknown: Sequence[str], known: Sequence[str]) -> None:
        for bad in (word.partition("=")[0] for word in unknown):
            if not bad.startswith("-"):
                raise ConfigError(f"{bad} is one word too many. Leave it out.")
            near = did_you_mean(bad, known)
            raise ConfigError(f"{bad} is not an option.{near} ({', '.join(known)})")


def composed_parser(command: str) -> Parser:
    """Return the options of a command that composes a config."""
    usage = "[GROUP=OPTION ...] [SETTING=VALUE ...]"
    parser = Parser(command, usage, words="overrides")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config as YAML and stop")
    parser.add_argument(
        *("-m", "--multirun"),
        action="store_true",
        help="run every combination of KEY=A,B,..., each in a process and a run.dir; the same line "
        "again skips finished jobs; hydra.launcher.jobs=N runs N side by side, "
        "hydra/launcher=submitit_slurm submits them, hydra/sweeper=optuna searches instead "
        "(`--help hydra/launcher hydra/sweeper`)",
    )
    about = "look for groups and recipes in DIR too (DIR/recipes/x.yaml is recipes=x)"
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help=about)
    return parser


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """Return the options and overrides in `words`, in any order. ConfigError for wrong options."""
    options = composed_parser(command).read(words)
    if options.cfg and options.multirun:
        raise ConfigError("--cfg and --multirun exclude each other.")
    return options
