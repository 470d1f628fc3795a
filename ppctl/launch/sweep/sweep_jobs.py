"""A sweep as values: its jobs, their results, and checks for impossible sweeps."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ppctl.config import Config, Run
from ppctl.config.changed_settings import changes, value_text
from ppctl.config.code_digests import changed_modules, sources_here
from ppctl.config.groups.command_settings import Launcher, SideBySide, SubmititSlurm
from ppctl.errors import ConfigError, PpctlError, one_line
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.reports.foreign_files import check_inside, check_place, from_json, read_settings
from ppctl.user_files import read_file

FILES = ("sweep.json", "sweep.html")
LOG = "output.log"  # in a run.dir: the output of a job that shared the machine
SUBMITTED_LOG = "submitted.log"  # in a run.dir: the output of a submitted job
STUDY, SUBMITIT = "optuna.journal", ".submitit"  # a file and a folder in a sweep's directory
EARLIER = "finished earlier"  # status of a job that an earlier start of the sweep finished
DONE = ("finished", EARLIER)
STATES = ("running", "queued", *DONE, "failed", "interrupted", "not started")
SUBMITTED = "submitted.json"  # in a run.dir: the submission of its job
NUMBERS = (  # numbers of a run, in this order; None if not recorded
    "steps",
    "final_loss",
    "eval_loss",
    "step_time_s",  # median over steps
    "predicted_step_time_s",
    "tokens_per_s",  # median over steps
    "rows_per_s",  # median over steps, for data without tokens
    *("ideal_bubble_fraction", "predicted_bubble_fraction", "measured_bubble_fraction"),
    *("memory_bytes", "predicted_memory_bytes"),
)


@dataclass(frozen=True)
class Job:
    """One combination of the swept values."""

    index: int
    values: Mapping[str, Any]  # swept values by key
    name: str  # swept values as typed: KEY=VALUE ...
    run_dir: Path
    words: tuple[str, ...] = ()  # command line, without the program's name and run.dir
    config: Config | None = None  # None: the values are refused
    refusal: PpctlError | None = None  # error that its values raise


@dataclass(frozen=True)
class Result:
    """The end of a job, or the reason why it did not begin, and the numbers of its run."""

    job: Job
    status: str = "not started"  # one of STATES
    code: int | None = None  # exit code as in a shell
    seconds: float | None = None  # lifetime of its process
    error: str | None = None  # message in one line, for a failed job
    numbers: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(NUMBERS))

    @property
    def is_done(self) -> bool:
        return self.status in DONE


@dataclass(frozen=True)
class Sweep:
    """A request of `ppctl COMMAND --multirun`."""

    command: str
    directory: Path
    jobs: list[Job]  # a search appends to the list
    launcher: Launcher = field(default_factory=SideBySide)
    as_json: bool = False
    study: ChoosesJobs | None = None  # chooses further jobs

    @property
    def num_parallel(self) -> int:
        return self.launcher.jobs or 1

    @property
    def is_submitted(self) -> bool:
        """Whether its jobs outlive this process."""
        return isinstance(self.launcher, SubmititSlurm)

    @property
    def trains(self) -> bool:
        """Whether its jobs are runs, each with a run.dir for its files."""
        return self.command == "train"


class ChoosesJobs(Protocol):
    """Chooses jobs from results: `ppctl.cli.optuna_sweeper.OptunaStudy`, an extra."""

    def samples(self) -> list[Job]: ...
    def open(self) -> None: ...
    def ask(self) -> Job | None: ...
    def tell(self, result: Result) -> None: ...


class Change(NamedTuple):
    """A new state of a started job."""

    job: int  # number of the job
    state: str  # running | queued | ended
    more: str = ""  # rest of the line printed about the job
    code: int | None = None  # exit code of an ended job; -N: killed by signal N
    error: dict[str, Any] | None = None  # document of an ended job's error, if it left one


def check_sweep(sweep: Sweep) -> None:
    """Raise ConfigError for an impossible sweep."""
    # 1. check jobs, launcher and search
    if not sweep.jobs and sweep.study is None:
        raise ConfigError(
            "This sweep is empty: a list or range has no values. Give each KEY at least one."
        )
    if (sweep.num_parallel > 1 or sweep.is_submitted) and not sweep.trains:
        how = f"hydra.launcher.jobs={sweep.num_parallel}"
        how = "hydra/launcher=submitit_slurm" if sweep.is_submitted else how
        raise ConfigError(
            f"{how}: only jobs of `ppctl train` run side by side, because each has a run.dir for "
            f"output. Leave it out: jobs of `ppctl {sweep.command}` then run one after another."
        )
    if sweep.study is not None and not sweep.trains:
        what = f"searches by the records of runs, and `ppctl {sweep.command}` makes no runs"
        raise ConfigError(f"hydra/sweeper=optuna {what}.")
    # 2. check each job
    refused = [one_line(job.refusal) for job in sweep.jobs if job.refusal is not None]
    if refused and len(refused) == len(sweep.jobs):
        all_of = f"All {len(refused)} jobs are refused; the first: " if len(refused) > 1 else ""
        raise ConfigError(f"{all_of}{refused[0]}")
    if sweep.trains:
        _check_directories(sweep)
    _check_equal(sweep.jobs)
    # 3. check for Slurm
    if sweep.is_submitted and shutil.which("sbatch") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm needs Slurm's sbatch, which is not on this machine's "
            "PATH. Start the sweep where jobs are submitted, or leave the launcher out."
        )


def _check_directories(sweep: Sweep) -> None:
    """Raise ConfigError if jobs share a directory, or write outside it through a link."""
    check_place(sweep.directory, "run.dir")
    check_inside(sweep.directory, (*FILES, STUDY, SUBMITIT), "run.dir")
    owners: dict[str, Job] = {}
    for job in sweep.jobs:
        check_place(job.run_dir, "run.dir")
        check_inside(job.run_dir, (LOG, SUBMITTED_LOG, SUBMITTED), "run.dir")
        first = owners.setdefault(os.path.realpath(job.run_dir), job)
        if first is not job:
            raise ConfigError(
                f"Jobs {first.index} ({first.name}) and {job.index} ({job.name}) have the same "
                f"run.dir, {job.run_dir}. Leave out the repeated value, or leave "
                "run.dir to the sweep."
            )


def _check_equal(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if two jobs make the same request, as with values 1e-3 and 0.001."""
    owners: dict[str, Job] = {}
    for job in jobs:
        if job.config is None:
            continue
        run_dir = job.config.run.dir if "run.dir" in job.values else ""
        request = replace(job.config, run=replace(job.config.run, dir=run_dir))
        first = owners.setdefault(repr(request), job)
        if first is not job:
            raise ConfigError(
                f"Jobs {first.index} ({first.name}) and {job.index} ({job.name}) are the same "
                "request: their values are equal. Leave one of them out."
            )


