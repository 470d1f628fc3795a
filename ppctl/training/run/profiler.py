"""What traces of the profiler show: the tasks of steps, and one step's timeline.

executor=spmd: the compiled program names the instructions that a tick runs for each kind of task
(T: S and T of a part of the vocabulary), and those that run once a task; the schedule names the
ticks of a rank's tasks. So the n-th event of such an instruction is the rank's n-th task of that
kind. That needs neither program nor step, which GPUs do not name in CUDA graphs.

executor=mpmd: a task's span is from the trace where the backend tells programs by device, otherwise
from each task's seconds, run one at a time.
"""

import json
import re
import tempfile
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

from ppctl.executors.hlo_text import calls, computations, name_of, path_of
from ppctl.executors.spmd.device_program import SCOPES
from ppctl.reports.measured_timeline_file import TASKS_FILE, Span, mean_costs, measured_timeline
from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.mesh_axes import RANK_AXES
from ppctl.schedule.simulator import Timeline, simulate
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd

Tree = Any
DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
PART_COLUMNS: dict[Kind, str] = {"E": "embedded", "T": "head", "G": "embedding_grad"}  # of ticks
OPS_LINES = ("XLA Ops", "Stream ")  # lines of instructions on a TPU, of kernels on a GPU


# --- a step of executor=mpmd ----------------------------------------------------------------------


def timed_step(
    engine: Mpmd, schedule: Schedule, state: Tree, batch: Tree
) -> tuple[Tree, Tree, Timeline]:
    """Run one step alone to its end; return (next state, metrics, measured timeline)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, metrics = jax.block_until_ready(engine.step(state, batch))
        spans = traced_spans(Path(folder), engine.dispatched(), engine.devices())
    if spans is not None:
        return state, metrics, measured_timeline(schedule, spans)
    state, metrics, seconds = engine.step_by_step(state, batch)
    return state, metrics, simulate(schedule, mean_costs(schedule, seconds))


def traced_spans(
    directory: Path, programs: Sequence[Sequence[tuple[str, Task | None]]], devices: Sequence[int]
) -> dict[Task, Span] | None:
    """Return the span of each task on its rank's first device; None if the trace lacks them.

    A rank's programs of one name run in the order in which they were dispatched.
    """
    # 1. the operations of each run of a program
    runs: dict[tuple, list[Span]] = defaultdict(list)
    for _, _, event in chain.from_iterable(map(_recorded, directory.rglob("*.xplane.pb"))):
        stats = dict(event.stats)
        if {"hlo_module", "run_id", "device_ordinal"} <= stats.keys():
            key = int(stats["device_ordinal"]), stats["hlo_module"], stats["run_id"]
            end_ns = event.start_ns + event.duration_ns
            runs[key].append((event.start_ns / 1e9, end_ns / 1e9))
    # 2. the n-th run of a program is the n-th task that was dispatched to it
    task_spans: dict[Task, Span] = {}
    for device, of_rank in zip(devices, programs, strict=True):
        for name in {name for name, task in of_rank if task is not None}:
            tasks = [task for other, task in of_rank if other == name and task is not None]
            parts = (runs[key] for key in runs if key[:2] == (device, name))
            spans = sorted((min(a for a, _ in each), max(b for _, b in each)) for each in parts)
            if len(spans) != len(tasks):
                return None
            task_spans |= zip(tasks, spans, strict=True)
    return task_spans


def _recorded(file: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (plane's name, line's name, event) of a trace."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                yield plane.name, line.name, event


# --- tasks of executor=spmd -----------------------------------------------------------------------


def write_tasks(
    directory: Path, compiled_text: str, ticks: Ticks, mesh: Mesh, num_steps: int
) -> Path | None:
    """Write the newest trace in `directory` for Perfetto: a track a rank, an event a task.

    None if the trace lacks the tasks of all `num_steps` steps. An event runs from the first to the
    last traced operation of its task; ids in `args` are those of the schedule.
    """
    # 1. the tasks
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    spans = list(_task_spans(files[-1], compiled_text, ticks, mesh, num_steps)) if files else []
    if not spans:
        return None
    # 2. names of tracks, and events
    shown = [axis for axis in RANK_AXES if mesh.shape[axis] > 1]
    names = {
        device: " ".join([f"rank {place['pp']}", *(f"{axis}={place[axis]}" for axis in shown)])
        for device, place in _places(mesh).items()
    }
    meta = {"ph": "M", "pid": 0}
    events: list[dict[str, Any]] = [
        meta | {"name": "thread_name", "tid": device, "args": {"name": name}}
        for device, name in names.items()
    ]
    about = {"name": f"tasks ({' x '.join(mesh.axis_names)})"}
    events.append(meta | {"name": "process_name", "args": about})
    events += [{"ph": "X", "pid": 0, "cat": "task", **span} for span in spans]
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


def _task_spans(
    file: Path, compiled_text: str, ticks: Ticks, mesh: Mesh, num_steps: int
) -> Iterator[dict[str, Any]]:
    """Yield name, device, start and duration (microseconds) of every task in the trace."""
    bodies, places = task_bodies(compiled_text), _places(mesh)
    instructions = {name for found in bodies.values() for body in found for name in body.all}
    module = compiled_text.removeprefix("HloModule ").split(",", 1)[0]
    for device, events in _events(file, instructions, module, mesh).items():
        rank = places[device]["pp"]
        for scope, found in bodies.items():
            # 1. the rank's tasks of this kind, and when each begins
            of_ticks = ((tick, _task(ticks, tick, rank, scope)) for tick in range(ticks.num_ticks))
            tasks = [(tick, task) for tick, task in of_ticks if task is not None]
            begins = _begins(found, events, num_steps * len(tasks))
            # 2. the first and the last operation of each
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
            # 3. their spans
            for number, (low, high) in bounds.items():
                tick, task = tasks[number % len(tasks)]
                times = {"ts": low / 1e3, "dur": (high - low) / 1e3}
                yield {
                    "name": str(task),
                    "tid": device,
                    **times,
                    "args": task._asdict() | {"tick": tick},
                }


def _task(ticks: Ticks, tick: int, rank: int, scope: str) -> Task | None:
    """Return the task that a rank runs for a scope in a tick; None where it has none."""
    line = ticks.table[tick][rank]
    for kind, column in PART_COLUMNS.items():
        if SCOPES[kind] == scope:
            number = line[ticks.columns.index(column)]  # of the microbatch, from 1; 0: of none
            return Task(rank, kind, number - 1) if number else None
    for task, column in zip(ticks.cells[tick][rank], ("f", "b"), strict=True):
        is_run = line[ticks.columns.index(column if ticks.program == "fb" else "kind")]
        if task is not None and SCOPES[task.kind] == scope and is_run:
            return task
    return None


def _begins(bodies: Sequence["TaskBody"], events: Sequence[_Event], number: int) -> list[float]:
    """Return when the first operation of each of `number` tasks begins; [] if events are missing.

    The first operation may differ: some run at the same time. A compiler that peels turns off the
    loop of ticks copies their bodies, so several bodies share the tasks.
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
    """Return the runs of these instructions of a program on devices of `mesh`, by device id."""
    kernels = {re.sub(r"\W", "_", name): name for name in instructions}
    here = {device.local_hardware_id: device.id for device in mesh.local_devices}
    found: dict[int, list[_Event]] = {device.id: [] for device in mesh.devices.flat}
    for plane, line, event in _recorded(file):
        on_device = DEVICE.fullmatch(plane)
        if on_device is not None and not line.startswith(OPS_LINES):
            continue
        said = event.name.removeprefix("%").partition(" = ")[0]
        if on_device is None and said not in instructions:
            continue
        stats = dict(event.stats)
        if stats.get("hlo_module", module) != module:
            continue  # an evaluation in the window has operations of the same names
        names = said, stats.get("hlo_op"), kernels.get(said)
        name = next((name for name in names if name in instructions), None)
        device = stats.get("device_ordinal")
        if on_device is not None:
            device = here.get(int(on_device[1]))
        if name is not None and device in found:
            end_ns = event.start_ns + event.duration_ns
            found[device].append(_Event(name, event.start_ns, end_ns))
    return found


