"""The prediction for a request before anything is compiled: memory, step time and bubble of `plan`,
`train` and `tune`.

There are two kinds of bubble. The ideal one follows from the schedule and its executor alone: equal
stages with
F = I = W, and nothing else takes time. The predicted one is by the seconds of layers, embedding and
head, and of transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.planner.cost.op_times import StepTime
from ppctl.planner.cost.rank_memory import predicted_memory
from ppctl.planner.cost.step_time import (
    hardware_of,
    op_times_of,
    predicted_time,
    timeline_of,
)
from ppctl.schedule.search.extrapolated_cost import MOST_TASKS
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.run.run_lines import StepPrediction


@dataclass(frozen=True)
class JobPrediction:
    """The prediction for a request before anything is compiled."""

    memory: tuple[Mapping[str, int], ...]  # of each rank, of one device, by part
    time: StepTime | None  # by the costs of the request
    unknown: str | None  # why the time is not known
    ideal_bubble: float | None  # 0..1; None without a pipeline
    bubble: float | None  # 0..1: by the same seconds as the time; None where these are not known

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """For each rank."""
        return tuple(sum(of_rank.values()) for of_rank in self.memory)


def predict_job(job: TrainingJob) -> JobPrediction:
    """Return the prediction for a job."""
    time, unknown = predicted_time(job)
    bubble = None if time is None else _bubble(job, time)
    return JobPrediction(predicted_memory(job), time, unknown, job.pipe.bubble(), bubble)


def predict_step(job: TrainingJob) -> StepPrediction:
    """Return the prediction for a run, as `ppctl train` prints it."""
    found, hardware = predict_job(job), hardware_of(job)
    name = "unknown hardware" if hardware is None else f"hardware={hardware.name}"
    return StepPrediction(
        None if found.time is None else found.time.total_s,
        max(found.total_bytes),
        name,
        found.ideal_bubble,
        found.bubble,
    )


def _bubble(job: TrainingJob, time: StepTime) -> float | None:
    """Return the idle share of the ranks in the predicted step, as a timeline would measure it.

    Devices that share cores, as simulated ones do, are busy for longer while others work: of these
    it takes a timeline, None where that is too long.
    """
    pipe = job.pipe
    if not pipe.execution.is_pipelined:
        return None
    if time.width >= pipe.mesh.size:
        return time.bubble_fraction
    if sum(map(len, pipe.schedule.ranks)) > MOST_TASKS:
        return None
    return timeline_of(pipe, op_times_of(job)).bubble_fraction
