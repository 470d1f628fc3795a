"""The lowering to ticks keeps the schedule, and its table drives the right values through the right
slots.
"""

import pytest
from support.sizes import by_ranks, grid, make

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import Schedule, Task, Value, reads, writes
from ppctl.schedule.lockstep_ticks import counted, counted_s, pack
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import forward_only, ticks
from ppctl.schedule.tick_table import FB_COLUMNS
from ppctl.schedule.validation import validate

COSTS = Costs()  # F=1, B=2
SIZES = grid(rounds=(1, 2))
remats = pytest.mark.parametrize("remat", [Remat.FULL, Remat.NONE])  # layer is lowered as none is
FORWARD_BACKWARD = Costs(1, 0.5, 0.5)  # F=B: no reason to pair them


# --- the cells keep the schedule ----------------------------------------------------------------


def check_cells(schedule, cells):
    """Every task once, in program order, at most one F and one B a tick, nothing read before it is
    there.
    """
    num_stages = schedule.num_stages
    for rank, program in enumerate(schedule.ranks):
        run = [task for row in cells for task in row[rank] if task is not None]
        assert run == list(program)
    written = {}
    for t, row in enumerate(cells):
        for cell in row:
            assert cell.forward is None or cell.forward.kind == "F"
            assert cell.backward is None or cell.backward.kind == "B"
            for task in filter(None, cell):
                written |= dict.fromkeys(writes(task), (t, task.kind))
    for t, row in enumerate(cells):
        for task in (task for cell in row for task in cell if task is not None):
            for value in reads(task, num_stages):
                at, kind = written[value]
                # a stash never leaves its rank: the backward of the same tick may have it
                assert at < t or (at == t and value.name == "stash" and kind == "F")
    assert any(task is not None for cell in cells[-1] for task in cell)


@pytest.mark.parametrize("shape", ["op", "fb"])
@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_ticks_run_every_task_once_in_program_order_after_its_inputs(sizes, shape):
    for size in sizes:
        schedule = make(*size)
        for program in (schedule, forward_only(schedule)):
            cells = pack(program, shape)
            check_cells(program, cells)
            if shape == "op":
                assert all(None in cell for row in cells for cell in row)


@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_the_cheaper_shape_is_taken(sizes):
    for size in sizes:
        schedule = make(*size)
        for costs in (COSTS, FORWARD_BACKWARD, Costs(1, 1, 1, 5)):
            rows = [counted(schedule, pack(schedule, shape)) for shape in ("op", "fb")]
            cheapest = min(counted_s(each, costs, schedule.num_chunks) for each in rows)
            lowered = ticks(schedule, costs)
            assert lowered.makespan_s(costs) == pytest.approx(
                cheapest, rel=1e-12
            )  # summed in another order
            assert lowered.cells == pack(schedule, lowered.shape)
            assert lowered.num_ticks == len(lowered.cells) == len(lowered.table)


# --- the table moves the values -----------------------------------------------------------


