"""Profiler traces: a window of steps for xprof and Perfetto, and its tasks by name (`2F0`), rank by rank."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ppctl.executors.spmd.body import SCOPES
from ppctl.reports.timeline_io import TASKS_FILE
from ppctl.schedule.ir import Task
from ppctl.schedule.ticks import Ticks


class Window:
    """A trace of steps start..start+num_steps-1, written below `directory`; use `step` around each of them.

    start: None for no trace. `finish` returns the traced directory once, when the window has just ended.
    """

    def __init__(self, directory: Path, start: int | None, num_steps: int):
        self.directory, self.start, self.num_steps = directory, start, num_steps
        self.running = False

    def step(self, step: int) -> Any:
        """Return a context for the dispatch of one step (0-based)."""
        if step == self.start:
            self.directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.directory), create_perfetto_trace=True)
            self.running = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step) if self.running else nullcontext()

    def is_due(self, num_finished: int) -> bool:
        """Return whether the trace should end now, all its steps having finished."""
        return self.running and self.start is not None and num_finished >= self.start + self.num_steps

    def finish(self) -> Path:
        """Write the trace, and return its directory."""
        jax.profiler.stop_trace()
        self.running = False
        return self.directory


@contextmanager
def traced(window: Window) -> Iterator[Window]:
    """Yield `window`; a trace that still runs at the end (of an interrupted run) is written as it is."""
    try:
        yield window
    finally:
        if window.running:
            window.finish()


def write_tasks(directory: Path, compiled_text: str, ticks: Ticks, mesh: Mesh) -> Path | None:
    """Write a Perfetto trace with a track for each rank and an event for each task, from the newest in `directory`.

    None where the backend's trace does not tell operations by device and tick (so far only CPU does). An event runs
    from the first to the last operation of its task; ids in `args` are those of the schedule.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    spans = list(_task_spans(files[-1], compiled_text, ticks, mesh)) if files else []
    if not spans:
        return None
    axes = " x ".join(mesh.axis_names)
    events: list[dict[str, Any]] = []
    for device, place in _places(mesh).items():
        name = f"rank {place['pp']}" + "".join(
            f" {axis}={place[axis]}" for axis in ("dp", "fsdp") if mesh.shape[axis] > 1
        )
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


def _task_spans(file: Path, compiled_text: str, ticks: Ticks, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield name, device, start and duration (microseconds) of every task in the trace.

    A device runs one branch for each kind of task in every tick, so the n-th time it enters a branch is tick n. The
    operations of the branch, known by their scope in the compiled program, then bound the task.
    """
    operations, entries = _scopes(compiled_text)
    module = compiled_text.removeprefix("HloModule ").split(",", 1)[0]
    ops: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    starts: dict[tuple, list[float]] = defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name not in operations:
                    continue
                stats = dict(event.stats)
                if stats.get("hlo_module") != module or "device_ordinal" not in stats or "run_id" not in stats:
                    continue  # an evaluation in the window has operations of the same names
                key = (stats["run_id"], int(stats["device_ordinal"]), operations[event.name])
                ops[key].append((event.start_ns, event.start_ns + event.duration_ns))
                if event.name in entries:
                    starts[key].append(event.start_ns)
    places = _places(mesh)
    for (run, device, scope), begins in starts.items():
        if len(begins) != ticks.num_ticks or device not in places:
            continue
        begins.sort()
        bounds: dict[int, tuple[float, float]] = {}
        for begin, end in ops[run, device, scope]:
            tick = int(np.searchsorted(begins, begin, side="right")) - 1
            if tick < 0:  # moved out of the loop by the compiler
                continue
            low, high = bounds.get(tick, (begin, end))
            bounds[tick] = min(low, begin), max(high, end)
        for tick, (low, high) in bounds.items():
            rank = places[device]["pp"]
            task = _task(ticks, tick, rank, scope)
            if task is not None:
                names = {"stage": task.stage, "kind": task.kind, "microbatch": task.microbatch, "tick": tick}
                yield {"name": str(task), "tid": device, "ts": low / 1e3, "dur": (high - low) / 1e3, "args": names}


def _task(ticks: Ticks, tick: int, rank: int, scope: str) -> Task | None:
    """Return the task that a rank runs in a branch of a tick; None where it skips the branch."""
    line = ticks.table[tick][rank]
    for task, column in zip(ticks.cells[tick][rank], ("f", "b"), strict=True):
        is_run = line[ticks.columns.index(column if ticks.program == "fb" else "kind")]
        if task is not None and SCOPES[task.kind] == scope and is_run:
            return task
    return None


def _scopes(compiled_text: str) -> tuple[dict[str, str], set[str]]:
    """Return for each operation of a tick's tasks its scope, and the operations that enter one."""
    operations: dict[str, str] = {}
    entries: set[str] = set()
    pattern = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*? metadata=\{.*?op_name="([^"]*)"')
    for line in compiled_text.splitlines():
        match = pattern.match(line)
        if match is None:
            continue
        name, path = match.groups()
        for scope in SCOPES.values():
            if f"/{scope}/cond/" in path:
                operations[name] = scope
            elif path.endswith(f"/{scope}/cond") and " conditional(" in line:
                operations[name] = scope
                entries.add(name)
    return operations, entries
