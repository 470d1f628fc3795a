"""Which job of a sweep is the best, and by what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.launch.local_processes import newest_checkpoint
from ppctl.launch.sweep.sweep_jobs import Job, Sweep, command_line
from ppctl.reports.terminal_output import SPEEDS

# Settings without effect on the trained model: jobs that differ only in these differ in speed.
LAYOUT = ("mesh", "schedule", "partition", "executor", "hardware", "costs", "launch")
DONE = ("finished", "skipped")
LEAST_DECIMALS, MOST_DECIMALS = 4, 9  # of a loss

Recorded = tuple[Job, Mapping[str, Any]]  # a job and its record


@dataclass(frozen=True)
class Best:
    """The job that is ahead of the others in one number."""

    what: str  # fastest | lowest eval_loss | lowest final_loss
    by: str  # the number of a record that decided
    job: Job
    value: str
    checkpoint: Path | None  # its newest
    command: str  # trains it anew, in a separate directory

    @property
    def place(self) -> Path:
        """Where it is: its checkpoint, or its directory where it saved none."""
        return self.job.run_dir if self.checkpoint is None else self.checkpoint

    @property
    def text(self) -> str:
        """The best job in a line for people."""
        return f"{self.what}: {self.value}, job {self.job.index} ({self.job.name})"

    @property
    def lines(self) -> tuple[str, ...]:
        """The best job for the terminal: value, place, and the command that trains it anew."""
        return (self.text, f"  in {self.place}", f"  anew: {self.command}")


def best_of(sweep: Sweep, records: Sequence[Mapping[str, Any]]) -> list[Best]:
    """Return the best finished jobs: by loss, if more than the layout varies, and by speed.

    Losses are compared where all these jobs trained equally many steps.
    """
    done = finished(sweep, records)
    names = {key.lstrip("+").split(".")[0] for job in sweep.jobs for key in job.values}
    best = []
    if names - {*LAYOUT} and len({record["steps"] for _, record in done}) == 1:
        loss = loss_of(done)
        best += _ahead(sweep, done, loss, f"lowest {loss}", sign=-1)
    for by, unit in SPEEDS.items():
        best += _ahead(sweep, done, by, f"fastest, in {unit}", sign=1)
    return best


def finished(sweep: Sweep, records: Sequence[Mapping[str, Any]]) -> list[Recorded]:
    """Return the finished jobs with their records."""
    pairs = zip(sweep.jobs, records, strict=True)
    return [(job, record) for job, record in pairs if record["status"] in DONE]


def loss_of(done: Sequence[Recorded]) -> str:
    """Return the loss that jobs are compared by: eval_loss where all evaluated, else final_loss."""
    has_all = done and all(record["eval_loss"] is not None for _, record in done)
    return "eval_loss" if has_all else "final_loss"


def _ahead(sweep: Sweep, done: Sequence[Recorded], by: str, what: str, *, sign: int) -> list[Best]:
    known = [(job, record[by]) for job, record in done if record[by] is not None]
    if len(known) < 2:
        return []
    job, value = max(known, key=lambda each: sign * each[1])
    step = newest_checkpoint(job.run_dir)
    checkpoint = None if step is None else job.run_dir / "checkpoints" / str(step)
    text = f"{value:,.0f}" if sign > 0 else f"{value:.{decimals([value for _, value in known])}f}"
    command = command_line(job.words, sweep.directory / f"best_{by}")
    return [Best(what, by, job, text, checkpoint, command)]


def decimals(values: Iterable[float | None]) -> int:
    """Return how many decimals, LEAST_DECIMALS to MOST_DECIMALS, tell these numbers apart.

    >>> decimals([0.5, 0.25, None]), decimals([1.00001, 1.00002]), decimals([1.0, 1.0 + 1e-15])
    (4, 5, 9)
    """
    different = {value for value in values if value is not None}
    for number in range(LEAST_DECIMALS, MOST_DECIMALS):
        if len({f"{value:.{number}f}" for value in different}) == len(different):
            return number
    return MOST_DECIMALS
