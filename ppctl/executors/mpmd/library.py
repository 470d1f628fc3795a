"""The programs of a plan as a runtime must know them, and how what they write lies where XLA divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from ppctl.executors.auto_axes import dim_of, with_dims
from ppctl.executors.compiler_preset import CompilerPreset
from ppctl.executors.mpmd.plan import ProgramId
from ppctl.executors.stage.divided_dims import divided_dims

Tree = Any


class ProgramLibrary(Protocol):
    """The programs as a runtime must know them: functions, PartitionSpecs, donated arguments, compiler presets.

    auto: axes over which XLA divides; `divided_dims`: the dim of each leaf of a value that it divides, None where it is
    to be found in the program.
    """

    @property
    def auto(self) -> tuple[str, ...]: ...
    def divided_dims(self, program: ProgramId, name: str, value: Tree) -> Sequence[int | None] | None: ...
    def function(self, program: ProgramId) -> Callable[..., tuple]: ...
    def all_specs(self, program: ProgramId, names: Sequence[str]) -> list[Tree]: ...
    def donated(self, program: ProgramId) -> tuple[str, ...]: ...
    def preset(self, program: ProgramId) -> CompilerPreset: ...


def written_specs(
    programs: ProgramLibrary,
    program: ProgramId,
    traced: jax.stages.Traced,
    reads: Sequence[Tree],
    specs: Sequence[Tree],
) -> list[Tree]:
    """Return the specs of what a program writes, leaf by leaf, with the dims that XLA divides.

    So values lie as the next program expects them. traced: with a turn before its reads and writes; reads: shapes with
    shardings; specs: without those dims, or with them already.
    """
    (axis,) = programs.auto
    shardings = [a.sharding for a in jax.tree.leaves(reads)]
    _, *followed = divided_dims(traced.jaxpr.jaxpr, [None, *(dim_of(each.spec, axis) for each in shardings)])
    rest, found = iter(followed), []
    for name, value, spec in zip(program.writes, traced.out_info[1:], specs, strict=True):
        of_program = [next(rest) for _ in jax.tree.leaves(value)]
        dims = programs.divided_dims(program, name, value)
        size = shardings[0].mesh.shape[axis]
        found.append(with_dims(spec, value, of_program if dims is None else dims, axis, size))
    return found
