"""The order of collectives in the text of compiled programs.

XLA for CPUs only starts collectives in the program's order, and a branch that waits for a thread
counts as started. Devices that then differ in the order wait for each other forever.
"""

import re
from functools import cache

from ppctl.executors.hlo_text import COLLECTIVE, calls, computations, name_of

OPERAND = re.compile(r"%([\w.\-]+)")


def unordered(text):
    """Pairs of a branch or loop with collectives, and a later collective that may start before."""
    _, lines = computations(text)

    @cache
    def communicates(name):
        return any(COLLECTIVE.match(line) or any(called(line)) for line in lines.get(name, ()))

    def called(line):
        return (communicates(call.computation) for call in calls(line))

    found = []
    for body in lines.values():
        flows, before = [], {}  # before: name -> names of the branches and loops that it waits for
        for line in body:
            name, is_flow = name_of(line), any(called(line))
            if name is None:
                continue
            operands = [each for each in OPERAND.findall(line) if each in before]
            before[name] = set().union(*(before[each] for each in operands))
            if is_flow or COLLECTIVE.match(line):
                found += [(flow, name) for flow in flows if flow not in before[name]]
            if is_flow:
                flows.append(name)
                before[name] = before[name] | {name}
    return found


def assert_ordered(texts):
    """Assert that programs have collectives, and that data orders all of them."""
    assert any(COLLECTIVE.match(line) for text in texts for line in text.splitlines())
    found = [pair for text in texts for pair in unordered(text)]
    assert not found, found
