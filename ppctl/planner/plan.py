"""The prediction for a request, as `ppctl plan` prints it: its stages, bubble, step time, the memory of each rank.

What it predicts comes from `planner.predict`, as in `ppctl tune` and `ppctl train`. plan.compile=true compiles what
training runs for the devices of this machine, plan.topology for others that are not here, and its memory is shown next
to that.
"""

from __future__ import annotations

import re
import time

import jax

from ppctl.config import Config
from ppctl.config.schedule_from_config import label
from ppctl.planner.advise import propose
from ppctl.planner.assumptions import assumptions
from ppctl.planner.devices import devices_text
from ppctl.planner.memory import DeviceLimit, device_limit
from ppctl.planner.network_layers import network_layers
from ppctl.planner.predict import predict_job
from ppctl.planner.prediction import Prediction, StagePart
from ppctl.planner.step_runs import as_run, out_of_memory
from ppctl.planner.step_time import hardware_of, mfu_of, op_times_of
from ppctl.planner.token_budget import check_tokens, token_budget
from ppctl.schedule.costs import Costs
from ppctl.training.job import TrainingJob, assemble, model_flops, unit_of_work
from ppctl.training.pipeline import Pipeline

AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)")  # as XLA's compiler for TPUs refuses
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def predict(config: Config) -> Prediction:
    """Return the prediction for a request. ConfigError or ScheduleError for what cannot be."""
    return predicted(assemble(config, only_planned=True))


def predicted(job: TrainingJob) -> Prediction:
    """Return the prediction for a job."""
    config, pipe = job.config, job.pipe
    unit, count = unit_of_work(job)
    step_tokens = count if unit == "tokens_per_s" else None
    check_tokens("plan.tokens", config.plan.tokens, step_tokens)
    known = predict_job(job)
    time_ = known.time
    total, compile_s, refusal = _compile(pipe) if config.plan.compiles else (None, None, None)
    memory = known.memory if total is None else pipe.memory()
    needed = known.total_bytes if total is None else total
    limit = _limit(job, refusal)
    fits = None if limit is None else max(needed) <= limit.size_bytes
    most = limit.most if limit is not None and not fits else None
    if limit is None and total is not None and config.plan.topology is not None:
        fits = True  # the compiler for TPUs refuses what does not
    costs = None if time_ is None else as_run(pipe, op_times_of(job, config.costs))[0]
    flops = model_flops(job)
    step_s = None if time_ is None else time_.total_s
    mfu, hardware = mfu_of(job, step_s, flops), hardware_of(job)
    return Prediction(
        schedule=label(config.schedule),
        auto=None if job.choice is None else job.choice.summary,
        partition=tuple(map(len, pipe.partition)),
        rank_of=tuple(pipe.schedule.rank_of),
        stages=_stages(job, costs),
        layers=network_layers(pipe),
        ideal_bubble_fraction=known.ideal_bubble,
        predicted_bubble_fraction=known.bubble,
        num_parameters=pipe.num_parameters,
        step_flops=flops.full,
        devices=devices_text(job),
        hardware=None if hardware is None else hardware.name,
        costs=config.costs.name,
        step_time_s=step_s,
        step_time_by_measured_costs_s=known.by_measured_costs_s,
        transfer_s=costs.hop_s if costs is not None and pipe.execution.is_pipelined else None,
        per_step_overhead_s=None if time_ is None else time_.overhead_s,
        unknown=known.unknown,
        unit=unit,
        tokens_per_s=None if step_s is None else count / step_s,
        token_budget=token_budget(config.plan.tokens, step_tokens, step_s, pipe.mesh.size, hardware),
        mfu_fraction=mfu.full,
        mfu_causal_fraction=mfu.causal,
        memory_bytes=memory,
        total_bytes=needed,
        is_compiled=total is not None,
        predicted_bytes=known.total_bytes,
        limit_bytes=None if limit is None else limit.size_bytes,
        limit_source=None if limit is None else limit.source,
        limit_fraction=None if limit is None else limit.fraction,
        fitting_memory_fraction=most.fraction if most is not None and max(needed) <= most.size_bytes else None,
        fits=False if refusal else fits,
        compile_s=compile_s,
        refusal=refusal,
        assumes=assumptions(job, is_timed=time_ is not None),
        proposal=propose(pipe, None if limit is None else limit.size_bytes),
    )


def _stages(job: TrainingJob, costs: Costs | None) -> tuple[StagePart, ...]:
    """Return what each stage is; costs: of their tasks, None where these are not known."""
    pipe = job.pipe
    if not pipe.execution.is_pipelined:
        return ()
    layout, mesh = pipe.layout, pipe.mesh.devices
    return tuple(
        StagePart(
            layers.start,
            len(layers),
            rank,
            () if job.config.plan.only_predicts_topology else tuple(device.id for device in mesh[:, rank, :].flat),
            *(None if costs is None else costs.seconds(kind, s, 1) for kind in "FBIW"),
        )
        for s, (layers, rank) in enumerate(zip(layout.partition, layout.rank_of, strict=True))
    )


def _compile(pipe: Pipeline) -> tuple[tuple[int, ...] | None, float, str | None]:
    """Return (bytes of one device of each rank, seconds, None), or (None, seconds, why) where the compiler refuses."""
    began = time.perf_counter()
    try:
        total = pipe.engine.compile(evaluate=False).total_bytes
    except jax.errors.JaxRuntimeError as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        return None, time.perf_counter() - began, reason
    return total, time.perf_counter() - began, None


def _limit(job: TrainingJob, refusal: str | None) -> DeviceLimit | None:
    """Return the memory of a device; where the compiler refuses, what it says there is."""
    stated = None if refusal is None else AVAILABLE.search(refusal)
    if job.config.plan.memory_gib is None and stated is not None:
        return DeviceLimit(round(float(stated[1]) * UNITS[stated[2]]), "stated by the compiler")
    return device_limit(job.config, job.pipe.mesh.devices.flat[0])
