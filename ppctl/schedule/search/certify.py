"""`ppctl schedule certify`: how short any order of a schedule's tasks can be, by constraint programming.

OR-tools CP-SAT finds starts for all tasks (one at a time on a rank, values before their readers, activations within the
cap) and proves a lower bound. Minutes for 200 tasks, hopeless for thousands: a certificate, no planner. The only
importer of ortools, which comes with ppctl[certify].
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ppctl.errors import ConfigError
from ppctl.schedule.activations import peak_activations
from ppctl.schedule.bounds import makespan_bound_s
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task, writes
from ppctl.schedule.simulate import duration_s, simulate
from ppctl.schedule.validate import validate

MOST_TASKS = 2000  # above, CP-SAT proves nothing in any time that a user waits
MOST_TICKS = 10_000_000  # of the makespan in the costs' common unit of time


@dataclass(frozen=True)
class Certificate:
    """No order of the tasks under `cap` activations takes less than lower_bound_s; `schedule` takes shortest_s."""

    schedule: Schedule
    cap: float
    lower_bound_s: float
    shortest_s: float

    @property
    def is_proven(self) -> bool:
        """Return whether `schedule` is as short as any."""
        return self.shortest_s <= self.lower_bound_s * (1 + 1e-9)


def certify(schedule: Schedule, costs: Costs, cap: float | None = None, *, time_limit_s: float = 60.0) -> Certificate:
    """The shortest order of the schedule's tasks on its placement that CP-SAT finds, and the bound that it proves.

    cap: activations of a rank, in units of one microbatch through 1/p of the model; None: what the schedule holds.
    ConfigError without ortools, and for schedules or costs that are out of its reach.
    """
    cp_model = _cp_model()
    tasks = [task for tasks in schedule.ranks for task in tasks]
    if len(tasks) > MOST_TASKS:
        raise ConfigError(
            f"{len(tasks)} tasks are more than the {MOST_TASKS} that can be certified. "
            "Use fewer ranks, microbatches or chunks."
        )
    cap = max(peak_activations(schedule)) if cap is None else cap
    known = simulate(schedule, costs)
    unit_s = _common_unit([*(duration_s(task, costs, schedule.num_chunks) for task in tasks), costs.hop_s])
    if known.makespan_s / unit_s > MOST_TICKS:
        raise ConfigError(f"the costs have no common unit of time above {unit_s:g} s. Round them to fewer digits.")

    def ticks(seconds: float) -> int:
        return round(seconds / unit_s)

    horizon = ticks(known.makespan_s)

    model = cp_model.CpModel()
    starts = {task: model.new_int_var(0, horizon, str(task)) for task in tasks}
    lasts = {task: ticks(duration_s(task, costs, schedule.num_chunks)) for task in tasks}
    makespan = model.new_int_var(0, horizon, "makespan")
    for program in schedule.ranks:
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[task], lasts[task], str(task)) for task in program]
        )
        enter = [(starts[task], 1) for task in program if task.kind == "F"]
        leave = [(starts[task] + lasts[task], -1) for task in program if task.kind in "BW"]
        times, changes = zip(*enter, *leave, strict=True)
        model.add_reservoir_constraint(times, changes, 0, int(cap * schedule.num_chunks + 1e-9))
    writer = {value: task for task in tasks for value in writes(task)}
    for task in tasks:
        model.add(makespan >= starts[task] + lasts[task])
        for value in schedule.reads(task):
            source = writer[value]
            crosses = schedule.rank_of[source.stage] != schedule.rank_of[task.stage]
            model.add(starts[task] >= starts[source] + lasts[source] + crosses * ticks(costs.hop_s))
        later = Task(task.stage, task.kind, task.microbatch + 1)
        if later in starts:  # microbatches are alike, so they may as well come in their order
            model.add(starts[later] >= starts[task] + lasts[task])
        model.add_hint(starts[task], ticks(known.start_s[task]))
    model.minimize(makespan)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = os.cpu_count() or 1
    status = solver.solve(model)
    bound_s = max(solver.best_objective_bound * unit_s, makespan_bound_s(schedule, costs))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Certificate(schedule, cap, bound_s, known.makespan_s)
    begin = {task: solver.value(start) for task, start in starts.items()}
    ranks = tuple(tuple(sorted(program, key=lambda task: (begin[task], lasts[task]))) for program in schedule.ranks)
    found = validate(Schedule("certified", ranks, schedule.rank_of, schedule.num_microbatches))
    shortest_s = simulate(found, costs).makespan_s
    if shortest_s >= known.makespan_s and max(peak_activations(schedule)) <= cap:
        return Certificate(schedule, cap, bound_s, known.makespan_s)
    return Certificate(found, cap, bound_s, shortest_s)


def _common_unit(seconds: list[float]) -> float:
    """The largest time of which all are multiples, taken as the decimals that they print as.

    >>> _common_unit([0.5, 0.375, 0.1])
    0.025
    """
    found = [Fraction(str(value)) for value in set(seconds) if value]
    parts = math.lcm(*(value.denominator for value in found))
    return math.gcd(*(int(value * parts) for value in found)) / parts


def _cp_model() -> Any:
    """OR-tools' module, which only ppctl[certify] brings."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError("`ppctl schedule certify` needs OR-tools. Install ppctl[certify].") from None
    return cp_model
