"""The curves of a file of records, read once and thinned to the points that a figure can show."""

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

BUCKETS = 1024  # of a thinned curve: two in each column of pixels of a figure
MOST_POINTS = 4 * BUCKETS  # curves with more are thinned
MOST_STEP = 10**15  # exact as a float
LARGEST = 1e100  # larger numbers cannot be drawn, and count as not finite

Points = Sequence[tuple[float, float | None]]  # (step, value), ascending; None: not finite


class Curve(NamedTuple):
    """A recorded number over the steps; the median and the counts are of all its steps."""

    points: Points  # of many: the ends; of each bucket the least, the median, the greatest, a None
    median: float | None  # None: no finite value
    num_lost: int = 0  # values that are not finite
    first_lost: int | None = None  # step of the first of these


def read_curves(
    path: Path, names: Sequence[str], newest_of: Sequence[str], problems: list[str]
) -> tuple[dict[str, Curve], dict[str, Any]]:
    """Return the recorded curves of these names, and the newest values of `newest_of`.

    The file is read once, with 16 bytes for each value. What is wrong is added to `problems`.
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
                problem = "are not in order, or there twice: of each the last line counts"
                problems.append(f"steps of {path.name} {problem}")
    return curves, newest


def _curve(steps: array[int], values: array[float]) -> tuple[Curve, bool]:
    """Return the curve of these points, and whether their steps ascend as recorded."""
    is_ordered = all(map(lt, steps, islice(steps, 1, None)))
    if not is_ordered:  # of a repeated step the last value
        points = sorted(dict(zip(steps, values, strict=True)).items())
        steps, values = array("q", [x for x, _ in points]), array("d", [y for _, y in points])
    known = [value if -LARGEST < value < LARGEST else None for value in values]
    lost = [step for step, value in zip(steps, known, strict=True) if value is None]
    if len(known) <= MOST_POINTS:
        kept, finite = range(len(known)), [value for value in known if value is not None]
        median = statistics.median(finite) if finite else None
    else:
        kept, median = _thinned(known)
    points = [(steps[i], known[i]) for i in kept]
    return Curve(points, median, len(lost), lost[0] if lost else None), is_ordered


def _thinned(values: Sequence[float | None]) -> tuple[Sequence[int], float | None]:
    """Return the ascending places of the points that are kept, and the median of all."""
    import numpy as np  # only for long runs: `ppctl runs show` of others starts without it

    y = np.array(values, float)
    is_finite = np.isfinite(y)
    kept = {0, len(y) - 1}
    for places in np.array_split(np.arange(len(y)), BUCKETS):
        finite, others = places[is_finite[places]], places[~is_finite[places]]
        order = finite[np.argsort(y[finite], kind="stable")].tolist()
        kept |= {*order[:1], *order[len(order) // 2 :][:1], *order[-1:], *others[:1].tolist()}
    return sorted(kept), float(np.median(y[is_finite])) if is_finite.any() else None
