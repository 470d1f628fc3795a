"""The measured timeline of one step: when each task ran on its device.

From the profiler's trace where the backend tells programs by device, otherwise from each task's seconds, run one at a
time.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ppctl.reports.timeline_io import Span, mean_costs, measured_timeline
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.simulate import Timeline, simulate
from ppctl.training.engines import TimedEngine

Tree = Any


def timed_step(engine: TimedEngine, schedule: Schedule, state: Tree, batch: Tree) -> tuple[Tree, Tree, Timeline]:
    """Run one step alone, and return (next state, metrics, measured timeline). Waits until it is done."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            state, metrics = jax.block_until_ready(engine.step(state, batch))
        finally:
            jax.profiler.stop_trace()
        spans = traced_spans(Path(folder), engine.dispatched(), engine.devices())
    if spans is not None:
        return state, metrics, measured_timeline(schedule, spans)
    state, metrics, seconds = engine.step_by_step(state, batch)
    return state, metrics, simulate(schedule, mean_costs(schedule, seconds))


def traced_spans(
    directory: Path, programs: Sequence[Sequence[tuple[str, Task | None]]], devices: Sequence[int]
) -> dict[Task, Span] | None:
    """Return the span of each task on its rank's first device, or None where the trace does not tell them apart.

    A rank's programs of one name run in the order in which they were dispatched.
    """
    runs: dict[tuple, list[Span]] = defaultdict(list)
    for file in directory.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if {"hlo_module", "run_id", "device_ordinal"} <= stats.keys():
                        key = int(stats["device_ordinal"]), stats["hlo_module"], stats["run_id"]
                        runs[key].append((event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9))
    found: dict[Task, Span] = {}
    for device, of_rank in zip(devices, programs, strict=True):
        for name in {name for name, task in of_rank if task is not None}:
            tasks = [task for other, task in of_rank if other == name and task is not None]
            parts = (spans for (there, module, _), spans in runs.items() if (there, module) == (device, name))
            spans = sorted((min(a for a, _ in each), max(b for _, b in each)) for each in parts)
            if len(spans) != len(tasks):
                return None
            found |= zip(tasks, spans, strict=True)
    return found
