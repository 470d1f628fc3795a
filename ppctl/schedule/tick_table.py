"""The tables of ticks: for each rank its task, and the slots of the values it reads and writes.

A rank runs one task in a single-op tick ("op"), which serves split backwards and V placements.
Every task except W has one output, an activation or a gradient. After the tick the output stays on
its rank (at the turn of a V), or moves to rank r+1 or r-1 of the ring. The receiver's row of the
table gives the hop and the slot. Activations and gradients have one shape and share their slots.

A rank runs an F, then a B, in a forward-backward tick ("fb"). Activations move to rank r+1,
gradients to rank r-1. A value that arrives can be read from the next tick on.
"""

from itertools import pairwise, product
from typing import Literal

from ppctl.schedule.ir import KINDS, STAGE_WRITES, Kind, Schedule, Task, reads
from ppctl.schedule.lockstep_ticks import Cells, Part, Slots
from ppctl.schedule.remat import Remat

TickProgram = Literal["fb", "op"]  # program that runs the ticks; it sets the columns
HOPS = {"stay": 0, "next": 1, "previous": -1}  # receiver minus sender on the ring
FB_HOPS = {"act": 1, "grad": -1}  # receiver minus sender of outputs of forward-backward ticks
FB_COLUMNS = (
    # forward: run or not; chunk, microbatch, first / last stage or not; slot read, slots written
    *("f", "f_chunk", "f_microbatch", "f_first", "f_last", "f_act", "f_stash", "f_grad"),
    # backward: the same; slots read
    *("b", "b_chunk", "b_microbatch", "b_first", "b_last", "b_stash", "b_grad"),
    # after the tick: activation / gradient arrives or not, its slot
    *("act_arrives", "act_slot", "grad_arrives", "grad_slot"),
)
COLUMNS = (
    # kind: 0 for an idle rank, else 1 + index in KINDS; the others as above
    *("kind", "chunk", "microbatch", "first", "last"),
    # slots read: activation, gradient; slots read or written: stash, pending
    *("act", "grad", "stash", "pending"),
    # after the tick, for each hop: value arrives or not, its slot
    *(f"{hop}_{what}" for hop in HOPS for what in ("arrives", "slot")),
)
Table = tuple[tuple[tuple[int, ...], ...], ...]  # [tick][rank][column]


def why_not(schedule: Schedule) -> str | None:
    """Return why executor=spmd, a ring of ranks, cannot run `schedule`; None if it can."""
    num_ranks, name = schedule.num_ranks, schedule.name
    use = "Use executor=mpmd, or a schedule with looped or V-shaped placement."
    for stage, (here, there) in enumerate(pairwise(schedule.rank_of)):
        if hop_between(here, there, num_ranks) is None:
            return (
                f"{name}: stages {stage} and {stage + 1} are on ranks {here} and {there}, but the "
                f"spmd ring goes from rank {here} to {(here - 1) % num_ranks} and "
                f"{(here + 1) % num_ranks}. {use}"
            )
    counts = [len(stages) for stages in schedule.stages_of]
    if len(set(counts)) > 1:
        held = f"the ranks hold {', '.join(map(str, counts))} stages"
        return f"{name}: {held}, but executor=spmd needs the same number on each. {use}"
    return None


def hop_between(here: int, there: int, num_ranks: int) -> str | None:
    """Return the hop from rank `here` to rank `there`, a key of HOPS; None if not neighbours.

    The hop between two different ranks is always "next" if num_ranks is 2.

    >>> hop_between(2, 2, 4), hop_between(3, 0, 4), hop_between(2, 1, 4), hop_between(1, 0, 2)
    ('stay', 'next', 'previous', 'next')
    """
    return next((hop for hop, step in HOPS.items() if (here + step) % num_ranks == there), None)


def receivers(schedule: Schedule) -> dict[Part, tuple[str, int]]:
    """Return (name of a value, stage that reads it) for each (stage, kind) that sends a value."""
    readers: tuple[Kind, ...] = ("F", "B")
    return {
        (value.stage, kind): (value.name, stage)
        for stage, reader in product(range(schedule.num_stages), readers)
        for value in reads(Task(stage, reader, 0), schedule.num_stages)
        for kind in STAGE_WRITES
        if value.name in FB_HOPS and value.name in STAGE_WRITES[kind]
    }


def leaves_last_forward(schedule: Schedule, remat: Remat) -> bool:
    """Return whether the last stage skips its forward because its backward recomputes it."""
    return schedule.has_backward and remat.keeps_input_only and not schedule.part_ranks


def assign_slots(
    schedule: Schedule, cells: Cells, remat: Remat, program: TickProgram
) -> tuple[Table, dict[str, int]]:
    """Return (table, number of slots of each kind)."""
    slots = _RankSlots(schedule, remat, program)
    idle = [0] * len(FB_COLUMNS if program == "fb" else COLUMNS)
    table: list[tuple[tuple[int, ...], ...]] = []
    for row in cells:
        lines = [idle.copy() for _ in row]
        # within a tick: all forwards, then all backwards, then the transfers
        for place in (0, 1):
            for rank, cell in enumerate(row):
                task = cell[place]
                if task is not None:
                    slots.use(rank, task, lines[rank])
        for task in (task for cell in row for task in cell if task is not None):
            if task[:2] in slots.sent:
                rank, arrives, store, value = slots.sent[task[:2]]
                lines[rank][arrives] = 1
                lines[rank][arrives + 1] = store[rank].put(value + task.microbatch)
        table.append(tuple(map(tuple, lines)))
    counts = {name: max(each.count for each in store) for name, store in slots.stores.items()}
    return tuple(table), counts


