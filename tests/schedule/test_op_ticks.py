"""Ticks of one task of any kind: the table drives every value of every family through the right
slots.
"""

import pytest
from support.all_families import cases
from support.sizes import random_programs

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import KINDS, Value
from ppctl.schedule.lockstep_ticks import pack
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import forward_only, ticks
from ppctl.schedule.tick_table import COLUMNS, HOPS, assign_slots

UNIT = Costs(1, 1, 1)
remats = pytest.mark.parametrize("remat", [Remat.FULL, Remat.NONE])  # layer is lowered as none is


class Machine:
    """Runs a table as the spmd executor does, on names of values. Uses only a device's knowledge of
    the schedule.
    """

    def __init__(self, schedule, table, num_slots, keep_input):
        self.schedule, self.table, self.keep_input = schedule, table, keep_input
        self.last = schedule.num_stages - 1
        self.trains = any(task.kind != "F" for tasks in schedule.ranks for task in tasks)
        self.slots = [
            {name: [None] * count for name, count in num_slots.items()}
            for _ in range(schedule.num_ranks)
        ]
        self.most = dict.fromkeys(num_slots, 0)
        self.losses, self.done = [], []

    def write(self, rank, name, slot, value):
        assert self.slots[rank][name][slot] is None, (
            f"{value} overwrites {self.slots[rank][name][slot]}"
        )
        self.slots[rank][name][slot] = value
        self.most[name] = max(self.most[name], sum(v is not None for v in self.slots[rank][name]))

    def read(self, rank, name, slot, value, *, last=True):
        assert self.slots[rank][name][slot] == value
        if last:
            self.slots[rank][name][slot] = None

    def run_task(self, rank, at):
        """The output of the rank's task."""
        stage, m, kind = (
            self.schedule.stages_of[rank][at["chunk"]],
            at["microbatch"],
            KINDS[at["kind"] - 1],
        )
        assert (at["first"], at["last"]) == (stage == 0, stage == self.last)
        self.done.append((stage, kind, m))
        act, stash, pending = (
            Value("act", stage - 1, m),
            Value("stash", stage, m),
            Value("pending", stage, m),
        )
        if kind == "W":
            return self.read(rank, "pending", at["pending"], pending)
        if kind == "F":
            if stage > 0:
                self.read(rank, "value", at["act"], act, last=not (self.trains and self.keep_input))
            if self.trains and not self.keep_input:
                self.write(rank, "stash", at["stash"], stash)
            if stage == self.last:
                self.losses.append(m)
                return Value("grad", stage + 1, m)
            return Value("act", stage, m)
        if not self.keep_input:
            self.read(rank, "stash", at["stash"], stash)
        elif stage > 0:
            self.read(rank, "value", at["act"], act)
        if self.keep_input and stage == self.last:
            self.losses.append(m)
        else:
            self.read(rank, "value", at["grad"], Value("grad", stage + 1, m))
        if kind == "I":
            self.write(rank, "pending", at["pending"], pending)
        return Value("grad", stage, m)

    def run(self):
        ranks = range(self.schedule.num_ranks)
        for row in self.table:
            cells = [dict(zip(COLUMNS, columns, strict=True)) for columns in row]
            sent = [
                self.run_task(rank, at) if at["kind"] else None for rank, at in enumerate(cells)
            ]
            for rank, at in enumerate(cells):
                for hop, step in HOPS.items():
                    if at[f"{hop}_arrives"]:
                        value = sent[(rank - step) % len(ranks)]
                        assert value is not None, "a value arrives from a rank that sent none"
                        self.write(rank, "value", at[f"{hop}_slot"], value)
        return self


def check_table(schedule, remat):
    table, num_slots = assign_slots(schedule, pack(schedule, "op"), remat, "op")
    machine = Machine(schedule, table, num_slots, remat.keeps_input_only).run()
    assert not any(
        value for of_rank in machine.slots for slots in of_rank.values() for value in slots
    )  # all was used
    assert sorted(machine.losses) == list(range(schedule.num_microbatches))
    tasks = {tuple(task) for tasks in schedule.ranks for task in tasks}
    if machine.trains and remat.keeps_input_only:  # left to the backward
        tasks -= {(machine.last, "F", m) for m in range(schedule.num_microbatches)}
    assert len(machine.done) == len(tasks)
    assert set(machine.done) == tasks
    assert (
        machine.most == num_slots
    )  # no slot too many: at some tick the busiest rank needs them all


@remats
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_table_brings_every_value_where_it_is_read_and_no_slot_holds_two(p, remat):
    for family, num_ranks, m, knobs in cases(ranks=(p,), microbatches=lambda p: (p, 2 * p, 3 * p)):
        schedule = build(family, num_ranks, m, **knobs)
        for program in (schedule, forward_only(schedule)):
            check_table(program, remat)


@remats
def test_programs_of_no_family_keep_their_values_apart_too(remat):
    for schedule in random_programs():
        check_table(schedule, remat)


def test_only_a_placement_that_turns_keeps_a_value_on_its_rank():
    def hops(family, p):
        table = ticks(build(family, p, 2 * p), UNIT).table
        columns = zip(
            COLUMNS, zip(*(line for row in table for line in row), strict=True), strict=True
        )
        return {
            name.removesuffix("_arrives")
            for name, values in columns
            if name.endswith("_arrives") and any(values)
        }

    assert hops("zb_h1", 4) == {"next", "previous"}
    assert hops("zb_v", 4) == {"stay", "next", "previous"}
    assert hops("zb_h1", 2) == {"next"}  # the other rank is next to this one either way
    assert hops("zb_v", 1) == {"stay"}


@remats
@pytest.mark.parametrize(
    "family", ["zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "gis", "dualpipe_v"]
)
def test_slots_do_not_depend_on_the_number_of_microbatches(family, remat):
    few, many = (ticks(build(family, 4, m), UNIT, remat).num_slots for m in (16, 64))
    assert few == many
    assert sum(few.values()) < 48


@pytest.mark.parametrize("family", ["zb_h1", "zb_h2", "interleaved_zb", "zb_v", "gis"])
def test_lockstep_loses_little_where_all_tasks_take_as_long(family):
    schedule = build(family, 8, 32)
    assert ticks(schedule, UNIT).makespan_s(UNIT) <= 1.04 * simulate(schedule, UNIT).makespan_s