class Machine:
    """Runs a table as the spmd executor does, on names of values. Uses only a device's knowledge of
    the schedule.
    """

    def __init__(self, lowered, keep_input):
        self.lowered, self.keep_input = lowered, keep_input
        schedule = lowered.schedule
        self.num_ranks, self.last = schedule.num_ranks, schedule.num_stages - 1
        slots = lowered.num_slots
        self.slots = {
            name: [[None] * count for _ in range(self.num_ranks)] for name, count in slots.items()
        }
        self.live = {
            name: [set() for _ in range(self.num_ranks)] for name in slots
        }  # slots whose value is still needed
        self.losses, self.gradients, self.most_live = [], [], dict.fromkeys(slots, 0)

    def write(self, name, rank, slot, value):
        assert slot not in self.live[name][rank], (
            f"{value} overwrites {self.slots[name][rank][slot]}"
        )
        self.slots[name][rank][slot] = value
        self.live[name][rank].add(slot)
        self.most_live[name] = max(self.most_live[name], max(map(len, self.live[name])))

    def read(self, name, rank, slot, value, last):
        assert slot in self.live[name][rank]
        assert self.slots[name][rank][slot] == value
        if last:
            self.live[name][rank].remove(slot)

    def place(self, at, prefix, rank):
        """(stage, microbatch) of a cell; the flags agree."""
        stage = at[f"{prefix}_chunk"] * self.num_ranks + rank
        assert (at[f"{prefix}_first"], at[f"{prefix}_last"]) == (stage == 0, stage == self.last)
        return stage, at[f"{prefix}_microbatch"]

    def forward(self, at, rank):
        stage, m = self.place(at, "f", rank)
        trains = self.lowered.has_backward
        if stage > 0:
            self.read(
                "act",
                rank,
                at["f_act"],
                Value("act", stage - 1, m),
                last=not (trains and self.keep_input),
            )
        if trains and not self.keep_input:
            self.write("stash", rank, at["f_stash"], Value("stash", stage, m))
        if stage == self.last:
            self.losses.append(m)
            if trains:
                self.write("grad", rank, at["f_grad"], Value("grad", stage + 1, m))
        return Value("act", stage, m)

    def backward(self, at, rank):
        stage, m = self.place(at, "b", rank)
        if not self.keep_input:
            self.read("stash", rank, at["b_stash"], Value("stash", stage, m), last=True)
        elif stage > 0:
            self.read("act", rank, at["b_stash"], Value("act", stage - 1, m), last=True)
        if self.keep_input and stage == self.last:
            self.losses.append(m)  # the loss is computed again, from the input
        else:
            self.read("grad", rank, at["b_grad"], Value("grad", stage + 1, m), last=True)
        self.gradients.append((stage, m))
        return Value("grad", stage, m)

    def run(self):
        for row in self.lowered.table:
            cells = [dict(zip(FB_COLUMNS, columns, strict=True)) for columns in row]
            sent = {"act": [None] * self.num_ranks, "grad": [None] * self.num_ranks}
            for rank, at in enumerate(cells):
                if at["f"]:
                    sent["act"][rank] = self.forward(at, rank)
            for rank, at in enumerate(cells):
                if at["b"]:
                    sent["grad"][rank] = self.backward(at, rank)
            for rank, at in enumerate(cells):
                for name, hop in (("act", 1), ("grad", -1)):
                    if at[f"{name}_arrives"]:
                        value = sent[name][(rank - hop) % self.num_ranks]
                        assert value is not None, f"{name} arrives from an idle rank"
                        self.write(name, rank, at[f"{name}_slot"], value)
        return self


def check_table(lowered, keep_input):
    schedule, machine = lowered.schedule, Machine(lowered, keep_input).run()
    assert all(
        not slots for of_rank in machine.live.values() for slots in of_rank
    )  # everything that arrived was used
    assert sorted(machine.losses) == list(range(schedule.num_microbatches))
    places = [(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)]
    assert sorted(machine.gradients) == (places if lowered.has_backward else [])
    # no slot too many: at some tick the busiest rank needs them all
    assert machine.most_live == lowered.num_slots


@remats
@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_the_table_brings_every_value_where_it_is_read_and_no_slot_holds_two(sizes, remat):
    for size in sizes:
        schedule = make(*size)
        for costs in (COSTS, FORWARD_BACKWARD):
            check_table(ticks(schedule, costs, remat), remat.keeps_input_only)


@remats
@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_schedules_of_only_forwards_keep_no_residuals(sizes, remat):
    for size in sizes:
        schedule = make(*size)
        lowered = ticks(forward_only(schedule), COSTS, remat)
        assert not lowered.has_backward
        assert lowered.num_slots["stash"] == lowered.num_slots["grad"] == 0
        names = dict(
            zip(
                FB_COLUMNS,
                zip(*(columns for row in lowered.table for columns in row), strict=True),
                strict=True,
            )
        )
        assert not any(any(names[name]) for name in FB_COLUMNS if name.startswith(("b", "grad")))
        assert (
            sum(names["f"]) == schedule.num_stages * schedule.num_microbatches
        )  # the last stage's forward runs too
        check_table(lowered, remat.keeps_input_only)