class _RankSlots:
    """The slots of every rank, by the values in them.

    A stash or pending value is identified by (stage, microbatch), any other value by its number.
    """

    def __init__(self, schedule: Schedule, remat: Remat, program: TickProgram):
        trains, self.is_op = schedule.has_backward, program == "op"
        self.last, self.is_divided = schedule.num_stages - 1, bool(schedule.part_ranks)
        self.leaves_last = leaves_last_forward(schedule, remat)
        self.keep_input = trains and remat.keeps_input_only  # no backward: nothing to keep
        self.keep_stash = trains and not remat.keeps_input_only
        self.head_in_forward = self.keep_stash or (trains and self.is_divided)
        acts, grads, self.stashes, self.pendings = (
            [Slots() for _ in schedule.ranks] for _ in range(4)
        )
        self.acts, self.grads = acts, acts if self.is_op else grads
        self.stores = {"act": acts, "grad": grads, "stash": self.stashes}
        if self.is_op:
            self.stores = {"value": acts, "stash": self.stashes, "pending": self.pendings}
        # numbers of microbatch 0's values: the input of each stage, the gradient of its output
        num_stages, number = schedule.num_stages, schedule.num_microbatches
        self.act = [stage * number for stage in range(num_stages)]
        self.grad = [(num_stages + stage) * number for stage in range(num_stages)]
        self.at = {kind: task_columns(program, kind) for kind in KINDS}
        # the (column, value) pairs that all microbatches of a stage and kind share
        self.facts = dict[Part, list[tuple[int, int]]]()
        for stage, kind in product(range(num_stages), KINDS):
            at, is_last = self.at[kind], stage == self.last
            is_run = int(not (kind == "F" and is_last and self.leaves_last))
            first = at["kind"], 1 + KINDS.index(kind) if self.is_op else is_run
            chunk = at["chunk"], schedule.chunk_of[stage]
            ends = (at["first"], int(stage == 0)), (at["last"], int(is_last))
            self.facts[stage, kind] = [first, chunk, *ends]
        self.sent = self._sent(schedule)

    def use(self, rank: int, task: Task, line: list[int]) -> None:
        """Fill in a task's columns of `line`; take or free its slots."""
        stage, kind, m = task
        at, is_forward = self.at[kind], kind == "F"
        if self.is_op and is_forward and stage == self.last and self.leaves_last:
            return
        for column, value in self.facts[stage, kind]:
            line[column] = value
        line[at["microbatch"]] = m
        if kind == "W":
            line[at["pending"]] = self.pendings[rank].drop((stage, m))
            return
        if kind == "I":
            line[at["pending"]] = self.pendings[rank].put((stage, m))
        if self.keep_stash:
            stashes = self.stashes[rank]
            line[at["stash"]] = stashes.put((stage, m)) if is_forward else stashes.drop((stage, m))
        if (stage > 0 or self.is_divided) and (is_forward or not self.keep_stash):
            acts, value = self.acts[rank], self.act[stage] + m
            if stage == 0 and is_forward:  # E has just written it
                acts.put(value)
            stays = is_forward and self.keep_input
            line[at["act"]] = acts.of[value] if stays else acts.drop(value)
        grads, value = self.grads[rank], self.grad[stage] + m
        if not is_forward and (stage < self.last or self.head_in_forward):
            line[at["grad"]] = grads.drop(value)
        elif is_forward and stage == self.last and self.head_in_forward and not self.is_op:
            line[at["grad"]] = grads.put(value)

    def _sent(self, schedule: Schedule) -> dict[Part, tuple[int, int, list[Slots], int]]:
        """Return (receiving rank, arrival column, slots, microbatch 0's value) of each output."""
        sent: dict[Part, tuple[int, int, list[Slots], int]] = {}

        def arrives(name: str, here: int, there: int) -> int:
            if not self.is_op:
                return FB_COLUMNS.index(f"{name}_arrives")
            return COLUMNS.index(f"{hop_between(here, there, schedule.num_ranks)}_arrives")

        for (stage, kind), (value, reader) in receivers(schedule).items():
            store, numbers = (self.acts, self.act) if value == "act" else (self.grads, self.grad)
            here, there = schedule.rank_of[stage], schedule.rank_of[reader]
            sent[stage, kind] = there, arrives(value, here, there), store, numbers[reader]
        if self.head_in_forward and self.is_op:
            rank = schedule.rank_of[self.last]
            sent[self.last, "F"] = rank, arrives("", rank, rank), self.grads, self.grad[self.last]
        return sent


def task_columns(program: TickProgram, kind: Kind) -> dict[str, int]:
    """Return the indices of a task's columns, by their names in single-op ticks."""
    if program == "op":
        return {name: i for i, name in enumerate(COLUMNS)}
    way = "f" if kind == "F" else "b"
    names = {name.removeprefix(f"{way}_"): i for i, name in enumerate(FB_COLUMNS)}
    # in fb ticks a backward has one column for its stash or, if it recomputes, its input
    return {"act": names["stash"], **names, "kind": FB_COLUMNS.index(way)}
