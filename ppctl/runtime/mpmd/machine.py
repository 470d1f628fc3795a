"""Programs on submeshes: traced and lowered once for all ranks, compiled in threads, dispatched by the host.

A program is lowered for an abstract submesh and compiled for the devices of each rank that runs it. JAX has no public
way to load one executable on other devices, so ranks share the trace, and the stages of one rank the executable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.runtime.mpmd.plan import TASKS, Key, Op, Program, last_uses
from ppctl.schedule.ir import Task

Tree = Any


# On CPU most of a compile is a fixed price for each fused kernel (MLIR contexts, LLVM's passes), and each rank pays it.
# CPU s to compile for one rank, and with these options (jax 0.10.2, bench model, 2 layers a stage, a busy machine): F
# 1.3 and 0.7, B 2.8 and 1.9, which run as fast; prepare, squares and update 2.2 and 0.4. Those three run longer without
# LLVM's passes (7 and 12, 2 and 2, 12 and 42 ms), but only once a step: 3% of it. Tried and rejected: level 0 for tasks
# (F and B 4.4 and 1.2 to compile, but F runs 34 and 55 ms, B 123 and 160); level 0 with MLIR's emitters (a third less
# to compile); xla_cpu_opt_preset, xla_llvm_disable_expensive_passes, xla_cpu_prefer_vector_width (nothing gained);
# xla_disable_hlo_passes=fusion (2.4 times as long to compile).
CPU_OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,  # kernels of a program in one LLVM module
    "xla_backend_optimization_level": 0,
}
CPU_OPTIMIZED = CPU_OPTIONS | {"xla_backend_optimization_level": 1}
OPTIMIZED = (*TASKS, "finish")  # which copies all gradients: 5 ms, not 10, for 0.1 s


class Programs(Protocol):
    """What a machine must know of programs."""

    def function(self, program: Program) -> Callable[..., tuple]: ...
    def specs(self, program: Program, name: str) -> Tree: ...
    def donated(self, program: Program) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Walk:
    """A compiled plan. `steps` are (call, slots read, slots written, slots freed)."""

    ops: tuple[Op, ...]
    steps: tuple[tuple[Callable[..., Sequence], tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    slots: Mapping[Key, int]
    given: tuple[Key, ...]
    kept: tuple[Key, ...]
    shapes: Mapping[Key, Tree]  # of what is kept
    peak_bytes: tuple[int, ...]  # for each rank, on one device: values and temporaries, without what is given

    def run(self, given: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """The values to keep, from those given. Returns when all is dispatched, not when it is done."""
        values: list[Any] = [None] * len(self.slots)
        for key in self.given:
            values[self.slots[key]] = given[key]
        for call, reads, writes, freed in self.steps:
            results = call(*[values[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                values[i] = result
            results = None
            for i in freed:
                values[i] = None
        return {key: values[self.slots[key]] for key in self.kept}

    def timed(self, seconds: dict[Task, float]) -> Walk:
        """The same walk, one program at a time; its runs put the seconds of each task into `seconds`."""

        def waiting(op: Op, call: Callable[..., Sequence]) -> Callable[..., Sequence]:
            def run(*values: Tree) -> Sequence:
                began = time.perf_counter()
                results = jax.block_until_ready(call(*values))
                if op.program is not None and op.task is not None:
                    seconds[op.task] = time.perf_counter() - began
                return results

            return run

        steps = tuple((waiting(op, call), *rest) for op, (call, *rest) in zip(self.ops, self.steps, strict=True))
        return replace(self, steps=steps)

    @cached_property
    def programs(self) -> list[list[tuple[str, Task | None]]]:
        """For each rank its programs in order: name of the compiled module, and the task if it is one."""
        ranks = range(len(self.peak_bytes))
        return [[(f"jit_{o.program.kind}", o.task) for o in self.ops if o.program and o.rank == r] for r in ranks]


class Machine:
    """The submeshes of the ranks, all of one shape, and the programs that run on them."""

    def __init__(self, submeshes: Sequence[Mesh], programs: Programs, options: Mapping[str, Any] | None = None):
        self.submeshes, self.programs, self.options = submeshes, programs, dict(options or {})
        one = submeshes[0]
        self.abstract = AbstractMesh(one.devices.shape, one.axis_names, axis_types=one.axis_types)
        self.lowered: dict[Program, tuple[jax.stages.Lowered, tuple]] = {}
        self.compiled: dict[tuple[Program, int], jax.stages.Compiled] = {}

    def shape(self, tree: Tree, specs: Tree) -> Tree:
        """Shapes with the shardings of `specs` (a tree, or a prefix of one) on a submesh."""

        def one(spec: P, part: Tree) -> Tree:
            sharding = NamedSharding(self.abstract, spec)
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), part)

        return jax.tree.map(one, specs, tree, is_leaf=lambda a: isinstance(a, P))

    def on(self, rank: int, shapes: Tree) -> Tree:
        """The shardings of `shapes` on the devices of a rank."""
        return jax.tree.map(lambda a: NamedSharding(self.submeshes[rank], a.sharding.spec), shapes)

    def compile(self, ops: Sequence[Op], given: Mapping[Key, Tree], kept: Collection[Key]) -> Walk:
        """The walk over `ops`, from values of these shapes to those that are kept."""
        shapes: dict[Key, Tree] = dict(given)
        for op in ops:
            if op.program is None:
                shapes[op.writes[0]] = shapes[op.reads[0]]
            else:
                written = self._lower(op.program, tuple(shapes[key] for key in op.reads))
                shapes.update(zip(op.writes, written, strict=True))
        self._compile(ops)
        slots = {key: i for i, key in enumerate(shapes)}
        freed = last_uses(ops, {*kept, *given})
        steps = []
        for op, drop in zip(ops, freed, strict=True):
            if op.program is None:
                call = partial(_move, self.on(op.rank, shapes[op.reads[0]]))
            else:
                call = self.compiled[op.program, op.rank]
            places = (tuple(slots[key] for key in keys) for keys in (op.reads, op.writes, drop))
            steps.append((call, *places))
        peak_bytes = self._peak_bytes(ops, freed, shapes, given)
        kept_shapes = {key: shapes[key] for key in kept}
        return Walk(tuple(ops), tuple(steps), slots, tuple(given), tuple(kept), kept_shapes, peak_bytes)

    def _lower(self, program: Program, reads: tuple) -> tuple:
        """Shapes of what a program writes; lowers it the first time."""
        if program not in self.lowered:
            specs = [self.programs.specs(program, name) for name in program.reads]
            out_specs = [self.programs.specs(program, name) for name in program.writes]
            donated = self.programs.donated(program)
            function = self.programs.function(program)

            def local(*values: Tree) -> tuple:
                return function(*values)

            local.__name__ = program.kind  # names the compiled module
            whole = jax.shard_map(
                local, mesh=self.abstract, in_specs=tuple(specs), out_specs=tuple(out_specs), check_vma=False
            )
            donate = tuple(i for i, name in enumerate(program.reads) if name in donated)
            traced = jax.jit(whole, donate_argnums=donate).trace(*reads)
            lowered = traced.lower(lowering_platforms=(self._platform,))
            written = tuple(self.shape(out, spec) for out, spec in zip(lowered.out_info, out_specs, strict=True))
            self.lowered[program] = lowered, written
        return self.lowered[program][1]

    @property
    def _platform(self) -> str:
        device = self.submeshes[0].devices.flat[0]
        if device.platform != "gpu":
            return device.platform
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"

    def _options(self, program: Program) -> dict[str, Any]:
        """Of the compiler: those given come before ours."""
        if self._platform != "cpu":
            return self.options
        return (CPU_OPTIMIZED if program.kind in OPTIMIZED else CPU_OPTIONS) | self.options

    def _compile(self, ops: Sequence[Op]) -> None:
        """Compiles what is not compiled yet, in threads."""
        wanted = {(op.program, op.rank): None for op in ops if op.program is not None}
        missing = [key for key in wanted if key not in self.compiled]

        def compiled(key: tuple[Program, int]) -> jax.stages.Compiled:
            program, rank = key
            return self.lowered[program][0].compile(
                self._options(program), device_assignment=tuple(self.submeshes[rank].devices.flat)
            )

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            self.compiled.update(zip(missing, threads.map(compiled, missing), strict=True))

    def _peak_bytes(
        self, ops: Sequence[Op], freed: Sequence[tuple[Key, ...]], shapes: Mapping[Key, Tree], given: Collection[Key]
    ) -> tuple[int, ...]:
        live = [0] * len(self.submeshes)
        peak = [0] * len(self.submeshes)
        where: dict[Key, int] = {}
        size = {key: _bytes(tree) for key, tree in shapes.items()}
        for op, drop in zip(ops, freed, strict=True):
            for key in op.writes:
                if key not in where and key not in given:
                    where[key] = op.rank
                    live[op.rank] += size[key]
            temp = 0
            if op.program is not None:
                memory = self.compiled[op.program, op.rank].memory_analysis()
                assert memory is not None, "every backend of ours reports memory"
                temp = memory.temp_size_in_bytes
            peak[op.rank] = max(peak[op.rank], live[op.rank] + temp)
            for key in drop:
                if key in where:
                    live[where.pop(key)] -= size[key]
        return tuple(peak)


def _move(shardings: Tree, value: Tree) -> tuple[Tree]:
    return (jax.device_put(value, shardings),)


def _bytes(tree: Tree) -> int:
    """Bytes on one device."""
    total = 0
    for a in jax.tree.leaves(tree):
        count = 1
        for n in a.sharding.shard_shape(a.shape):
            count *= n
        total += count * a.dtype.itemsize
    return total
