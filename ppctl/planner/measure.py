"""Op times by measurement: the pieces of a model, timed on the devices that are here, and kept for the next time.

Kept by model, size of a microbatch, executor, device, and the versions of everything that compiles or runs them.
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
from ppctl.config.sources import sources
from ppctl.errors import ConfigError
from ppctl.executors.compiler_preset import cpu_options
from ppctl.executors.mesh import AXES, RANK_AXES
from ppctl.planner.calibrate import corrected, small_request, small_step
from ppctl.planner.op_times import OpTimes, PieceTimes
from ppctl.planner.step_runs import examples_of_device, run_steps
from ppctl.planner.timing import (
    LAYERS,
    Timing,
    dispatched,
    embed_head_bodies,
    layer_bodies,
    tick_body,
    turn,
    without_tasks,
)
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.job import TrainingJob
from ppctl.training.models import lora_of
from ppctl.training.pipeline import Pipeline

Times = dict[str, Timing]
SOURCES = ("executors", "model")  # whose programs are timed
SMALL_PARTS = ("mesh", "schedule", "executor", "model", "data")  # of the request of a small step


def measured_op_times(job: TrainingJob, cache_dir: Path) -> OpTimes:
    """Return the op times of a job, on the devices of its mesh."""
    times = _kept(cache_dir, _key(job, with_mesh=False), lambda: _pieces(job))
    times |= _kept(cache_dir, _key(job, with_mesh=True), lambda: _of_mesh(job))
    op_times, small = _combined(job.pipe, times), _kept(cache_dir, _small_key(job), lambda: small_step(job))
    return corrected(job, op_times, small["small"]) if small else op_times


def is_kept(job: TrainingJob, cache_dir: Path) -> bool:
    """Return whether a request was measured before, so that `measured_op_times` only reads."""
    keys = (_key(job, with_mesh=False), _key(job, with_mesh=True), _small_key(job))
    return all(_read(_file(cache_dir, key)[0]) is not None for key in keys)


def _combined(pipe: Pipeline, times: Times) -> OpTimes:
    """Return the op times of a device working alone.

    Simulated devices share cores: a piece takes CPU seconds, and a device working alone turns over so many of
    these in a second; all together turn over more, but not as many times more as there are devices.
    """
    is_shared = _is_shared(pipe)
    alone = times["alone"].cpu_s / times["alone"].wall_s / pipe.execution.axes.num_devices if is_shared else 1.0
    layers = [times[kind] for kind in "FBIW" if kind in times]
    together = sum(each.cpu_s for each in layers) / sum(each.wall_s for each in layers)
    number = pipe.mesh.size

    def seconds(name: str, share: int = 1) -> float:
        timing = times[name]
        return (timing.cpu_s / number / alone if is_shared else timing.wall_s) / share

    if "B" in times:
        trained = pipe.trained_share  # of W, where I and W of all weights are as long
        weight_grad = seconds("B", LAYERS) * trained / (1 + trained)
        layer = PieceTimes(seconds("F", LAYERS), seconds("B", LAYERS) - weight_grad, weight_grad)
    else:
        layer = PieceTimes(*(seconds(kind, LAYERS) for kind in "FIW"))
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
    bodies = layer_bodies(model, split=pipe.schedule.is_split) | embed_head_bodies(model, examples_of_device(job))
    is_quick = pipe.execution.dispatches_tasks and not model.remat.recomputes and _is_shared(pipe)
    options = cpu_options("quick") if is_quick else None
    times = {name: turn(*body, mesh, options) for name, body in bodies.items()}
    one = Mesh(mesh.devices[:1, :1, :1], AXES, axis_types=mesh.axis_types)
    times["alone"] = turn(*bodies["F"], one, options)
    return times


def _of_mesh(job: TrainingJob) -> Times:
    """Time what depends on the mesh.

    "once": the per-step overhead; "tick": its transfers (executor=spmd); "task": starting one (executor=mpmd).
    """
    pipe, pp = job.pipe, job.pipe.mesh.shape["pp"]
    step = without_tasks(pipe.layout, pipe.dtype, pipe.stack.trainable)
    engine = OneProgram(pipe.states, pipe.batch_shapes, step, step, pipe.optimizer, pipe.lr_schedule)
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
            f"costs=measure keeps what it times in {cache_dir}, which cannot be written: {error.strerror}. "
            "Use costs.cache_dir=DIR."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return times


def _read(file: Path) -> Times | None:
    """Return the times in a file, None where there is none or it is damaged."""
    try:
        match json.loads(file.read_text()):
            case {"times": {**found}} if all(
                isinstance(each, list) and len(each) == 2 and all(isinstance(s, int | float) for s in each)
                for each in found.values()
            ):
                return {str(name): Timing(*seconds) for name, seconds in found.items()}
    except (OSError, ValueError, RecursionError):
        pass
    return None


def _file(cache_dir: Path, key: dict[str, Any]) -> tuple[Path, str]:
    """Return (the file of the times for `key`, the key as text)."""
    text = json.dumps(key, sort_keys=True, indent=1)
    return cache_dir / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json", text


def _key(job: TrainingJob, *, with_mesh: bool) -> dict[str, Any]:
    """Return all that the times depend on."""
    pipe, config = job.pipe, job.config
    execution = pipe.execution
    key: dict[str, Any] = {
        "code": _code(),
        "jax": [version("jax"), version("jaxlib")],
        "device": pipe.mesh.devices.flat[0].device_kind,
        "cores": [platform.processor() or platform.machine(), os.cpu_count()] if _is_shared(pipe) else None,
        "executor": [execution.executor, execution.remat, execution.unroll],
        "model": [asdict(config.model) | {"num_layers": None}, job.data.vocab_size, _own_source(config)],
        "adapters": None if (lora := lora_of(config.optim)) is None else asdict(lora),
        "data": config.data.name,
        "divided": asdict(execution.axes),
        "shapes": jax.tree.map(lambda a: [a.shape, str(a.dtype)], pipe.model.microbatch),
        "dtype": str(pipe.dtype),
    }
    if with_mesh:
        partition = [len(layers) for layers in pipe.partition]
        return key | {"mesh": config.mesh.text, "partition": partition, "ranks": pipe.schedule.rank_of}
    return key | {"devices": pipe.mesh.size, "split": pipe.schedule.is_split}


def _own_source(config: Config) -> dict[str, str] | None:
    """Return the digests of the code of a model of the user's own, else None."""
    if not isinstance(config.model, CustomModel):
        return None
    return {module: digests.code for module, digests in sources(config.model.target).items()}


def _small_key(job: TrainingJob) -> dict[str, Any]:
    """Return all that the small step depends on."""
    small = small_request(job)
    request = None if small is None else {name: asdict(getattr(small, name)) for name in SMALL_PARTS}
    return _key(job, with_mesh=False) | {"small": request}


def _code() -> str:
    """Return a digest of the sources whose programs are timed."""
    here, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for part in SOURCES for file in (here / part).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
