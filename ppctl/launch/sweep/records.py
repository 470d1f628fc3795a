"""A run's remains as one record: its settings, how it ended, and the numbers people compare."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppctl.launch.sweep.jobs import Job, Outcome
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
    found: dict[str, Any] = {name: last.get(name) for name in NUMBERS}
    found |= {"steps": last.get("step"), "final_loss": last.get("loss")}
    found["eval_loss"] = evaluations[-1].get("eval_loss") if evaluations else None
    for name in ("step_time_s", "tokens_per_s", "rows_per_s"):
        values = [record[name] for record in steps if record.get(name) is not None]
        found[name] = statistics.median(values) if values else None
    found["measured_bubble_fraction"] = measured_bubble(run_dir / "timeline" / "timeline.csv", since_s)
    return found


def _lines(path: Path, since_s: float) -> Iterator[dict[str, Any]]:
    """Yield the whole records in a file of JSON lines that was written since then; a kill may leave half of one."""
    try:
        if path.stat().st_mtime < since_s:
            return
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield record
