"""The tasks of a profiler's trace by name (`2F0`), rank by rank: of executor=spmd, on CPUs, GPUs and TPUs.

The compiled program says which instructions a tick runs for each kind of task (T: S and T of a part of the vocabulary),
and which of them once a task; the schedule says in which ticks a rank has one. So the n-th event of such an instruction
is the rank's n-th task of that kind, whatever else a trace tells: GPUs name kernels in CUDA graphs, but not their
program or step.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ppctl.executors.hlo import calls, computations, name_of, path_of
from ppctl.executors.mesh import RANK_AXES
from ppctl.executors.spmd.body import PART_SCOPES, SCOPES
from ppctl.reports.timeline_io import TASKS_FILE
from ppctl.schedule.ir import Kind, Task
from ppctl.schedule.ticks import Ticks

DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
PART_COLUMNS: dict[Kind, str] = {"E": "embedded", "T": "head", "G": "embedding_grad"}  # of ticks
OPS_LINES = ("XLA Ops", "Stream ")  # of a device: its instructions on a TPU, its kernels on a GPU


def write_tasks(directory: Path, compiled_text: str, ticks: Ticks, mesh: Mesh, num_steps: int) -> Path | None:
    """Write a Perfetto trace with a track for each rank and an event for each task, from the newest in `directory`.

    None where the trace does not tell the tasks of all `num_steps` steps. An event runs from the first to the last
    operation of its task that the trace names; ids in `args` are those of the schedule.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    spans = list(_task_spans(files[-1], compiled_text, ticks, mesh, num_steps)) if files else []
    if not spans:
        return None
    axes = " x ".join(mesh.axis_names)
    events: list[dict[str, Any]] = []
    for device, place in _places(mesh).items():
        name = f"rank {place['pp']}" + "".join(f" {axis}={place[axis]}" for axis in RANK_AXES if mesh.shape[axis] > 1)
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": device, "args": {"name": name}})
    events.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"tasks ({axes})"}})
    for span in spans:
        events.append({"ph": "X", "pid": 0, "cat": "task", **span})
    path = directory / TASKS_FILE
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return path


def _places(mesh: Mesh) -> dict[int, dict[str, int]]:
    """Return for each device id its coordinate along every mesh axis."""
    return {
        device.id: dict(zip(mesh.axis_names, map(int, index), strict=True))
        for index, device in np.ndenumerate(mesh.devices)
    }


class _Event(NamedTuple):
    """An operation that a device ran."""

    instruction: str
    start_ns: float
    end_ns: float


