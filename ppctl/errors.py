"""The errors a user can meet. Each is one line: the values, the equation that fails, and the remedy."""

from __future__ import annotations


class PpctlError(Exception):
    """A request that cannot be served. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2


class ConfigError(PpctlError):
    """A setting, or a combination of settings, that is impossible."""


class ScheduleError(PpctlError):
    """A schedule that breaks the dependency rule, or a size that a schedule family cannot serve."""


class DataError(PpctlError):
    """A data set that is missing, too small, or not what its config says."""


class CheckpointError(PpctlError):
    """A checkpoint that is missing, unreadable, or belongs to another model or data set."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not all that was saved."""

    def __init__(self, step: int, what: str, remedy: str):
        super().__init__(f"{what}. {remedy}")
        self.step, self.what = step, what


class SaveError(CheckpointError):
    """A checkpoint that could not be written; those before it are as they were."""


class NonFiniteError(PpctlError):
    """Training met a loss or gradient that is not finite and stopped."""

    exit_code = 4  # not that of a bug: starting again would meet it again


class LostError(PpctlError):
    """Another process of the run is gone."""

    exit_code = 3


class DeclinedError(PpctlError):
    """The user was asked, and said no."""

    exit_code = 1


class AgreedError(ConfigError):
    """An error that all processes of a run find at the same point; process 0 prints it."""


class ElsewhereError(PpctlError):
    """The error that ends this process is printed by another one of the run, and not here."""