def test_schedules_of_only_forwards_keep_their_order():
    schedule = build("interleaved", 2, 4)
    program = forward_only(schedule)
    assert program.name == "interleaved (forward only)"
    for before, after in zip(schedule.ranks, program.ranks, strict=True):
        assert [task for task in before if task.kind == "F"] == list(after)


# --- costs ------------------------------------------------------------------------------


@remats
@pytest.mark.parametrize(
    ("family", "V"), [("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 1), ("interleaved", 2)]
)
def test_slots_do_not_depend_on_the_number_of_microbatches(family, V, remat):
    def counts(m):
        return ticks(make(family, 4, m, V), COSTS, remat).num_slots

    assert counts(16) == counts(64) == counts(256)
    assert sum(counts(16).values()) < 32


@remats
def test_slots_of_gpipe_grow_with_the_number_of_microbatches(remat):
    for m in (16, 64):
        lowered = ticks(build("gpipe", 4, m), COSTS, remat)
        assert max(lowered.num_slots.values()) == m


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize(
    ("family", "V", "low", "high"),
    [
        ("gpipe", 1, 1.0, 1.0),
        ("eager_1f1b", 1, 1.0, 1.0),
        ("interleaved", 2, 1.0, 1.0),
        ("1f1b", 1, 1.24, 1.28),
    ],
)
def test_lockstep_stretches_only_1f1b(family, V, low, high, p):
    schedule = make(family, p, 4 * p, V)
    lowered, free_s = ticks(schedule, COSTS), simulate(schedule, COSTS).makespan_s
    assert low - 1e-12 <= lowered.makespan_s(COSTS) / free_s <= high + 1e-12
    busy_s = 4 * p * (COSTS.forward_s + COSTS.backward_s)
    assert lowered.bubble_fraction(COSTS) == pytest.approx(1 - busy_s / lowered.makespan_s(COSTS))


@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_lockstep_is_never_faster_than_free_running_ranks(sizes):
    for size in sizes:
        schedule = make(*size)
        for costs in (COSTS, FORWARD_BACKWARD, Costs(1, 1.05, 0.75)):
            assert (
                ticks(schedule, costs).makespan_s(costs)
                >= simulate(schedule, costs).makespan_s - 1e-9
            )


# --- what cannot be lowered ---------------------------------------------------------------------


def forwards_and_backwards(rank_of):
    """A schedule of one microbatch with that placement."""
    tasks = [Task(s, "F", 0) for s in range(len(rank_of))]
    tasks += [Task(s, "B", 0) for s in reversed(range(len(rank_of)))]
    ranks = tuple(
        tuple(task for task in tasks if rank_of[task.stage] == r) for r in range(max(rank_of) + 1)
    )
    return validate(Schedule("mine", ranks, rank_of, 1))


def test_a_hop_between_ranks_that_are_not_neighbours_is_refused():
    with pytest.raises(ScheduleError) as error:
        ticks(forwards_and_backwards((0, 2, 1, 3)), COSTS)
    assert str(error.value) == (
        "mine: stages 0 and 1 are on ranks 0 and 2, but the spmd ring goes from rank 0 to 3 and 1. "
        "Use executor=mpmd, or a schedule with looped or V-shaped placement."
    )


def test_ranks_with_different_numbers_of_stages_are_refused():
    with pytest.raises(ScheduleError) as error:
        ticks(forwards_and_backwards((0, 1, 1)), COSTS)
    assert str(error.value) == (
        "mine: the ranks hold 1, 2 stages, but executor=spmd needs the same number on each. "
        "Use executor=mpmd, or a schedule with looped or V-shaped placement."
    )


def test_ranks_that_wait_for_each_other_are_refused():
    programs = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    ranks = tuple(tuple(map(Task.parse, program.split())) for program in programs)
    with pytest.raises(ScheduleError, match=r"waits for .*, which no rank can write any more"):
        ticks(Schedule("stuck", ranks, (0, 1), 2), COSTS)
