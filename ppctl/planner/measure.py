"""Prices by measurement: the pieces of a model, timed on the devices that are here, and kept for the next time.

Kept by model, size of a microbatch, executor, device, and the versions of everything that compiles or runs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ppctl.config import CustomModel
from ppctl.errors import ConfigError
from ppctl.executors.compiler_preset import cpu_options
from ppctl.planner.calibrate import corrected, small_request, small_step
from ppctl.planner.op_times import Piece, Prices
from ppctl.planner.step_runs import run_steps
from ppctl.planner.timing import LAYERS, Timing, dispatched, end_bodies, layer_bodies, tick_body, turn, without_tasks
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.job import Parts
from ppctl.training.user_code import source_digest

Times = dict[str, Timing]
SOURCES = ("executors", "model")  # whose programs are timed
SMALL_PARTS = ("mesh", "schedule", "executor", "model", "data")  # of the request of a small step


def measured(parts: Parts, cache_dir: Path) -> Prices:
    """The prices of a request, on the devices of its mesh."""
    times = _kept(cache_dir, _key(parts, with_mesh=False), lambda: _pieces(parts))
    times |= _kept(cache_dir, _key(parts, with_mesh=True), lambda: _of_mesh(parts))
    prices, small = _prices(parts, times), _kept(cache_dir, _small_key(parts), lambda: small_step(parts))
    return corrected(parts, prices, small["small"]) if small else prices


def is_kept(parts: Parts, cache_dir: Path) -> bool:
    """Whether a request was measured before, so that `measured` only reads."""
    keys = (_key(parts, with_mesh=False), _key(parts, with_mesh=True), _small_key(parts))
    return all(_read(_file(cache_dir, key)[0]) is not None for key in keys)


def _prices(parts: Parts, times: Times) -> Prices:
    """Seconds of a device working alone.

    Simulated devices share cores: a piece has a price in CPU seconds, and a device working alone turns over so many of
    these in a second; all together turn over more, but not as many times more as there are devices.
    """
    is_shared = _is_shared(parts)
    alone = times["alone"].cpu_s / times["alone"].wall_s if is_shared else 1.0
    layers = [times[kind] for kind in "FBIW" if kind in times]
    together = sum(taken.cpu_s for taken in layers) / sum(taken.wall_s for taken in layers)
    number = parts.mesh.size

    def price(name: str, share: int = 1) -> float:
        taken = times[name]
        return (taken.cpu_s / number / alone if is_shared else taken.wall_s) / share

    if "B" in times:
        half = price("B", LAYERS) / 2
        layer = Piece(price("F", LAYERS), half, half)
    else:
        layer = Piece(*(price(kind, LAYERS) for kind in "FIW"))
    return Prices(
        Piece(price("embed"), 0.0, price("embed_grad")),
        layer,
        Piece(0.0, price("head"), 0.0),
        task_s=times["task"].cpu_s / alone if "task" in times else 0.0,
        hop_s=price("tick") if "tick" in times else 0.0,
        once_s=times["once"].cpu_s / together if is_shared else times["once"].wall_s,
        once_cpu_s=times["once"].cpu_s,
        capacity=together / alone if is_shared else float("inf"),
        cores=alone,
    )


def _is_shared(parts: Parts) -> bool:
    return parts.mesh.devices.flat[0].platform == "cpu"


def _pieces(parts: Parts) -> Times:
    """The tasks of a layer and of both ends, on all devices at the same time; "alone": F on one device."""
    model, mesh = parts.model, parts.mesh
    bodies = layer_bodies(model, split=parts.schedule.is_split) | end_bodies(model)
    is_quick = parts.config.executor.name == "mpmd" and not model.remat.recomputes and _is_shared(parts)
    options = cpu_options("quick") if is_quick else None
    times = {name: turn(*body, mesh, options) for name, body in bodies.items()}
    one = Mesh(np.array(mesh.devices.flat[:1]), ("all",), axis_types=mesh.axis_types[:1])
    times["alone"] = turn(*bodies["F"], one, options)
    return times


def _of_mesh(parts: Parts) -> Times:
    """What depends on the mesh: "once" a step; "tick", its transfers (of executor=spmd); "task", its start (mpmd)."""
    layout, pp = parts.states.layout, parts.mesh.shape["pp"]
    step = without_tasks(layout, parts.dtype)
    engine = OneProgram(parts.states, parts.batch_shapes, step, step, parts.optimizer, parts.lr_schedule)
    times = {"once": run_steps(engine, parts)}
    if parts.ticks is not None and pp > 1:
        times["tick"] = turn(*tick_body(parts.model.x, pp), parts.mesh)
    if parts.config.executor.name == "mpmd" and pp > 1:
        devices, axes, kinds = parts.mesh.devices, ("dp", "fsdp"), parts.mesh.axis_types[:2]
        here, there = (Mesh(devices[:, r, :], axes, axis_types=kinds) for r in (0, 1))
        times["task"] = dispatched(parts.model, here, there)
    return times


# what was measured before


def _kept(cache_dir: Path, key: dict[str, Any], measure: Callable[[], Times]) -> Times:
    """What was measured for `key`, now or before."""
    file, text = _file(cache_dir, key)
    times = _read(file)
    if times is not None:
        return times
    beside = file.with_suffix(f".{os.getpid()}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        beside.touch()  # refused before anything is timed
        times = measure()
        beside.write_text(json.dumps({"key": json.loads(text), "times": times}, indent=1))
        beside.replace(file)
    except OSError as error:
        raise ConfigError(
            f"costs=measure keeps what it times in {cache_dir}, which cannot be written: {error.strerror}. "
            "Use costs.cache_dir=DIR."
        ) from error
    finally:
        with suppress(OSError):
            beside.unlink()
    return times


def _read(file: Path) -> Times | None:
    """What a file holds, None where there is none or it is damaged."""
    try:
        match json.loads(file.read_text()):
            case {"times": {**found}} if all(
                isinstance(each, list) and len(each) == 2 and all(isinstance(s, int | float) for s in each)
                for each in found.values()
            ):
                return {str(name): Timing(*seconds) for name, seconds in found.items()}
    except (OSError, ValueError):
        pass
    return None


def _file(cache_dir: Path, key: dict[str, Any]) -> tuple[Path, str]:
    """Where what was measured for `key` is kept, and the key as text."""
    text = json.dumps(key, sort_keys=True, indent=1)
    return cache_dir / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json", text


def _key(parts: Parts, *, with_mesh: bool) -> dict[str, Any]:
    """All that what is measured depends on."""
    device, executor = parts.mesh.devices.flat[0], parts.config.executor
    key: dict[str, Any] = {
        "code": _code(),
        "jax": [version("jax"), version("jaxlib")],
        "device": device.device_kind,
        "cores": [platform.processor() or platform.machine(), os.cpu_count()] if _is_shared(parts) else None,
        "executor": [executor.name, executor.remat, executor.unroll],
        "model": [asdict(parts.config.model) | {"num_layers": None}, parts.data.vocab_size, _own(parts)],
        "shapes": jax.tree.map(lambda a: [a.shape, str(a.dtype)], parts.model.microbatch),
        "dtype": str(parts.dtype),
    }
    if with_mesh:
        partition = [len(layers) for layers in parts.states.layout.partition]
        return key | {"mesh": parts.config.mesh.text, "partition": partition, "ranks": parts.schedule.rank_of}
    return key | {"devices": parts.mesh.size, "split": parts.schedule.is_split}


def _own(parts: Parts) -> str | None:
    """A digest of a model of the user's own."""
    model = parts.config.model
    return source_digest(model.target) if isinstance(model, CustomModel) else None


def _small_key(parts: Parts) -> dict[str, Any]:
    """All that the small step depends on."""
    small = small_request(parts)
    request = None if small is None else {name: asdict(getattr(small, name)) for name in SMALL_PARTS}
    return _key(parts, with_mesh=False) | {"small": request}


def _code() -> str:
    """A digest of the sources whose programs are timed."""
    here, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for part in SOURCES for file in (here / part).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
