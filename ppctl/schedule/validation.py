"""Validation of schedules by the dependency rule of `ir`.

A schedule that passes `validate` cannot deadlock, computes every gradient once, and reads nothing
before it exists.
"""

from collections.abc import Sequence

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs, Rule
from ppctl.schedule.ir import PART_KINDS, WRITES, Kind, Schedule, Task, Value, writes

GRID_WIDTH = 14  # number of steps shown
# maximum number of (stage, microbatch) pairs to search for the first missing task, unless the
# schedule has at least as many tasks as pairs
MOST_MISSING = 100_000
# required values of each stage, then of each vocabulary part, with the kinds of their writers
NEEDED: tuple[dict[str, Kind], ...] = (
    {"act": "F", "wgrad": "B"},
    {"embedded": "E", "sums": "S", "head_grad": "T", "embedding_wgrad": "G"},
)


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule`. ScheduleError for misplaced, missing, repeated or blocked tasks."""
    check_places(schedule)
    rule = Rule.of(schedule)
    _check_complete(schedule, rule, _check_tasks(schedule, rule))
    check_order(schedule)
    return schedule


def check_places(schedule: Schedule) -> None:
    """Raise ScheduleError for a stage or task out of range, or if most tasks are missing.

    The values of a schedule without most of its tasks would fill the memory.
    """
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.num_ranks:
            ranks = f"there are ranks 0..{schedule.num_ranks - 1}"
            raise ScheduleError(f"stage {stage} is placed on rank {rank}, but {ranks}.")
    num_tasks, m = sum(map(len, schedule.ranks)), schedule.num_microbatches
    num_pairs = m * schedule.num_stages
    num_places = {kind: len(schedule.ranks_of(kind)) for kind in WRITES}
    if num_tasks == 0 or num_pairs > max(num_tasks, MOST_MISSING):
        raise ScheduleError(
            f"{schedule.name}: {m} microbatches of {schedule.num_stages} stages are "
            f"2*{m}*{schedule.num_stages} = {2 * num_pairs} tasks or more, but there are "
            f"{num_tasks}."
        )
    for rank, tasks in enumerate(schedule.ranks):
        for step, (stage, kind, microbatch) in enumerate(tasks):
            if not (0 <= microbatch < m and 0 <= stage < num_places.get(kind, 0)):
                what = _misplaced(schedule, tasks[step], rank)
                raise fault(schedule, rank, step, what)


def check_order(schedule: Schedule) -> None:
    """Raise ScheduleError, with the grid and an arrow, if ranks deadlock."""
    jobs = Jobs(schedule, Costs())
    if jobs.run(jobs.first) is not None:
        return
    programs = list(zip(schedule.ranks, jobs.at, strict=True))
    written = {v for tasks, at in programs for task in tasks[:at] for v in writes(task)}
    rank = next(rank for rank, (tasks, at) in enumerate(programs) if at < len(tasks))
    task = schedule.ranks[rank][jobs.at[rank]]
    missing = next(value for value in schedule.reads(task) if value not in written)
    what = f"{task} waits for {missing}, which no rank can write any more. "
    what += order_that_blocks(schedule, jobs.at)
    raise fault(schedule, rank, jobs.at[rank], what.rstrip())


def _check_tasks(schedule: Schedule, rule: Rule) -> bytearray:
    """Return 1 for each written value, else 0. ScheduleError for a misplaced or repeated task."""
    holders = {kind: schedule.ranks_of(kind) for kind in WRITES}
    written = bytearray(rule.num_values)
    for rank, tasks in enumerate(schedule.ranks):
        for step, task in enumerate(tasks):
            stage, kind, m = task
            held = holders[kind]
            if held[stage] != rank:
                raise fault(schedule, rank, step, _misplaced(schedule, task, rank))
            for base in rule.writes[stage, kind]:
                if written[base + m]:
                    value = writes(task)[rule.writes[stage, kind].index(base)]
                    raise fault(schedule, rank, step, f"{task} writes {value} a second time.")
                written[base + m] = 1
    return written


def _misplaced(schedule: Schedule, task: Task, rank: int) -> str:
    """Return the message for a task that is out of range or on the wrong rank."""
    (stage, kind, m), held = task, schedule.ranks_of(task.kind)
    place, whole = ("part", " of the vocabulary") if kind in PART_KINDS else ("stage", "")
    if kind in WRITES and 0 <= stage < len(held) and 0 <= m < schedule.num_microbatches:
        return f"{task} is on rank {rank}, but {place} {stage} is on rank {held[stage]}."
    last = schedule.num_microbatches - 1
    return f"{task} is outside {place}s 0..{len(held) - 1}{whole} x microbatches 0..{last}."


def _check_complete(schedule: Schedule, rule: Rule, written: bytearray) -> None:
    """Raise ScheduleError for the first required value that no task writes."""
    for needed in NEEDED:
        for place, rank in enumerate(schedule.ranks_of(next(iter(needed)))):
            bases = {name: rule.base[name, place] for name in needed}
            gaps = {
                name: written.find(0, base, base + schedule.num_microbatches) - base
                for name, base in bases.items()
            }
            missing = {name: m for name, m in gaps.items() if m >= 0}
            if not missing:
                continue
            name = min(missing, key=missing.__getitem__)
            kind, m = needed[name], missing[name]
            if kind == "B" and written[rule.base["pending", place] + m]:
                kind = "W"
            lacks = f"{Task(place, kind, m)}, which writes {Value(name, place, m)}"
            what = f"the program ends without {lacks}."
            raise fault(schedule, rank, len(schedule.ranks[rank]), what)


# --- messages of faults ---------------------------------------------------------------------------


def grid(ranks: Sequence[Sequence[Task]], arrow: tuple[int, int] | None = None) -> str:
    """Return the ranks' tasks as text: up to GRID_WIDTH steps around `arrow` (rank, step)."""
    center = arrow[1] if arrow else 0
    steps = max([center + 1, *map(len, ranks)])  # the arrow may point at the end of a program
    low = max(0, min(center - GRID_WIDTH // 2, steps - GRID_WIDTH))
    high = min(steps, low + GRID_WIDTH)
    lines = ["step".rjust(8) + "".join(f"{t:>9}" for t in range(low, high))]
    for r, tasks in enumerate(ranks):
        cells = [
            ("->" if arrow == (r, t) else "") + (str(tasks[t]) if t < len(tasks) else "")
            for t in range(low, high)
        ]
        lines.append(f"rank {r}".rjust(8) + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def fault(schedule: Schedule, rank: int, step: int, what: str) -> ScheduleError:
    """Return the error for one step of one rank: the message, and the grid with an arrow."""
    shown = grid(schedule.ranks, (rank, step))
    return ScheduleError(f"{schedule.name}: rank {rank}, step {step}: {what}\n{shown}")


def order_that_blocks(schedule: Schedule, at: Sequence[int]) -> str:
    """Return text that names the tasks in the wrong order; "" if unknown.

    at: each rank's step where it blocks, or the length of its program if it ended.
    """
    circle = sorted(_circle(schedule, at))
    pairs = [f"rank {rank} has {first} before {later}" for rank, first, later in circle]
    if len(pairs) == 1:
        return f"R{pairs[0][1:]}, on which it depends."
    return f"R{', and '.join(pairs)[1:]}: each waits for the other." if pairs else ""


def _circle(schedule: Schedule, at: Sequence[int]) -> list[tuple[int, Task, Task]]:
    """Return the cycle of waits: (rank, its blocked task, its later task that others need)."""
    ranks = enumerate(schedule.ranks)
    places = {task: (rank, step) for rank, tasks in ranks for step, task in enumerate(tasks)}
    writer = {value: task for task in places for value in writes(task)}
    done = {task for tasks, step in zip(schedule.ranks, at, strict=True) for task in tasks[:step]}
    rank = next(rank for rank, tasks in enumerate(schedule.ranks) if at[rank] < len(tasks))
    task, seen = schedule.ranks[rank][at[rank]], dict[Task, int]()
    pairs: list[tuple[int, Task, Task]] = []
    while task not in seen:
        seen[task] = len(pairs)
        missing = next(value for value in schedule.reads(task) if writer.get(value) not in done)
        if missing not in writer:
            return []  # no task writes the missing value
        needed = writer[missing]
        rank, step = places[needed]
        task = schedule.ranks[rank][at[rank]]
        if step != at[rank]:
            pairs.append((rank, task, needed))
    return pairs[seen[task] :]
