"""The table of a schedule with one task of any kind a tick, for split backwards and for placements that turn.

Every task but a W has one output, an activation or a gradient. After the tick it stays on its rank (the turn of a V),
or goes one hop to rank r+1 or r-1, round the ring; its receiver's table says from where, and into which slot. Both
kinds of output have one shape and share their slots. What arrives can be read from the next tick on.
"""

from __future__ import annotations

from ppctl.schedule.ir import KINDS, Schedule, Task, Value
from ppctl.schedule.lockstep import Cell, Slots

HOPS = {"stay": 0, "next": 1, "previous": -1}

COLUMNS = (
    # the task: 0 for none, else 1 + its place among KINDS; its stage's chunk, is that the first / the last
    *("kind", "chunk", "microbatch", "first", "last"),
    # slots that it reads: activation, gradient; slots that it reads or writes: stash, pending
    *("act", "grad", "stash", "pending"),
    # after the tick, for each hop: does a value arrive by it, and in which slot
    *(f"{hop}_{what}" for hop in HOPS for what in ("arrives", "slot")),
)

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
    schedule: Schedule, cells: tuple[tuple[Cell, ...], ...], *, keep_input: bool, head_in_forward: bool
) -> tuple[Table, dict[str, int]]:
    """(table, number of slots of each kind: value, stash, pending); the arguments are those of `ticks`.

    With head_in_forward the output of the last stage's forward is the gradient of its activation.
    """
    num_ranks, last = schedule.num_ranks, schedule.num_stages - 1
    trains = any(task.kind != "F" for tasks in schedule.ranks for task in tasks)
    keep_input, keep_stash = trains and keep_input, trains and not keep_input
    slots = {name: [Slots() for _ in range(num_ranks)] for name in ("value", "stash", "pending")}

    def use(rank: int, task: Task) -> dict[str, int]:
        """The columns of a task, whose slots are taken and freed."""
        stage, kind, m = task
        act, grad = Value("act", stage - 1, m), Value("grad", stage + 1, m)
        values, stashes, pendings = (slots[name][rank] for name in ("value", "stash", "pending"))
        line = {"kind": 1 + KINDS.index(kind), "chunk": schedule.chunk_of[stage], "microbatch": m}
        line |= {"first": int(stage == 0), "last": int(stage == last)}
        if kind == "F":
            if keep_input and stage == last:
                return {}  # left to the backward, which recomputes it
            if stage > 0:
                line["act"] = values.of[act] if keep_input else values.drop(act)
            if keep_stash:
                line["stash"] = stashes.put(Value("stash", stage, m))
            return line
        if kind == "W":
            return line | {"pending": pendings.drop(Value("pending", stage, m))}
        if keep_stash:
            line["stash"] = stashes.drop(Value("stash", stage, m))
        elif stage > 0:
            line["act"] = values.drop(act)
        if stage < last or head_in_forward:
            line["grad"] = values.drop(grad)
        if kind == "I":
            line["pending"] = pendings.put(Value("pending", stage, m))
        return line

    def output(task: Task) -> tuple[Value, int] | None:
        """What a task sends, and to which stage."""
        stage, kind, m = task
        if kind == "F" and stage < last:
            return Value("act", stage, m), stage + 1
        if kind == "F" and trains and head_in_forward:
            return Value("grad", last + 1, m), last
        return (Value("grad", stage, m), stage - 1) if kind in "BI" and stage > 0 else None

    table = []
    for row in cells:
        tasks = [cell.forward or cell.backward for cell in row]
        # within a tick: all tasks, then the transfers
        lines = [{} if task is None else use(rank, task) for rank, task in enumerate(tasks)]
        for here, task in enumerate(tasks):
            sent = None if task is None else output(task)
            if sent is not None:
                value, stage = sent
                there = schedule.rank_of[stage]
                hop = hop_between(here, there, num_ranks)
                lines[there] |= {f"{hop}_arrives": 1, f"{hop}_slot": slots["value"][there].put(value)}
        table.append(tuple(tuple(line.get(name, 0) for name in COLUMNS) for line in lines))
    return tuple(table), {name: max(s.count for s in of_rank) for name, of_rank in slots.items()}
