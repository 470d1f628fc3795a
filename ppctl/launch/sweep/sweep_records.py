"""Records of jobs: settings, end, numbers; the best; a sweep from its directory. No JAX."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.config.changed_settings import shown
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.launch.sweep.sweep_jobs import FILES, MARK, STATES, Job, Outcome, Sweep, command_line
from ppctl.reports.foreign_files import from_json, read_file
from ppctl.reports.measured_timeline_file import measured_bubble
from ppctl.reports.recorded_settings import differing_settings
from ppctl.reports.run_files import (
    find_runs,
    read_lines,
    record_number,
    run_summary,
    whole_number,
)
from ppctl.reports.terminal_output import SPEEDS

NUMBERS = (  # in this order; None where a run has none
    "steps",
    "final_loss",
    "eval_loss",
    "step_time_s",  # median
    "predicted_step_time_s",
    "tokens_per_s",  # median
    "rows_per_s",  # the same, of data without tokens
    *("ideal_bubble_fraction", "predicted_bubble_fraction", "measured_bubble_fraction"),
    *("memory_bytes", "predicted_memory_bytes"),
)
ENDS = ("status", "exit_code", "seconds", "error", "run_dir")

# Settings without effect on the trained model: jobs that differ only in these differ in speed.
LAYOUT = ("mesh", "schedule", "partition", "executor", "hardware", "launch")
DONE = ("finished", "skipped")
LEAST_DECIMALS, MOST_DECIMALS = 4, 9  # of a loss

Recorded = tuple[Job, Mapping[str, Any]]  # a job and its record
Words = Callable[[Path], Sequence[str]]


def record_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return one record: the job's number, its swept values by key, ENDS and NUMBERS.

    The numbers of a job that did not finish are those that this start wrote.
    """
    since_s = 0.0 if outcome.status in ("finished", "skipped") else outcome.began_s
    ends = (outcome.status, outcome.code, outcome.seconds, outcome.error, str(job.run_dir))
    record = {"job": job.index, **job.values, **dict(zip(ENDS, ends, strict=True))}
    return record | (
        dict.fromkeys(NUMBERS) if since_s is None else numbers_of(job.run_dir, since_s)
    )


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of the summary in a sweep's directory, [] where it cannot be read."""
    try:
        records = from_json(read_file(directory / FILES[0]))
        return [dict(record) for record in records if os.path.realpath(record["run_dir"])]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def numbers_of(run_dir: Path, since_s: float = 0.0) -> dict[str, Any]:
    """Return NUMBERS of a run, as far as it wrote them, in files that were written since then."""
    steps = list(_lines(run_dir / "metrics.jsonl", since_s))
    evaluations = list(_lines(run_dir / "eval.jsonl", since_s))
    last = steps[-1] if steps else {}
    numbers: dict[str, Any] = {name: _number(last, name) for name in NUMBERS}
    numbers |= {"steps": whole_number(last, "step"), "final_loss": _number(last, "loss")}
    numbers["eval_loss"] = _number(evaluations[-1], "eval_loss") if evaluations else None
    for name in ("step_time_s", "tokens_per_s", "rows_per_s"):
        values = [value for record in steps if (value := _number(record, name)) is not None]
        numbers[name] = statistics.median(values) if values else None
    timeline = run_dir / "timeline" / "timeline.csv"
    numbers["measured_bubble_fraction"] = measured_bubble(timeline, since_s)
    return numbers


def _number(record: Mapping[str, Any], name: str) -> float | None:
    """Return an entry of a record as it is, if it is a number."""
    return None if record_number(record, name) is None else record[name]


def _lines(path: Path, since_s: float) -> Iterator[dict[str, Any]]:
    """Yield the whole records in a file of JSON lines, if that was written since then."""
    try:
        if path.stat().st_mtime < since_s:
            return
    except OSError:
        return
    yield from (record for record in read_lines(path, []) if "step" in record)


def equal_errors(sweep: Sweep, outcomes: Sequence[Outcome]) -> dict[str, list[Job]]:
    """Return the failed jobs by their error, in the order of the first job of each."""
    jobs: dict[str, list[Job]] = {}
    for job, outcome in zip(sweep.jobs, outcomes, strict=True):
        if outcome.error is not None:
            jobs.setdefault(outcome.error, []).append(job)
    return jobs


