"""Read curves from a file of records, thinned to the points that a figure can show."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from itertools import islice
from math import nan
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.reports.run_files import read_lines, record_number

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
