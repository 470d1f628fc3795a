"""Collectives of a compiled program, read from its HLO: their kinds, bytes, and how often a run has them.

The text states how often a loop turns where the compiler knows it (`known_trip_count`), as it does of every scan.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-permute"),
    *("all-to-all", "ragged-all-to-all", "collective-broadcast"),
)
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ({'|'.join(KINDS)})(-start)?\(")
CALLED = re.compile(r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\]")


@dataclass(frozen=True)
class Collective:
    """Instructions of a kind that run equally often. Bytes are of their results on one device, of one run of each."""

    kind: str
    instructions: int
    times: int | None  # that a run of the program has each; None: the compiler does not know how often a loop turns
    is_at_most: bool  # they stand in a branch that a device may not take
    bytes: int

    @property
    def all_bytes(self) -> int | None:
        """Bytes of a run of the program."""
        return None if self.times is None else self.times * self.bytes


@dataclass(frozen=True)
class _Call:
    computation: str
    times: int | None
    is_branch: bool


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a program, from its compiled HLO, those of a kind and as many runs together.

    >>> text = "ENTRY %main (x: f32[2]) -> f32[8] {\\n  ROOT %g = f32[8]{0} all-gather(%x), dimensions={0}\\n}"
    >>> collectives(text)
    [Collective(kind='all-gather', instructions=1, times=1, is_at_most=False, bytes=32)]
    """
    entry, lines = _computations(text)
    callers: dict[str, list[_Call]] = {name: [] for name in lines}
    for name, body in lines.items():
        for line in body:
            for called, times, is_branch in _calls(line):
                if called in callers:  # kernels that are not in the text have names, too
                    callers[called].append(_Call(name, times, is_branch))

    @cache
    def runs(name: str) -> tuple[int | None, bool]:
        """Return (how often a run of the program has this computation, whether at most)."""
        if name == entry:
            return 1, False
        total: int | None = 0
        is_at_most = False
        for call in callers[name]:
            above, above_at_most = runs(call.computation)
            if total is None or above is None or call.times is None:
                total = None
            else:
                total += above * call.times
            is_at_most |= call.is_branch or above_at_most
        return total, is_at_most

    number, size = Counter[tuple](), Counter[tuple]()
    for name, body in lines.items():
        for line in body:
            found = COLLECTIVE.match(line)
            if found is not None:
                which = found[2], *runs(name)
                number[which] += 1
                size[which] += _bytes(found[1], found[2], is_start=found[3] is not None)
    return [Collective(which[0], number[which], which[1], which[2], size[which]) for which in number]


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
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


def _calls(line: str) -> list[tuple[str, int | None, bool]]:
    """Return (computation, times, whether it is a branch) of each that an instruction calls."""
    called = CALLED.findall(line)
    branches = BRANCHES.search(line)
    many = [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else []
    if " while(" in line:
        turns = TURNS.search(line)
        return [(name, None if turns is None else int(turns[1]), False) for name in called]
    is_branch = " conditional(" in line
    return [(name, 1, is_branch) for name in called + many]


def _bytes(shape: str, kind: str, *, is_start: bool) -> int:
    """Return the bytes of the result of an instruction of this shape; one that starts has its operands before it."""
    if is_start and kind != "all-reduce":
        shape = _entries(shape)[1]
    return sum(_array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(shape))


def _entries(shape: str) -> list[str]:
    """Return the entries of a tuple's shape."""
    found, depth = [""], 0
    for letter in shape.strip()[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def _array_bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    width = 8 if dtype == "pred" else 0 if bits is None else int(bits[0])
    return prod(int(size.removeprefix("<=")) for size in dims.split(",") if size) * width // 8
