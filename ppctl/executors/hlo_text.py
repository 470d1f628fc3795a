"""The text of compiled HLO: its computations, their instructions, and what each of these calls."""

from __future__ import annotations

import re
from typing import NamedTuple

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(r"\b(to_apply|calls|body|condition|(?:true|false)_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
OP_NAME = re.compile(r'metadata=\{.*?op_name="([^"]*)"')


class Call(NamedTuple):
    """A computation that an instruction calls."""

    computation: str
    how: str  # the attribute that names it: to_apply | calls | body | condition | branch
    times: int | None  # calls a run of the instruction; None: a loop of unknown length
    is_branch: bool  # whether it is one of several branches


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """Return (name of the entry, lines of each computation)."""
    entry, name, found = "", "", {}
    for line in text.splitlines():
        head = None if line[:1].isspace() else COMPUTATION.match(line)
        if head is not None and not line.startswith("HloModule"):
            name = head[2]
            entry = name if head[1] else entry
            found[name] = []
        elif name:
            found[name].append(line)
    return entry, found


def calls(line: str) -> list[Call]:
    """Return the computations that an instruction calls; a conditional's: false, then true.

    >>> [call.how for call in calls("%w = s32[] while(%x), condition=%c, body=%b")]
    ['condition', 'body']
    """
    is_branch = " conditional(" in line
    turns, times = TURNS.search(line), 1
    if " while(" in line:
        times = None if turns is None else int(turns[1])
    named = sorted(CALLED.findall(line), key=lambda call: call[0] == "true_computation")
    found = [Call(name, "branch" if is_branch else how, times, is_branch) for how, name in named]
    branches = BRANCHES.search(line)
    listed = [] if branches is None else branches[1].split(",")
    names = [name.strip().lstrip("%") for name in listed]
    return found + [Call(name, "branch" if is_branch else "calls", 1, is_branch) for name in names]


def name_of(line: str) -> str | None:
    """Return the name of the instruction in a line, or None."""
    found = NAME.match(line)
    return None if found is None else found[1]


def path_of(line: str) -> str:
    """Return an instruction's path in the traced function: "jit(step)/while/body/dot_general"."""
    found = OP_NAME.search(line)
    return "" if found is None else found[1]
