"""The remains of a run as one record: its settings, its end, and the numbers people compare."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppctl.launch.sweep.sweep_jobs import FILES, Job, Outcome
from ppctl.reports.foreign_files import from_json, read_file
from ppctl.reports.measured_timeline_file import measured_bubble
from ppctl.reports.run_files import read_lines, record_number, whole_number

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
        records = from_json(read_file(directory / FILES[1]))
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
