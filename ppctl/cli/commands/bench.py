"""`ppctl bench`: time the training step, compared with its prediction and the un-pipelined model.

Machines are shared and noisy, so: CPU seconds of the process, steps of all candidates in turn, ratios taken round by
round, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ppctl.config import Config, Schedule, Spmd, Uniform
from ppctl.reports.terminal import OutputConsole, show_json, show_table
from ppctl.schedule import LOOPED_WHOLE
from ppctl.training.checks import check_room
from ppctl.training.engines import Engine
from ppctl.training.job import TrainingJob, assemble, without_pipeline

Tree = Any
ROUNDS = 9
GROWTH = (8, 16, 64)  # microbatches at which programs are compared


@dataclass
class BenchStep:
    """An engine with a compiled train step and its state, ready to run again and again."""

    name: str
    engine: Engine
    state: Tree
    batch: Tree
    compile_cpu_s: float  # trace and compile
    temp_bytes: int  # of one device
    num_tasks: int | None  # that the host dispatches in a step; None where a step is one program


def bench(config: Config, *, as_json: bool) -> int:
    """Time the config's executor with every remat setting, and the reference, on one batch; return 0."""
    requests = {"reference": without_pipeline(config)}
    if config.executor.IS_PIPELINED:
        for remat in config.executor.REMAT:
            requests[f"remat={remat}"] = replace(config, executor=replace(config.executor, remat=remat))
    if config.executor.DISPATCHES_TASKS and config.schedule.name in LOOPED_WHOLE:
        requests["executor=spmd"] = replace(config, executor=Spmd(remat=config.executor.remat))
    # the largest mesh first: it decides how many devices are simulated
    candidates = [prepare(name, request) for name, request in reversed(requests.items())][::-1]
    steps = time_steps(candidates)
    families = LOOPED_WHOLE if config.executor.IN_TICKS else (config.schedule.name,) * config.executor.IS_PIPELINED
    growth = [grow(config, name) for name in families]
    if as_json:
        show_json({"steps": steps, "growth": growth, "rounds": ROUNDS, "device": jax.devices()[0].device_kind})
        return 0
    console = OutputConsole()
    what = f"{config.schedule.name}, {config.schedule.num_microbatches} microbatches, mesh={config.mesh.text}"
    show_table(
        console,
        f"one train step ({what}), medians of {ROUNDS} rounds",
        ("", "CPU s", "/ reference", "wall s", "compile CPU s", "temp MB a device", "dispatch us a task"),
        (
            (
                row["name"],
                f"{row['cpu_s']:.3f}",
                f"{row['cpu_ratio']:.2f}",
                f"{row['wall_s']:.3f}",
                f"{row['compile_cpu_s']:.1f}",
                f"{row['temp_bytes'] / 1e6:.0f}",
                "" if row["dispatch_us_per_task"] is None else f"{row['dispatch_us_per_task']:.0f}",
            )
            for row in steps
        ),
    )
    few, some, many = GROWTH
    show_table(
        console,
        f"the program at {many} microbatches of the same size (remat={config.executor.remat})",
        ("", f"compile CPU s / at {few}", f"temp memory / at {some}"),
        ((row["name"], f"{row['compile_ratio']:.2f}", f"{row['temp_ratio']:.2f}") for row in growth),
    )
    return 0


def prepare(name: str, config: Config) -> BenchStep:
    """Return the compiled step of `config` and what it runs on."""
    job = assemble(config)
    check_room(job.pipe)
    engine = job.pipe.engine
    temp_bytes, compile_cpu_s = _compile(job)
    batch = engine.put(next(job.data.batches()))
    num_tasks = sum(map(len, job.pipe.schedule.ranks)) if job.pipe.execution.dispatches_tasks else None
    return BenchStep(name, engine, engine.new_state(), batch, compile_cpu_s, temp_bytes, num_tasks)


def time_steps(candidates: Sequence[BenchStep]) -> list[dict[str, Any]]:
    """Return for each candidate medians over all rounds.

    They are of CPU and wall seconds a step, of the dispatching thread's CPU seconds, and of the CPU ratio to the first
    candidate in the same round.
    """
    times: list[list[tuple[float, float, float]]] = [[] for _ in candidates]
    for _ in range(ROUNDS + 1):
        for candidate, measured in zip(candidates, times, strict=True):
            cpu, wall, host = time.process_time(), time.perf_counter(), time.thread_time()
            candidate.state, _ = running = candidate.engine.step(candidate.state, candidate.batch)
            host = time.thread_time() - host
            jax.block_until_ready(running)
            measured.append((time.process_time() - cpu, time.perf_counter() - wall, host))
    first = times[0][1:]  # the first round warms up
    return [
        {
            "name": candidate.name,
            "cpu_s": statistics.median(cpu for cpu, _, _ in measured[1:]),
            "cpu_ratio": statistics.median(
                cpu / base for (cpu, *_), (base, *_) in zip(measured[1:], first, strict=True)
            ),
            "wall_s": statistics.median(wall for _, wall, _ in measured[1:]),
            "dispatch_s": (host_s := statistics.median(host for _, _, host in measured[1:])),
            "dispatch_us_per_task": None if candidate.num_tasks is None else host_s / candidate.num_tasks * 1e6,
            "compile_cpu_s": candidate.compile_cpu_s,
            "temp_bytes": candidate.temp_bytes,
        }
        for candidate, measured in zip(candidates, times, strict=True)
    ]


def grow(config: Config, family: str) -> dict[str, Any]:
    """Return how trace-and-compile CPU seconds and temp memory of a family grow with the number of microbatches."""
    examples = config.data.batch_size // config.schedule.num_microbatches
    compiled = {}
    for num_microbatches in GROWTH:
        is_own = family == config.schedule.name
        schedule = config.schedule if is_own else Schedule(name=family)
        schedule = replace(schedule, num_microbatches=num_microbatches)
        data = replace(config.data, batch_size=examples * num_microbatches)
        request = replace(config, schedule=schedule, data=data, partition=Uniform())  # which fits any family
        temp_bytes, cpu_s = _compile(assemble(request))
        compiled[num_microbatches] = cpu_s, temp_bytes
    few, some, many = (compiled[m] for m in GROWTH)
    return {"name": family, "compile_ratio": many[0] / few[0], "temp_ratio": many[1] / some[1]}


def _compile(job: TrainingJob) -> tuple[int, float]:
    """Return (bytes of temporaries on one device, as the compiler planned them; CPU seconds of trace and compile)."""
    began = time.process_time()
    footprint = job.pipe.engine.compile(evaluate=False)
    return footprint.temp_bytes, time.process_time() - began
