"""The message on ranks that wait for each other names tasks whose order is really wrong."""

import random
import re
from dataclasses import replace

import pytest

from ppctl.errors import ScheduleError
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Task, reads, writes
from ppctl.schedule.validation import validate


def ancestors(schedule):
    """By task, all that must run before it: a closure of reads and writes, found the slow way."""
    tasks = [task for program in schedule.ranks for task in program]
    writer = {value: task for task in tasks for value in writes(task)}
    found = {task: {writer[value] for value in reads(task, schedule.num_stages)} for task in tasks}
    while True:
        wider = {
            task: before.union(*(found[each] for each in before)) for task, before in found.items()
        }
        if wider == found:
            return found
        found = wider


def swapped(schedule, choose):
    """The schedule with a few tasks of its ranks moved."""
    ranks = [list(program) for program in schedule.ranks]
    for _ in range(choose.randint(1, 3)):
        program = choose.choice(ranks)
        program.insert(choose.randrange(len(program)), program.pop(choose.randrange(len(program))))
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def fault(schedule):
    try:
        validate(schedule)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_named_tasks_are_in_that_order_and_cannot_be(family):
    choose, kinds = random.Random(family), {"depends": 0, "circle": 0}
    while min(kinds.values()) < 5:
        schedule = swapped(build(family, choose.choice((2, 4)), 4), choose)
        if (error := fault(schedule)) is not None:
            cause = error.partition("\n")[0].partition("which no rank can write any more. ")[2]
            named = [
                (int(rank), Task.parse(first), Task.parse(later))
                for rank, first, later in re.findall(r"ank (\d+) has (\w+) before (\w+)", cause)
            ]
            assert named
            for rank, first, later in named:
                program = schedule.ranks[rank]
                assert program.index(first) < program.index(later)
            before = ancestors(schedule)
            if cause.endswith("on which it depends."):
                ((_, first, later),) = named
                assert later in before[first]
                kinds["depends"] += 1
            else:
                assert cause.endswith(": each waits for the other.")
                # along the circle: where a rank stands waits for what stands too late on another
                for _, first, _ in named:
                    assert any(later in before[first] for _, _, later in named)
                kinds["circle"] += 1
