"""Ranks that share cores, as simulated devices do: what a schedule takes when only some can work at full speed.

With a capacity of c, k ranks at work go on at the speed min(1, c/k) each (processor sharing).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.simulate import Timeline, duration_s, simulate
from ppctl.schedule.walk import Rule, walk

ROUNDING = 1e-12  # relative


def together_s(works_s: Sequence[float], capacity: float) -> float:
    """Seconds until all of `works_s`, which start together, are done.

    >>> together_s([1.0, 1.0, 3.0], capacity=2.0)
    3.5
    """
    left = len(works_s)
    if left <= capacity:
        return max(works_s, default=0.0)
    done = elapsed = 0.0
    for work in sorted(works_s):
        elapsed += (work - done) * max(1.0, left / capacity)
        done, left = work, left - 1
    return elapsed


def free_running_s(schedule: Schedule, costs: Costs, capacity: float = inf) -> float:
    """The makespan of free-running ranks that share `capacity`; with enough for all, that of `simulate`.

    Transfers take no part of the capacity. ConfigError and ScheduleError as `simulate`.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> free_running_s(one_f_one_b(2, 4), Costs(), capacity=1.0)
    24.0
    """
    return free_running(schedule, costs, capacity).makespan_s


def free_running(schedule: Schedule, costs: Costs, capacity: float = inf) -> Timeline:
    """Return the timeline whose makespan `free_running_s` is."""
    if capacity >= schedule.num_ranks:
        return simulate(schedule, costs)
    assert costs.link_hosts is None, "devices that share cores have no links to queue for"
    costs.check(schedule.num_stages, schedule.num_parts)
    ranks = _Ranks(schedule, costs)
    now = 0.0
    while True:
        ranks.start(now)
        if not ranks.left and not ranks.moving:
            break
        speed = min(1.0, capacity / len(ranks.left)) if ranks.left else 1.0
        until = min((left / speed for left in ranks.left.values()), default=inf)
        until = min(until, min((at - now for at in ranks.moving.values()), default=inf))
        now += until
        ranks.advance(now, until * speed)
    if not ranks.are_done:
        for _ in walk(schedule):  # which says what is missing
            pass
    return Timeline(schedule, costs, ranks.start_s, ranks.end_s, is_uneven=True)


class _Ranks:
    """The state of every rank: `left`, seconds of its task at full speed; `moving`, when values arrive elsewhere."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.costs, self.rule = schedule, costs, Rule.of(schedule)
        self.arrivals = self.rule.arrivals(costs.hop_s)
        self.at = [0] * schedule.num_ranks
        self.left: dict[int, float] = {}
        self.written: dict[int, float] = {}  # value -> when it was written
        self.moving: dict[int, float] = {}  # rank -> when what it waits for arrives
        self.start_s: dict[Task, float] = {}
        self.end_s: dict[Task, float] = {}

    def start(self, now: float) -> None:
        """Every idle rank begins its next task, if all that it reads is there."""
        self.moving = {}
        for rank, tasks in enumerate(self.schedule.ranks):
            if rank in self.left or self.at[rank] == len(tasks):
                continue
            stage, kind, m = task = tasks[self.at[rank]]
            ready = 0.0
            for base, after_s in self.arrivals[kind][stage]:
                ready = max(ready, self.written.get(base + m, inf) + after_s)
            if ready <= now * (1 + ROUNDING):
                self.left[rank] = duration_s(task, self.costs, self.schedule.num_chunks)
                self.start_s[task] = now
            elif ready < inf:
                self.moving[rank] = ready

    def advance(self, now: float, work_s: float) -> None:
        """All tasks at work get `work_s` further; what is done writes its values."""
        for rank in list(self.left):
            self.left[rank] -= work_s
            if self.left[rank] > ROUNDING * now:
                continue
            del self.left[rank]
            stage, kind, m = task = self.schedule.ranks[rank][self.at[rank]]
            self.end_s[task] = now
            self.written |= dict.fromkeys((base + m for base in self.rule.writes[kind][stage]), now)
            self.at[rank] += 1

    @property
    def are_done(self) -> bool:
        return all(at == len(tasks) for at, tasks in zip(self.at, self.schedule.ranks, strict=True))
