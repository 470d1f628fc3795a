"""A sweep as values: its jobs, and how each of them ended."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from ppctl.config import Config
from ppctl.config.sweep import Search
from ppctl.errors import ConfigError
from ppctl.launch.sweep.finished import has_ended, other_settings
from ppctl.reports.foreign import check_inside

FILES = ("sweep.csv", "sweep.json", "sweep.html")
LOG = "output.log"  # in a run.dir: what a job printed that shared the machine
SUBMITTED_LOG = "submitted.log"  # the same of a job that was submitted to a cluster
SHARED = "Jobs ran side by side, which slows each of them: their speeds are not those of a run alone"
MARK = "multirun.yaml"  # what a sweep leaves in its directory before its first job starts
STUDY, SUBMITIT = "optuna.journal", ".submitit"  # in a sweep's directory: a search, and what submitit writes
SUBMITTED = "submitted.json"  # in a run.dir: as what its job was submitted


@dataclass(frozen=True)
class Job:
    """One combination of the swept values."""

    index: int
    swept: tuple[str, ...]  # its overrides of what the sweep varies, as one types them
    values: Mapping[str, Any]  # the same by key
    words: tuple[str, ...]  # of its command line, without the program's name and run.dir
    run_dir: Path
    config: Config | None  # None: refused
    refusal: str | None = None  # why its settings are impossible together, or its data are too few
    refusal_kind: str = ConfigError.kind  # of error, as `--json` names it

    @property
    def name(self) -> str:
        return " ".join(self.swept)


@dataclass(frozen=True)
class Sweep:
    """A request of `ppctl COMMAND --multirun`."""

    command: str
    directory: Path
    jobs: list[Job]  # a search adds to them
    num_parallel: int = 1
    as_json: bool = False
    document: str = ""  # what all jobs share, as yaml
    submit: SubmitsJobs | None = None  # None: jobs are processes of this one
    study: ChoosesJobs | None = None  # chooses further jobs

    @property
    def trains(self) -> bool:
        """Its jobs are runs: they can be finished before, and have a run.dir for what they leave."""
        return self.command == "train"


class Choices(NamedTuple):
    """A search chooses one of these values, as one types them."""

    texts: tuple[str, ...]


class Span(NamedTuple):
    """A search chooses a number from `low` to `high`, both included; a whole one where all here are."""

    low: float
    high: float
    step: float | None = None  # None: 1 of whole numbers, any of others
    is_log: bool = False


class Notice(NamedTuple):
    """An event that is only to be shown."""

    text: str


class Moved(NamedTuple):
    """An event of a job that was submitted."""

    child: int
    state: str  # queued | running
    more: str  # for the line that says so


JobEvents = SimpleQueue[Any]  # of Exit, Stop, Notice and Moved


class StartsJobs(Protocol):
    """Where jobs run. Their ends are events."""

    takes_all: bool  # it lines jobs up itself
    is_awaited: bool  # after a stop request its jobs are waited for

    def begin(self, job: Job) -> str | None:
        """Begin a job; return where it writes, or None where an event says so. OSError where it cannot write."""
        ...

    def commit(self) -> None:
        """Start what has begun, if it has not started yet."""
        ...

    def end(self, index: int) -> str:
        """Return the end of what a job printed, once it has ended."""
        ...

    def stop(self, number: int, jobs: Collection[int]) -> str:
        """Answer a stop request, which is signal `number`, for these jobs; return what to say of them."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class SubmitsJobs(Protocol):
    """Where jobs are submitted, which go on when the sweep's own process ends."""

    @property
    def is_here(self) -> bool:
        """Jobs share this machine, where they slow each other."""
        ...

    def check(self) -> None:
        """Raise ConfigError where jobs cannot be submitted from here."""
        ...

    def starter(self, sweep: Sweep, events: JobEvents) -> StartsJobs:
        """Return what submits the jobs of a sweep."""
        ...


class ChoosesJobs(Protocol):
    """Chooses jobs by how those before them ended."""

    search: Search

    def samples(self) -> list[Job]:
        """Return jobs that might be chosen; each choice is in one of them."""
        ...

    def check(self) -> None:
        """Raise ConfigError where the directory holds the study of another search."""
        ...

    def open(self) -> None:
        """Read what stands in the directory, or begin it."""
        ...

    def ask(self) -> Job | None:
        """Return the next job, or None where there is none."""
        ...

    def tell(self, job: Job, outcome: Outcome) -> None:
        """Note how a job ended."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a job ended, or why it did not begin."""

    status: str  # waiting | queued | running | finished | skipped | failed | interrupted | not started
    code: int | None = None  # exit code as in a shell
    seconds: float | None = None  # that its process lived
    error: str | None = None  # one line, of a job that failed
    began_s: float | None = None  # as time.time()


