"""Which job of a sweep is the best, and by what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppctl.launch.sweep.jobs import Job, Sweep, command_line

# Of these the trained model does not depend: jobs that differ in nothing else differ in speed.
LAYOUT = ("mesh", "schedule", "partition", "executor", "hardware", "costs", "launch")
DONE = ("finished", "skipped")


@dataclass(frozen=True)
class Best:
    """The job that is ahead of the others in one number."""

    what: str  # fastest | lowest eval_loss | lowest final_loss
    job: Job
    value: float
    command: str  # trains it anew, in a directory of its own

    @property
    def text(self) -> str:
        """The best job in a line for people."""
        value = f"{self.value:,.0f}" if self.what.startswith("fastest") else f"{self.value:.4f}"
        return f"{self.what}: job {self.job.index} ({self.job.name}), {value}"


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
    return [Best(what, job, value, command_line(job.words, sweep.directory / "best"))]
