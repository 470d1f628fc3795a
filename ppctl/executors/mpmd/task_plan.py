"""The plan of a schedule's tasks: their programs, what these read and write, and who sends it to whom.

Values have names:

w, ends_in, ends_out        a stage's parameters, those of the embedding and of the head, as the tasks take them
inputs, targets, m          the batch, and the number of a microbatch
x, gx; y, gy                input and output of a stage for one microbatch, and their gradients
stash, pending              what a forward keeps for its backward, what I leaves to W
acc, acc_in, acc_out        sums of gradients: a stage's, the embedding's, the head's
sum                         a stage's sum of gradients over the devices of its rank, which keep a shard each
losses                      sums of the losses and of their number

Where the vocabulary is divided, stages have no embedding and no head, and for each rank there are

ends, acc_ends, part        its part of both, the sums of its gradients, and the number of the part
own_x, part_x               its summand of the first stage's input, here and on the rank of that stage
last_y, first_gx            the last stage's output, the gradient of the first one's input
logits, own_log_sums        what S leaves to T: for T on this rank, and for that of all
log_sums, all_log_sums      the latter on the last stage's rank, and what it makes of all of them, back here
own_gy, part_gy             its summand of the gradient of the last stage's output, here and on the rank of that stage
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ppctl.executors.mpmd.plan import Key, PlanEntry, ProgramId, Step, with_moves
from ppctl.schedule.ir import PART_KINDS, Kind, Schedule, Task
from ppctl.schedule.partition.partition import Partition

FORWARD = "forward"  # the program of a forward that keeps nothing
JOINS = TOTAL, TOTAL_LOG_SUMS = "total", "log_sums"  # the programs that make one value of those of all parts
TASKS = (FORWARD, "F", "B", "I", "W", *PART_KINDS, *JOINS)  # others run once a step
OF_RANK = (*("inputs", "targets", "losses", "ends_in", "ends_out", "acc_in", "acc_out"), "ends", "acc_ends", "part")


class Role(NamedTuple):
    """The size of a stage, and whether embedding or head belong to it."""

    num_layers: int
    is_first: bool
    is_last: bool
    first_layer: int | None = None  # where layers differ: the number of its first one


def roles(partition: Partition, *, are_alike: bool, have_ends: bool = True) -> tuple[Role, ...]:
    """Return the role of each stage. Of layers that are alike it does not matter which ones a stage holds.

    have_ends: embedding and head belong to the first and the last stage; otherwise every rank has a part of them.
    """
    last = len(partition) - 1
    return tuple(
        Role(len(layers), have_ends and s == 0, have_ends and s == last, None if are_alike else layers.start)
        for s, layers in enumerate(partition)
    )


def task_program(kind: str, role: Role, keeps_input: bool) -> ProgramId | None:
    """Return the program of a task, or None where there is nothing to run.

    keeps_input (remat=full): the stash is the stage's input, and the backward runs the stage again; so the last stage's
    forward is left to its backward, with the head, and the first one's input is embedded again.
    """
    embedding = ("ends_in", "inputs", "m") if role.is_first else ("x",)
    head = ("ends_out", "targets", "m", "losses") if role.is_last else ()
    with_grad = ("acc_out",) if role.is_last else ()
    reads: tuple[str, ...] = ("w",)
    writes: tuple[str, ...] = ()
    if kind == "F" and keeps_input:
        if role.is_last:
            return None
        kind = FORWARD
    if kind == FORWARD:
        reads += embedding + head
        writes += ("losses",) if role.is_last else ("y",)
    elif kind == "F":
        reads += embedding + head + with_grad
        writes += ("stash", "gy", "losses", "acc_out") if role.is_last else ("stash", "y")
    elif kind == "W":
        reads += ("pending", "acc")
        writes += ("acc",)
    else:
        reads += embedding + head + with_grad if keeps_input else ("stash",)
        if not (keeps_input and role.is_last):
            reads += ("gy",)
        if role.is_first:
            reads += ("ends_in", "inputs", "m", "acc_in")
        reads += ("acc",) if kind == "B" else ()
        writes += ("acc",) if kind == "B" else ("pending",)
        writes += ("acc_in",) if role.is_first else ("gx",)
        writes += ("losses", "acc_out") if keeps_input and role.is_last else ()
    return ProgramId(kind, tuple(dict.fromkeys(reads)), writes, role)


PART_PROGRAMS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what the tasks of parts read and write
    "E": (("ends", "part", "inputs", "m"), ("own_x",)),
    "S": (("ends", "part", "last_y"), ("own_log_sums", "logits")),
    "T": (
        ("ends", "part", "targets", "m", "last_y", "all_log_sums", "logits", "losses", "acc_ends"),
        ("own_gy", "losses", "acc_ends"),
    ),
    "G": (("ends", "part", "inputs", "m", "first_gx", "acc_ends"), ("acc_ends",)),
}


def part_program(kind: Kind, has_backward: bool) -> ProgramId:
    """Return the program of a task of a part; of T without a backward the loss is all."""
    reads, writes = PART_PROGRAMS[kind]
    if kind == "T" and not has_backward:
        reads, writes = tuple(name for name in reads if name != "acc_ends"), ("losses",)
    return ProgramId(kind, reads, writes, None)


def task_entries(
    schedule: Schedule, order: Iterable[Task], role: Sequence[Role], *, keeps_input: bool
) -> list[PlanEntry]:
    """Return the tasks of `schedule` in `order`, by their start, and the moves of what one rank writes for another.

    role: of each stage. A schedule of forwards alone keeps nothing.
    """
    return with_moves(_steps(schedule, order, role, keeps_input))


def _steps(schedule: Schedule, order: Iterable[Task], role: Sequence[Role], keeps_input: bool) -> Iterator[Step]:
    """Yield the programs of tasks, and before the first that reads it what joins the values of all parts."""
    has_backward = any(kind in "BI" for counts in schedule.counts for kind, _, _ in counts)
    joined = set[tuple[str, int]]()
    for task in order:
        kind = task.kind if has_backward or task.kind != "F" else FORWARD
        if task.kind in PART_KINDS:
            program = part_program(task.kind, has_backward)
        else:
            program = task_program(kind, role[task.stage], keeps_input)
        if program is None:
            continue
        rank = schedule.rank_at(task)
        if schedule.divides_vocabulary:
            for name in program.reads:
                if _is_joined(schedule, task, name) and (name, task.microbatch) not in joined:
                    joined.add((name, task.microbatch))
                    yield _join(schedule, name, task.microbatch)
        reads, writes = (tuple(_key(name, task, rank) for name in names) for names in (program.reads, program.writes))
        readers = tuple(tuple(_readers(schedule, name, task)) for name in program.writes)
        yield Step(program, rank, reads, writes, readers, task)


def _key(name: str, task: Task, rank: int) -> Key:
    """Return the key of a value that a task reads or writes."""
    stage, _, microbatch = task
    if name == "m":
        return (name, rank, microbatch)
    if name in OF_RANK:
        return (name, rank)
    return (name, stage) if name in ("w", "acc") else (name, stage, microbatch)


def _readers(schedule: Schedule, name: str, task: Task) -> list[tuple[int, Key]]:
    """Return the ranks that read what a task writes, each with the key that the value has there."""
    (s, _, m), last, ranks = task, schedule.num_stages - 1, range(schedule.num_ranks)
    first_rank, last_rank = schedule.rank_of[0], schedule.rank_of[-1]
    if name == "y" and s < last:
        return [(schedule.rank_of[s + 1], ("x", s + 1, m))]
    if name == "gx" and s > 0:
        return [(schedule.rank_of[s - 1], ("gy", s - 1, m))]
    if name == "y":
        return [(r, ("last_y", r, m)) for r in ranks]
    if name == "gx":
        return [(r, ("first_gx", r, m)) for r in ranks]
    there = {"own_x": (first_rank, "part_x"), "own_log_sums": (last_rank, "log_sums"), "own_gy": (last_rank, "part_gy")}
    if name not in there:
        return []
    rank, name_there = there[name]
    return [(rank, (name_there, s, m))]


def _is_joined(schedule: Schedule, task: Task, name: str) -> bool:
    """Return whether a value that a task reads is made of what all parts have written."""
    stage = {"x": 0, "gy": schedule.num_stages - 1}
    return name == "all_log_sums" or (name in stage and task.stage == stage[name])


def _join(schedule: Schedule, name: str, microbatch: int) -> Step:
    """Return the program that makes a value of those that all parts have written for a microbatch."""
    ranks, last = range(schedule.num_ranks), schedule.num_stages - 1
    read = {"x": "part_x", "gy": "part_gy", "all_log_sums": "log_sums"}[name]
    rank, kind = schedule.rank_of[0 if name == "x" else -1], TOTAL_LOG_SUMS if name == "all_log_sums" else TOTAL
    program = ProgramId(kind, (read,) * len(ranks), (name,), None)
    reads = tuple((read, part, microbatch) for part in ranks)
    if name != "all_log_sums":
        return Step(program, rank, reads, ((name, 0 if name == "x" else last, microbatch),))
    readers = tuple((r, (name, r, microbatch)) for r in ranks)
    return Step(program, rank, reads, ((name, rank, microbatch),), (readers,))
