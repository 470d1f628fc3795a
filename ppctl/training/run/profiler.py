"""Read traces of JAX's profiler: the tasks of steps, and one step's timeline.

executor=spmd: the compiled program shows which instructions a tick runs for each kind of task (T
stands for S and T of vocabulary parallelism), and which of them run once per task. The schedule
gives the ticks of a rank's tasks. So the n-th event of an instruction that runs once per task
belongs to the rank's n-th task of that kind. Events need no program or step id, which GPUs omit in
CUDA graphs.

executor=mpmd: spans come from the trace if the backend records program runs by device. Otherwise
each task runs and is timed alone, and spans are simulated from these seconds.
"""

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ppctl.config import Run
from ppctl.executors.hlo_text import calls, computations, name_of, path_of
from ppctl.executors.spmd.device_program import SCOPES
from ppctl.launch import join_processes as distributed
from ppctl.reports.measured_timeline_file import TASKS_FILE, Span, mean_costs, measured_timeline
from ppctl.schedule.ir import Kind, Task
from ppctl.schedule.mesh_axes import RANK_AXES
from ppctl.schedule.simulator import Timeline, simulate
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd
from ppctl.training.run.run_environment import writing

Tree = Any
DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
# columns of Ticks with the microbatches of these kinds
PART_COLUMNS: dict[Kind, str] = {"E": "embedded", "T": "head", "G": "embedding_grad"}
OPS_LINES = ("XLA Ops", "Stream ")  # trace lines of instructions on a TPU, of kernels on a GPU


# --- a step of executor=mpmd ----------------------------------------------------------------------


def timed_step(engine: Mpmd, state: Tree, batch: Tree) -> tuple[Tree, Tree, Timeline]:
    """Run one step to its end; return (next state, metrics, measured timeline)."""
    schedule = engine.scheduled.schedule
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, metrics = jax.block_until_ready(engine.step(state, batch))
        devices = [mesh.devices.flat[0].id for mesh in engine.meshes.by_rank]
        spans = traced_spans(Path(folder), engine.dispatched(), devices)
    if spans is not None:
        return state, metrics, measured_timeline(schedule, spans)
    state, metrics, seconds = engine.step_by_step(state, batch)
    return state, metrics, simulate(schedule, mean_costs(schedule, seconds))


def traced_spans(
    directory: Path, programs: Sequence[Sequence[tuple[str, Task | None]]], devices: Sequence[int]
) -> dict[Task, Span] | None:
    """Return the span of each task on its rank's first device; None if the trace lacks them.

    The n-th run of a program is its n-th dispatch: a rank runs programs of one name in order.

    programs: for each rank, (program name, task) in the order of dispatch. devices: for each rank,
    the id of its first device.
    """
    # 1. the spans of the operations of each program run
    runs: dict[tuple, list[Span]] = defaultdict(list)
    for _, _, event in chain.from_iterable(map(_recorded, directory.rglob("*.xplane.pb"))):
        stats = dict(event.stats)
        if {"hlo_module", "run_id", "device_ordinal"} <= stats.keys():
            key = int(stats["device_ordinal"]), stats["hlo_module"], stats["run_id"]
            end_ns = event.start_ns + event.duration_ns
            runs[key].append((event.start_ns / 1e9, end_ns / 1e9))
    # 2. the n-th run of a program for its n-th task
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
    """Yield (plane name, line name, event) for each event of a trace."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                yield plane.name, line.name, event


# --- tasks of executor=spmd -----------------------------------------------------------------------


def write_tasks(
    directory: Path, compiled_text: str, ticks: Ticks, mesh: Mesh, num_steps: int
) -> Path | None:
    """Write the newest trace in `directory` for Perfetto: one track per rank, one event per task.

    Returns the file, or None if events of the `num_steps` steps are missing. An event spans the
    first to the last traced operation of its task; `args` holds the fields of the Task.
    """
    # 1. the tasks
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    spans = list(_task_spans(files[-1], compiled_text, ticks, mesh, num_steps)) if files else []
    if not spans:
        return None
    # 2. names of tracks, and events
    shown = [axis for axis in RANK_AXES if mesh.shape[axis] > 1]
    about = {"name": f"tasks ({' x '.join(mesh.axis_names)})"}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": about}]
    for device, place in _places(mesh).items():
        name = " ".join([f"rank {place['pp']}", *(f"{axis}={place[axis]}" for axis in shown)])
        of_track = {"name": "thread_name", "tid": device, "args": {"name": name}}
        events.append({"ph": "M", "pid": 0} | of_track)
    events += [{"ph": "X", "pid": 0, "cat": "task", **span} for span in spans]
    path = directory / TASKS_FILE
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return path


def _places(mesh: Mesh) -> dict[int, dict[str, int]]:
    """Return the coordinate along every mesh axis, by device id."""
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
    """Yield the Perfetto event of every task in the trace; times are in microseconds."""
    bodies, places = task_bodies(compiled_text), _places(mesh)
    instructions = {name for found in bodies.values() for body in found for name in body.all}
    module = compiled_text.removeprefix("HloModule ").split(",", 1)[0]
    for device, events in _events(file, instructions, module, mesh).items():
        rank = places[device]["pp"]
        for scope, found in bodies.items():
            # 1. the rank's tasks of this kind, and the start of each
            of_ticks = ((tick, _task(ticks, tick, rank, scope)) for tick in range(ticks.num_ticks))
            tasks = [(tick, task) for tick, task in of_ticks if task is not None]
            begins = _begins(found, events, num_steps * len(tasks))
            # 2. the first and the last operation of each task
            bounds: dict[int, tuple[float, float]] = {}
            names = frozenset(chain.from_iterable(body.all for body in found))
            for event in events:
                number = bisect_right(begins, event.start_ns) - 1
                # negative: an operation that the compiler moved out of the loop
                if event.instruction not in names or number < 0:
                    continue
                low, high = bounds.get(number, (event.start_ns, event.end_ns))
                bounds[number] = min(low, event.start_ns), max(high, event.end_ns)
            # 3. the spans of the tasks
            for number, (low, high) in bounds.items():
                tick, task = tasks[number % len(tasks)]
                times = {"ts": low / 1e3, "dur": (high - low) / 1e3}
                args = task._asdict() | {"tick": tick}
                yield {"name": str(task), "tid": device, **times, "args": args}


def _task(ticks: Ticks, tick: int, rank: int, scope: str) -> Task | None:
    """Return the task that `rank` runs under the named scope `scope` in a tick, or None."""
    line = ticks.table[tick][rank]
    for kind, column in PART_COLUMNS.items():
        if SCOPES[kind] == scope:
            number = line[ticks.columns.index(column)]  # microbatch, from 1; 0: no task
            return Task(rank, kind, number - 1) if number else None
    for task, column in zip(ticks.cells[tick][rank], ("f", "b"), strict=True):
        is_run = line[ticks.columns.index(column if ticks.program == "fb" else "kind")]
        if task is not None and SCOPES[task.kind] == scope and is_run:
            return task
    return None


def _begins(bodies: Sequence["TaskBody"], events: Sequence[_Event], number: int) -> list[float]:
    """Return the start of the first operation of each of `number` tasks; [] if events are missing.

    Operations may run at the same time, so the earliest start of a task counts. A compiler that
    peels iterations off the loop of ticks copies their bodies, so several bodies share the tasks.
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
    """Return the events of a module's instructions on the devices of `mesh`, by device id."""
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
            continue  # an evaluation in the window has operations with the same names
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
    """The instructions that a tick runs for one kind of task."""

    once: frozenset[str]  # instructions outside of the body's loops and branches
    all: frozenset[str]  # all instructions, inside of loops and branches, too