def state_counts(outcomes: Sequence[Outcome]) -> str:
    """Return the number of jobs in each state, in words.

    >>> state_counts([Outcome("finished"), Outcome("failed"), Outcome("finished")])
    '3 jobs: 2 finished, 1 failed'
    """
    numbers = Counter(outcome.status for outcome in outcomes)
    counts = ", ".join(f"{numbers[state]} {state}" for state in STATES if numbers[state])
    return f"{len(outcomes)} job{'s' * (len(outcomes) != 1)}: {counts}"


# --- the best -------------------------------------------------------------------------------------


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


# --- a sweep from its directory -------------------------------------------------------------------


def is_sweep(directory: Path) -> bool:
    """Return whether a sweep has written to a directory."""
    return any((directory / name).is_file() for name in (MARK, FILES[0]))


def read_sweep(directory: Path, words_of: Words) -> dict[str, Any]:
    """Return the sweep in a directory, as `ppctl runs show --json` prints it.

    Its jobs are the runs below it, and those of its summary that left no run: refused, or failed
    before they began. words_of: returns the words that the run in a directory was started with.
    """
    # 1. the jobs, in the order of the summary
    recorded = {os.path.realpath(record["run_dir"]): record for record in read_records(directory)}
    jobs = _jobs_with_runs(directory, words_of)
    places = {os.path.realpath(job["run_dir"]) for job in jobs}
    jobs += [_job_without_run(record) for place, record in recorded.items() if place not in places]
    order = {place: index for index, place in enumerate(recorded)}
    jobs.sort(key=lambda job: order.get(os.path.realpath(job["run_dir"]), len(order)))
    # 2. their axes
    axes: dict[str, dict[str, None]] = {}
    for job in jobs:
        for name, value in job["values"].items():
            axes.setdefault(name, {})[value] = None
    return {
        "sweep_dir": str(directory),
        "counts": dict(Counter(job["status"] for job in jobs).most_common()),
        "axes": {name: [*values] for name, values in axes.items()},
        "best": [
            {
                "what": best.what,
                "job": best.job.index,
                "value": jobs[best.job.index][best.by],
                "place": str(best.place),
                "command": best.command,
                "text": best.text,
            }
            for best in _best(directory, jobs, words_of)
        ],
        "jobs": [{"job": index, **job} for index, job in enumerate(jobs)],
        "files": [str(directory / name) for name in FILES if (directory / name).is_file()],
    }


def _jobs_with_runs(directory: Path, words_of: Words) -> list[dict[str, Any]]:
    runs = [run_summary(name, path) for name, path in find_runs(directory) if path != directory]
    words = [[*words_of(run.path)] for run in runs]
    differ = differing_settings([run.config for run in runs], words)
    jobs = []
    for index, run in enumerate(runs):
        texts = {name: values[index] for name, values in differ.items()}
        facts = {"run_dir": str(run.path), "status": run.status, "reason": run.reason}
        facts |= {"step": run.step, "num_steps": run.num_steps}
        facts["values"] = {name: text for name, text in texts.items() if text is not None}
        jobs.append(facts | numbers_of(run.path))
    return jobs


def _job_without_run(record: Mapping[str, Any]) -> dict[str, Any]:
    varied = [key for key in record if key not in ("job", *ENDS, *NUMBERS)]
    facts = {"run_dir": record["run_dir"], "status": str(record.get("status"))}
    facts |= {"reason": record.get("error"), "step": 0, "num_steps": None}
    facts["values"] = {key: shown(record[key]) for key in varied}
    return facts | dict.fromkeys(NUMBERS)


def job_name(job: Mapping[str, Any]) -> str:
    values = " ".join(f"{key}={value}" for key, value in job["values"].items())
    return values or Path(job["run_dir"]).name


def _best(directory: Path, jobs: Sequence[Mapping[str, Any]], words_of: Words) -> list[Best]:
    """Return the best jobs, each with the command that trains it anew in a separate directory."""
    made = []
    for index, job in enumerate(jobs):
        run_dir = Path(job["run_dir"])
        words = [word for word in words_of(run_dir) if not word.lstrip("+").startswith("run.dir=")]
        swept = tuple(f"{key}={value}" for key, value in job["values"].items())
        made.append(Job(index, swept, job["values"], ("train", *words), run_dir, None))
    return best_of(Sweep("train", directory, made), jobs)
