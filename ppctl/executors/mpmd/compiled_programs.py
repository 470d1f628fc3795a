"""The programs of mpmd: traced and lowered once for a group of ranks, compiled in threads.

A program is lowered for the abstract mesh of its group and compiled for the devices of each rank
that runs it. JAX has no public way to load one executable on other devices, so ranks share only the
trace. For described devices (`plan.topology`) each program is compiled once and cannot run. A
crossing is a program that moves a value between ranks of different processes.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from ppctl.executors.compiler_options import temp_bytes
from ppctl.executors.device_mesh import processes
from ppctl.executors.model_shapes import Model, shard_bytes
from ppctl.executors.mpmd import crossings
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, ProgramId, last_uses
from ppctl.executors.mpmd.plan_values import value_kind
from ppctl.executors.mpmd.program_library import ProgramLibrary
from ppctl.executors.mpmd.transfers import parts_of
from ppctl.executors.parameter_layout import without_axes
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.model.trainable_parameters import is_none

Tree = Any


class CompiledPrograms:
    """The traced, lowered and compiled programs of plans; libraries: one for each group."""

    def __init__(
        self,
        meshes: RankMeshes,
        libraries: Sequence[ProgramLibrary],
        options: Mapping[str, Any] | None = None,
    ):
        self.meshes, self.libraries, self.options = meshes, libraries, dict(options or {})
        self.submeshes = meshes.by_rank
        firsts = (self.submeshes[group.ranks[0]] for group in meshes.groups)
        self.abstract = tuple(
            AbstractMesh(mesh.devices.shape, mesh.axis_names, axis_types=mesh.axis_types)
            for mesh in firsts
        )
        self.is_described, self.is_mine = meshes.is_described, meshes.is_mine
        # `traced` with the shapes of their results, `compiled` by key of `place`
        self.traced: dict[ProgramId, tuple[jax.stages.Traced, tuple]] = {}
        self.lowered: dict[ProgramId, jax.stages.Lowered] = {}
        self.compiled: dict[tuple[ProgramId, int | None], jax.stages.Compiled] = {}
        self.crossings: dict[crossings.Crossing, jax.stages.Compiled] = {}

    # shapes

    def shape(self, tree: Tree, specs: Tree, group: int) -> Tree:
        """Return shapes with the shardings of `specs` (a tree, or a prefix of one) on a group."""
        mesh = self.abstract[group]

        def one(spec: P, part: Tree) -> Tree:
            return jax.tree.map(partial(_sharded, sharding=NamedSharding(mesh, spec)), part)

        return jax.tree.map(one, specs, tree)

    def placed(self, rank: int, shapes: Tree) -> Tree:
        """Return `shapes` with their shardings on the devices of a rank."""
        return _on(self.submeshes[rank], shapes)

    def shapes(self, entries: Sequence[PlanEntry], given: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the shapes of all values of a plan."""
        shapes: dict[Key, Tree] = dict(given)
        for entry in entries:
            written = tuple(shapes[key] for key in entry.reads)
            if entry.program is not None:
                written = self._trace(entry.program, written)
            elif self.changes_group(entry):
                written = (self._received(entry, written[0], shapes.get(("params", entry.rank))),)
            shapes.update(zip(entry.writes, written, strict=True))
        return shapes

    def model_of(self, rank: int) -> Model:
        """Return the model as a device of a rank sees it."""
        return self.libraries[self.meshes.group_of[rank]].model

    def changes_group(self, entry: PlanEntry) -> bool:
        """Return whether a move is between ranks of different sizes."""
        return len({self.meshes.group_of[rank] for rank in entry.ranks}) > 1

    def _received(self, entry: PlanEntry, sent: Tree, params: Tree) -> Tree:
        """Return the shapes of a value on a receiver of other sizes; params: of the receiver.

        Activations are cut into rows in the order of devices, on either side. Gradients of shared
        leaves are divided as the receiver's parameters.
        """
        group = self.meshes.group_of[entry.rank]
        mesh, form = self.abstract[group], value_kind(entry.reads[0][0]).form
        if form == "shared":
            pairs = sent, params["embed_head"]
            return jax.tree.map(lambda a, p: None if a is None else p, *pairs, is_leaf=is_none)
        if form != "activation":
            return _on(mesh, sent)
        x = self.model_of(entry.rank).x
        shape = jax.ShapeDtypeStruct((x.shape[0] * mesh.size, *x.shape[1:]), sent.dtype)
        return _sharded(shape, NamedSharding(mesh, sent.sharding.spec))

    # programs

    def _trace(self, program: ProgramId, reads: tuple) -> tuple:
        """Trace a program once, with a turn before its values; return the shapes it writes."""
        if program in self.traced:
            return self.traced[program][1]
        # 1. the function of one device, which also counts the turn up
        library, mesh = self.libraries[program.group], self.abstract[program.group]
        auto, function = library.auto_axes(program), library.function(program)
        specs, out_specs = (library.all_specs(program, n) for n in (program.reads, program.writes))

        def local(turn: jax.Array, *values: Tree) -> tuple:
            return turn + 1, *function(*values)

        local.__name__ = program.kind  # name of the compiled module
        # 2. over the devices of a rank
        whole, manual = local, set(mesh.axis_names) - set(auto)
        if manual:  # because shard_map reads an empty set as all axes
            whole = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P(), *without_axes(specs, auto)),
                out_specs=(P(), *without_axes(out_specs, auto)),
                axis_names=manual,
                check_vma=False,
            )
        donated = library.donated(program)
        donate = tuple(i for i, name in enumerate(program.reads, 1) if name in donated)
        shardings = jax.tree.map(partial(NamedSharding, mesh), (P(), *out_specs))
        jitted = jax.jit(whole, donate_argnums=donate, out_shardings=shardings)
        turn = self.shape(jax.ShapeDtypeStruct((), np.int32), P(), program.group)
        traced = jitted.trace(turn, *reads)
        written = tuple(
            self.shape(tree, spec, program.group)
            for tree, spec in zip(traced.out_info[1:], out_specs, strict=True)
        )
        self.traced[program] = traced, written
        return written

    def lower(self, program: ProgramId) -> jax.stages.Lowered:
        """Return a traced program lowered for the platform of the devices; lower it only once."""
        if program not in self.lowered:
            traced, _ = self.traced[program]
            # a described device becomes JAX's default
            device = self.meshes.device
            with jax.default_device(device) if self.is_described else nullcontext():
                self.lowered[program] = traced.lower(lowering_platforms=(self._platform,))
        return self.lowered[program]

    @property
    def _platform(self) -> str:
        device = self.meshes.device
        if device.platform != "gpu":
            return device.platform
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"

    def place(self, program: ProgramId, rank: int) -> tuple[ProgramId, int | None]:
        """Return the key of a rank's executable in `compiled`; described ranks share one."""
        return program, None if self.is_described else rank

    def crosses(self, entry: PlanEntry) -> bool:
        """Return whether a move is between processes."""
        assert entry.sender is not None, "only moves have a sender"
        sender, receiver = (processes(self.submeshes[r]) for r in (entry.sender, entry.rank))
        is_elsewhere = sender != receiver or self.changes_group(entry)
        return is_elsewhere and len({*sender, *receiver}) > 1

    def crossing(self, entry: PlanEntry, shapes: Mapping[Key, Tree]) -> crossings.Crossing:
        """Return the identity of the program of a move between processes."""
        parts, arrived = (parts_of(shapes[key]) for key in (entry.reads[0], entry.writes[0]))
        return crossings.Crossing(parts, arrived, self.route(entry), *entry.ranks)

    def route(self, entry: PlanEntry) -> crossings.Route:
        """Return the route of a move between processes, or between ranks of other sizes."""
        ranks = [(self.submeshes[rank], self.model_of(rank)) for rank in entry.ranks]
        numbers = [mesh.size for mesh, _ in ranks]
        if not self.changes_group(entry):
            return crossings.direct(numbers[0])
        if value_kind(entry.reads[0][0]).form != "activation":
            return crossings.copies(*numbers)
        places = (crossings.row_places(mesh, divides_rows=of.divides_rows) for mesh, of in ranks)
        return crossings.rows(*places)

    def compile(self, entries: Sequence[PlanEntry], shapes: Mapping[Key, Tree]) -> None:
        """Compile missing programs in threads, started in plan order: the same in all processes."""
        # 1. missing executables by key: (cache, lowered program, mesh)
        missing: dict[tuple, tuple[dict, jax.stages.Lowered, Mesh]] = {}
        for entry in entries:
            if entry.program is not None:
                place = self.place(entry.program, entry.rank)
                if place not in self.compiled and place not in missing:
                    lowered, devices = self.lower(entry.program), self.submeshes[entry.rank]
                    missing[place] = self.compiled, lowered, devices
            elif entry.sender is not None and not self.is_described and self.crosses(entry):
                move = self.crossing(entry, shapes)
                if move not in self.crossings:
                    both = [self.submeshes[rank] for rank in entry.ranks]
                    sizes = both[0].size, both[0].size + both[1].size
                    lowered = crossings.lower_crossing(*sizes, *move[:3], self._platform)
                    missing[move] = self.crossings, lowered, crossings.union(*both)

        # 2. compile them
        def compiled(key: tuple) -> jax.stages.Compiled:
            _, lowered, mesh = missing[key]
            return lowered.compile(self.options, device_assignment=tuple(mesh.devices.flat))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for key, result in zip(missing, threads.map(compiled, missing), strict=True):
                missing[key][0][key] = result

    def compiled_first(self, entries: Sequence[PlanEntry]) -> dict[ProgramId, jax.stages.Compiled]:
        """Return each traced program of these entries, compiled for the first rank that runs it."""
        first = {entry.program: entry for entry in reversed(entries) if entry.program is not None}
        self.compile(list(first.values()), {})
        return {id_: self.compiled[self.place(id_, entry.rank)] for id_, entry in first.items()}