def has_ended(run_dir: Path, run: Run) -> bool:
    """Return whether run_dir has the checkpoint of the last step, and run.resume allows its use."""
    return run.resume != "never" and newest_checkpoint(run_dir) == run.num_steps


def check_finished(run_dir: Path, wanted: Config) -> None:
    """Raise ConfigError if run_dir holds a finished run of other settings or code."""
    if not has_ended(run_dir, wanted.run):
        return
    try:
        before = read_settings(run_dir / "config.yaml")
        texts = [*(change.text for change in changes(before, wanted)), *_code_changes(run_dir)]
    except (OSError, ValueError, AttributeError):
        texts = ["its config.yaml cannot be read"]
    if texts:
        more = [f"{len(texts) - 3} more"] if len(texts) > 3 else []
        raise ConfigError(
            f"{run_dir} holds a finished run of other settings ({'; '.join(texts[:3] + more)}). "
            "Use another run.name or run.dir, or move it away."
        )


def _code_changes(run_dir: Path) -> list[str]:
    """Return a text for each module of the user's code changed since a run's newest checkpoint."""
    file = run_dir / "checkpoints" / str(newest_checkpoint(run_dir)) / "meta" / "data.json"
    try:
        parts = from_json(read_file(file))["meta"]["sources"].values()
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # a damaged checkpoint
        return []
    modules = {name: digest for part in parts for name, digest in part.items()}
    now = sources_here(modules)
    changed = changed_modules({name: modules[name] for name in now}, now)
    return [f"the code of {name} has changed" for name in changed]


def job_command(job: Job) -> list[str]:
    """Return the command of a job's process."""
    run_dir = f"run.dir={value_text(str(job.run_dir))}"
    return [sys.executable, "-m", "ppctl.cli", *job.words, run_dir]
