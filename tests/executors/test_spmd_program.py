"""What the spmd program is made of: its size, its memory, and where its collectives stand."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from support.cases import COMPILE_FAST, MLP, Case, make_stack, staged_step

from ppctl.model.stack import init

PROGRAMS = [("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2)]
programs = pytest.mark.parametrize(("schedule", "num_chunks"), PROGRAMS)


def shapes_of(case):
    """Shapes of staged parameters, with their shardings, and of a batch."""
    stack, layout = make_stack(case.model, case.num_layers), case.layout()
    staged = jax.eval_shape(lambda: layout.to_staged(init(stack, 0)))
    shardings = layout.shardings(layout.staged_specs(staged))
    params = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), staged, shardings)
    dims = {"inputs": MLP["input_dim"], "targets": MLP["target_dim"]}
    return params, {name: jax.ShapeDtypeStruct((case.batch_size, dim), jnp.float64) for name, dim in dims.items()}


@cache
def compiled(case):
    return jax.jit(staged_step(case)).lower(*shapes_of(case)).compile(COMPILE_FAST)


# --- collectives -----------------------------------------------------------------------------------------------------

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
            todo += [word for line in program[name] for word in re.findall(r"%([\w.\-]+)", line) if word in program]
    return seen


def collectives_below(program, root):
    """How many collectives of each kind stand in `root` and all that it calls."""
    lines = [line for name in called(program, root) for line in program[name]]
    count = {kind: sum(bool(re.search(rf" {kind}(-start)?\(", line)) for line in lines) for kind in COLLECTIVES}
    return {kind: number for kind, number in count.items() if number}


def collectives(case):
    """(of the whole program, of the body of each loop over ticks)."""
    text = compiled(case).as_text()
    program = computations(text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)[1]
    bodies = [re.search(r"body=%?([\w.\-]+)", line)[1] for line in program[entry] if re.search(r" while\(", line)]
    return collectives_below(program, entry), [collectives_below(program, body) for body in bodies]


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("schedule", "num_chunks", "mesh"), [("interleaved", 2, (2, 2, 2)), ("1f1b", 1, (2, 4, 1))])
def test_a_tick_moves_one_activation_and_one_gradient_and_nothing_else(schedule, num_chunks, mesh, remat):
    case = Case(schedule, mesh, num_chunks=num_chunks, model="mlp", remat=remat)
    whole, loops = collectives(case)
    assert loops == [{"collective-permute": 2}]
    assert whole["all-reduce"] >= 1  # the loss and the gradients, once a step
    if mesh[2] > 1:
        assert whole["all-gather"] >= 2
        assert whole["reduce-scatter"] >= 2


def test_warm_up_and_cool_down_move_one_value_a_tick_where_idle_ranks_compute():
    _, loops = collectives(Case("eager_1f1b", (1, 4, 1), model="mlp", skip_idle=False))
    assert loops == [{"collective-permute": 1}, {"collective-permute": 2}, {"collective-permute": 1}]


def test_parameters_are_gathered_inside_the_tick_when_asked_for():
    case = Case("interleaved", (2, 2, 2), num_chunks=2, model="mlp", gather_each_tick=True)
    _, (loop,) = collectives(case)
    assert loop.pop("collective-permute") == 2
    assert loop.pop("all-gather") >= 2
    assert loop == {}


# --- memory ----------------------------------------------------------------------------------------------------------

ROWS = 256  # of a microbatch: so many that activations outweigh the table of ticks


def temp_bytes(schedule, num_chunks, m, remat):
    case = Case(schedule, (1, 4, 1), m, num_chunks, model="mlp", batch_size=ROWS * m, remat=remat)
    return compiled(case).memory_analysis().temp_size_in_bytes


remats = pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.slow)])


@remats
@pytest.mark.parametrize(("schedule", "num_chunks"), PROGRAMS[1:])
def test_memory_does_not_grow_with_the_number_of_microbatches(schedule, num_chunks, remat):
    assert temp_bytes(schedule, num_chunks, 64, remat) <= 1.05 * temp_bytes(schedule, num_chunks, 16, remat)


@remats
def test_memory_of_gpipe_grows_by_the_activations_of_every_microbatch(remat):
    grown = temp_bytes("gpipe", 1, 64, remat) - temp_bytes("gpipe", 1, 16, remat)
    assert grown >= 48 * ROWS * MLP["d_model"] * 8  # float64


@remats
@pytest.mark.parametrize(("schedule", "num_chunks"), PROGRAMS[1:])
def test_no_schedule_is_gpipe_in_disguise(schedule, num_chunks, remat):
    assert temp_bytes(schedule, num_chunks, 64, remat) < 0.5 * temp_bytes("gpipe", 1, 64, remat)


# --- size ------------------------------------------------------------------------------------------------------------


def num_equations(jaxpr):
    def inner(value):
        if isinstance(value, core.ClosedJaxpr):
            return num_equations(value.jaxpr)
        if isinstance(value, core.Jaxpr):
            return num_equations(value)
        return sum(map(inner, value)) if isinstance(value, tuple | list) else 0

    return sum(1 + sum(map(inner, equation.params.values())) for equation in jaxpr.eqns)


def sizes(case):
    """Equations traced, and lines handed to the compiler."""
    traced = jax.jit(staged_step(case)).trace(*shapes_of(case))
    return num_equations(traced.jaxpr.jaxpr), len(traced.lower().as_text().splitlines())


@pytest.mark.parametrize("skip_idle", [True, False], ids=["skip", "compute"])
@pytest.mark.parametrize("pp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@programs
def test_program_size_does_not_depend_on_the_number_of_microbatches(schedule, num_chunks, pp, skip_idle):
    def at(m):
        case = Case(schedule, (1, pp, 1), m, num_chunks, model="mlp", batch_size=2 * m, skip_idle=skip_idle)
        return sizes(case)

    assert at(8) == at(64)


@pytest.mark.parametrize("changes", [{"unroll": 0}, {"remat": "none"}, {"gather_each_tick": True}], ids=str)
def test_no_option_makes_program_size_depend_on_the_number_of_microbatches(changes):
    def at(m):
        return sizes(Case("interleaved", (1, 2, 2), m, 2, model="mlp", num_layers=7, batch_size=2 * m, **changes))

    assert at(8) == at(64)
