"""The text of compiled HLO: its computations, their calls, and its collectives.

The text states the trip count of loops that the compiler knows, such as scans, and the devices that
communicate, numbered as in the mesh.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(r"\b(to_apply|calls|body|condition|(?:true|false)_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
OP_NAME = re.compile(r'metadata=\{.*?op_name="([^"]*)"')
KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-permute"),
    *("all-to-all", "ragged-all-to-all", "collective-broadcast"),
)
COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ({'|'.join(KINDS)})(-start)?\(")
DONE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .+? [\w\-]+-done\(.*?%([\w.\-]+)")
PRODUCT = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"[^\"]*(?:matmul|gemm|cudnn|triton)"
)
GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# groups written as a mesh: (axes with sizes, device ids if out of order, axes or parts of axes
# along which the devices of a group lie)
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.+?)\))? \{([^}]*)\}")
MESH_AXIS = re.compile(r"([^,=]+)=(\d+)")
GROUP_AXIS = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?(?:,|$)")
MESH_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+)")
ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,<=]*)\]")


class Call(NamedTuple):
    """A computation that an instruction calls."""

    computation: str
    how: str  # attribute that names the computation: to_apply | calls | body | condition | branch
    times: int | None  # calls per run of the instruction; None: a loop of unknown length
    is_branch: bool  # whether it is a branch of a conditional, which might be skipped


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """Return (name of the entry computation, lines of each computation)."""
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
    """Return the computations that an instruction calls; a conditional's false branch is first.

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
    """Return the name of the instruction in a line; None for other lines."""
    found = NAME.match(line)
    return None if found is None else found[1]


def path_of(line: str) -> str:
    """Return an instruction's path in the traced function, such as "jit(step)/while/body/mul"."""
    found = OP_NAME.search(line)
    return "" if found is None else found[1]


@dataclass(frozen=True)
class Collective:
    """Collective instructions with the same kind, axes and number of runs."""

    kind: str
    axes: tuple[str, ...]  # axes of the mesh along which devices communicate
    instructions: int
    times: int | None  # runs per run of the program; None: a loop of unknown length
    is_at_most: bool  # whether `times` is an upper bound: instructions in a branch may be skipped
    bytes: int  # bytes on one device of all instructions' results, if each runs once
    overlapped: int  # number of instructions with a product between start and done

    @property
    def all_bytes(self) -> int | None:
        """Bytes per run of the program; None if unknown."""
        return None if self.times is None else self.times * self.bytes


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Return the collectives of compiled HLO, grouped by kind, axes and number of runs.

    mesh: the axes of the program's devices, with their sizes.

    >>> gather = "ROOT %g = f32[8]{0} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0)"
    >>> text = f"ENTRY %main (x: f32[2]) -> f32[8] {{\\n  {gather}\\n}}"
    >>> [(each.kind, each.axes, each.bytes) for each in collectives(text, {"pp": 4, "fsdp": 2})]
    [('all-gather', ('pp',), 32)]
    """
    # 1. how often each computation runs
    entry, lines = computations(text)
    callers: dict[str, list[tuple[str, int | None, bool]]] = {name: [] for name in lines}
    for name, body in lines.items():
        for line in body:
            for call in calls(line):
                if call.computation in callers:  # calls may name kernels that are not in the text
                    callers[call.computation].append((name, call.times, call.is_branch))

    @cache
    def runs(name: str) -> tuple[int | None, bool]:
        """Return (runs of a computation per run of the program, whether that is an upper bound)."""
        if name == entry:
            return 1, False
        total: int | None = 0
        is_at_most = False
        for caller, times, is_branch in callers[name]:
            above, above_at_most = runs(caller)
            known = None if above is None or times is None else above * times
            total = None if total is None or known is None else total + known
            is_at_most |= is_branch or above_at_most
        return total, is_at_most

    @cache
    def has_product(name: str) -> bool:
        return any(map(multiplies, lines.get(name, ())))

    def multiplies(line: str) -> bool:
        """Return whether an instruction is a matrix product, or calls one."""
        if PRODUCT.search(line) is not None:
            return True
        return any(has_product(call.computation) for call in calls(line))

    # 2. collectives by kind, axes and runs
    number, size, hidden = Counter[tuple](), Counter[tuple](), Counter[tuple]()
    for name, body in lines.items():
        beside = _beside_products(body, multiplies)
        for line in body:
            found = COLLECTIVE.match(line)
            if found is not None:
                which = found[2], axes_of(line, mesh), *runs(name)
                number[which] += 1
                hidden[which] += name_of(line) in beside
                size[which] += _bytes(found[1], found[2], is_start=found[3] is not None)
    found = []
    for (kind, axes, times, is_at_most), count in number.items():
        which = kind, axes, times, is_at_most
        found.append(Collective(kind, axes, count, *which[2:], size[which], hidden[which]))
    return found


def _beside_products(body: list[str], multiplies: Callable[[str], bool]) -> set[str]:
    """Return the names of start instructions with a matrix product between start and done.

    body: lines of a computation. multiplies: whether a line is a product, or calls one.
    """
    started, found = dict[str, bool](), set[str]()
    for line in body:
        done, name = DONE.match(line), name_of(line)
        if done is not None and started.pop(done[1], False):
            found.add(done[1])
        elif multiplies(line):
            started = dict.fromkeys(started, True)
        elif name is not None and "-start(" in line:
            started[name] = False
    return found


def axes_of(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh along which the devices of a collective communicate.

    >>> pairs = "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"
    >>> axes_of(f"collective-permute(%x), {pairs}", {"pp": 2, "tp": 2})
    ('pp',)
    """
    shape, found = tuple(mesh.values()), set[int]()
    for group in _groups(line, prod(shape)):
        places = np.array(np.unravel_index(group, shape))
        found |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return tuple(name for i, name in enumerate(mesh) if i in found)


