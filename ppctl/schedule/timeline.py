"""When each task of a schedule runs: in the ticks of one program, or on free-running ranks."""

from __future__ import annotations

from functools import cache
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.shared_cores import free_running, together_s
from ppctl.schedule.simulate import Timeline, duration_s
from ppctl.schedule.ticks import Ticks

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
    now, hop_s = 0.0, costs.hop_s
    for row, of_rank in zip(ticks.cells, spans, strict=True):
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


def _cells(ticks: Ticks, costs: Costs) -> Spans:
    """Seconds of every rank's tasks in each tick."""

    def seconds(task: Task | None) -> float:
        return 0.0 if task is None else duration_s(task, costs, ticks.schedule.num_chunks)

    return [[(seconds(forward), seconds(backward)) for forward, backward in row] for row in ticks.cells]
