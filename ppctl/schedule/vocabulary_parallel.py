"""Vocabulary parallelism: embedding and head divided over the ranks, as tasks of any schedule.

Rank r holds part r of embedding and head and runs E, S, T and G of each microbatch (`schedule.ir`;
arXiv 2411.05288). The last stage's backward needs the T of every rank, each T the S of every rank,
and each S the last stage's forward. With `delay` more microbatches in flight, ranks have other
work during these waits.
"""

from collections import deque
from dataclasses import replace
from math import inf

from ppctl.errors import ScheduleError, setting
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import ChoosingRanks, Chosen, Jobs
from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.validation import validate

DELAYS = (0, 1, 2)  # microbatches; 1 hides the wait of T for S, 2 also that of B for T
AHEAD = 2  # maximum lead of E over the first stage's F, in microbatches
PRIORITY = "TSEG"  # order of tasks that are ready at the same time; stage tasks come last


def with_vocabulary(
    schedule: Schedule, delay: int | None = None, costs: Costs | None = None
) -> Schedule:
    """Return `schedule` with embedding and head divided over its ranks.

    A rank runs the tasks of its part between those of its stages, as soon as their values arrive.

    Args:
        schedule: two ranks or more, with a whole vocabulary.
        delay: extra microbatches in flight between a forward and its backward; a rank's peak grows
            by at most `delay` microbatches. None: the value of `DELAYS` with the shortest step, the
            smallest in a tie.
        costs: seconds of tasks, which decide their order; None: the papers' units.

    Raises:
        ScheduleError: for one rank, a divided vocabulary, or a delay that deadlocks.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> [str(task) for task in with_vocabulary(one_f_one_b(2, 1)).ranks[1]]
    ['1E0', '1F0', '1S0', '1T0', '1B0', '1G0']
    """
    whole = setting("schedule.vocab", "whole")
    if schedule.num_ranks == 1:
        raise ScheduleError(
            f"{schedule.name}: {setting('schedule.vocab', 'parallel')} divides embedding and head "
            f"over the ranks of the pipeline, but num_ranks=1. Use {whole}, or more ranks."
        )
    if schedule.vocab_parts:
        what = "its tasks divide the vocabulary already (E, S, T and G)"
        raise ScheduleError(f"{schedule.name}: {what}. Use {whole}.")
    delays = DELAYS if delay is None else (delay,)
    timed = [_delayed(schedule, each, costs or Costs()) for each in delays]
    return validate(min(timed, key=lambda each: each[0])[1])


def _delayed(schedule: Schedule, delay: int, costs: Costs) -> tuple[float, Schedule]:
    """Return (makespan in seconds, schedule); (infinity, a deadlocking schedule) if ranks block."""
    # 1. add the tasks of parts; E may be at most AHEAD microbatches before the first stage's F
    programs = zip(schedule.ranks, schedule.stages_of, strict=True)
    ahead = tuple(_ahead(tasks, delay * len(stages)) for tasks, stages in programs)
    jobs = Jobs(with_parts(replace(schedule, ranks=ahead)), costs)
    number = {task: n for n, task in enumerate(jobs.tasks)}
    embedded = [task.microbatch for task in jobs.schedule.ranks[0] if task.kind == "E"]
    for earlier, m in zip(embedded, embedded[AHEAD:], strict=False):
        (act, _stash) = jobs.makes[number[Task(0, "F", earlier)]]
        for r in range(schedule.num_ranks):
            jobs.needs[number[Task(r, "E", m)]] = ((act + earlier - m, 0.0),)
    # 2. run the ranks: each runs whichever of its tasks is ready first
    ranks = ChoosingRanks(jobs)
    kinds = [
        *PRIORITY,
        "FBIW",
    ]  # queues of a rank: one for each kind of its part, one of its stages
    queues = [
        [deque(task for task in order if jobs.tasks[task].kind in kind) for kind in kinds]
        for order in jobs.first
    ]

    def choose(rank: int, now_s: float) -> Chosen:
        heads = [(max(now_s, ranks.ready_s(q[0])), i) for i, q in enumerate(queues[rank]) if q]
        start_s, i = min(heads, default=(inf, 0))
        return ((), start_s) if start_s > now_s else ((queues[rank][i].popleft(),), now_s)

    orders = ranks.run(choose)
    if orders is None:
        return inf, jobs.schedule
    ends_s = (written_s for written_s in ranks.written_s if written_s < inf)
    return round(max(ends_s), 9), jobs.as_schedule(orders, schedule.name)


def with_parts(schedule: Schedule) -> Schedule:
    """Return `schedule` with the tasks of vocabulary parts appended to each rank's program.

    Only for uses that ignore the order of parts: counts of tasks, and lockstep ticks. Tasks of one
    kind are in the order of the stage tasks that they belong to.
    """

    def order(stage: int, kinds: str) -> list[int]:
        tasks = schedule.ranks[schedule.rank_of[stage]]
        return [task.microbatch for task in tasks if task.stage == stage and task.kind in kinds]

    last = order(schedule.num_stages - 1, "F")
    more: dict[Kind, list[int]]
    more = {"T": last, "S": last, "E": order(0, "F"), "G": order(0, "BI")}
    ranks = tuple(
        (*tasks, *(Task(r, kind, m) for kind in more for m in more[kind]))
        for r, tasks in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=ranks, part_ranks=tuple(range(schedule.num_ranks)))


def _ahead(tasks: tuple[Task, ...], number: int) -> tuple[Task, ...]:
    """Return a rank's tasks in order, but with `number` more forwards before each backward.

    >>> program = "0F0 0B0 0F1 0B1 0F2 0B2".split()
    >>> " ".join(map(str, _ahead(tuple(map(Task.parse, program)), 1)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    forwards = deque(task for task in tasks if task.kind == "F")
    moved: list[Task] = []
    before = done = 0
    for task in tasks:
        if task.kind == "F":
            before += 1
            continue
        while forwards and done < before + number:
            moved.append(forwards.popleft())
            done += 1
        moved.append(task)
    return (*moved, *forwards)
