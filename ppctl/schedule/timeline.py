"""When each task of a schedule runs: in the ticks of one program, or on free-running ranks."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.lockstep import Divided, TickCell, phases
from ppctl.schedule.shared_cores import free_running, together_s
from ppctl.schedule.simulate import Timeline, duration_s
from ppctl.schedule.ticks import Ticks, how_divided

Spans = list[list[tuple[float, float]]]  # [tick][rank]: seconds of a forward, then of a backward


def timeline_at(schedule: Schedule, ticks: Ticks | None, costs: Costs, capacity: float = inf) -> Timeline:
    """The timeline of a schedule at these costs: in its ticks, or of free-running ranks where it has none."""
    if ticks is None:
        return free_running(schedule, costs, capacity)
    return lockstep(ticks, costs, _cells(ticks, costs), capacity)


def lockstep(ticks: Ticks, costs: Costs, spans: Spans, capacity: float) -> Timeline:
    """The timeline of ticks one after another, each as long as its ranks need to finish, transfers included.

    Ranks that share `capacity` go on alike: when one has done w seconds of work, every other has too, or has ended.
    """
    start_s: dict[Task, float] = {}
    end_s: dict[Task, float] = {}
    now, hop_s, divided = 0.0, costs.hop_s, how_divided(ticks.schedule)
    for row, of_rank in zip(ticks.cells, spans, strict=True):
        if divided is not None:
            now = _meet(now, _with_seconds(row, of_rank, divided, costs), hop_s, capacity, start_s, end_s)
            continue
        works_s = [f + b + hop_s for f, b in of_rank]

        @cache
        def after(work_s: float, works_s: list[float] = works_s) -> float:
            """Seconds until a rank of this tick has done so much."""
            return together_s([min(each, work_s) for each in works_s], capacity)

        for cell, (f, b) in zip(row, of_rank, strict=True):
            if cell.forward is not None:
                start_s[cell.forward], end_s[cell.forward] = now, now + after(f)
            if cell.backward is not None:
                start_s[cell.backward], end_s[cell.backward] = now + after(f), now + after(f + b)
        now += after(max(works_s))
    return Timeline(ticks.schedule, costs, start_s, end_s, is_uneven=True)


def _with_seconds(
    row: tuple[TickCell, ...], of_rank: list[tuple[float, float]], divided: Divided, costs: Costs
) -> list[list[list[tuple[Task, float]]]]:
    """The phases of a tick, each task with its seconds."""
    given = {task: s for cell, spans in zip(row, of_rank, strict=True) for task, s in zip(cell, spans, strict=True)}

    def seconds(task: Task) -> float:
        return given[task] if task in given else costs.seconds(task.kind, task.stage, 1)

    return [[[(task, seconds(task)) for task in tasks] for tasks in phase] for phase in phases(row, divided)]


def _meet(
    now: float,
    phases_s: list[list[list[tuple[Task, float]]]],
    hop_s: float,
    capacity: float,
    start_s: dict[Task, float],
    end_s: dict[Task, float],
) -> float:
    """Return the end of a tick that begins now, whose ranks meet after each phase; its tasks get a start and an end."""
    for phase in phases_s:
        works_s = [sum(seconds for _, seconds in tasks) + hop_s for tasks in phase]
        for tasks in phase:
            done_s = [0.0, *accumulate(seconds for _, seconds in tasks)]
            at_s = [now + together_s([min(work_s, done) for work_s in works_s], capacity) for done in done_s]
            for (task, _), span in zip(tasks, pairwise(at_s), strict=True):
                start_s[task], end_s[task] = span
        now += together_s(works_s, capacity)
    return now


def _cells(ticks: Ticks, costs: Costs) -> Spans:
    """Seconds of every rank's tasks in each tick."""

    def seconds(task: Task | None) -> float:
        return 0.0 if task is None else duration_s(task, costs, ticks.schedule.num_chunks)

    return [[(seconds(forward), seconds(backward)) for forward, backward in row] for row in ticks.cells]
