"""The placement of each parameter (layer, stage, rank, devices, sharding), read from the arrays."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from operator import contains
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ppctl.executors.parameter_layout import Layout, is_layer
from ppctl.executors.tree_bytes import shard_bytes
from ppctl.reports.terminal_output import show_table, size_text

Tree = Any
COLUMNS = ("parameter", "layers", "stages", "ranks", "devices", "shape", "sharding")
COLUMNS += ("bytes a device",)
NAMES_WIDTH = 48


@dataclass(frozen=True)
class Placed:
    """Parameters with the same placement; shape and bytes of one parameter in one layer."""

    parameters: tuple[str, ...]
    layers: tuple[int, ...]  # in model order; (): a parameter of embedding or head
    stages: tuple[int, ...]  # stages of these layers, in model order
    ranks: tuple[int, ...]
    devices: tuple[int, ...]  # ids
    shape: tuple[int, ...]
    sharding: str  # sharding of the stacked array [chunk, rank, layer of the chunk, *shape]
    bytes_a_device: int


@dataclass(frozen=True)
class Placement:
    """All parameters of a state, and the bytes of them on each rank's devices, padding included."""

    rows: tuple[Placed, ...]  # rows of the table; a key of `ppctl train --json`
    rank_bytes: tuple[int, ...]  # bytes on one device


def placement(
    trees: Sequence[Tree], layout: Layout, gather: Callable[[str], list[str]]
) -> Placement:
    """Return the placement of parameters: one tree of arrays for the whole mesh, or one a rank.

    Ranks of other processes have a tree of None; those processes report it.
    gather: returns the texts of all processes, given this one's; all processes call this.
    """
    # 1. the parameters and bytes of this process
    rank_of = _rank_of(layout)
    rows: list[Placed] = []
    held = Counter[int]()
    for rank, tree in enumerate(trees):
        for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if is_layer(path):
                rows += _of_layers(path, a, layout, rank)
            else:
                rows.append(_unstacked(path, a, rank_of))
            for device in a.sharding.device_set:
                held[device.id] += shard_bytes(a)
    # 2. those of all processes
    texts = gather(json.dumps([list(map(asdict, rows)), list(held.items())]))
    of_processes = [json.loads(text) for text in texts]
    everywhere = dict.fromkeys(_read(row) for each, _ in of_processes for row in each)
    by_rank = [0] * layout.mesh.shape["pp"]
    for device, size in (item for _, each in of_processes for item in each):
        by_rank[rank_of[device]] = max(by_rank[rank_of[device]], size)
    return Placement(tuple(_grouped(list(everywhere))), tuple(by_rank))


def print_placement(console: Console, found: Placement) -> None:
    """Print the table of parameters, and the bytes of a device of each rank."""
    cells = []
    for row in found.rows:
        names = textwrap.wrap(", ".join(row.parameters), NAMES_WIDTH, break_long_words=False)
        runs = map(runs_text, (row.layers, row.stages, row.ranks, row.devices))
        sizes = str(list(row.shape)), row.sharding, f"{row.bytes_a_device:,}"
        cells.append(("\n".join(names), *runs, *sizes))
    title = (
        "where parameters lie (shape and bytes: of one layer; sharding: of the array, chunk x "
        "rank x layer x shape)"
    )
    show_table(console, title, COLUMNS, cells)
    alike: dict[int, list[int]] = {}
    for rank, size in enumerate(found.rank_bytes):
        alike.setdefault(size, []).append(rank)
    sizes = ", ".join(f"{size_text(size)} on rank {runs_text(on)}" for size, on in alike.items())
    console.print(f"parameters of a device: {sizes}", markup=False, highlight=False, soft_wrap=True)


def runs_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with their runs as such.

    >>> runs_text([0, 1, 2, 5, 7, 8]), runs_text([])
    ('0-2 5 7-8', '')
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _rank_of(layout: Layout) -> dict[int, int]:
    """Return for each device id its place along pp."""
    axis = layout.mesh.axis_names.index("pp")
    return {device.id: int(index[axis]) for index, device in np.ndenumerate(layout.mesh.devices)}


def _unstacked(path: tuple, a: jax.Array, rank_of: dict[int, int]) -> Placed:
    devices = sorted(device.id for device in a.sharding.device_set)
    ranks = sorted({rank_of[device] for device in devices})
    return Placed((_name(path),), (), (), tuple(ranks), tuple(devices), *_sizes(a, 0))


def _of_layers(path: tuple, a: jax.Array, layout: Layout, rank: int) -> Iterator[Placed]:
    """Yield the placement of each layer in an array [chunk, rank, layer slot, ...].

    rank: the first one of the array.
    """
    rank_of = _rank_of(layout)
    boxes = {}  # for each device its ranges of the first three dims
    for device, index in a.sharding.devices_indices_map(a.shape).items():
        each = zip(index[:3], a.shape[:3], strict=True)
        boxes[device.id] = [range(*part.indices(size)) for part, size in each]
    stage_of = {layer: stage for stage, layers in enumerate(layout.partition) for layer in layers}
    for layer, (chunk, there, slot) in enumerate(layout.places):
        place = chunk, there - rank, slot
        devices = sorted(i for i, box in boxes.items() if all(map(contains, box, place)))
        if devices:
            ranks = tuple(sorted({rank_of[device] for device in devices}))
            name, stage = (_name(path),), (stage_of[layer],)
            yield Placed(name, (layer,), stage, ranks, tuple(devices), *_sizes(a, len(place)))


def _sizes(a: jax.Array, stacked: int) -> tuple[tuple[int, ...], str, int]:
    """Return (shape, sharding, bytes on one device) of one entry along the `stacked` first dims."""
    spec = getattr(a.sharding, "spec", a.sharding)
    one = a.sharding.shard_shape(a.shape)[stacked:]
    return a.shape[stacked:], str(spec), prod(one) * a.dtype.itemsize


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _read(row: dict[str, Any]) -> Placed:
    """Return a row of the table from its JSON."""
    values: Any = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    return Placed(**values)


def _grouped(rows: list[Placed]) -> list[Placed]:
    """Merge the rows that differ only in their layer, then those that differ only in their name."""
    by_layer: dict[Placed, tuple[set[int], set[int]]] = {}
    for row in rows:
        layers, stages = by_layer.setdefault(replace(row, layers=(), stages=()), (set(), set()))
        layers.update(row.layers)
        stages.update(row.stages)
    by_name: dict[Placed, list[str]] = {}
    for row, (layers, stages) in by_layer.items():
        found = {"layers": tuple(sorted(layers)), "stages": tuple(sorted(stages))}
        by_name.setdefault(replace(row, parameters=(), **found), []).extend(row.parameters)
    found = [replace(row, parameters=tuple(names)) for row, names in by_name.items()]
    return sorted(found, key=lambda row: (row.layers, row.ranks))
