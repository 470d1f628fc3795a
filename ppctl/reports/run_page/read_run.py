"""Read all files of a run: curves, newest numbers, environment and problems.

Curves are thinned to the points that a figure can show.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import nan
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.schedule_from_config import Planned
from ppctl.reports import run_status
from ppctl.reports.foreign_files import from_json
from ppctl.reports.measured_timeline_file import measured_bubble
from ppctl.reports.page_kit import SPEEDS
from ppctl.reports.run_files import MEMORY_FILE, RunSummary, read_lines, record_number, run_summary
from ppctl.user_files import read_file

TIMED = ("grad_norm", "step_time_s", *SPEEDS, "mfu_fraction")  # curves whose medians are reported
CURVES = ("loss", "lr", *TIMED)
LOAD, DROPPED = "expert_load", "expert_dropped_tokens"  # numbers of each layer
NEWEST = (
    *("predicted_step_time_s", "ideal_bubble_fraction", "predicted_bubble_fraction"),
    *("predicted_memory_bytes", "memory_bytes", "compile_time_s"),
)
MOST_BYTES = 10**18  # bytes of a device; larger numbers are faults of the file
UNREADABLE = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError)

BUCKETS = 1024  # groups of points of a thinned curve, two for each pixel of a figure's width
MOST_POINTS = 4 * BUCKETS  # points of a curve; a curve with more is thinned
MOST_STEP = 10**15  # steps below this are exact as floats
LARGEST = 1e100  # larger numbers cannot be drawn, and count as not finite

COLUMNS = 128  # least number of blocks of `LayerValues`, unless there are fewer steps
MOST_LAYERS = 10_000

Points = Sequence[tuple[float, float | None]]  # (step, value), ascending; None: not finite


class Curve(NamedTuple):
    """A recorded number over the steps. Median and counts are of all steps, not of `points`."""

    # if thinned, the first and last point, and of each bucket the least, median and greatest value
    # and one None
    points: Points
    median: float | None  # None: no finite value
    num_lost: int = 0  # number of values that are not finite
    first_lost: int | None = None  # step of the first value that is not finite


class LayerValues(NamedTuple):
    """The greatest number of each layer in each block of steps; blocks are equally long."""

    first: int  # first recorded step
    last: Sequence[int]  # last step of each block
    values: Sequence[Sequence[float]]  # [blocks, layers]; NaN: not recorded


@dataclass(frozen=True)
class RecordedRun:
    """The content of the files of one run."""

    summary: RunSummary
    words: Sequence[str]  # the request: settings that differ from the defaults
    command: str  # the command that resumes the run; "": unknown
    curves: Mapping[str, Curve]  # recorded CURVES and eval_loss
    newest: Mapping[str, float]  # last recorded value of each of NEWEST
    measured_bubble: float | None  # 0..1, from the measured timeline
    starts: Sequence[Mapping[str, Any]]  # lines of starts in status.jsonl
    problems: Sequence[str]  # a phrase for each problem of the files
    pipeline: Planned | str  # the planned pipeline, or the reason why it is unknown
    memory: Sequence[Mapping[str, int]]  # bytes of a device by part, for each rank; or empty
    layers: Mapping[str, LayerValues]  # LOAD and DROPPED of models with experts

    @property
    def speed(self) -> str | None:
        """Return the key of SPEEDS that the run has recorded, or None."""
        return next((name for name in SPEEDS if self.median(name) is not None), None)

    def median(self, name: str) -> float | None:
        """Return the median of a curve; None if it has no finite value."""
        return self.curves[name].median if name in self.curves else None

    def points(self, name: str) -> Points:
        """Return the points of a curve; () if it is not recorded."""
        return self.curves[name].points if name in self.curves else ()


def read_run(
    name: str,
    path: Path,
    words: Sequence[str],
    command: str,
    notes: Sequence[str],
    pipeline: Planned | str,
) -> RecordedRun:
    """Return the run in a directory; problems of its files are listed in it, not raised.

    words, command, pipeline: as in `RecordedRun`. notes: more problems to list.
    """
    # 1. records
    summary, problems = run_summary(name, path), []
    curves, last = read_curves(path / "metrics.jsonl", CURVES, (*NEWEST, LOAD), problems)
    evaluations, _ = read_curves(path / "eval.jsonl", ("eval_loss",), (), problems)
    found = {name: record_number(last, name) for name in NEWEST}
    newest = {name: n for name, n in found.items() if n is not None and abs(n) < LARGEST}
    memory = _memory(path / MEMORY_FILE, problems)
    pairs = ((name, read_layers(path / "metrics.jsonl", name)) for name in (LOAD, DROPPED))
    has_experts = LOAD in last
    layers = {name: found for name, found in pairs if found is not None} if has_experts else {}
    # 2. starts
    lines = read_lines(path / run_status.FILE, problems)
    starts = [line for line in lines if line.get("status") == run_status.STARTED]
    numbers = curves | evaluations, newest, measured_bubble(path / "timeline" / "timeline.csv")
    problems = list(dict.fromkeys((*summary.problems, *problems, *notes)))
    return RecordedRun(
        summary, words, command, *numbers, starts, problems, pipeline, memory, layers
    )


def _memory(path: Path, problems: list[str]) -> list[dict[str, int]]:
    """Return the bytes of each rank by part, recorded at the newest start; [] without a record."""
    try:
        ranks = from_json(read_file(path))["ranks"]
        memory = [{str(part): size for part, size in of_rank.items()} for of_rank in ranks]
        sizes = [size for of_rank in memory for size in of_rank.values()]
        if all(type(size) is int and 0 <= size < MOST_BYTES for size in sizes):
            return memory
    except FileNotFoundError:
        return []
    except UNREADABLE:
        pass
    problems.append(f"{path.name} cannot be read")
    return []


def versions_of(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the recorded package versions of a start."""
    versions = start.get("versions")
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def read_layers(path: Path, name: str) -> LayerValues | None:
    """Return the greatest value of `name` per block of steps and layer; None if never recorded."""
    first, last, rows = 0, array("q"), []
    size, number = 1, 0  # steps of a block, steps so far
    for record in read_lines(path, []):
        # 1. the numbers of a step
        step, values = record.get("step"), record.get(name)
        if type(step) is not int or not 0 <= step < MOST_STEP or not isinstance(values, list):
            continue
        numbers = [record_number({name: value}, name) for value in values[:MOST_LAYERS]]
        row = [nan if n is None or not abs(n) < LARGEST else n for n in numbers]
        if rows and len(row) != len(rows[0]):
            continue
        # 2. the block of the step; blocks double in size when there are 2 * COLUMNS
        if number % size == 0:
            rows.append(row)
            last.append(step)
        else:
            rows[-1], last[-1] = _greatest(rows[-1], row), step
        first, number = first if number else step, number + 1
        if len(rows) == 2 * COLUMNS and number % size == 0:
            rows = [*map(_greatest, rows[::2], rows[1::2])]
            last, size = last[1::2], 2 * size
    return LayerValues(first, last, rows) if rows else None


