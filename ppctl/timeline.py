"""The measured timeline of one step beside the predicted one: when each task ran on its device, and each rank's bubble.

From the profiler's trace where the backend tells programs by device, otherwise from each task's seconds, run one at a
time. The prediction has the measured means as costs, so what is left between both is order, transfers and the host.
"""

from __future__ import annotations

import csv
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ppctl.costs import Costs
from ppctl.draw.drawing import Drawing
from ppctl.draw.html import page
from ppctl.draw.perfetto import trace
from ppctl.engine import TimedEngine
from ppctl.schedule.bounds import makespan_bound_s, peak_activations_bound, period_bound_s
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.simulate import Timeline, simulate

Tree = Any
Span = tuple[float, float]  # start and end in seconds
FILES = ("timeline.csv", "timeline.perfetto.json", "timeline.html")


def timed_step(engine: TimedEngine, schedule: Schedule, state: Tree, batch: Tree) -> tuple[Tree, Tree, Timeline]:
    """(next state, metrics, measured timeline) of a step that nothing else runs beside. Waits until it is done."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            state, metrics = jax.block_until_ready(engine.step(state, batch))
        finally:
            jax.profiler.stop_trace()
        spans = traced_spans(Path(folder), engine.programs(), engine.devices())
    if spans is not None:
        return state, metrics, measured(schedule, spans)
    state, metrics, seconds = engine.step_by_step(state, batch)
    return state, metrics, simulate(schedule, mean_costs(schedule, seconds))


def traced_spans(
    directory: Path, programs: Sequence[Sequence[tuple[str, Task | None]]], devices: Sequence[int]
) -> dict[Task, Span] | None:
    """The span of each task on its rank's first device, or None where the trace does not tell them.

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


def measured(schedule: Schedule, spans: Mapping[Task, Span]) -> Timeline:
    """The timeline of these spans, from 0 on. A task that was no program (left to another) takes no time."""
    origin = min(start for start, _ in spans.values())
    start_s: dict[Task, float] = {}
    end_s: dict[Task, float] = {}
    for tasks in schedule.ranks:
        free_s = 0.0
        for task in tasks:
            start, end = spans[task] if task in spans else (origin + free_s, origin + free_s)
            start_s[task], end_s[task] = start - origin, end - origin
            free_s = end - origin
    seconds = {task: end_s[task] - start_s[task] for task in start_s}
    return Timeline(schedule, mean_costs(schedule, seconds), start_s, end_s, is_uneven=True)


def mean_costs(schedule: Schedule, seconds: Mapping[Task, float]) -> Costs:
    """The mean seconds of each stage's tasks. Of a whole backward half counts as I, half as W."""
    of_kind: dict[tuple[str, int], list[float]] = defaultdict(list)
    for task, taken_s in seconds.items():
        of_kind[task.kind, task.stage].append(taken_s)

    def mean(kind: str, stage: int) -> float:
        return statistics.fmean(of_kind[kind, stage]) if of_kind[kind, stage] else 0.0

    stages = range(schedule.num_stages)
    halves = [mean("B", s) / 2 for s in stages]
    forward, of_input, of_weight = (tuple(mean(kind, s) for s in stages) for kind in "FIW")
    split = lambda half, whole: half + whole  # noqa: E731
    return Costs(forward, tuple(map(split, of_input, halves)), tuple(map(split, of_weight, halves)))


def write(directory: Path, timeline: Timeline) -> list[str]:
    """Writes CSV, Perfetto JSON and html of a measured timeline beside its prediction; the bubbles, a line each."""
    directory.mkdir(parents=True, exist_ok=True)
    schedule, costs = timeline.schedule, timeline.costs
    predicted = simulate(schedule, costs)
    bounds = makespan_bound_s(schedule, costs), period_bound_s(schedule, costs)
    drawings = [
        Drawing(label, each, *bounds, peak_activations_bound(schedule, costs, predicted.period_s))
        for label, each in ((f"{schedule.name}, measured", timeline), (f"{schedule.name}, predicted", predicted))
    ]
    with (directory / FILES[0]).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["rank", "task", "start_s", "end_s", "predicted_start_s", "predicted_end_s"])
        for rank, tasks in enumerate(schedule.ranks):
            for task in tasks:
                numbers = (each[task] for line in (timeline, predicted) for each in (line.start_s, line.end_s))
                rows.writerow([rank, task, *(f"{number:.9f}" for number in numbers)])
    events = []
    for pid, drawing in enumerate(drawings):
        events += [event | {"pid": pid} for event in trace(drawing)["traceEvents"]]
    (directory / FILES[1]).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    (directory / FILES[2]).write_text(page(drawings), encoding="utf-8")
    ranks = zip(timeline.bubble_fractions, predicted.bubble_fractions, strict=True)
    return [
        f"timeline  {directory}: step {timeline.makespan_s:.4f} s, predicted {predicted.makespan_s:.4f} s",
        *(f"rank {r:<4} bubble {bubble:.1%}, predicted {wanted:.1%}" for r, (bubble, wanted) in enumerate(ranks)),
    ]
