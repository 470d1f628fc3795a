"""Results of the jobs of a sweep: their numbers, the best, `sweep.json`, and a table. No JAX."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ppctl.config.changed_settings import shown
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.launch.sweep.sweep_jobs import DONE, FILES, LOG, NUMBERS, STATES, Job, Result
from ppctl.reports import page_kit as kit
from ppctl.reports.foreign_files import from_json, printable
from ppctl.reports.measured_timeline_file import measured_bubble
from ppctl.reports.run_files import is_run, record_number, run_summary, whole_number
from ppctl.reports.run_page.read_run import Curve, read_curves
from ppctl.reports.terminal_output import SPEEDS, json_safe, replace_file, show_lines, show_table
from ppctl.user_files import read_file

ENDS = ("status", "exit_code", "seconds", "error", "run_dir")

# Settings without effect on the trained model: jobs that differ only in these differ in speed.
LAYOUT = ("mesh", "schedule", "partition", "executor", "hardware", "launch")
LOSSES = ("final_loss", "eval_loss")
MEDIANS = ("step_time_s", *SPEEDS)
LEAST = ("seconds", "step time", "steps")  # columns that make room in a narrow terminal


def numbers_of(run_dir: Path, since_s: float = 0.0) -> dict[str, Any]:
    """Return the NUMBERS of a run. Files last written before since_s (Unix seconds) are ignored."""
    curves, last = _curves(run_dir / "metrics.jsonl", since_s)
    _, last_evaluation = _curves(run_dir / "eval.jsonl", since_s)
    numbers: dict[str, Any] = {name: _number(last, name) for name in NUMBERS}
    numbers |= {"steps": whole_number(last, "step"), "final_loss": _number(last, "loss")}
    if whole_number(last_evaluation, "step") or not numbers["steps"]:  # not before training
        numbers["eval_loss"] = _number(last_evaluation, "eval_loss")
    numbers |= {name: curves[name].median if name in curves else None for name in MEDIANS}
    timeline = run_dir / "timeline" / "timeline.csv"
    numbers["measured_bubble_fraction"] = measured_bubble(timeline, since_s)
    return numbers


def _number(record: Mapping[str, Any], name: str) -> float | None:
    return None if record_number(record, name) is None else record[name]


def _curves(path: Path, since_s: float) -> tuple[dict[str, Curve], dict[str, Any]]:
    if not os.path.isfile(path) or path.stat().st_mtime < since_s:
        return {}, {}
    return read_curves(path, MEDIANS, ("step", "loss", *NUMBERS), [])


def equal_errors(results: Sequence[Result]) -> dict[str, list[Job]]:
    """Return the failed jobs, grouped by error message, in the order of each group's first job.

    Messages that differ only in the job's run.dir are one group; in the message of a group of
    several jobs, RUN_DIR stands for the directory.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.error is not None:
            run_dir = result.job.run_dir
            places = "|".join(re.escape(str(each)) for each in (run_dir.absolute(), run_dir))
            error = re.sub(rf"(?<![\w/.-])({places})(?![\w.-])", "RUN_DIR", result.error)
            alike.setdefault(error, []).append(result)
    return {
        error if len(same) > 1 else str(same[0].error): [each.job for each in same]
        for error, same in alike.items()
    }


def state_counts(results: Sequence[Result]) -> str:
    """Return the number of jobs in each state, in words, as in `3 jobs: 2 finished, 1 failed`."""
    numbers = Counter(result.status for result in results)
    order = sorted(numbers, key=lambda state: (*STATES, state).index(state))
    counts = ", ".join(f"{numbers[state]} {state}" for state in order)
    return f"{len(results)} job{'s' * (len(results) != 1)}: {counts}"


def side_by_side_note(results: Sequence[Result]) -> str:
    """Return a note if any job shared the machine, in this or an earlier start, else ""."""
    shared = any((result.job.run_dir / LOG).exists() for result in results)
    note = "Jobs ran side by side, which slows each of them: the fastest is not named"
    return note if shared else ""


def show_results(console: Console, results: Sequence[Result]) -> None:
    """Print a table of jobs, and each error once."""
    names = ("steps", *LOSSES, "step_time_s", *SPEEDS)
    present = [name for name in names if any(each.numbers[name] is not None for each in results)]
    columns = {
        "job": [printable(f"{each.job.index}: {each.job.name}") for each in results],
        "status": [each.status + f" ({each.code})" * bool(each.code) for each in results],
    }
    for name in present:
        heading, texts = kit.NUMBERS[name]
        columns[heading] = texts([each.numbers[name] for each in results])
    columns["seconds"] = ["" if each.seconds is None else f"{each.seconds:.1f}" for each in results]
    rows = zip(*columns.values(), strict=True)
    show_table(console, state_counts(results), [*columns], rows, LEAST)
    for error, jobs in equal_errors(results).items():
        others = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        line = f"ppctl: job {jobs[0].index}: {jobs[0].name}{others}: {error}"
        show_lines(console, printable(line))


