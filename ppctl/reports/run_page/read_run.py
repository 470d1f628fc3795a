"""Read all files of a run: curves, newest numbers, environment and problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.config.schedule_from_config import Planned
from ppctl.reports import run_status
from ppctl.reports.foreign_files import from_json
from ppctl.reports.measured_timeline_file import measured_bubble
from ppctl.reports.page_kit import SPEEDS
from ppctl.reports.run_files import MEMORY_FILE, RunSummary, read_lines, record_number, run_summary
from ppctl.reports.run_page.recorded_curves import (
    LARGEST,
    Curve,
    LayerValues,
    Points,
    read_curves,
    read_layers,
)
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
    numbers = {name: record_number(last, name) for name in NEWEST}
    newest = {name: n for name, n in numbers.items() if n is not None and abs(n) < LARGEST}
    memory = _memory(path / MEMORY_FILE, problems)
    pairs = ((name, read_layers(path / "metrics.jsonl", name)) for name in (LOAD, DROPPED))
    has_experts = LOAD in last
    layers = {name: found for name, found in pairs if found is not None} if has_experts else {}
    # 2. starts
    lines = read_lines(path / run_status.FILE, problems)
    starts = [line for line in lines if line.get("status") == run_status.STARTED]
    return RecordedRun(
        summary,
        words,
        command,
        curves | evaluations,
        newest,
        measured_bubble(path / "timeline" / "timeline.csv"),
        starts,
        list(dict.fromkeys((*summary.problems, *problems, *notes))),
        pipeline,
        memory,
        layers,
    )


def _memory(path: Path, problems: list[str]) -> list[dict[str, int]]:
    """Return the bytes of each rank by part, recorded at the newest start; [] without a record."""
    try:
        ranks = from_json(read_file(path))["ranks"]
        return [{str(part): _whole(size) for part, size in of_rank.items()} for of_rank in ranks]
    except FileNotFoundError:
        return []
    except UNREADABLE:
        problems.append(f"{path.name} cannot be read")
        return []


def _whole(size: Any) -> int:
    if type(size) is not int or not 0 <= size < MOST_BYTES:
        raise ValueError(size)
    return size


def versions_of(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the recorded package versions of a start."""
    versions = start.get("versions")
    if not isinstance(versions, dict):
        return {}
    return {str(name): str(version) for name, version in versions.items()}
