"""Compiled programs of the spmd executor, read: their collectives, memory and size."""

import re
from functools import cache

import jax
import jax.numpy as jnp
from jax.extend import core
from support.cases import COMPILE_FAST, MLP, Case, make_stack, staged_step

from ppctl.model.stack import init

ROWS = 256  # rows of a microbatch: enough that activations outweigh the table of ticks


def shapes_of(case):
    """Shapes of staged parameters, with their shardings, and of a batch."""
    stack, layout = make_stack(case.model, case.num_layers), case.layout()
    staged = jax.eval_shape(lambda: layout.to_staged(init(stack, 0)))
    shardings = layout.shardings(layout.staged_specs(staged))
    params = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), staged, shardings
    )
    dims = {"inputs": MLP["input_dim"], "targets": MLP["target_dim"]}
    return params, {
        name: jax.ShapeDtypeStruct((case.batch_size, dim), jnp.float64)
        for name, dim in dims.items()
    }


@cache
def compiled(case):
    return jax.jit(staged_step(case)).lower(*shapes_of(case)).compile(COMPILE_FAST)


ONCE_A_STEP = ("all-reduce", "reduce-scatter", "all-gather")
COLLECTIVES = ("collective-permute", "all-to-all", "collective-broadcast", *ONCE_A_STEP)


def computations(text):
    """The instructions of each computation of a compiled program."""
    found, name = {}, None
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = header[1]
            found[name] = []
        elif line.startswith("  ") and name is not None:
            found[name].append(line.strip())
    return found


def called(program, root):
    """The names of `root` and of all that it calls: loops, branches, fusions."""
    seen, todo = set(), [root]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [
                word
                for line in program[name]
                for word in re.findall(r"%([\w.\-]+)", line)
                if word in program
            ]
    return seen


def collectives_below(program, root):
    """How many collectives of each kind stand in `root` and all that it calls."""
    lines = [line for name in called(program, root) for line in program[name]]
    count = {
        kind: sum(bool(re.search(rf" {kind}(-start)?\(", line)) for line in lines)
        for kind in COLLECTIVES
    }
    return {kind: number for kind, number in count.items() if number}


def collectives(case):
    """(of the whole program, of the body of each loop over ticks)."""
    text = compiled(case).as_text()
    program = computations(text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)[1]
    bodies = [
        re.search(r"body=%?([\w.\-]+)", line)[1]
        for line in program[entry]
        if re.search(r" while\(", line)
    ]
    return collectives_below(program, entry), [collectives_below(program, body) for body in bodies]


def temp_bytes(schedule, num_chunks, m, remat):
    case = Case(schedule, (1, 4, 1), m, num_chunks, model="mlp", batch_size=ROWS * m, remat=remat)
    return compiled(case).memory_analysis().temp_size_in_bytes


def equations(jaxpr):
    """All equations of a jaxpr and of those inside them."""

    def inner(value):
        if isinstance(value, core.ClosedJaxpr):
            yield from equations(value.jaxpr)
        elif isinstance(value, core.Jaxpr):
            yield from equations(value)
        elif isinstance(value, tuple | list):
            for each in value:
                yield from inner(each)

    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            yield from inner(value)


def sizes(case):
    """Equations traced, and lines handed to the compiler."""
    traced = jax.jit(staged_step(case)).trace(*shapes_of(case))
    return len(list(equations(traced.jaxpr.jaxpr))), len(traced.lower().as_text().splitlines())
