"""The placement of every parameter: its layer, stage, rank and devices, and how it is sharded, read from the arrays."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ppctl.executors.layout import Layout, is_layer
from ppctl.reports.terminal import show_table, size_text

Tree = Any
COLUMNS = ("parameter", "layers", "stages", "ranks", "devices", "shape", "sharding", "bytes a device")
NAMES_WIDTH = 48


@dataclass(frozen=True)
class Placed:
    """Parameters that lie alike, in layers that do. Shape and bytes are of one of them in one layer."""

    parameters: tuple[str, ...]
    layers: tuple[int, ...]  # in model order; none: the parameter is of the embedding or the head
    stages: tuple[int, ...]  # that these layers are of, in model order
    ranks: tuple[int, ...]
    devices: tuple[int, ...]  # ids
    shape: tuple[int, ...]
    sharding: str  # of the array, in which layers are stacked: [chunk, rank, layer of the chunk, *shape]
    bytes_a_device: int


@dataclass(frozen=True)
class Placement:
    """All parameters of a state, and the bytes of them on each rank's devices, padding included."""

    rows: tuple[Placed, ...]  # of the table; a key of `ppctl train --json`
    rank_bytes: tuple[int, ...]  # of one device


def placement(trees: Sequence[Tree], layout: Layout, gather: Callable[[str], list[str]]) -> Placement:
    """Return the placement of parameters: a tree of arrays for the whole mesh, or one for each rank.

    A rank of other processes is a tree of None here; those report it.
    gather: returns the texts of all processes, given this one's; all processes call this.
    """
    rank_of = _rank_of(layout)
    rows: list[Placed] = []
    held: dict[int, int] = {}
    for rank, tree in enumerate(trees):
        for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]:
            rows += _of_layers(path, a, layout, rank) if is_layer(path) else [_unstacked(path, a, rank_of)]
            for device in a.sharding.device_set:
                held[device.id] = held.get(device.id, 0) + prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    of_processes = [json.loads(text) for text in gather(json.dumps([list(map(asdict, rows)), list(held.items())]))]
    everywhere = dict.fromkeys(_read(row) for each, _ in of_processes for row in each)
    held = {device: size for _, each in of_processes for device, size in each}
    by_rank = [[held[device] for device in held if rank_of[device] == r] for r in range(layout.mesh.shape["pp"])]
    return Placement(tuple(_grouped(list(everywhere))), tuple(map(max, by_rank)))


def print_placement(console: Console, found: Placement) -> None:
    """Print the table of parameters, and the bytes of a device of each rank."""
    cells = []
    for row in found.rows:
        names = textwrap.wrap(", ".join(row.parameters), NAMES_WIDTH, break_long_words=False)
        line = (
            *("\n".join(names), runs_text(row.layers), runs_text(row.stages)),
            *(runs_text(row.ranks), runs_text(row.devices), str(list(row.shape)), row.sharding),
            f"{row.bytes_a_device:,}",
        )
        cells.append(line)
    title = "where parameters lie (shape and bytes: of one layer; sharding: of the array, chunk x rank x layer x shape)"
    show_table(console, title, COLUMNS, cells)
    alike: dict[int, list[int]] = {}
    for rank, size in enumerate(found.rank_bytes):
        alike.setdefault(size, []).append(rank)
    sizes = ", ".join(f"{size_text(size)} on rank {runs_text(ranks)}" for size, ranks in alike.items())
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
    """Yield the placement of each layer in an array [chunk, rank, layer of the chunk, ...]; `rank`: its first one."""
    rank_of = _rank_of(layout)
    boxes = {  # for each device what it holds of the first three dims
        device.id: [range(*part.indices(size)) for part, size in zip(index[:3], a.shape[:3], strict=True)]
        for device, index in a.sharding.devices_indices_map(a.shape).items()
    }
    stage_of = {layer: stage for stage, layers in enumerate(layout.partition) for layer in layers}
    for layer, (chunk, there, slot) in enumerate(layout.places):
        place = chunk, there - rank, slot
        devices = sorted(i for i, box in boxes.items() if all(n in part for n, part in zip(place, box, strict=True)))
        if devices:
            ranks = sorted({rank_of[device] for device in devices})
            yield Placed(
                (_name(path),), (layer,), (stage_of[layer],), tuple(ranks), tuple(devices), *_sizes(a, len(place))
            )


def _sizes(a: jax.Array, stacked: int) -> tuple[tuple[int, ...], str, int]:
    """Return (shape, sharding, bytes of one device) of an entry of an array with so many stacked dims."""
    spec = getattr(a.sharding, "spec", a.sharding)
    one = a.sharding.shard_shape(a.shape)[stacked:]
    return a.shape[stacked:], str(spec), prod(one) * a.dtype.itemsize


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _read(row: dict[str, Any]) -> Placed:
    """Return a row of the table from its JSON."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Placed(**values)


def _grouped(rows: list[Placed]) -> list[Placed]:
    """Merge the rows that differ in their layer alone, then those that differ in their name alone."""
    by_layer: dict[Placed, tuple[set[int], set[int]]] = {}
    for row in rows:
        layers, stages = by_layer.setdefault(replace(row, layers=(), stages=()), (set(), set()))
        layers.update(row.layers)
        stages.update(row.stages)
    by_name: dict[Placed, list[str]] = {}
    for row, (layers, stages) in by_layer.items():
        alike = replace(row, parameters=(), layers=tuple(sorted(layers)), stages=tuple(sorted(stages)))
        by_name.setdefault(alike, []).extend(row.parameters)
    found = [replace(row, parameters=tuple(names)) for row, names in by_name.items()]
    return sorted(found, key=lambda row: (row.layers, row.ranks))