def _groups(line: str, num_devices: int) -> Iterator[list[int]]:
    """Yield the groups of devices that communicate, or pairs of sender and receiver."""
    if (iota := IOTA.search(line)) is not None:
        shape, dims, order = map(_ints, iota.groups())
        numbers = np.arange(prod(dims)).reshape(dims)
        yield from numbers.transpose(order or None).reshape(-1, shape[-1]).tolist()
        return
    if (named := MESH.search(line)) is not None:
        yield from _groups_of_mesh(*named.groups())
        return
    listed = GROUPS.search(line)
    groups = [] if listed is None else re.findall(r"\{([\d,]*)\}", listed[1])
    yield from (_ints(group) for group in groups if group)
    if not groups:
        yield list(range(num_devices))


def _ints(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


def _groups_of_mesh(mesh: str, ids: str | None, axes: str) -> Iterator[list[int]]:
    """Yield the groups of devices along some axes of a mesh, as XLA of jaxlib 0.12 writes them.

    `x:(a)b`: axis x is reshaped to [a, b, rest], and a group lies along the dim of size b.

    >>> list(_groups_of_mesh("'x'=2,'y'=4", None, "'x','y':(2)2"))
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    >>> [*_groups_of_mesh("x=2,y=2", "[2,2]T(1,0)", "y")]
    [[0, 2], [1, 3]]
    >>> [*_groups_of_mesh("x=2,y=2", "3,1,2,0", "y")]
    [[3, 1], [2, 0]]
    """
    # 1. the devices in the mesh's order
    sizes = {name: int(size) for name, size in MESH_AXIS.findall(mesh)}
    devices = np.arange(prod(sizes.values()))
    if ids is not None and (listed := MESH_IDS.match(ids)) is not None:
        dims, order, each = map(_ints, listed.groups())
        devices = np.array(each) if each else devices.reshape(dims).transpose(order or None)
    # 2. each axis reshaped to [before, part of a group, rest]
    parts = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in GROUP_AXIS.findall(axes)
    }
    shape, of_group = list[int](), list[int]()
    for name, whole in sizes.items():
        before, size = parts.get(name, (whole, 1))
        of_group += [len(shape) + 1] if name in parts else []
        shape += [before, size, whole // (before * size)]
    # 3. the dims of a group last
    apart = [i for i in range(len(shape)) if i not in of_group]
    whole = devices.reshape(shape).transpose(apart + of_group)
    yield from whole.reshape(-1, prod(shape[i] for i in of_group)).tolist()


def _bytes(shape: str, kind: str, *, is_start: bool) -> int:
    """Return the bytes of a collective's result on one device.

    The shape of a start, except that of an all-reduce, is a tuple: its operands, then its results.
    """
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