def _sharded(a: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def _on(mesh: Mesh | AbstractMesh, shapes: Tree) -> Tree:
    """Return sharded shapes with the same specs on another mesh."""
    return jax.tree.map(lambda a: _sharded(a, NamedSharding(mesh, a.sharding.spec)), shapes)


# the memory of a plan


def memory_breakdown(
    programs: CompiledPrograms,
    entries: Sequence[PlanEntry],
    given: Mapping[Key, Tree],
    kept: Collection[Key],
    temps: Sequence[int] | None = None,
    shapes: Mapping[Key, Tree] | None = None,
) -> tuple[dict[str, int], ...]:
    """Return for each rank the bytes on one device at the peak, by value name, without `given`.

    temps: bytes of temporaries of each entry; None: those of the compiled programs.
    shapes: shapes of all values; None: trace them.
    """
    shapes = programs.shapes(entries, given) if shapes is None else shapes
    temps = temps or [_temp_bytes(programs, entry) for entry in entries]
    live = [Counter[str]() for _ in programs.submeshes]
    peak = [Counter[str]() for _ in programs.submeshes]
    where: dict[Key, int] = {}
    # runs of a program write values of one tree of shapes
    trees = {id(tree): tree for tree in shapes.values()}
    bytes_of = {number: shard_bytes(tree) for number, tree in trees.items()}
    size = {key: bytes_of[id(tree)] for key, tree in shapes.items()}
    freed = last_uses(entries, {*kept, *given})
    for entry, drop, temp in zip(entries, freed, temps, strict=True):
        for key in _passed_on(programs, entry, drop):
            live[where.pop(key)][key[0]] -= size[key]
        for key in entry.writes:
            if key not in where and key not in given:
                where[key] = entry.rank
                live[entry.rank][key[0]] += size[key]
        if live[entry.rank].total() + temp > peak[entry.rank].total():
            peak[entry.rank] = live[entry.rank] + Counter(temporaries=temp)
        for key in drop:
            if key in where:
                live[where.pop(key)][key[0]] -= size[key]
    pairs = zip(peak, programs.is_mine, strict=True)
    return tuple(dict(held) if mine else {} for held, mine in pairs)


def _temp_bytes(programs: CompiledPrograms, entry: PlanEntry) -> int:
    """Return the temporary bytes of an entry whose program is compiled, else 0."""
    place = entry.program and programs.place(entry.program, entry.rank)
    compiled = None if place is None else programs.compiled.get(place)
    return 0 if compiled is None else temp_bytes(compiled)


def _passed_on(programs: CompiledPrograms, entry: PlanEntry, freed: Sequence[Key]) -> list[Key]:
    """Return the freed values whose memory a program without a task reuses for its results."""
    if entry.program is None or entry.task is not None:
        return []
    donated = programs.libraries[entry.program.group].donated(entry.program)
    return [key for key in freed if key in entry.reads and key[0] in donated]
