"""The request of each layout that a search found, and its prediction as by `ppctl plan`."""

from __future__ import annotations

from dataclasses import replace

from ppctl import config as settings
from ppctl.config import Config, Explicit, Uniform
from ppctl.config.schedule_from_config import named
from ppctl.model.stack import Stack
from ppctl.planner.cost.predict_step import JobPrediction, predict_job
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.training.pipeline.job import TrainingJob, assemble

Planned = tuple[Candidate, Config]  # a layout predicted as by `ppctl plan`, and its request


def as_planned(config: Config, stack: Stack, candidate: Candidate) -> Planned:
    """Return a layout with what `ppctl plan` predicts of it."""
    request = request_of(config, candidate)
    _, found = predicted_of(request, stack)
    return with_prediction(candidate, found), request


def predicted_of(request: Config, stack: Stack) -> tuple[TrainingJob, JobPrediction]:
    """Return a request's job, not for training, and its prediction; stack: as the hardware runs."""
    job = assemble(request, on_one_device=True, only_planned=True)
    return job, predict_job(replace(job, counted_stack=stack))


def with_prediction(candidate: Candidate, found: JobPrediction) -> Candidate:
    """Return a layout with a prediction in place of what the search has estimated."""
    assert found.time is not None, "unknown hardware is not tuned for"
    memory = max(found.memory, key=lambda of_rank: sum(of_rank.values()))
    bubbles = {"ideal_bubble": found.ideal_bubble, "bubble": found.bubble}
    return replace(candidate, time=found.time, memory=memory, **bubbles)


def request_of(config: Config, candidate: Candidate) -> Config:
    """Return the request of a layout."""
    sizes = list(candidate.partition)
    is_uniform = sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    schedule = named(candidate.family, candidate.num_microbatches, candidate.num_chunks)
    partition = Uniform() if is_uniform else Explicit(layers=sizes)
    return request_with(config, candidate, schedule, partition)


def request_with(
    config: Config, candidate: Candidate, schedule: settings.Schedule, partition: settings.Uniform
) -> Config:
    """Return a layout's request (mesh, remat, vocabulary) with a schedule and a partition."""
    found = replace(
        config,
        mesh=settings.Mesh(*candidate.mesh, order=config.mesh.order),
        schedule=replace(schedule, vocab=candidate.vocab),
        partition=partition,
        executor=replace(config.executor, remat=candidate.remat),
        tune=settings.Tune(),
    )
    settings.check(found)
    return found