def task_bodies(compiled_text: str) -> dict[str, list[TaskBody]]:
    """Return the bodies of each kind of task in a compiled program, by scope."""
    _, lines = computations(compiled_text)
    found: dict[str, list[TaskBody]] = {}
    for line in chain.from_iterable(lines.values()):
        path = path_of(line)
        for scope in SCOPES.values():
            if path.endswith((f"/{scope}/cond", f"/{scope}/while")):
                called = [each for each in calls(line) if each.how in ("body", "branch")]
                if called:  # the last one is the branch of a true predicate
                    last = called[-1].computation
                    names = (frozenset(_names(lines, last, nested=n)) for n in (False, True))
                    found.setdefault(scope, []).append(TaskBody(*names))
    return found


def _names(lines: dict[str, list[str]], computation: str, *, nested: bool) -> Iterator[str]:
    """Yield the instructions of a computation and its callees; nested: also in loops, branches."""
    for line in lines.get(computation, ()):
        if (name := name_of(line)) is not None:
            yield name
        for call in calls(line):
            if nested or call.how in ("to_apply", "calls"):
                yield from _names(lines, call.computation, nested=nested)


class ProfileWindow(ExitStack):
    """The traced steps of one start, on process 0. A context manager: an error closes the trace.

    steps: the steps of run.profile from `start` on, counted from 0; empty: no trace.
    """

    def __init__(self, run: Run, start: int) -> None:
        super().__init__()
        requested = run.profile_steps if distributed.is_lead() else None
        self._requested, self._start = requested or range(0), start
        self.steps = self._requested[max(0, start - self._requested.start) :]
        self.directory = Path(run.dir) / "profile"
        self.is_open = False

    @property
    def passed(self) -> str | None:
        """Return a line on the requested steps that lie before this start, or None.

        >>> ProfileWindow(Run(profile="2-9"), 4).passed
        'run.profile traces only steps 4-9: this start begins with step 4 (the first is 0)'
        """
        if len(self.steps) == len(self._requested):
            return None
        what = f"traces only {_text(self.steps)}" if self.steps else "traces nothing"
        return f"run.profile {what}: this start begins with step {self._start} (the first is 0)"

    def begin(self) -> None:
        """Start the trace."""
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self.enter_context(jax.profiler.trace(str(self.directory), create_perfetto_trace=True))
        self.is_open = True

    def end(self, finished: int) -> str:
        """Write the trace; return a note if the end of the run cut it short, else ""."""
        self.is_open = False
        with writing(self.directory):
            self.close()
        traced = self.steps[: finished - self.steps.start]
        lacks = f"{_text(traced)} of {_text(self.steps)}"
        return "" if traced == self.steps else f", cut by the end of the run: {lacks}"


def _text(steps: range) -> str:
    return f"steps {steps.start}-{steps.stop - 1}"
