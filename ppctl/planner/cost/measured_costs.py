"""Op times by measurement: a model's pieces, timed on the attached devices and cached.

The cache's keys are model, size of a microbatch, executor, device, and the versions of all code
that compiles or runs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ppctl.config import Config, CustomModel
from ppctl.config.code_digests import sources
from ppctl.errors import ConfigError
from ppctl.executors.compiler_options import cpu_options
from ppctl.executors.device_mesh import AXES, RANK_AXES
from ppctl.planner.cost.calibrate import corrected, small_request, small_step
from ppctl.planner.cost.op_times import OpTimes, PieceTimes
from ppctl.planner.cost.piece_timing import (
    LAYERS,
    Timing,
    dispatched,
    embed_head_bodies,
    layer_bodies,
    tick_body,
    turn,
    without_tasks,
)
from ppctl.planner.cost.step_runs import examples_of_device, run_steps
from ppctl.training.pipeline.built_in_models import lora_of
from ppctl.training.pipeline.engines.one_program import OneProgram
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.pipeline import Pipeline

Times = dict[str, Timing]
SOURCES = ("executors", "model")  # whose programs are timed
SMALL_PARTS = ("mesh", "schedule", "executor", "model", "data")  # of the request of a small step


def measured_op_times(job: TrainingJob, cache_dir: Path) -> OpTimes:
    """Return the op times of a job, on the devices of its mesh."""
    times = _kept(cache_dir, _key(job, with_mesh=False), lambda: _pieces(job))
    times |= _kept(cache_dir, _key(job, with_mesh=True), lambda: _of_mesh(job))
    op_times = _combined(job.pipe, times)
    small = _kept(cache_dir, _small_key(job), lambda: small_step(job))
    return corrected(job, op_times, small["small"]) if small else op_times


def _combined(pipe: Pipeline, times: Times) -> OpTimes:
    """Return the op times of a device working alone.

    Simulated devices share cores: pieces take CPU seconds. A device alone keeps `alone` cores busy,
    all devices `together`, less than in proportion to their number.
    """
    # 1. busy cores
    is_shared, number, alone = _is_shared(pipe), pipe.mesh.size, 1.0
    if is_shared:
        alone = times["alone"].cpu_s / times["alone"].wall_s / pipe.execution.axes.num_devices
    layers = [times[kind] for kind in "FBIW" if kind in times]
    together = sum(each.cpu_s for each in layers) / sum(each.wall_s for each in layers)

    # 2. pieces
    def seconds(name: str, share: int = 1) -> float:
        timing = times[name]
        return (timing.cpu_s / number / alone if is_shared else timing.wall_s) / share

    if "B" in times:
        trained = pipe.trained_share  # of W, where I and W of all weights are as long
        weight_grad = seconds("B", LAYERS) * trained / (1 + trained)
        layer = PieceTimes(seconds("F", LAYERS), seconds("B", LAYERS) - weight_grad, weight_grad)
    else:
        layer = PieceTimes(*(seconds(kind, LAYERS) for kind in "FIW"))

    # 3. what the mesh adds
    return OpTimes(
        PieceTimes(seconds("embed"), 0.0, seconds("embed_grad")),
        layer,
        PieceTimes(0.0, seconds("head"), 0.0),
        task_s=times["task"].cpu_s / alone if "task" in times else 0.0,
        hop_s=seconds("tick") if "tick" in times else 0.0,
        overhead_s=times["once"].cpu_s / together if is_shared else times["once"].wall_s,
        overhead_cpu_s=times["once"].cpu_s,
        capacity=together / alone if is_shared else float("inf"),
        cores=alone,
    )


def _is_shared(pipe: Pipeline) -> bool:
    return pipe.mesh.devices.flat[0].platform == "cpu"


def _pieces(job: TrainingJob) -> Times:
    """Time the tasks of a layer, of embedding and of head on all devices at the same time.

    "alone": F on one device, or on those that a stage is divided over.
    """
    pipe, model, mesh = job.pipe, job.pipe.model, job.pipe.mesh
    bodies = layer_bodies(model, split=pipe.schedule.is_split)
    bodies |= embed_head_bodies(model, examples_of_device(job))
    is_quick = pipe.execution.dispatches_tasks and not model.remat.recomputes and _is_shared(pipe)
    options = cpu_options("quick") if is_quick else None
    times = {name: turn(*body, mesh, options) for name, body in bodies.items()}
    one = Mesh(mesh.devices[:1, :1, :1], AXES, axis_types=mesh.axis_types)
    times["alone"] = turn(*bodies["F"], one, options)
    return times


def _of_mesh(job: TrainingJob) -> Times:
    """Time what depends on the mesh.

    "once": the per-step overhead; "tick": its transfers (executor=spmd); "task": starting one
    (executor=mpmd).
    """
    pipe, pp = job.pipe, job.pipe.mesh.shape["pp"]
    step = without_tasks(pipe.layout, pipe.dtype, pipe.stack.trainable)
    how = pipe.optimizer, pipe.lr_schedule
    engine = OneProgram(pipe.states, pipe.batch_shapes, step, step, *how)
    times = {"once": run_steps(replace(job, pipe=replace(pipe, engine=engine)))}
    if pipe.ticks is not None and pp > 1:
        times["tick"] = turn(*tick_body(pipe.model.x, pp), pipe.mesh)
    if pipe.execution.dispatches_tasks and pp > 1:
        devices, kinds = pipe.mesh.devices, pipe.mesh.axis_types[: len(RANK_AXES)]
        here, there = (Mesh(devices[:, r], RANK_AXES, axis_types=kinds) for r in (0, 1))
        times["task"] = dispatched(pipe.model, here, there)
    return times


# measurements that are kept


def _kept(cache_dir: Path, key: dict[str, Any], measure: Callable[[], Times]) -> Times:
    """Return the times for `key`, measured before or now."""
    file, text = _file(cache_dir, key)
    times = _read(file)
    if times is not None:
        return times
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        partial.touch()  # refused before anything is timed
        times = measure()
        partial.write_text(json.dumps({"key": json.loads(text), "times": times}, indent=1))
        partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"costs=measure keeps what it times in {cache_dir}, which cannot be written: "
            f"{error.strerror}. Set XDG_CACHE_HOME to a directory that can be."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return times


def _read(file: Path) -> Times | None:
    """Return the times in a file, None where there is none or it is damaged."""
    try:
        times = json.loads(file.read_text())["times"]
        return {name: Timing(float(wall), float(cpu)) for name, (wall, cpu) in times.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _file(cache_dir: Path, key: dict[str, Any]) -> tuple[Path, str]:
    """Return (the file of the times for `key`, the key as text)."""
    text = json.dumps(key, sort_keys=True, indent=1)
    return cache_dir / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json", text


def _key(job: TrainingJob, *, with_mesh: bool) -> dict[str, Any]:
    """Return all that the times depend on."""
    pipe, config, execution = job.pipe, job.config, job.pipe.execution
    model, cpu = asdict(config.model), [platform.processor() or platform.machine(), os.cpu_count()]
    lora = lora_of(config.optim)
    key: dict[str, Any] = {
        "code": _code(),
        "jax": [version("jax"), version("jaxlib")],
        "device": pipe.mesh.devices.flat[0].device_kind,
        "cores": cpu if _is_shared(pipe) else None,
        "executor": [execution.executor, execution.remat, execution.unroll],
        "model": [model | {"num_layers": None}, job.data.vocab_size, _user_source(config)],
        "adapters": None if lora is None else asdict(lora),
        "data": config.data.name,
        "divided": asdict(execution.axes),
        "shapes": jax.tree.map(lambda a: [a.shape, str(a.dtype)], pipe.model.microbatch),
        "dtype": str(pipe.dtype),
    }
    if not with_mesh:
        return key | {"devices": pipe.mesh.size, "split": pipe.schedule.is_split}
    layers = {"partition": [*map(len, pipe.partition)], "ranks": pipe.schedule.rank_of}
    return key | {"mesh": config.mesh.text, **layers}


def _user_source(config: Config) -> dict[str, str] | None:
    """Return the digests of a custom model's code, else None."""
    if not isinstance(config.model, CustomModel):
        return None
    return {module: digests.code for module, digests in sources(config.model.target).items()}


def _small_key(job: TrainingJob) -> dict[str, Any]:
    """Return all that the small step depends on."""
    small = small_request(job)
    parts = () if small is None else SMALL_PARTS
    return _key(job, with_mesh=False) | {
        "small": {name: asdict(getattr(small, name)) for name in parts}
    }


def _code() -> str:
    """Return a digest of the sources whose programs are timed."""
    here, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for part in SOURCES for file in (here / part).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