# --- the best -------------------------------------------------------------------------------------


class Best(NamedTuple):
    """The job that is best in one number."""

    what: str  # fastest, in tok/s | lowest eval_loss | lowest final_loss
    job: int
    value: float
    text: str  # line to print
    place: str  # its newest checkpoint, else its run.dir


def best_of(results: Sequence[Result]) -> list[Best]:
    """Return the best finished jobs by loss and by speed.

    Losses are compared if a setting outside LAYOUT was swept and all finished jobs trained the same
    number of steps; speeds are compared if no job shared the machine.
    """
    done = [result for result in results if result.is_done]
    names = {key.lstrip("+").split(".")[0] for result in results for key in result.job.values}
    best = []
    if names - {*LAYOUT} and len({result.numbers["steps"] for result in done}) == 1:
        has_all = all(result.numbers["eval_loss"] is not None for result in done)
        loss = "eval_loss" if has_all else "final_loss"
        best += _ahead(done, loss, f"lowest {loss}", sign=-1)
    for by, unit in SPEEDS.items() if not side_by_side_note(done) else ():
        best += _ahead(done, by, f"fastest, in {unit}", sign=1)
    return best


def _ahead(done: Sequence[Result], by: str, what: str, *, sign: int) -> list[Best]:
    known = [(each.job, each.numbers[by]) for each in done if each.numbers[by] is not None]
    if len(known) < 2:
        return []
    job, value = max(known, key=lambda each: sign * each[1])
    values = [value for _, value in known]
    texts = kit.NUMBERS[by][1](values)
    numbers = {job.index: text for (job, _), text in zip(known, texts, strict=True)}
    number = numbers.pop(job.index)
    text = f"{what}: {number}, job {job.index} ({job.name})"
    if alike := [str(index) for index, each in numbers.items() if each == number]:
        text += f"; the same in job{'s' * (len(alike) > 1)} {', '.join(alike)}"
    step, place = newest_checkpoint(job.run_dir), job.run_dir
    place = place if step is None else place / "checkpoints" / str(step)
    return [Best(what, job.index, value, text, str(place))]


# --- sweep.json -----------------------------------------------------------------------------------


def write_records(directory: Path, results: Sequence[Result]) -> None:
    """Write sweep.json, a record per job: number, swept values, fields ENDS and NUMBERS.

    Numbers that are not finite are null. OSError if the file cannot be written.
    """
    records = []
    for each in results:
        ends = (each.status, each.code, each.seconds, each.error, str(each.job.run_dir))
        values = {"job": each.job.index, **each.job.values}
        records.append({**values, **dict(zip(ENDS, ends, strict=True)), **each.numbers})
    text = json.dumps(json_safe(records), indent=1, allow_nan=False, default=str)
    replace_file(directory / FILES[0], text + "\n")


def is_sweep(directory: Path) -> bool:
    """Return whether a sweep has written to a directory."""
    return os.path.isfile(directory / FILES[0])


def read_sweep(directory: Path) -> list[Result]:
    """Return the results of a sweep from its records and the current state of its jobs' runs.

    The sweep may be running, killed or moved. [] if the records cannot be read.
    """
    try:
        records = from_json(read_file(directory / FILES[0]))
        return [_read(directory, index, record) for index, record in enumerate(records)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _read(directory: Path, index: int, record: Mapping[str, Any]) -> Result:
    # 1. read the job, as recorded
    recorded = Path(record["run_dir"])
    inside = directory / recorded.name
    values = {k: shown(v) for k, v in record.items() if k not in ("job", *ENDS, *NUMBERS)}
    name = " ".join(f"{key}={value}" for key, value in values.items())
    job = Job(index, values, name, inside if inside.is_dir() else recorded)
    code, seconds = whole_number(record, "exit_code"), record_number(record, "seconds")
    status, error = str(record["status"]), record["error"]
    is_refused = code is not None and seconds is None and error is not None
    # 2. read its run
    if is_refused or not is_run(job.run_dir):
        status = "not started" if status == "running" else status
        return Result(job, status, code, seconds, error if error is None else str(error))
    run = run_summary(name, job.run_dir)
    if run.status != status and not (run.status == "finished" and status in DONE):
        status, code, seconds = run.status, None, None
    return Result(job, status, code, seconds, run.reason, numbers_of(job.run_dir))
