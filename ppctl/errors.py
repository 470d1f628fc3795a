"""Errors for users. Each message is one line: the values, the failed equation, and the remedy."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Values of `kind` in `--json` for ends of a command that have no error class below.
INTERRUPTED, OUTPUT, BUG = "interrupted", "output", "bug"
REMEDY = re.compile(  # the sentence with the remedy, and all text after it
    r"(?<=[.?:)] )(?:(?:Add|Call|Choose|Copy|Delete|Did you "
    r"mean|Drop|End|Free|Give|Go|Install|Leave|Let|Look|Lower|Make|Move"
    r"|Name|Please|Raise|Remove|Restore|Round|Say|Set|Start|Try|Use|Write)\b|`ppctl ).*"
)


# --- names of settings in messages ---------------------------------------------------------------

Writer = Callable[[str, object, str | None], str]  # takes the arguments of `setting`


def setting(name: str, value: object = None, argument: str | None = None) -> str:
    """Return a setting, and its value if any, as the reader of a message would write it.

    argument: the text for users of the Python API; None: the name's last part with the value.
    Messages of `ppctl.cli` and `ppctl.config` write settings directly.

    >>> setting("mesh.tp", 2)
    'tp=2'
    >>> with written_as(as_setting):
    ...     setting("mesh.tp", 2)
    'mesh.tp=2'
    """
    return _writers[-1](name, value, argument)


def as_argument(name: str, value: object, argument: str | None) -> str:
    """Return `NAME=VALUE` as an argument of the Python API, or `argument` if given."""
    return argument or as_setting(name.rpartition(".")[2], value)


def as_setting(name: str, value: object, argument: str | None = None) -> str:
    """Return `PART.NAME=VALUE`, as typed on the command line."""
    return name if value is None else f"{name}={value}"


def as_option(name: str, value: object, argument: str | None) -> str:
    """Return `--NAME VALUE`, for a command that has options instead of settings."""
    option = f"--{name.rpartition('.')[2].replace('_', '-')}"
    return option if value is None else f"{option} {value}"


_writers: list[Writer] = [as_argument]  # not per thread: threads that read files raise errors, too


@contextmanager
def written_as(writer: Writer) -> Iterator[None]:
    """Make `setting` use `writer` in the body, or in a decorated function."""
    _writers.append(writer)
    try:
        yield
    finally:
        _writers.pop()


# --- errors --------------------------------------------------------------------------------------


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three of `names` that resemble `word`, nearest first."""
    return difflib.get_close_matches(word, list(names), n=3, cutoff=cutoff)


def suggested(names: Sequence[str]) -> str:
    """Return ' Did you mean ...?' with these names, or '' without names.

    >>> suggested(nearest("trian", ["train", "verify"])), suggested([])
    (' Did you mean train?', '')
    """
    return f" Did you mean {' or '.join(names)}?" if names else ""


def one_line(error: object) -> str:
    return " ".join(str(error).split())


class PpctlError(Exception):
    """A request that ppctl cannot serve: the base class of its errors.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = 2
    kind = "request"  # name in `--json`; docs/command-line.md lists all


class ConfigError(PpctlError):
    """An impossible setting, or an impossible combination of settings."""

    kind = "config"


class ScheduleError(PpctlError):
    """A schedule that breaks the dependency rule, or a size that a schedule family cannot serve."""

    kind = "schedule"


class DataError(PpctlError):
    """A data set that is missing, too small, or different from its config."""

    kind = "data"


@contextmanager
def os_errors(
    what: str, remedy: str = "", kind: type[PpctlError] = ConfigError, form: str = "{}: {}"
) -> Iterator[None]:
    """Raise an error for an OSError in the body: `what`, the system's reason, the remedy.

    kind: class of the error. form: text with `what` and the reason, such as IN_BRACKETS.
    """
    try:
        yield
    except OSError as error:
        reason = form.format(what, error.strerror or error)
        raise kind(f"{reason}. {remedy}".rstrip()) from error


IN_BRACKETS = "{} ({})"  # form of `os_errors`


def missing_package(what: str, package: str, extra: str) -> DataError:
    """Return the error for a feature, `what`, whose optional package is not installed.

    extra: ppctl's extra that installs the package.
    """
    return DataError(
        f"{what} needs {package}, which is not installed. Install it: pip install 'ppctl[{extra}]'."
    )


class CheckpointError(PpctlError):
    """A checkpoint that is missing, unreadable, or belongs to another model or data set."""

    kind = "checkpoint"


class DamagedError(CheckpointError):
    """A checkpoint with missing or changed files."""

    def __init__(self, step: int, what: str, remedy: str):
        super().__init__(f"{what}. {remedy}")
        self.step, self.what = step, what


class SaveError(CheckpointError):
    """A checkpoint that could not be written; earlier checkpoints are unchanged."""

    kind = "save"


class NonFiniteError(PpctlError):
    """Training stopped at a loss or gradient that is not finite."""

    kind = "non_finite"
    exit_code = 4  # not a bug's exit code: a restart would stop at the same step


class SkippedError(NonFiniteError):
    """Too many steps in a row were skipped; the state before them is valid and saved."""


class LostError(PpctlError):
    """Another process of the run is gone."""

    kind = "process_lost"
    exit_code = 3


class DeclinedError(PpctlError):
    """The user answered no at a prompt."""

    kind = "declined"
    exit_code = 1


class AgreedError(ConfigError):
    """An error that all processes of a run find at the same point; process 0 prints it."""


class ElsewhereError(PpctlError):
    """Raised where another process of the run has already printed the error."""


def error_document(kind: str, message: str) -> dict[str, dict[str, Any]]:
    """Return the document that `--json` prints for an error: kind, message, and remedy if any.

    >>> error_document("config", "mesh.pp=0 must be at least 1. Use mesh.pp=1.")["error"]["remedy"]
    'Use mesh.pp=1.'
    """
    found = REMEDY.search(message)
    return {
        "error": {"kind": kind, "message": message, "remedy": None if found is None else found[0]}
    }