def ran_side_by_side(sweep: Sweep) -> bool:
    """Return whether any job shared the machine, in this start of the sweep or in one before."""
    here = sweep.submit is not None and sweep.submit.is_here and sweep.num_parallel > 1
    return here or any((job.run_dir / LOG).exists() for job in sweep.jobs)


def check_sweep(sweep: Sweep) -> None:
    """Raise ConfigError for a sweep of which nothing should be started."""
    if not sweep.jobs and sweep.study is None:
        raise ConfigError("This sweep is empty: a list or range has no values. Give each KEY at least one.")
    if (sweep.num_parallel > 1 or sweep.submit is not None) and not sweep.trains:
        how = f"hydra.launcher.jobs={sweep.num_parallel}" if sweep.submit is None else "hydra/launcher=submitit"
        raise ConfigError(
            f"{how}: only jobs of `ppctl train` run side by side, which have a run.dir for their output. "
            f"Leave it out, and jobs of `ppctl {sweep.command}` follow one another."
        )
    if sweep.study is not None and not sweep.trains:
        raise ConfigError(f"hydra/sweeper=optuna searches by what runs record, and `ppctl {sweep.command}` makes none.")
    check_refusals(sweep)
    if sweep.trains:
        _check_directories(sweep)
    if sweep.study is not None:
        sweep.study.check()
    if sweep.submit is not None:
        sweep.submit.check()


def check_refusals(sweep: Sweep) -> None:
    """Raise ConfigError where every job is refused."""
    refused = [job.refusal for job in sweep.jobs if job.refusal is not None]
    if sweep.jobs and len(refused) == len(sweep.jobs):
        reasons = len({*refused})
        of_many = "" if reasons == 1 else f", for {reasons} reasons; the first"
        raise ConfigError(
            refused[0] if len(refused) == 1 else f"All {len(refused)} jobs are refused{of_many}: {refused[0]}"
        )


def _check_directories(sweep: Sweep) -> None:
    """ConfigError where two jobs would write into one place, or a job or the summary over something else."""
    check_inside(sweep.directory, (MARK, *FILES, STUDY, SUBMITIT), "run.dir")
    owners: dict[str, Job] = {}
    for job in sweep.jobs:
        check_inside(job.run_dir, (LOG, SUBMITTED_LOG, SUBMITTED), "run.dir")
        first = owners.setdefault(os.path.realpath(job.run_dir), job)
        if first is not job:
            raise ConfigError(
                f"Jobs {first.index} ({first.name}) and {job.index} ({job.name}) have the same run.dir, {job.run_dir}. "
                "Leave out a value that is there twice, or leave run.dir to the sweep."
            )
        if job.config is not None and has_ended(job.run_dir, job.config):
            other = other_settings(job.run_dir, job.config)
            if other is not None:
                raise ConfigError(
                    f"Job {job.index} ({job.name}): {job.run_dir} holds a finished run of other settings ({other}). "
                    "Use another run.name or run.dir, or move it away."
                )
    there = [name for name in FILES if (sweep.directory / name).exists()]
    if there and not (sweep.directory / MARK).exists():
        raise ConfigError(
            f"{sweep.directory / there[0]} is not of a sweep and stays. Use another run.name or run.dir, or move it."
        )
    nearest = next(path for path in (sweep.directory, *sweep.directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = "permission denied" if nearest.is_dir() else f"{nearest} is a file"
        raise ConfigError(f"run.dir={sweep.directory} cannot be written: {why}. Use another run.dir.")


def command_line(words: Sequence[str], run_dir: Path | None = None) -> str:
    """Return what one types to run a job's words, in a run.dir of one's own if there is one.

    >>> command_line(["train", "run.name=a b"], Path("runs/x"))
    "ppctl train 'run.name=a b' run.dir=runs/x"
    """
    return shlex.join(["ppctl", *words, *([] if run_dir is None else [run_dir_override(run_dir)])])


def run_dir_override(run_dir: Path) -> str:
    """Return the override for a directory of any name; quotes are for Hydra, where its grammar needs them.

    >>> run_dir_override(Path("runs/a=1,b=2"))
    "run.dir='runs/a=1,b=2'"
    """
    text = str(run_dir)
    is_plain = all(letter.isalnum() or letter in "/_.+-" for letter in text)
    return f"run.dir={text}" if is_plain else "run.dir='{}'".format(text.replace("'", "\\'"))