@dataclass(frozen=True)
class TaskBody:
    """The instructions that a tick runs for a kind of task."""

    once: frozenset[str]  # instructions outside of its loops and branches
    all: frozenset[str]  # those inside too


def task_bodies(compiled_text: str) -> dict[str, list[TaskBody]]:
    """Return the loops and branches of a program's ticks for each kind of task, by its scope."""
    _, lines = computations(compiled_text)
    found: dict[str, list[TaskBody]] = {}
    for line in chain.from_iterable(lines.values()):
        path = path_of(line)
        for scope in SCOPES.values():
            if path.endswith((f"/{scope}/cond", f"/{scope}/while")):
                called = [each for each in calls(line) if each.how in ("body", "branch")]
                if called:  # the last: the branch taken where a predicate is true
                    last = called[-1].computation
                    names = (frozenset(_names(lines, last, nested=n)) for n in (False, True))
                    found.setdefault(scope, []).append(TaskBody(*names))
    return found


def _names(lines: dict[str, list[str]], computation: str, *, nested: bool) -> Iterator[str]:
    """Yield the instructions of a computation and its callees; nested: in loops and branches."""
    for line in lines.get(computation, ()):
        name = name_of(line)
        if name is not None:
            yield name
        for call in calls(line):
            if nested or call.how in ("to_apply", "calls"):
                yield from _names(lines, call.computation, nested=nested)
