"""`ppctl plan`: what a request takes, before it trains: its stages, its bubble, its step time, the memory of each rank.

Seconds are priced (`price`), memory is weighed (`weigh`): parts that follow from shapes are exact. What else a program
needs (its temporaries) only its compiler knows. XLA's for CPUs is asked at once, without the code being made that
training runs (`compiler_preset`): an estimate for CPUs, which simulated devices are. plan.compile=true compiles what
training runs, for the devices of this machine or for TPUs that are not here.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path

import jax

from ppctl.config import Config
from ppctl.config.schedule_from_config import label
from ppctl.planner.advise import propose
from ppctl.planner.plan_page import page, picture_of
from ppctl.planner.plan_terminal import show
from ppctl.planner.prediction import Prediction, StagePart
from ppctl.planner.step_runs import as_run
from ppctl.planner.step_time import device_bytes, hardware_of, priced, prices_of
from ppctl.reports.terminal import check_file, show_json, write_file
from ppctl.training.job import Parts, assemble, model_flops, unit_of_work
from ppctl.training.known_hardware import NOMINAL, mfu_peak_flops
from ppctl.training.memory import by_part, weighed

AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)")  # as XLA's compiler for TPUs refuses
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def plan(config: Config, *, as_json: bool) -> int:
    """0 where the request fits, or may for all that is known, else 1; prints what it takes, and writes plan.html."""
    file = config.plan.html
    if file is not None:
        check_file(f"plan.html={file}", Path(file))
    parts = assemble(config)
    found = predicted(parts)
    if as_json:
        show_json(asdict(found))
    else:
        show(found, config)
    if file is not None:
        write_file(f"plan.html={file}", Path(file), page(found, config, picture_of(parts, found.unknown)))
    return int(found.fits is False)


def predict(config: Config) -> Prediction:
    """The prediction for a request. ConfigError or ScheduleError for what cannot be."""
    return predicted(assemble(config))


def predicted(parts: Parts) -> Prediction:
    """The same of the parts of a request."""
    config = parts.config
    time_, unknown = priced(parts)
    total, compile_s, refusal = _compile(parts) if config.plan.compile else (None, None, None)
    memory, estimated = weighed(parts)
    if total is not None or estimated is None:
        memory = by_part(parts, total)
    needed = total or estimated or tuple(sum(of_rank.values()) for of_rank in memory)
    is_complete = total is not None or estimated is not None
    limit = _limit(parts, refusal)
    fits = None if limit is None else max(needed) <= limit
    hardware = hardware_of(parts)
    stands_in = total is None and estimated is not None and hardware is not None and hardware.name != NOMINAL
    if fits and not is_complete:
        fits = None  # what is known fits; temporaries may not
    elif not fits and limit is not None and stands_in and parts.dtype == "bfloat16":
        known = max(sum(of_rank.values()) - of_rank.get("temporaries", 0) for of_rank in memory)
        fits = None if known <= limit else False  # temporaries may be half as large where bfloat16 is not widened
    elif limit is None and total is not None and config.plan.topology is not None:
        fits = True  # the compiler for TPUs refuses what does not
    unit, count = unit_of_work(parts)
    flops = model_flops(parts)
    peak = mfu_peak_flops(config.hardware if hardware is None else hardware, "", str(parts.dtype))
    step_s = None if time_ is None else time_.total_s
    return Prediction(
        schedule=label(config.schedule),
        partition=tuple(map(len, parts.states.layout.partition)),
        rank_of=tuple(parts.schedule.rank_of),
        stages=_stages(parts, known=time_ is not None),
        bubble_fraction=parts.bubble_fraction,
        num_parameters=sum(a.size for a in jax.tree.leaves(parts.states.natural["params"])),
        step_flops=flops,
        devices=f"{parts.mesh.size} x {parts.mesh.devices.flat[0].device_kind}",
        hardware=None if hardware is None else hardware.name,
        costs=config.costs.name,
        step_time_s=step_s,
        once_s=None if time_ is None else time_.once_s,
        unknown=unknown,
        unit=unit,
        tokens_per_s=None if step_s is None else count / step_s,
        mfu_fraction=None if step_s is None or peak is None else flops / step_s / (peak * parts.mesh.size),
        memory_bytes=memory,
        total_bytes=needed,
        is_complete=is_complete,
        is_compiled=total is not None,
        estimated_bytes=estimated,
        limit_bytes=limit,
        fits=False if refusal else fits,
        compile_s=compile_s,
        refusal=refusal,
        proposal=propose(parts, limit),
    )


def _stages(parts: Parts, *, known: bool) -> tuple[StagePart, ...]:
    """What each stage is; known: whether there are prices."""
    if parts.config.executor.name == "reference":
        return ()
    layout, mesh = parts.states.layout, parts.mesh.devices
    costs = as_run(parts, prices_of(parts, parts.config.costs))[0] if known else None
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


def _compile(parts: Parts) -> tuple[tuple[int, ...] | None, float, str | None]:
    """(bytes of one device of each rank, seconds, None), or (None, seconds, why) where the compiler refuses."""
    began = time.perf_counter()
    try:
        total = parts.engine.compile(evaluate=False).total_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = " ".join(str(error).split("\n")[0].split()).removeprefix("RESOURCE_EXHAUSTED: ")
        return None, time.perf_counter() - began, said
    return total, time.perf_counter() - began, None


def _limit(parts: Parts, refusal: str | None) -> int | None:
    """Bytes of a device; where the compiler refuses, those that it says there are."""
    stated = None if refusal is None else AVAILABLE.search(refusal)
    if parts.config.plan.memory_gib is None and stated is not None:
        return round(float(stated[1]) * UNITS[stated[2]])
    return device_bytes(parts.config, parts.mesh.devices.flat[0])