def _task_spans(file: Path, compiled_text: str, ticks: Ticks, mesh: Mesh, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield name, device, start and duration (microseconds) of every task in the trace."""
    bodies, places = task_bodies(compiled_text), _places(mesh)
    instructions = {name for found in bodies.values() for body in found for name in body.all}
    module = compiled_text.removeprefix("HloModule ").split(",", 1)[0]
    for device, events in _events(file, instructions, module, mesh).items():
        rank = places[device]["pp"]
        for scope, found in bodies.items():
            tasks = [(tick, task) for tick in range(ticks.num_ticks) if (task := _task(ticks, tick, rank, scope))]
            begins = _begins(found, events, num_steps * len(tasks))
            bounds: dict[int, tuple[float, float]] = {}
            names = frozenset(chain.from_iterable(body.all for body in found))
            for event in events:
                if event.instruction not in names:
                    continue
                number = bisect_right(begins, event.start_ns) - 1
                if number < 0:  # moved out of the loop by the compiler
                    continue
                low, high = bounds.get(number, (event.start_ns, event.end_ns))
                bounds[number] = min(low, event.start_ns), max(high, event.end_ns)
            for number, (low, high) in bounds.items():
                tick, task = tasks[number % len(tasks)]
                args = {"stage": task.stage, "kind": task.kind, "microbatch": task.microbatch, "tick": tick}
                yield {"name": str(task), "tid": device, "ts": low / 1e3, "dur": (high - low) / 1e3, "args": args}


def _task(ticks: Ticks, tick: int, rank: int, scope: str) -> Task | None:
    """Return the task that a rank runs for a scope in a tick; None where it has none."""
    line = ticks.table[tick][rank]
    for kind, column in PART_COLUMNS.items():
        if PART_SCOPES[kind] == scope:
            number = line[ticks.columns.index(column)]  # of the microbatch, from 1; 0: of none
            return Task(rank, kind, number - 1) if number else None
    for task, column in zip(ticks.cells[tick][rank], ("f", "b"), strict=True):
        is_run = line[ticks.columns.index(column if ticks.program == "fb" else "kind")]
        if task is not None and SCOPES[task.kind] == scope and is_run:
            return task
    return None


def _begins(bodies: Sequence[TaskBody], events: Sequence[_Event], number: int) -> list[float]:
    """Return when each of so many tasks begins, with its first operation; [] where the events do not say.

    Which operation is the first may differ: some run at the same time. A compiler that takes the first or last turns
    out of the loop of ticks copies what they run: several bodies share the tasks.
    """
    starts: dict[str, list[float]] = defaultdict(list)
    for event in events:
        starts[event.instruction].append(event.start_ns)
    begins: list[float] = []
    for body in bodies:
        found = [sorted(starts[name]) for name in body.once if name in starts]
        if found:
            usual, _ = Counter(map(len, found)).most_common(1)[0]
            begins += np.min([each for each in found if len(each) == usual], axis=0).tolist()
    return sorted(begins) if len(begins) == number else []


def _events(file: Path, instructions: set[str], module: str, mesh: Mesh) -> dict[int, list[_Event]]:
    """Return what the devices of `mesh` ran of these instructions of a program, by device id."""
    kernels = {re.sub(r"\W", "_", name): name for name in instructions}
    here = {device.local_hardware_id: device.id for device in mesh.local_devices}
    found: dict[int, list[_Event]] = {device.id: [] for device in mesh.devices.flat}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        on_device = DEVICE.fullmatch(plane.name)
        for line in plane.lines:
            if on_device is not None and not line.name.startswith(OPS_LINES):
                continue
            for event in line.events:
                said = event.name.removeprefix("%").partition(" = ")[0]
                if on_device is None and said not in instructions:
                    continue
                stats = dict(event.stats)
                if stats.get("hlo_module", module) != module:
                    continue  # an evaluation in the window has operations of the same names
                names = said, stats.get("hlo_op"), kernels.get(said)
                name = next((name for name in names if name in instructions), None)
                device = stats.get("device_ordinal") if on_device is None else here.get(int(on_device[1]))
                if name is not None and device in found:
                    found[device].append(_Event(name, event.start_ns, event.start_ns + event.duration_ns))
    return found


@dataclass(frozen=True)
class TaskBody:
    """The instructions that a tick runs for a kind of task."""

    once: frozenset[str]  # each time
    all: frozenset[str]  # those in its loops and branches too


def task_bodies(compiled_text: str) -> dict[str, list[TaskBody]]:
    """Return the loops and branches that the ticks of a program have for each kind of task, by its scope."""
    _, lines = computations(compiled_text)
    found: dict[str, list[TaskBody]] = {}
    for line in chain.from_iterable(lines.values()):
        path = path_of(line)
        for scope in (*SCOPES.values(), *PART_SCOPES.values()):
            if path.endswith((f"/{scope}/cond", f"/{scope}/while")):
                called = [call.computation for call in calls(line) if call.how in ("body", "branch")]
                if called:  # the last: of a conditional the branch that is taken where its predicate is true
                    body = TaskBody(*(frozenset(_names(lines, called[-1], nested=n)) for n in (False, True)))
                    found.setdefault(scope, []).append(body)
    return found


def _names(lines: dict[str, list[str]], computation: str, *, nested: bool) -> Iterator[str]:
    """Yield the instructions of a computation and of those that it calls; nested: in loops and branches, too."""
    for line in lines.get(computation, ()):
        name = name_of(line)
        if name is not None:
            yield name
        for call in calls(line):
            if nested or call.how in ("to_apply", "calls"):
                yield from _names(lines, call.computation, nested=nested)
