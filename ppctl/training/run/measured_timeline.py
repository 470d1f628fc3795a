"""The measured timeline of one step: when each task ran on its device.

From the profiler's trace where the backend tells programs by device, otherwise from each task's
seconds, run one at a time.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ppctl.reports.measured_timeline_file import Span, mean_costs, measured_timeline
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.simulator import Timeline, simulate
from ppctl.training.pipeline.engines.engine_protocol import TimedEngine

Tree = Any


def timed_step(
    engine: TimedEngine, schedule: Schedule, state: Tree, batch: Tree
) -> tuple[Tree, Tree, Timeline]:
    """Run one step alone to its end; return (next state, metrics, measured timeline)."""
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
    """Return the span of each task on its rank's first device; None if the trace lacks them.

    A rank's programs of one name run in the order in which they were dispatched.
    """
    # 1. the operations of each run of a program
    runs: dict[tuple, list[Span]] = defaultdict(list)
    for file in directory.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
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