def _greatest(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [y if x != x or y > x else x for x, y in zip(a, b, strict=True)]  # x != x: NaN


def read_curves(
    path: Path, names: Sequence[str], newest_of: Sequence[str], problems: list[str]
) -> tuple[dict[str, Curve], dict[str, Any]]:
    """Return the recorded curves of `names`, and the newest values of `newest_of`.

    Reads the file once, and needs 16 bytes for each value. Adds a phrase to `problems` for each
    kind of faulty record.
    """
    # 1. the records
    columns = [(name, array("q"), array("d")) for name in names]
    newest: dict[str, Any] = {}
    num_stepless = 0
    for record in read_lines(path, problems):
        step = record.get("step")
        if type(step) is not int or not 0 <= step < MOST_STEP:
            num_stepless += 1
            continue
        for name, steps, values in columns:
            if name in record:
                value = record[name]
                if type(value) is not float:
                    value = record_number(record, name)
                steps.append(step)
                values.append(nan if value is None else value)
        for name in newest_of:
            if name in record:
                newest[name] = record[name]
    if num_stepless:
        records = f"record{'s' * (num_stepless > 1)} of {path.name}"
        problems.append(f"{num_stepless} {records} without a step, left out")
    # 2. the curves
    curves: dict[str, Curve] = {}
    for name, steps, values in columns:
        if steps:
            curves[name], is_ordered = _curve(steps, values)
            if not is_ordered:
                problem = "are out of order or repeated: the last line of a step counts"
                problems.append(f"steps of {path.name} {problem}")
    return curves, newest


def _curve(steps: array[int], values: array[float]) -> tuple[Curve, bool]:
    """Return the curve of these points, and whether their steps ascend strictly."""
    is_ordered = all(map(lt, steps, islice(steps, 1, None)))
    if not is_ordered:  # sort; the last value of a repeated step wins
        points = sorted(dict(zip(steps, values, strict=True)).items())
        steps, values = array("q", [x for x, _ in points]), array("d", [y for _, y in points])
    known = [value if -LARGEST < value < LARGEST else None for value in values]
    lost = [step for step, value in zip(steps, known, strict=True) if value is None]
    if len(known) <= MOST_POINTS:
        kept, finite = range(len(known)), [value for value in known if value is not None]
        # two steps: the second, as allocations slow the first
        median = statistics.median(finite[-1:] if len(finite) == 2 else finite) if finite else None
    else:
        kept, median = _thinned(known)
    points = [(steps[i], known[i]) for i in kept]
    return Curve(points, median, len(lost), lost[0] if lost else None), is_ordered


def _thinned(values: Sequence[float | None]) -> tuple[Sequence[int], float | None]:
    """Return the ascending indices of the points to keep, and the median of all values."""
    import numpy as np  # only for long runs: `ppctl runs show` starts faster without it

    y = np.array(values, float)
    is_finite = np.isfinite(y)
    kept = {0, len(y) - 1}
    for places in np.array_split(np.arange(len(y)), BUCKETS):
        finite, others = places[is_finite[places]], places[~is_finite[places]]
        order = finite[np.argsort(y[finite], kind="stable")].tolist()
        kept |= {*order[:1], *order[len(order) // 2 :][:1], *order[-1:], *others[:1].tolist()}
    return sorted(kept), float(np.median(y[is_finite])) if is_finite.any() else None
