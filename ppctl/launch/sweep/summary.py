"""The files that a sweep leaves in its directory: sweep.csv, sweep.json and sweep.html, one record a job."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.launch.sweep.best import best_of
from ppctl.launch.sweep.jobs import FILES, SHARED, Outcome, Sweep, ran_side_by_side
from ppctl.launch.sweep.records import ENDS, NUMBERS
from ppctl.launch.sweep.sweep_page import sweep_page
from ppctl.reports.foreign import from_json, read_file
from ppctl.reports.terminal import json_safe, replace_file


def write_summary(sweep: Sweep, outcomes: Sequence[Outcome], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the summary; return what to say of the sweep, a line each, also where a file cannot be written."""
    kept = earlier(sweep)
    texts = (as_csv([*records, *kept]), as_json([*records, *kept]), sweep_page(sweep, outcomes, records, len(kept)))
    lines = []
    for best in best_of(sweep, records):
        lines += best.lines
    if ran_side_by_side(sweep):
        lines.append(f"note: {SHARED}")
    try:
        for name, text in zip(FILES, texts, strict=True):
            replace_file(sweep.directory / name, text)
    except OSError as error:
        return [*lines, f"the summary in {sweep.directory} cannot be written: {error.strerror}"]
    return [*lines, f"summary: {', '.join(str(sweep.directory / name) for name in FILES)}"]


def earlier(sweep: Sweep) -> list[dict[str, Any]]:
    """Return records, without a number, of jobs that earlier sweeps left here and that are none of this one."""
    ours = {os.path.realpath(job.run_dir) for job in sweep.jobs}
    try:
        before = from_json(read_file(sweep.directory / FILES[1]))
        return [
            record | {"job": None}
            for record in before
            if os.path.realpath(record["run_dir"]) not in ours and Path(record["run_dir"]).is_dir()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def as_json(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a JSON list. Numbers that are not finite become null, because JSON has none."""
    return json.dumps(json_safe([*map(dict, records)]), indent=1, allow_nan=False, default=str) + "\n"


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each record below the names of `columns`; nothing stands for what is not known."""
    out = io.StringIO()
    rows = csv.DictWriter(out, columns(records), lineterminator="\n")
    rows.writeheader()
    rows.writerows(records)
    return out.getvalue()


def columns(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all records in order: number, swept settings, how it ended, numbers."""
    swept = list(dict.fromkeys(key for record in records for key in record if key not in ("job", *ENDS, *NUMBERS)))
    return ["job", *swept, "status", *NUMBERS, *(name for name in ENDS if name != "status")]
