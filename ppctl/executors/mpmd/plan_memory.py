"""The bytes of a plan's values on each rank, at the peak."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ppctl.executors.compiler_options import temp_bytes
from ppctl.executors.model_shapes import shard_bytes
from ppctl.executors.mpmd.compiled_programs import CompiledPrograms
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, last_uses

Tree = Any


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
    return tuple(
        dict(held) if mine else {} for held, mine in zip(peak, programs.is_mine, strict=True)
    )


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
