"""A run's remains as one record: its settings, how it ended, and the numbers people compare."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppctl.launch.sweep.jobs import Job, Outcome
from ppctl.reports.run_files import read_lines, record_number, whole_number
from ppctl.reports.timeline_io import measured_bubble

NUMBERS = (  # in this order; None where a run has none
    "steps",
    "final_loss",
    "eval_loss",
    "step_time_s",  # median
    "predicted_step_time_s",
    "tokens_per_s",  # median
    "rows_per_s",  # the same, of data without tokens
    "ideal_bubble_fraction",
    "predicted_bubble_fraction",
    "measured_bubble_fraction",
    "memory_bytes",
    "predicted_memory_bytes",
)
ENDS = ("status", "exit_code", "seconds", "error", "run_dir")


def record_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return one record: the job's number, its swept values by key, ENDS and NUMBERS.

    The numbers of a job that did not finish are those that this start wrote.
    """
    since_s = 0.0 if outcome.status in ("finished", "skipped") else outcome.began_s
    ends = (outcome.status, outcome.code, outcome.seconds, outcome.error, str(job.run_dir))
    return {
        "job": job.index,
        **job.values,
        **dict(zip(ENDS, ends, strict=True)),
        **(dict.fromkeys(NUMBERS) if since_s is None else numbers_of(job.run_dir, since_s)),
    }


def numbers_of(run_dir: Path, since_s: float = 0.0) -> dict[str, Any]:
    """Return NUMBERS of a run, as far as it wrote them; nothing of files that were not written since then."""
    steps = list(_lines(run_dir / "metrics.jsonl", since_s))
    evaluations = list(_lines(run_dir / "eval.jsonl", since_s))
    last = steps[-1] if steps else {}
    found: dict[str, Any] = {name: _number(last, name) for name in NUMBERS}
    found |= {"steps": whole_number(last, "step"), "final_loss": _number(last, "loss")}
    found["eval_loss"] = _number(evaluations[-1], "eval_loss") if evaluations else None
    for name in ("step_time_s", "tokens_per_s", "rows_per_s"):
        values = [value for record in steps if (value := _number(record, name)) is not None]
        found[name] = statistics.median(values) if values else None
    found["measured_bubble_fraction"] = measured_bubble(run_dir / "timeline" / "timeline.csv", since_s)
    return found


def _number(record: Mapping[str, Any], name: str) -> float | None:
    """Return an entry of a record as it is, if it is a number."""
    return None if record_number(record, name) is None else record[name]


def _lines(path: Path, since_s: float) -> Iterator[dict[str, Any]]:
    """Yield the whole records in a file of JSON lines that was written since then; a kill may leave half of one."""
    try:
        if path.stat().st_mtime < since_s:
            return
    except OSError:
        return
    yield from (record for record in read_lines(path, []) if "step" in record)
