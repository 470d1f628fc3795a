"""Two tasks of a rank as one program: the sends of each overlap matrix products of the other.

Both tasks are traced and cut into parts at their sends over the axes inside a stage. Then they run
by turns: barriers make each send begin and end with a part of the other task. Otherwise compilers
merge the sends of both tasks, or run one task after the other.

time   | ------------------------------------------------->
first  | part 0 | send 0 | part 1 | send 1 | part 2 | ...
second | send 0 | part 1 | send 1 | part 2 | send 2 | ...
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, ProgramId
from ppctl.executors.stage.jaxpr_tools import (
    bind_eqn,
    called_program,
    env_of,
    env_value,
    interpret,
    is_literal,
    results_of,
    retraced,
)
from ppctl.executors.stage.split_backward import FOREIGN, PRODUCTS
from ppctl.schedule.mesh_axes import STAGE_AXES

Tree = Any
SENDS = ("all_gather", "reduce_scatter", "all_to_all")
Equations = Sequence[core.JaxprEqn]
WORK = (*PRODUCTS, *FOREIGN, "pallas_call", "scan", "while", "cond")  # operations that take long


class FusedTasks(NamedTuple):
    """The `ProgramId.shape` of a fused program: two tasks' programs, and names for their values."""

    programs: tuple[ProgramId, ...]
    reads: tuple[tuple[str, ...], ...]  # fused program's names of the values that each task reads
    writes: tuple[tuple[str, ...], ...]

    def by_name(self, of: Callable[[ProgramId, Sequence[str]], Sequence[Any]]) -> dict[str, Any]:
        """Return `of` of each value of the two tasks, by the value's name in the fused program.

        of(program, names) returns one result for each of a task's names.
        """
        found = dict[str, Any]()
        for program, reads, writes in zip(*self, strict=True):
            found |= zip(reads, of(program, program.reads), strict=True)
            found |= zip(writes, of(program, program.writes), strict=True)
        return found


def fused_entry(first: PlanEntry, second: PlanEntry) -> PlanEntry:
    """Return the entry of a program that runs two tasks that do not wait for each other.

    The first task passes the rank's sums on to the second.
    """
    # 1. by key: the names of values, and the readers of written values
    entries, names, readers = (first, second), dict[Key, str](), dict[Key, tuple]()
    programs = tuple(entry.program for entry in entries if entry.program is not None)
    for entry, program in zip(entries, programs, strict=True):
        keys, inside = entry.reads + entry.writes, program.reads + program.writes
        names = {k: f"{program.kind}.{n}" for k, n in zip(keys, inside, strict=True)} | names
        readers |= zip(entry.writes, entry.readers, strict=True)
    # 2. the program; the second task's sums are written by the first, not read from the rank
    of = lambda keys: tuple(names[key] for key in keys)  # noqa: E731
    reads = dict.fromkeys(first.reads)
    reads |= dict.fromkeys(key for key in second.reads if key not in first.writes)
    read = tuple(of(entry.reads) for entry in entries)
    wrote = tuple(of(entry.writes) for entry in entries)
    kind = "".join(program.kind[0].upper() for program in programs)  # F for the kind "forward"
    program = ProgramId(kind, of(reads), of(readers), FusedTasks(programs, read, wrote))
    written = {"writes": tuple(readers), "readers": tuple(readers.values())}
    return first._replace(program=program, reads=tuple(reads), **written, second=second.task)


def run_fused(program: ProgramId, functions: Sequence[Callable], *values: Tree) -> tuple:
    """Return the values that a program of two tasks writes; functions: one for each task."""
    # 1. trace both; the second gets only shapes of sums that the first writes
    parts, known = program.shape, dict(zip(program.reads, values, strict=True))
    shapes, env, traced = dict(known), dict[Any, Any](), list[tuple]()
    for function, reads, writes in zip(functions, parts.reads, parts.writes, strict=True):
        args = [shapes[name] for name in reads]
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        closed = _inlined(closed)
        env |= env_of(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        late = {v for v in closed.jaxpr.invars if isinstance(env[v], jax.ShapeDtypeStruct)}
        traced.append((closed.jaxpr, *cut(closed.jaxpr, late), jax.tree.structure(out)))
        shapes |= zip(writes, out, strict=True)
    # 2. run them by turns, the backward first
    ahead, other = (
        _steps(env, *cuts) for _, *cuts, _, _ in traced[:: -1 if program.kind[0] == "F" else 1]
    )
    next(ahead)
    for ours, others in zip_longest(ahead, other, fillvalue=()):
        if ours and others:
            tied = [*ours, *others]
            env |= zip(tied, jax.lax.optimization_barrier([env[v] for v in tied]), strict=True)
    # 3. finish the first, then the second, which needs the first's sums
    for (jaxpr, _, _, last, out), reads, writes in zip(
        traced, parts.reads, parts.writes, strict=True
    ):
        env |= zip(jaxpr.invars, jax.tree.leaves([known[name] for name in reads]), strict=True)
        _run(env, last)
        results = [env_value(env, v) for v in jaxpr.outvars]
        known |= zip(writes, jax.tree.unflatten(out, results), strict=True)
    return tuple(known[name] for name in program.writes)


def _steps(env: dict, parts: Sequence[Equations], sends: Sequence[Equations]) -> Iterator[list]:
    """Run parts and sends in turn; yield operands before each group of sends, results after it."""
    for part, sent in zip_longest(parts, sends, fillvalue=()):
        _run(env, part)
        yield _operands(sent)
        _run(env, sent)
        yield [v for eqn in sent for v in eqn.outvars]


def _run(env: dict, equations: Equations) -> None:
    for eqn in equations:
        env |= results_of(eqn, env)


def _operands(equations: Equations) -> list[Any]:
    return list(dict.fromkeys(v for eqn in equations for v in eqn.invars if not is_literal(v)))


def cut(
    jaxpr: core.Jaxpr, late: set[Any]
) -> tuple[Sequence[Equations], Sequence[Equations], Equations]:
    """Return (parts of a program, sends after each part but the last, equations at the end).

    Sends form one group while no long operation is traced between them and no send reads another's
    result. late: variables without a value until the end; equations that depend on them come last.
    """
    parts, sends, last, late = [[]], list[list](), [], set(late)
    # the next part; results of the last sends and of this part: their readers come after the sends
    following, follow = [], set[Any]()
    for eqn in jaxpr.eqns:
        read = {*_operands([eqn])}
        depends, is_work = not follow.isdisjoint(read), eqn.primitive.name in WORK
        if not late.isdisjoint(read):
            late |= {*eqn.outvars}
            last.append(eqn)
        elif _is_send(eqn):
            if not sends:
                sends.append([])
            elif depends or any(each.primitive.name in WORK for each in following):
                parts, sends = [*parts, following], [*sends, []]
                following, follow = [], set()
            sends[-1].append(eqn)
            follow |= {*eqn.outvars}
        elif sends and (depends or is_work):
            following.append(eqn)
            follow |= {*eqn.outvars}
        else:
            parts[-1].append(eqn)
    return [*parts, following], sends, last


def _is_send(eqn: core.JaxprEqn) -> bool:
    axes = eqn.params.get("axis_name", ())
    named = (axes,) if isinstance(axes, str) else axes
    return eqn.primitive.name in SENDS and not set(STAGE_AXES).isdisjoint(named)


def _inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the program with its calls inlined; barriers stay."""

    def run(eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
        called = called_program(eqn)
        return bind_eqn(eqn, values) if called is None else interpret(called, values, run)

    return retraced(closed, run)
