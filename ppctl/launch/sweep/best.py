"""Which job of a sweep is the best, and by what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.launch.local import newest_checkpoint
from ppctl.launch.sweep.jobs import Job, Sweep, command_line

# Of these the trained model does not depend: jobs that differ in nothing else differ in speed.
LAYOUT = ("mesh", "schedule", "partition", "executor", "hardware", "costs", "launch")
DONE = ("finished", "skipped")
LEAST_DECIMALS, MOST_DECIMALS = 4, 9  # of a loss


@dataclass(frozen=True)
class Best:
    """The job that is ahead of the others in one number."""

    what: str  # fastest | lowest eval_loss | lowest final_loss
    by: str  # the number of a record that decided
    job: Job
    value: str
    checkpoint: Path | None  # its newest
    command: str  # trains it anew, in a directory of its own

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
        """The best job for the terminal: what it is, where, and what trains it anew."""
        return (self.text, f"  in {self.place}", f"  anew: {self.command}")


def best_of(sweep: Sweep, records: Sequence[Mapping[str, Any]]) -> list[Best]:
    """Return the best of the jobs that are done: by loss first where the sweep varies what is trained, and by speed.

    Losses are compared where all these jobs trained equally many steps and evaluated at the end, or none did.
    """
    done = [(job, record) for job, record in zip(sweep.jobs, records, strict=True) if record["status"] in DONE]
    found = []
    if any(key.lstrip("+").split(".")[0] not in LAYOUT for job in sweep.jobs for key in job.values):
        by = "eval_loss" if all(record["eval_loss"] is not None for _, record in done) else "final_loss"
        if len({record["steps"] for _, record in done}) == 1:
            found += _ahead(sweep, done, by, f"lowest {by}", sign=-1)
    for by, unit in (("tokens_per_s", "tok/s"), ("rows_per_s", "rows/s")):
        found += _ahead(sweep, done, by, f"fastest, in {unit}", sign=1)
    return found


def _ahead(sweep: Sweep, done: Sequence[tuple[Job, Mapping[str, Any]]], by: str, what: str, *, sign: int) -> list[Best]:
    known = [(job, record[by]) for job, record in done if record[by] is not None]
    if len(known) < 2:
        return []
    job, value = max(known, key=lambda each: sign * each[1])
    step = newest_checkpoint(job.run_dir)
    checkpoint = None if step is None else job.run_dir / "checkpoints" / str(step)
    text = f"{value:,.0f}" if sign > 0 else f"{value:.{decimals([value for _, value in known])}f}"
    return [Best(what, by, job, text, checkpoint, command_line(job.words, sweep.directory / f"best_{by}"))]


def decimals(values: Iterable[float | None]) -> int:
    """Return how many decimals, from LEAST_DECIMALS to MOST_DECIMALS, tell apart those of these numbers that differ.

    >>> decimals([0.5, 0.25, None]), decimals([1.00001, 1.00002]), decimals([1.0, 1.0 + 1e-15])
    (4, 5, 9)
    """
    different = {value for value in values if value is not None}
    for number in range(LEAST_DECIMALS, MOST_DECIMALS):
        if len({f"{value:.{number}f}" for value in different}) == len(different):
            return number
    return MOST_DECIMALS
