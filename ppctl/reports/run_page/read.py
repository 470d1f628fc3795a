"""The files of a run, read whole: its curves, its newest numbers, where it ran, and what is odd about it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ppctl.config.schedule_from_config import Pipeline
from ppctl.reports import run_status
from ppctl.reports.foreign import from_json, read_file
from ppctl.reports.run_files import MEMORY_FILE, RunSummary, read_lines, record_number, run_summary, whole_number
from ppctl.reports.timeline_io import measured_bubble

CURVES = ("loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "rows_per_s", "mfu_fraction")
NEWEST = (
    "predicted_step_time_s",
    "ideal_bubble_fraction",
    "predicted_bubble_fraction",
    "predicted_memory_bytes",
    "memory_bytes",
    "compile_time_s",
)
SPEEDS = ("tokens_per_s", "rows_per_s")
SLOW = 3.0  # times the median: a step far slower
MOST_BYTES = 10**18  # of a device
MOST_STEP = 10**15  # of a record, below which a float is exact
LARGEST = 1e100  # a number beyond cannot be drawn, and counts as not finite

Points = Sequence[tuple[float, float | None]]  # (step, value), ascending; None: not finite


@dataclass(frozen=True)
class RecordedRun:
    """One run, as its files have it."""

    summary: RunSummary
    config: Mapping[str, Any]  # composed; empty: it cannot be read
    words: Sequence[str]  # its request: settings other than the defaults
    command: str  # resumes it; empty where that is not known
    curves: Mapping[str, Points]  # of CURVES, each that a step recorded
    evaluations: Points
    newest: Mapping[str, float]  # of NEWEST, as last recorded
    measured_bubble: float | None  # 0..1, of its timeline
    versions: Mapping[str, str]  # as its newest start has them, else its newest checkpoint
    starts: Sequence[Mapping[str, Any]]  # of status.jsonl
    problems: Sequence[str]
    pipeline: Pipeline | str  # of its settings, or why it is not known
    memory: Sequence[Mapping[str, int]]  # of each rank bytes of a device by part; none where it was not recorded

    @property
    def speed(self) -> str | None:
        """Return the one of SPEEDS that the run recorded."""
        return next((name for name in SPEEDS if self.median(name) is not None), None)

    def values(self, name: str) -> list[float]:
        """Return the finite values of a curve."""
        return [value for _, value in self.curves.get(name, ()) if value is not None]

    def median(self, name: str) -> float | None:
        """Return the median of a curve, None where it has no finite value."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def non_finite(self, name: str) -> list[float]:
        """Return the steps at which a curve is not finite."""
        return [step for step, value in self.curves.get(name, ()) if value is None]

    @property
    def warm_up_steps(self) -> set[float]:
        """Return the first WARM_UP_STEPS steps of each start; the first step that is recorded begins one, too."""
        first = next((points[0][0] - 1 for points in self.curves.values() if points), 0)
        finished = [first, *(_step(start) for start in self.starts)]
        return {step + i for step in finished if step is not None for i in range(1, run_status.WARM_UP_STEPS + 1)}

    def slow_steps(self) -> list[tuple[float, float]]:
        """Return (step, seconds) of the steps that took more than SLOW times the median, the slowest first.

        Steps that warm up are none.
        """
        median, warm_up = self.median("step_time_s"), self.warm_up_steps
        if not median:
            return []
        points = self.curves["step_time_s"]
        pairs = [(step, value) for step, value in points if value is not None and step not in warm_up]
        return sorted((pair for pair in pairs if pair[1] > SLOW * median), key=lambda pair: -pair[1])


def read_run(
    name: str,
    path: Path,
    config: Mapping[str, Any],
    words: Sequence[str],
    command: str,
    notes: Sequence[str],
    pipeline: Pipeline | str,
) -> RecordedRun:
    """Return the run in a directory. What is wrong with its files is among its problems, and no exception."""
    summary, problems = run_summary(name, path), []
    curves, newest = _training(path / "metrics.jsonl", problems)
    evaluations = _ordered(_evaluations(path / "eval.jsonl", problems), "eval.jsonl", problems)
    memory = _memory(path / MEMORY_FILE, problems)
    lines = read_lines(path / run_status.FILE, problems)
    starts = [line for line in lines if line.get("status") == run_status.STARTED]
    return RecordedRun(
        summary,
        config,
        words,
        command,
        curves,
        evaluations,
        newest,
        measured_bubble(path / "timeline" / "timeline.csv"),
        versions_of(starts[-1]) if starts and versions_of(starts[-1]) else _versions(path, summary.checkpoints),
        starts,
        list(dict.fromkeys((*summary.problems, *problems, *notes))),
        pipeline,
        memory,
    )


def _memory(path: Path, problems: list[str]) -> list[dict[str, int]]:
    """Return the bytes of each rank by part, as the newest start recorded them."""
    try:
        ranks = from_json(read_file(path))["ranks"]
        return [{str(part): _whole(size) for part, size in of_rank.items()} for of_rank in ranks]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        problems.append(f"{path.name} cannot be read")
        return []


def _whole(size: Any) -> int:
    if type(size) is not int or not 0 <= size < MOST_BYTES:
        raise ValueError(size)
    return size


def _training(path: Path, problems: list[str]) -> tuple[dict[str, Points], dict[str, float]]:
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in CURVES}
    newest: dict[str, float] = {}
    num_stepless = 0
    for record in read_lines(path, problems):
        step = _step(record)
        if step is None:
            num_stepless += 1
            continue
        for name, points in found.items():
            if name in record:
                points.append((step, _finite(record, name)))
        for name in NEWEST:
            if name in record and (value := _finite(record, name)) is not None:
                newest[name] = value
    if num_stepless:
        problems.append(f"{num_stepless} record{'s' * (num_stepless > 1)} of {path.name} without a step, left out")
    return {name: _ordered(points, path.name, problems) for name, points in found.items() if points}, newest


def _evaluations(path: Path, problems: list[str]) -> list[tuple[float, float | None]]:
    found = ((_step(record), record) for record in read_lines(path, problems) if "eval_loss" in record)
    return [(step, _finite(record, "eval_loss")) for step, record in found if step is not None]


def _ordered(points: list[tuple[float, float | None]], name: str, problems: list[str]) -> Points:
    """Return points that ascend; of a step that is there twice the last one counts, which is added to `problems`."""
    if all(before[0] < after[0] for before, after in pairwise(points)):
        return points
    problem = f"steps of {name} are not in order, or there twice: of each the last line counts"
    if problem not in problems:
        problems.append(problem)
    return sorted(dict(points).items())


def _step(record: Mapping[str, Any]) -> int | None:
    step = whole_number(record, "step")
    return step if step is not None and 0 <= step < MOST_STEP else None


def _finite(record: Mapping[str, Any], name: str) -> float | None:
    value = record_number(record, name)
    return value if value is not None and abs(value) < LARGEST else None


def versions_of(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions that a start ran with; none where it does not say."""
    found = start.get("versions")
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def _versions(path: Path, checkpoints: Sequence[int]) -> dict[str, str]:
    for step in reversed(checkpoints):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            manifest = from_json(read_file(path / "checkpoints" / str(step) / "meta" / "data.json"))
            return {str(name): str(version) for name, version in manifest["meta"]["versions"].items()}
    return {}
