"""The measured timeline of a step: compare it with its simulation, write it, read it back.

The simulation uses the measured mean times as costs, so the difference is due to order, transfers
and the host. Loads no JAX.
"""

import csv
import io
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite
from operator import add
from pathlib import Path
from typing import Any

from ppctl.errors import PpctlError
from ppctl.reports.charts.draw_schedule import schedules_page
from ppctl.reports.charts.schedule_drawing import Drawing
from ppctl.reports.foreign_files import from_json
from ppctl.reports.terminal_output import bubble_text, seconds_text
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.schedule_text import from_csv, to_csv
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.schedule.simulator import Timeline
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.validation import validate
from ppctl.user_files import read_file

Span = tuple[float, float]  # start and end in seconds
FILES = ("timeline.csv", "timeline.html")
TASKS_FILE = "tasks.perfetto.json"  # file in a profile's directory
FIRST_DEVICE = re.compile(r"rank \d+( \w+=0)*")  # track of a rank's first device, in TASKS_FILE
MOST_RANKS = 8  # largest number of ranks whose bubbles are listed one by one
OVERLAP_S = 1e-8  # seconds; rounding in a file may let tasks overlap by its last digit


def measured_timeline(schedule: Schedule, spans: Mapping[Task, Span]) -> Timeline:
    """Return the timeline of these spans, starting at 0. A task without a span takes no time."""
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
    """Return the mean seconds of each stage's tasks. An unsplit B counts half as I, half as W."""
    of_kind: dict[tuple[str, int], list[float]] = defaultdict(list)
    for task, task_s in seconds.items():
        of_kind[task.kind, task.stage].append(task_s)

    def mean(kind: str, stage: int) -> float:
        return statistics.fmean(of_kind[kind, stage]) if of_kind[kind, stage] else 0.0

    stages = range(schedule.num_stages)
    halves = [mean("B", s) / 2 for s in stages]
    forward, of_input, of_weight = (tuple(mean(kind, s) for s in stages) for kind in "FIW")
    return Costs(forward, tuple(map(add, of_input, halves)), tuple(map(add, of_weight, halves)))


def measured_and_simulated(
    timeline: Timeline, ticks: Ticks | None = None, label: str | None = None
) -> tuple[Drawing, Drawing]:
    """Return drawings of a timeline and of its simulation with the tasks' mean times.

    ticks: lockstep ticks of the simulation; None: ranks run freely. label: name in the drawings'
    labels; None: the schedule's.
    """
    name, schedule = (
        label or timeline.schedule.name,
        (timeline if ticks is None else ticks).schedule,
    )
    simulated = ScheduledStep(schedule, timeline.costs, ticks).timeline(timeline.costs)
    means = Drawing(f"{name}, simulated from its means", simulated)
    return Drawing(f"{name}, measured", timeline), means


def write_timeline(
    directory: Path, timeline: Timeline, ideal: float | None = None, predicted: float | None = None
) -> list[str]:
    """Write CSV and html of a timeline and its simulation; return lines to print.

    ideal, predicted: other bubbles of the run, 0..1, for the lines; None: left out.
    """
    # 1. the files
    directory.mkdir(parents=True, exist_ok=True)
    schedule, drawings = timeline.schedule, measured_and_simulated(timeline)
    simulated = drawings[1].timeline
    times = timeline.start_s, timeline.end_s, simulated.start_s, simulated.end_s
    with (directory / FILES[0]).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["rank", "task", "start_s", "end_s", "simulated_start_s", "simulated_end_s"])
        for rank, tasks in enumerate(schedule.ranks):
            rows.writerows([rank, task, *(f"{of[task]:.9f}" for of in times)] for task in tasks)
    (directory / FILES[1]).write_text(schedules_page(drawings), encoding="utf-8")
    # 2. the lines
    of_ranks, is_few = timeline.bubble_fractions, len(timeline.bubble_fractions) <= MOST_RANKS
    some = of_ranks if is_few else (min(of_ranks), max(of_ranks))
    each = (" " if is_few else " to ").join(f"{bubble:.1%}" for bubble in some)
    return [
        f"timeline  {directory}: step {seconds_text(timeline.makespan_s)}; simulated with the "
        f"tasks' mean times, it takes {seconds_text(simulated.makespan_s)}",
        f"bubble    {bubble_text(ideal, predicted, timeline.bubble_fraction)} (ranks {each})",
    ]


