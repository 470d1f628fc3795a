"""Costs of a model for `ppctl schedule`, from `ppctl plan --json` or a run's measured timeline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.errors import ConfigError, ScheduleError
from ppctl.reports.foreign_files import from_json, read_file
from ppctl.reports.measured_timeline_file import FILES, read_timeline
from ppctl.schedule.simulator import Timeline

KINDS = ("forward_s", "input_grad_s", "weight_grad_s")
HOW = (
    "It takes what `ppctl plan ... --json` prints, or the directory of a run with "
    "run.timeline=true."
)


class ModelCosts(NamedTuple):
    """Seconds of one microbatch through the whole model and of a transfer, and their source."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    transfer_s: float
    source: str

    def words(self, num_ranks: int) -> list[str]:
        """Return the overrides of `ppctl schedule` for num_ranks ranks: costs of 1/p of the model.

        >>> ModelCosts(4.0, 6.0, 2.0, 0.5, "a plan").words(4)[:2]
        ['costs.forward_s=1.0', 'costs.input_grad_s=1.5']
        """
        of_rank = [f"costs.{name}={getattr(self, name) / num_ranks!r}" for name in KINDS]
        return [*of_rank, f"costs.transfer_s={self.transfer_s!r}"]


def costs_from(path: Path) -> ModelCosts:
    """Return the costs in a file or a run's directory, sums over its stages, or ConfigError."""
    try:
        return _of_run(path) if path.is_dir() else _of_plan(path)
    except (OSError, ValueError, RecursionError, ScheduleError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        reason = error.strerror if isinstance(error, OSError) else reason
        raise ConfigError(f"--costs-from {path} cannot be read: {reason}. {HOW}") from None


def _of_plan(path: Path) -> ModelCosts:
    document = from_json(read_file(path))
    stages: Any = document.get("stages") if isinstance(document, Mapping) else None
    is_list = isinstance(stages, list) and stages
    if not is_list or not all(isinstance(stage, Mapping) for stage in stages):
        raise ValueError("it has no stages")
    times = [[stage.get(name) for stage in stages] for name in KINDS]
    hop_s: Any = document.get("transfer_s")
    if not all(_is_time(value) for values in (*times, [hop_s]) for value in values):
        raise ValueError("its stages have no times, as of a plan for unknown hardware")
    forward_s, input_s, weight_s = map(sum, times)
    return ModelCosts(forward_s, input_s, weight_s, hop_s, f"predicted in {path}")


def _of_run(path: Path) -> ModelCosts:
    file = path / "timeline" / FILES[0]
    if not file.is_file():
        raise ValueError("this run has no measured timeline")
    timeline = read_timeline(file, path.name)
    costs, stages = timeline.costs, range(timeline.schedule.num_stages)
    forward_s, input_s, weight_s = (
        sum(costs.seconds(kind, stage, 1) for stage in stages) for kind in "FIW"
    )
    hop_s = transfer_s(timeline)
    return ModelCosts(forward_s, input_s, weight_s, hop_s, f"measured in {file}")


def transfer_s(timeline: Timeline) -> float:
    """Return the median seconds from a task's end to a waiting task's start elsewhere, or 0."""
    rank_of, gaps = timeline.schedule.rank_of, []
    for task, start_s in timeline.start_s.items():
        before = timeline.waits_for(task)
        if before is not None and rank_of[before.stage] != rank_of[task.stage]:
            gaps.append(max(0.0, start_s - timeline.end_s[before]))
    return statistics.median(gaps) if gaps else 0.0


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < float("inf")
