"""The plan of a schedule's tasks: their programs, the values read and written, and the readers.

`plan_values` has the names of values. With a divided vocabulary, stages have no embedding and no
head: each rank has a part of both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, ProgramId, with_moves
from ppctl.executors.mpmd.fused_tasks import fused_entry
from ppctl.executors.mpmd.plan_values import value_kind
from ppctl.model.random_keys import KEYS
from ppctl.schedule.ir import PART_KINDS, Kind, Schedule, Task
from ppctl.schedule.partition.partition import Partition

FORWARD = "forward"  # kind of a program that runs a forward without a stash
JOINS = TOTAL, TOTAL_LOG_SUMS = "total", "log_sums"  # programs that combine all parts' values
TASKS = (FORWARD, "F", "B", "I", "W", *PART_KINDS, *JOINS)  # others run once a step
# value joined from all parts -> (a part's value, its copy on the joining rank)
JOINED = {
    "x": ("own_x", "part_x"),
    "gy": ("own_gy", "part_gy"),
    "all_log_sums": ("own_log_sums", "log_sums"),
}


class Role(NamedTuple):
    """The size of a stage, and whether it has the embedding or the head."""

    num_layers: int
    is_first: bool
    is_last: bool
    first_layer: int | None = None  # number of its first layer; None: layers are alike


def roles(
    partition: Partition, *, are_alike: bool, have_embed_head: bool = True
) -> tuple[Role, ...]:
    """Return the role of each stage.

    have_embed_head=False: stages have neither, because each rank has a part of both.
    """
    first, last = (0, len(partition) - 1) if have_embed_head else (None, None)
    return tuple(
        Role(len(layers), s == first, s == last, None if are_alike else layers.start)
        for s, layers in enumerate(partition)
    )


def task_program(
    kind: str, role: Role, keeps_input: bool, *, with_keys: bool = False
) -> ProgramId | None:
    """Return the program of a task, or None if it has nothing to run.

    keeps_input (remat=full): the stash is the stage's input. The last stage's backward then runs
    its forward and the head, and the first stage's backward embeds its input again. with_keys:
    whether layers take random keys.
    """
    # 1. values that depend on the stage's place
    embedding = ("embed_head", "inputs", "m") if role.is_first else ("x",)
    head = ("embed_head", "targets", "m", "losses") if role.is_last else ()
    with_grad = ("acc_embed_head",) if role.is_last else ()
    reads: tuple[str, ...] = ("w", KEYS, "m") if with_keys else ("w",)
    writes: tuple[str, ...] = ()
    # 2. values of each kind of task
    if kind == "F" and keeps_input:
        if role.is_last:
            return None
        kind = FORWARD
    if kind == FORWARD:
        reads += embedding + head
        writes += ("losses",) if role.is_last else ("y",)
    elif kind == "F":
        reads += embedding + head + with_grad
        writes += ("stash", "gy", "losses", *with_grad) if role.is_last else ("stash", "y")
    elif kind == "W":
        reads += ("pending", "acc")
        writes += ("acc",)
    else:
        reads += embedding + head + with_grad if keeps_input else ("stash",)
        if not (keeps_input and role.is_last):
            reads += ("gy",)
        if role.is_first:
            reads += ("embed_head", "inputs", "m", "acc_embed_head")
        reads += ("acc",) if kind == "B" else ()
        writes += ("acc",) if kind == "B" else ("pending",)
        writes += ("acc_embed_head",) if role.is_first else ("gx",)
        writes += ("losses", "acc_embed_head") if keeps_input and role.is_last else ()
    once = lambda names: tuple(dict.fromkeys(names))  # noqa: E731
    return ProgramId(kind, once(reads), once(writes), role)


# kind of a task of a rank's part of the vocabulary -> (values read, values written)
PART_PROGRAMS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "E": (("embed_head", "part", "inputs", "m"), ("own_x",)),
    "S": (("embed_head", "part", "last_y"), ("own_log_sums", "logits")),
    "T": (
        (
            *("embed_head", "part", "targets", "m", "last_y"),
            *("all_log_sums", "logits", "losses", "acc_embed_head"),
        ),
        ("own_gy", "losses", "acc_embed_head"),
    ),
    "G": (("embed_head", "part", "inputs", "m", "first_gx", "acc_embed_head"), ("acc_embed_head",)),
}


def part_program(kind: Kind, has_backward: bool) -> ProgramId:
    """Return the program of a vocabulary task; if forward-only, T yields only the loss."""
    reads, writes = PART_PROGRAMS[kind]
    if kind == "T" and not has_backward:
        reads, writes = tuple(name for name in reads if name != "acc_embed_head"), ("losses",)
    return ProgramId(kind, reads, writes, None)


def task_entries(
    schedule: Schedule,
    order: Sequence[tuple[Task, ...]],
    role: Sequence[Role],
    *,
    reductions: Sequence[ProgramId] = (),
    **how: bool,
) -> list[PlanEntry]:
    """Return the plan entries of the tasks of `schedule`, with moves between ranks.

    order: tasks in order of start; tasks in one tuple run as one program. how: keeps_input and
    with_keys of `task_program`. reductions: for each stage, the program that reduces
    ("acc", stage) to ("sum", stage). A reduction runs once the sums are complete, right before the
    rank's next task, so that moves of the last task's values come first. Stages without layers are
    reduced at the end: their zeros would take memory early.
    """
    # plan entries by tasks, by (joined value, microbatch), or by reduced stage
    steps = dict[Any, PlanEntry]()
    backwards = (task for tasks in order for task in tasks if task.kind in "BW")
    last = {task.stage: task for task in backwards} if reductions else {}
    due: dict[int, int] = {}  # rank -> stage to reduce
    for tasks in order:
        # 1. the entries of the tasks
        of_tasks = (_task_entry(schedule, task, role, **how) for task in tasks)
        made = [entry for entry in of_tasks if entry is not None]
        if not made:
            continue
        # 2. the programs that join the values of all parts, each before its first reader
        for entry in made if schedule.vocab_parts else ():
            assert entry.program, "a task has a program"
            assert entry.task, "see `_task_entry`"
            stage, _, m = entry.task
            for name in entry.program.reads:
                is_here = name == "all_log_sums" or stage == _place(schedule, name)[0]
                if name in JOINED and (name, m) not in steps and is_here:
                    steps[name, m] = _join(schedule, name, m)
        # 3. the reduction that is due on this rank, then one program for the tasks
        rank = made[0].rank
        if rank in due:
            steps[due[rank]] = _reduction(reductions, due[rank], rank)
            del due[rank]
        steps[tasks] = made[0] if len(made) == 1 else fused_entry(*made)
        for task in tasks:
            if last.get(task.stage) == task and role[task.stage].num_layers:
                due[rank] = task.stage
    steps |= {stage: _reduction(reductions, stage, rank) for rank, stage in due.items()}
    for stage in sorted(last.keys() - steps.keys()):
        steps[stage] = _reduction(reductions, stage, schedule.rank_of[stage])
    return with_moves(steps.values())


def _task_entry(
    schedule: Schedule,
    task: Task,
    role: Sequence[Role],
    *,
    keeps_input: bool,
    with_keys: bool = False,
) -> PlanEntry | None:
    """Return the entry of a task, or None if it has nothing to run."""
    kind = task.kind if schedule.has_backward or task.kind != "F" else FORWARD
    if task.kind in PART_KINDS:
        program = part_program(task.kind, schedule.has_backward)
    else:
        program = task_program(kind, role[task.stage], keeps_input, with_keys=with_keys)
    if program is None:
        return None
    rank, values = schedule.rank_at(task), (program.reads, program.writes)
    reads, writes = (tuple(_key(name, task, rank) for name in names) for names in values)
    readers = tuple(tuple(_readers(schedule, name, task)) for name in program.writes)
    return PlanEntry(program, rank, reads, writes, task, readers=readers)


def _reduction(reductions: Sequence[ProgramId], stage: int, rank: int) -> PlanEntry:
    return PlanEntry(reductions[stage], rank, (("acc", stage),), (("sum", stage),))


def _key(name: str, task: Task, rank: int) -> Key:
    """Return the key of a value that a task reads or writes."""
    stage, _, microbatch = task
    numbers = {"rank": (rank,), "stage": (stage,), "microbatch": (rank, microbatch)}
    return (name, *numbers.get(value_kind(name).key, (stage, microbatch)))


def _readers(schedule: Schedule, name: str, task: Task) -> list[tuple[int, Key]]:
    """Return (rank, the value's key on it) for each rank that reads a value written by a task."""
    (s, _, m), ranks, last = task, range(schedule.num_ranks), schedule.num_stages - 1
    if name == "y" and s == last:
        return [(r, ("last_y", r, m)) for r in ranks]
    if name == "gx" and s == 0:
        return [(r, ("first_gx", r, m)) for r in ranks]
    if name in ("y", "gx"):
        there, at = ("x", s + 1) if name == "y" else ("gy", s - 1)
        return [(schedule.rank_of[at], (there, at, m))]
    of_parts = ((joined, there) for joined, (own, there) in JOINED.items() if own == name)
    return [(_place(schedule, joined)[1], (there, s, m)) for joined, there in of_parts]


def _place(schedule: Schedule, joined: str) -> tuple[int, int]:
    """Return (stage, its rank) where the values of all parts are joined."""
    stage = 0 if joined == "x" else schedule.num_stages - 1
    return stage, schedule.rank_of[stage]


def _join(schedule: Schedule, name: str, microbatch: int) -> PlanEntry:
    """Return the program that joins the values of all parts for a microbatch."""
    parts, (stage, rank) = range(schedule.num_ranks), _place(schedule, name)
    goes_to_all, (_, read) = name == "all_log_sums", JOINED[name]
    kind = TOTAL_LOG_SUMS if goes_to_all else TOTAL
    program = ProgramId(kind, (read,) * len(parts), (name,), None)
    reads = tuple((read, part, microbatch) for part in parts)
    readers = tuple((r, (name, r, microbatch)) for r in parts) if goes_to_all else ()
    key = (name, rank if goes_to_all else stage, microbatch)
    return PlanEntry(program, rank, reads, (key,), readers=(readers,))
