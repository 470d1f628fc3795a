"""The errors a user can meet. Each is one line: the values, the equation that fails, and the
remedy.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Kinds of what ends a command and is no error of these classes, as `--json` names them.
INTERRUPTED, OUTPUT, BUG = "interrupted", "output", "bug"
REMEDY = re.compile(  # a sentence that tells what to do, and what follows it
    r"(?<=[.?:)] )(?:(?:Add|Choose|Copy|Delete|Did you "
    r"mean|Drop|End|Free|Give|Go|Install|Leave|Let|Lower|Make|Move"
    r"|Name|Please|Raise|Restore|Round|Say|Set|Start|Try|Use|Write)\b|`ppctl ).*"
)


# --- names of settings in messages ---------------------------------------------------------------

Writer = Callable[[str, object, str | None], str]  # takes the arguments of `setting`


def setting(name: str, value: object = None, argument: str | None = None) -> str:
    """Return a setting in the words of a message's reader, with its value if that is given.

    argument: the words of the Python API, where these are not the last part of the name and the
    value. Messages of `ppctl.cli` and `ppctl.config` name settings directly.

    >>> setting("mesh.tp", 2)
    'tp=2'
    >>> with written_as(as_setting):
    ...     setting("mesh.tp", 2)
    'mesh.tp=2'
    """
    return _writers[-1](name, value, argument)


def as_argument(name: str, value: object, argument: str | None) -> str:
    """Return an argument of the Python API."""
    return argument or as_setting(name.rpartition(".")[2], value)


def as_setting(name: str, value: object, argument: str | None = None) -> str:
    """Return a setting of the command line."""
    return name if value is None else f"{name}={value}"


def as_option(name: str, value: object, argument: str | None) -> str:
    """Return an option of a command without settings."""
    option = f"--{name.rpartition('.')[2].replace('_', '-')}"
    return option if value is None else f"{option} {value}"


_writers: list[Writer] = [as_argument]  # shared by all threads: files are read in several


@contextmanager
def written_as(writer: Writer) -> Iterator[None]:
    """Let `setting` write names by `writer` in the body, or in a decorated function."""
    _writers.append(writer)
    try:
        yield
    finally:
        _writers.pop()


# --- errors --------------------------------------------------------------------------------------


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three of `names` that look like `word`, nearest first."""
    return difflib.get_close_matches(word, list(names), n=3, cutoff=cutoff)


def suggested(names: Sequence[str]) -> str:
    """Return ' Did you mean ...?' with these names, or nothing without any.

    >>> suggested(nearest("trian", ["train", "verify"])), suggested([])
    (' Did you mean train?', '')
    """
    return f" Did you mean {' or '.join(names)}?" if names else ""


def one_line(error: object) -> str:
    return " ".join(str(error).split())


class PpctlError(Exception):
    """A request that cannot be served. The command line prints it without a traceback and exits
    with `exit_code`.
    """

    exit_code = 2
    kind = "request"  # as `--json` names it; docs/command-line.md lists them


class ConfigError(PpctlError):
    """A setting, or a combination of settings, that is impossible."""

    kind = "config"


class ScheduleError(PpctlError):
    """A schedule that breaks the dependency rule, or a size that a schedule family cannot serve."""

    kind = "schedule"


class DataError(PpctlError):
    """A data set that is missing, too small, or not what its config says."""

    kind = "data"


def missing_package(what: str, package: str, extra: str) -> DataError:
    """Return the error of a feature whose optional package is not installed."""
    return DataError(
        f"{what} needs {package}, which is not installed. Install it: pip install 'ppctl[{extra}]'."
    )


class CheckpointError(PpctlError):
    """A checkpoint that is missing, unreadable, or belongs to another model or data set."""

    kind = "checkpoint"


class DamagedError(CheckpointError):
    """A checkpoint whose files are not all that was saved."""

    def __init__(self, step: int, what: str, remedy: str):
        super().__init__(f"{what}. {remedy}")
        self.step, self.what = step, what


class SaveError(CheckpointError):
    """A checkpoint that could not be written; those before it are as they were."""

    kind = "save"


class NonFiniteError(PpctlError):
    """Training met a loss or gradient that is not finite and stopped."""

    kind = "non_finite"
    exit_code = 4  # not that of a bug: starting again would meet it again


class SkippedError(NonFiniteError):
    """Too many steps in a row were skipped; the state before them is good, and is saved."""


class LostError(PpctlError):
    """Another process of the run is gone."""

    kind = "process_lost"
    exit_code = 3


class DeclinedError(PpctlError):
    """The user was asked, and said no."""

    kind = "declined"
    exit_code = 1


class AgreedError(ConfigError):
    """An error that all processes of a run find at the same point; process 0 prints it."""


class ElsewhereError(PpctlError):
    """The error that ends this process is printed by another one of the run, and not here."""


def error_document(kind: str, message: str) -> dict[str, dict[str, Any]]:
    """Return what `--json` prints of an error: its kind, its whole message, and the part of that
    which is the remedy.

    >>> error_document("config", "mesh.pp=0 must be at least 1. Use mesh.pp=1.")["error"]["remedy"]
    'Use mesh.pp=1.'
    """
    found = REMEDY.search(message)
    return {
        "error": {"kind": kind, "message": message, "remedy": None if found is None else found[0]}
    }