def read_timeline(file: Path, name: str) -> Timeline:
    """Return the timeline of the schedule `name` in a CSV. OSError, ValueError or ScheduleError."""
    cells, spans = defaultdict[int, list[Task]](list), dict[Task, Span]()
    try:
        for row in csv.DictReader(io.StringIO(read_file(file).decode(), newline="")):
            task = Task.parse(row["task"])
            cells[int(row["rank"])].append(task)
            spans[task] = float(row["start_s"]), float(row["end_s"])
    except (csv.Error, KeyError, TypeError, AttributeError) as error:
        raise ValueError("a line lacks rank, task, start_s or end_s") from error
    if sorted(cells) != list(range(len(cells))):
        raise ValueError("its ranks are not 0, 1, ...")
    if any(max(task.stage, task.microbatch) > len(spans) for task in spans):
        raise ValueError("tasks are missing")
    schedule = from_csv(to_csv([cells[rank] for rank in range(len(cells))]), name)
    return measured_timeline(schedule, _sound(schedule.ranks, spans))


def read_profile(file: Path, schedule: Schedule) -> tuple[Timeline, int]:
    """Return (the median traced step, number of traced steps) in a file of `write_tasks`.

    Tasks are ordered as each rank's first device ran them. OSError if the file cannot be read;
    ValueError or ScheduleError if it has no complete step of the schedule.
    """
    # 1. the complete steps
    try:
        steps = _traced_steps(from_json(read_file(file))["traceEvents"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is not a trace of tasks") from error
    last = schedule.num_stages - 1
    every = {task for tasks in schedule.ranks for task in tasks}
    # an F of the last stage may lack events, because it may run inside its B
    needed = {task for task in every if task[:2] != (last, "F")}
    whole = [spans for spans in steps if needed <= spans.keys() <= every]
    if not whole:
        every_task = "every task of the schedule on the first device of each rank"
        raise ValueError(f"no step in it has {every_task}")
    # 2. the step of median length
    spans = sorted(whole, key=_length_s)[(len(whole) - 1) // 2]
    timeline = measured_timeline(schedule, spans)
    ranks = tuple(
        tuple(sorted(tasks, key=lambda task: (timeline.start_s[task], timeline.end_s[task])))
        for tasks in schedule.ranks
    )
    as_run = validate(replace(schedule, ranks=ranks))
    _sound(as_run.ranks, spans)
    return replace(timeline, schedule=as_run), len(whole)


def _length_s(spans: Mapping[Task, Span]) -> float:
    return max(end for _, end in spans.values()) - min(start for start, _ in spans.values())


def _traced_steps(events: Sequence[Mapping[str, Any]]) -> list[dict[Task, Span]]:
    """Return each step's spans on the ranks' first devices: step n has each task's n-th span."""
    named = (event for event in events if event["name"] == "thread_name")
    names = {event["tid"]: event["args"]["name"] for event in named}
    first = {device for device, name in names.items() if FIRST_DEVICE.fullmatch(name)}
    by_task: dict[Task, list[Span]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] in first:
            span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            by_task[Task.parse(event["name"])].append(span)
    steps: list[dict[Task, Span]] = []
    for task, spans in by_task.items():
        steps += [{} for _ in range(len(spans) - len(steps))]
        for step, span in zip(steps, sorted(spans), strict=False):
            step[task] = span
    return steps


def _sound(ranks: Sequence[Sequence[Task]], spans: Mapping[Task, Span]) -> Mapping[Task, Span]:
    """Return `spans`. ValueError for a span that is no range, or overlaps one of its rank."""
    for tasks in ranks:
        free_s = -inf
        for task in tasks:
            if task not in spans:
                continue
            start, end = spans[task]
            if not (isfinite(start) and isfinite(end) and start <= end):
                raise ValueError(f"{task} from {start:g} to {end:g} s is no range")
            if start < free_s - OVERLAP_S:
                raise ValueError(f"{task} begins before the task before it on its rank ends")
            free_s = end
    if _length_s(spans) <= 0:
        raise ValueError("its ranges are empty")
    return spans


def measured_bubble(timeline: Path, since_s: float = 0.0) -> float | None:
    """Return the bubble, 0..1, of a file; None if unreadable or older than since_s (Unix time)."""
    with suppress(OSError, ValueError, PpctlError):
        if timeline.stat().st_mtime >= since_s:
            return read_timeline(timeline, "").bubble_fraction
    return None
