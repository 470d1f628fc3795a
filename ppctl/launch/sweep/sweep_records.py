"""Results of jobs: settings, end, numbers; the best; a sweep from its directory. No JAX."""

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.changed_settings import shown
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.launch.sweep.sweep_jobs import FILES, MARK, STATES, Job, Outcome, command_line
from ppctl.reports.foreign_files import from_json, read_file
from ppctl.reports.measured_timeline_file import measured_bubble
from ppctl.reports.recorded_settings import differing_settings
from ppctl.reports.run_files import find_runs, read_lines, record_number, run_summary, whole_number
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

Words = Callable[[Path], Sequence[str]]


@dataclass(frozen=True)
class Result:
    """A job, how it ended, and the numbers of its run."""

    job: Job
    outcome: Outcome
    numbers: Mapping[str, Any]  # NUMBERS

    @property
    def is_done(self) -> bool:
        return self.outcome.status in DONE

    @property
    def record(self) -> dict[str, Any]:
        """The result in one record: the job's number, its swept values by key, ENDS and NUMBERS."""
        end = self.outcome
        ends = (end.status, end.code, end.seconds, end.error, str(self.job.run_dir))
        values = {"job": self.job.index, **self.job.values}
        return {**values, **dict(zip(ENDS, ends, strict=True)), **self.numbers}


def result_of(job: Job, outcome: Outcome) -> Result:
    """Return the result of a job; without an end in order only with numbers of this start."""
    since_s = 0.0 if outcome.status in DONE else outcome.began_s
    numbers = dict.fromkeys(NUMBERS) if since_s is None else numbers_of(job.run_dir, since_s)
    return Result(job, outcome, numbers)


def numbers_of(run_dir: Path, since_s: float = 0.0) -> dict[str, Any]:
    """Return NUMBERS of a run, as far as it wrote them, in files that were written since then."""
    steps = _lines(run_dir / "metrics.jsonl", since_s)
    evaluations = _lines(run_dir / "eval.jsonl", since_s)
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
    return None if record_number(record, name) is None else record[name]


def _lines(path: Path, since_s: float) -> list[dict[str, Any]]:
    """Return the records of steps in a file of JSON lines, if that was written since then."""
    if not path.is_file() or path.stat().st_mtime < since_s:
        return []
    return [record for record in read_lines(path, []) if "step" in record]


def equal_errors(results: Sequence[Result]) -> dict[str, list[Job]]:
    """Return the failed jobs by their error, in the order of the first job of each."""
    jobs: dict[str, list[Job]] = {}
    for result in results:
        if result.outcome.error is not None:
            jobs.setdefault(result.outcome.error, []).append(result.job)
    return jobs


def state_counts(results: Sequence[Result]) -> str:
    """Return the number of jobs in each state, in words, as in `3 jobs: 2 finished, 1 failed`."""
    numbers = Counter(result.outcome.status for result in results)
    counts = ", ".join(f"{numbers[state]} {state}" for state in STATES if numbers[state])
    return f"{len(results)} job{'s' * (len(results) != 1)}: {counts}"


# --- the best -------------------------------------------------------------------------------------


class Best(NamedTuple):
    """The job that is ahead of the others in one number."""

    what: str  # fastest, in tok/s | lowest eval_loss | lowest final_loss
    by: str  # the number that decided
    job: Job
    text: str  # a line for people
    place: Path  # its newest checkpoint, or its directory where it saved none
    command: str  # trains it anew, in a separate directory


def best_of(directory: Path, results: Sequence[Result]) -> list[Best]:
    """Return the best finished jobs: by loss, if more than the layout varies, and by speed.

    Losses are compared where all these jobs trained equally many steps. directory: of the sweep.
    """
    done = [result for result in results if result.is_done]
    names = {key.lstrip("+").split(".")[0] for result in results for key in result.job.values}
    best = []
    if names - {*LAYOUT} and len({result.numbers["steps"] for result in done}) == 1:
        loss = loss_of(done)
        best += _ahead(directory, done, loss, f"lowest {loss}", sign=-1)
    for by, unit in SPEEDS.items():
        best += _ahead(directory, done, by, f"fastest, in {unit}", sign=1)
    return best


def loss_of(done: Sequence[Result]) -> str:
    """Return the loss that jobs are compared by: eval_loss where all evaluated, else final_loss."""
    has_all = done and all(result.numbers["eval_loss"] is not None for result in done)
    return "eval_loss" if has_all else "final_loss"


def _ahead(directory: Path, done: Sequence[Result], by: str, what: str, *, sign: int) -> list[Best]:
    known = [(each.job, each.numbers[by]) for each in done if each.numbers[by] is not None]
    if len(known) < 2:
        return []
    job, value = max(known, key=lambda each: sign * each[1])
    number = f"{value:,.0f}" if sign > 0 else f"{value:.{decimals([v for _, v in known])}f}"
    text = f"{what}: {number}, job {job.index} ({job.name})"
    step, place = newest_checkpoint(job.run_dir), job.run_dir
    place = place if step is None else place / "checkpoints" / str(step)
    return [Best(what, by, job, text, place, command_line(job.words, directory / f"best_{by}"))]


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
    recorded = {os.path.realpath(record["run_dir"]): record for record in _records(directory)}
    jobs = _jobs_with_runs(directory, words_of)
    places = {os.path.realpath(job["run_dir"]) for job in jobs}
    jobs += [_job_without_run(record) for place, record in recorded.items() if place not in places]
    order = {place: index for index, place in enumerate(recorded)}
    jobs.sort(key=lambda job: order.get(os.path.realpath(job["run_dir"]), len(order)))
    # 2. their axes, and the best
    axes: dict[str, dict[str, None]] = {}
    results = []
    for index, job in enumerate(jobs):
        for name, value in job["values"].items():
            axes.setdefault(name, {})[value] = None
        run_dir, swept = Path(job["run_dir"]), tuple(f"{k}={v}" for k, v in job["values"].items())
        words = [word for word in words_of(run_dir) if not word.lstrip("+").startswith("run.dir=")]
        made = Job(index, swept, job["values"], ("train", *words), run_dir, None)
        results.append(Result(made, Outcome(job["status"]), job))
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
            for best in best_of(directory, results)
        ],
        "jobs": [{"job": index, **job} for index, job in enumerate(jobs)],
        "files": [str(directory / name) for name in FILES if (directory / name).is_file()],
    }


def _records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of the summary in a sweep's directory, [] where it cannot be read."""
    try:
        records = from_json(read_file(directory / FILES[0]))
        return [dict(record) for record in records if os.path.realpath(record["run_dir"])]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


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
