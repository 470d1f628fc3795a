"""The table of single-op ticks: one task of any kind a tick, for split backwards and for placements that turn.

Every task but a W has one output, an activation or a gradient. After the tick it stays on its rank (the turn of a V),
or goes one hop to rank r+1 or r-1, round the ring; its receiver's table says from where, and into which slot. Both
kinds of output have one shape and share their slots. What arrives can be read from the next tick on.
"""

from __future__ import annotations

from ppctl.schedule.ir import KINDS, Kind, Schedule, Task
from ppctl.schedule.lockstep import Slots, TickCell
from ppctl.schedule.remat import Remat

HOPS = {"stay": 0, "next": 1, "previous": -1}

COLUMNS = (
    # the task: 0 for none, else 1 + its place among KINDS; its stage's chunk, is that the first / the last
    *("kind", "chunk", "microbatch", "first", "last"),
    # slots that it reads: activation, gradient; slots that it reads or writes: stash, pending
    *("act", "grad", "stash", "pending"),
    # after the tick, for each hop: does a value arrive by it, and in which slot
    *(f"{hop}_{what}" for hop in HOPS for what in ("arrives", "slot")),
)

KIND, MICROBATCH, ACT, GRAD, STASH, PENDING = (
    COLUMNS.index(name) for name in ("kind", "microbatch", "act", "grad", "stash", "pending")
)
NOTHING = [0] * len(COLUMNS)  # the columns of a rank without a task

Table = tuple[tuple[tuple[int, ...], ...], ...]  # [tick][rank][column]


def why_not(schedule: Schedule) -> str | None:
    """Why ranks in a ring, each with the same number of stages, cannot run `schedule`; None when they can."""
    num_ranks = schedule.num_ranks
    for stage, (here, there) in enumerate(zip(schedule.rank_of, schedule.rank_of[1:], strict=False)):
        if hop_between(here, there, num_ranks) is None:
            return (
                f"{schedule.name}: stages {stage} and {stage + 1} are on ranks {here} and {there}, but the spmd ring "
                f"goes from rank {here} to {(here - 1) % num_ranks} and {(here + 1) % num_ranks}. "
                "Use executor=mpmd, or a schedule with looped or V-shaped placement."
            )
    counts = [len(stages) for stages in schedule.stages_of]
    if len(set(counts)) > 1:
        return (
            f"{schedule.name}: the ranks hold {', '.join(map(str, counts))} stages, but executor=spmd needs the same "
            "number on each. Use executor=mpmd, or a schedule with looped or V-shaped placement."
        )
    return None


def hop_between(here: int, there: int, num_ranks: int) -> str | None:
    """The hop that takes a value from rank to rank, None if none does. Of two ranks either is next to the other.

    >>> hop_between(2, 2, 4), hop_between(3, 0, 4), hop_between(2, 1, 4), hop_between(1, 0, 2)
    ('stay', 'next', 'previous', 'next')
    """
    return next((hop for hop, step in HOPS.items() if (here + step) % num_ranks == there), None)


def assign_slots(
    schedule: Schedule, cells: tuple[tuple[TickCell, ...], ...], remat: Remat
) -> tuple[Table, dict[str, int]]:
    """Return (table, number of slots of each kind: value, stash, pending).

    Unless remat=full the output of the last stage's forward is the gradient of its activation, and always where the
    vocabulary is divided.
    """
    num_ranks, num_stages, number = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    last, is_divided = num_stages - 1, schedule.divides_vocabulary
    trains = any(task.kind in "BIW" for tasks in schedule.ranks for task in tasks)
    keep_input = trains and remat.keeps_input_only
    keep_stash = trains and not remat.keeps_input_only
    head_in_forward = keep_stash or (trains and is_divided)
    values, stashes, pendings = ([Slots() for _ in range(num_ranks)] for _ in range(3))
    # a value between stages by its number; a stash or pending gradient by (stage, microbatch)
    act = [stage * number for stage in range(num_stages)]
    embedded = (2 * num_stages + 1) * number
    grad = [(num_stages + stage) * number for stage in range(num_stages + 1)]
    columns = {(stage, kind): _columns(schedule, stage, kind) for stage in range(num_stages) for kind in KINDS}
    if keep_input and not is_divided:
        columns[last, "F"] = NOTHING  # left to the backward, which recomputes it

    def use(rank: int, task: Task) -> list[int]:
        """Return the columns of a task, whose slots are put and dropped."""
        stage, kind, m = task
        line = columns[stage, kind].copy()
        if not line[KIND]:
            return line
        line[MICROBATCH] = m
        if kind == "W":
            line[PENDING] = pendings[rank].drop((stage, m))
            return line
        if keep_stash:
            line[STASH] = stashes[rank].put((stage, m)) if kind == "F" else stashes[rank].drop((stage, m))
        if (stage > 0 or is_divided) and (kind == "F" or not keep_stash):
            stays = kind == "F" and keep_input
            value = (act[stage - 1] if stage > 0 else embedded) + m
            if stage == 0 and kind == "F":  # it was embedded right before
                values[rank].put(value)
            line[ACT] = values[rank].of[value] if stays else values[rank].drop(value)
        if kind != "F" and (stage < last or head_in_forward):
            line[GRAD] = values[rank].drop(grad[stage + 1] + m)
        if kind == "I":
            line[PENDING] = pendings[rank].put((stage, m))
        return line

    # for each kind and stage what it sends: (to which rank, the column that says so, the number of microbatch 0's)
    sent: dict[tuple[int, str], tuple[int, int, int]] = {}

    def sends(here: int, kinds: str, there: int, value: int) -> None:
        rank = schedule.rank_of[there]
        hop = hop_between(schedule.rank_of[here], rank, num_ranks)
        sent.update({(here, kind): (rank, COLUMNS.index(f"{hop}_arrives"), value) for kind in kinds})

    for stage in range(last):
        sends(stage, "F", stage + 1, act[stage])
        sends(stage + 1, "BI", stage, grad[stage + 1])
    if head_in_forward:
        sends(last, "F", last, grad[last + 1])

    table: list[tuple[tuple[int, ...], ...]] = []
    for row in cells:
        tasks = [forward or backward for forward, backward in row]
        # within a tick: all tasks, then the transfers
        lines = [NOTHING.copy() if task is None else use(rank, task) for rank, task in enumerate(tasks)]
        for task in tasks:
            if task is not None and task[:2] in sent:
                rank, arrives, value = sent[task[:2]]
                lines[rank][arrives] = 1
                lines[rank][arrives + 1] = values[rank].put(value + task.microbatch)
        table.append(tuple(map(tuple, lines)))
    kinds = {"value": values, "stash": stashes, "pending": pendings}
    return tuple(table), {name: max(slots.count for slots in of_rank) for name, of_rank in kinds.items()}


def _columns(schedule: Schedule, stage: int, kind: Kind) -> list[int]:
    """Return the columns that are the same for every microbatch of a stage's tasks of a kind."""
    first, last = int(stage == 0), int(stage == schedule.num_stages - 1)
    known = {"kind": 1 + KINDS.index(kind), "chunk": schedule.chunk_of[stage], "first": first, "last": last}
    return [known.get(name, 0) for name in COLUMNS]
