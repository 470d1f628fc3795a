"""`ppctl bench`: time the training step with every remat, compared with the un-pipelined model.

Machines are shared and noisy, so bench counts the CPU seconds of the process. In each round every
candidate runs one step, and its time is divided by the first candidate's in that round. The table
shows medians over the rounds.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ppctl.config import Config, Spmd, Transformer
from ppctl.config.groups.moe_settings import Experts
from ppctl.reports.terminal_output import OutputConsole, show_json, show_table
from ppctl.schedule.families.registry import LOOPED_WHOLE
from ppctl.training.pipeline.engines.make_engine import Engine
from ppctl.training.pipeline.job import TrainingJob, assemble, without_pipeline
from ppctl.training.pipeline.job_checks import check_room

Tree = Any
ROUNDS = 9
COLUMNS = {  # columns of the table: key, scale, format
    "CPU s": ("cpu_s", (1, ".3f")),
    "/ reference": ("cpu_ratio", (1, ".2f")),
    "wall s": ("wall_s", (1, ".3f")),
    "compile CPU s": ("compile_cpu_s", (1, ".1f")),
    "temp MB a device": ("temp_bytes", (1e-6, ".0f")),
    "dispatch us a task": ("dispatch_us_per_task", (1, ".0f")),
}


@dataclass
class BenchStep:
    """An engine with a compiled train step and its state, ready to run repeatedly."""

    name: str
    engine: Engine
    state: Tree
    batch: Tree
    compile_cpu_s: float  # CPU seconds to trace and compile
    temp_bytes: int  # bytes of temporary buffers on one device
    num_tasks: int | None  # tasks dispatched by the host in a step; None: one program


def bench(config: Config, *, as_json: bool) -> int:
    """Time the config's executor with every remat, and the reference, on one batch; return 0."""
    # 1. the train steps, the reference last: the first mesh decides how many devices are simulated
    executor, schedule = config.executor, config.schedule
    requests = {"reference": without_pipeline(config)}
    for remat in executor.REMAT if executor.ENGINE.is_pipelined else ():
        requests[f"remat={remat}"] = replace(config, executor=replace(executor, remat=remat))
    if (dense := without_experts(config)) is not None:
        requests[f"no experts, remat={executor.remat}"] = dense
    if executor.ENGINE.dispatches_tasks and schedule.name in LOOPED_WHOLE:
        requests["executor=spmd"] = replace(config, executor=Spmd(remat=executor.remat))
    candidates = [prepare(name, assemble(each)) for name, each in reversed(requests.items())][::-1]
    steps = time_steps(candidates)
    # 2. the output
    if as_json:
        device = jax.devices()[0].device_kind
        show_json({"steps": steps, "rounds": ROUNDS, "device": device})
        return 0
    what = f"{schedule.name}, {schedule.num_microbatches} microbatches, mesh={config.mesh.text}"
    title = f"one train step ({what}), medians of {ROUNDS} rounds"
    show_table(OutputConsole(), title, ("", *COLUMNS), map(_row, steps))
    return 0


def without_experts(config: Config) -> Config | None:
    """Return the config with an MLP in place of the experts; None unless all layers have experts.

    The MLP is as wide as the experts that a token uses, together.
    """
    model = config.model
    if not isinstance(model, Transformer) or not all(model.has_experts):
        return None
    moe = model.moe
    width = moe.top_k * model.expert_width + (moe.shared_width or 0)
    return replace(config, model=replace(model, moe=Experts(), mlp_width=width))


def _row(step: dict[str, Any]) -> list[str]:
    cells = [step["name"]]
    for key, (scale, form) in COLUMNS.values():
        cells.append("" if step[key] is None else f"{step[key] * scale:{form}}")
    return cells


def prepare(name: str, job: TrainingJob) -> BenchStep:
    """Compile the step of a job; return it with its state and batch."""
    check_room(job.pipe)
    engine, num_tasks = job.pipe.engine, None
    began = time.process_time()
    temp_bytes = engine.compile(evaluate=False).temp_bytes
    compile_cpu_s = time.process_time() - began
    batch = engine.batches.put(next(job.data.batches()))
    if job.pipe.execution.engine.dispatches_tasks:
        num_tasks = sum(map(len, job.pipe.schedule.ranks))
    return BenchStep(name, engine, engine.new_state(), batch, compile_cpu_s, temp_bytes, num_tasks)


def time_steps(candidates: Sequence[BenchStep]) -> list[dict[str, Any]]:
    """Return a row for each candidate, with medians over all rounds.

    A row has CPU and wall seconds of a step, CPU seconds of the dispatching thread, and the ratio
    of the CPU seconds to the first candidate's in the same round.
    """
    # 1. the rounds; the first is the warm-up
    times: list[list[tuple[float, float, float]]] = [[] for _ in candidates]
    for _ in range(ROUNDS + 1):
        for candidate, measured in zip(candidates, times, strict=True):
            cpu, wall, host = time.process_time(), time.perf_counter(), time.thread_time()
            candidate.state, _ = running = candidate.engine.step(candidate.state, candidate.batch)
            host = time.thread_time() - host
            jax.block_until_ready(running)
            measured.append((time.process_time() - cpu, time.perf_counter() - wall, host))

    # 2. medians
    first, rows = [cpu for cpu, _, _ in times[0][1:]], list[dict[str, Any]]()
    for candidate, measured in zip(candidates, times, strict=True):
        cpu, wall, host = zip(*measured[1:], strict=True)
        host_s, num_tasks = statistics.median(host), candidate.num_tasks
        ratios = (each / base for each, base in zip(cpu, first, strict=True))
        row = {
            "name": candidate.name,
            "cpu_s": statistics.median(cpu),
            "cpu_ratio": statistics.median(ratios),
            "wall_s": statistics.median(wall),
            "dispatch_s": host_s,
            "dispatch_us_per_task": None if num_tasks is None else host_s / num_tasks * 1e6,
            "compile_cpu_s": candidate.compile_cpu_s,
            "temp_bytes": candidate.temp_bytes,
        }
        rows.append(row)
    return rows
