"""The prediction for a request: its stages, its bubble, its step time, the memory of each rank.

Step time comes from `step_time`; memory that follows from shapes is exact. The rest of a program's memory (its
temporaries) only its compiler knows. By default XLA's compiler for CPUs plans it, without generating the code that
training runs (`compiler_preset`): an estimate for CPUs, which simulated devices are. plan.compile=true compiles what
training runs, for the devices of this machine or for TPUs and GPUs that are not here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import jax

from ppctl.config import Config
from ppctl.config.schedule_from_config import label
from ppctl.executors.mesh import hosts_text
from ppctl.planner.advise import propose
from ppctl.planner.prediction import Prediction, StagePart
from ppctl.planner.step_runs import as_run, out_of_memory
from ppctl.planner.step_time import device_bytes, device_kind, hardware_of, mfu_of, op_times_of, predicted_time
from ppctl.training.job import TrainingJob, assemble, model_flops, unit_of_work
from ppctl.training.known_hardware import NOMINAL
from ppctl.training.pipeline import Pipeline

AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)")  # as XLA's compiler for TPUs refuses
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def predict(config: Config) -> Prediction:
    """Return the prediction for a request. ConfigError or ScheduleError for what cannot be."""
    return predicted(assemble(config))


def predicted(job: TrainingJob) -> Prediction:
    """Return the prediction for a job."""
    config, pipe = job.config, job.pipe
    time_, unknown = predicted_time(job)
    total, compile_s, refusal = _compile(pipe) if config.plan.compile else (None, None, None)
    memory, with_temporaries = pipe.memory(), _estimated(pipe, config.plan.topology)
    estimated = None
    if with_temporaries is not None:
        estimated = tuple(sum(of_rank.values()) for of_rank in with_temporaries)
        memory = with_temporaries if total is None else memory
    needed = total or estimated or tuple(sum(of_rank.values()) for of_rank in memory)
    is_complete = total is not None or estimated is not None
    limit = _limit(job, refusal)
    fits = None if limit is None else max(needed) <= limit
    hardware = hardware_of(job)
    stands_in = total is None and estimated is not None and hardware is not None and hardware.name != NOMINAL
    if fits and not is_complete:
        fits = None  # what is known fits; temporaries may not
    elif not fits and limit is not None and stands_in and pipe.dtype == "bfloat16":
        known = max(sum(of_rank.values()) - of_rank.get("temporaries", 0) for of_rank in memory)
        fits = None if known <= limit else False  # temporaries may be half as large where bfloat16 is not widened
    elif limit is None and total is not None and config.plan.topology is not None:
        fits = True  # the compiler for TPUs refuses what does not
    unit, count = unit_of_work(job)
    flops = model_flops(job)
    step_s = None if time_ is None else time_.total_s
    mfu = mfu_of(job, step_s, flops)
    return Prediction(
        schedule=label(config.schedule),
        partition=tuple(map(len, pipe.partition)),
        rank_of=tuple(pipe.schedule.rank_of),
        stages=_stages(job, known=time_ is not None),
        bubble_fraction=pipe.bubble(),
        num_parameters=pipe.num_parameters,
        step_flops=flops.full,
        devices=", ".join(filter(None, (f"{pipe.mesh.size} x {device_kind(pipe)}", hosts_text(pipe.mesh)))),
        hardware=None if hardware is None else hardware.name,
        costs=config.costs.name,
        step_time_s=step_s,
        once_s=None if time_ is None else time_.overhead_s,
        unknown=unknown,
        unit=unit,
        tokens_per_s=None if step_s is None else count / step_s,
        mfu_fraction=mfu.full,
        mfu_causal_fraction=mfu.causal,
        memory_bytes=memory,
        total_bytes=needed,
        is_complete=is_complete,
        is_compiled=total is not None,
        estimated_bytes=estimated,
        limit_bytes=limit,
        fits=False if refusal else fits,
        compile_s=compile_s,
        refusal=refusal,
        proposal=propose(pipe, limit),
    )


def _stages(job: TrainingJob, *, known: bool) -> tuple[StagePart, ...]:
    """Return what each stage is; known: whether its op times are."""
    pipe = job.pipe
    if not pipe.execution.is_pipelined:
        return ()
    layout, mesh = pipe.layout, pipe.mesh.devices
    costs = as_run(pipe, op_times_of(job, job.config.costs))[0] if known else None
    return tuple(
        StagePart(
            layers.start,
            len(layers),
            rank,
            tuple(device.id for device in mesh[:, rank, :].flat),
            None if costs is None else costs.seconds("F", s, 1),
            None if costs is None else costs.seconds("B", s, 1),
        )
        for s, (layers, rank) in enumerate(zip(layout.partition, layout.rank_of, strict=True))
    )


def _estimated(pipe: Pipeline, topology: str | None) -> tuple[Mapping[str, int], ...] | None:
    """Return the memory of each rank with estimated temporaries; None for devices other than this machine's CPUs."""
    is_here = topology is None and pipe.mesh.devices.flat[0].platform == "cpu"
    return pipe.engine.estimate_memory() if is_here else None


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


def _limit(job: TrainingJob, refusal: str | None) -> int | None:
    """Return the bytes of a device; where the compiler refuses, those that it says there are."""
    stated = None if refusal is None else AVAILABLE.search(refusal)
    if job.config.plan.memory_gib is None and stated is not None:
        return round(float(stated[1]) * UNITS[stated[2]])
    return device_bytes(job.config, job.pipe.mesh.devices.flat[0])
