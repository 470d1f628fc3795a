"""Split backwards and V-shaped placements in one program: the gradients of the reference, in
bounded memory.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import COMPILE_FAST, Case, difference, run_reference, staged_step
from support.normalizing import normalizing_inputs, normalizing_stack
from support.selection import full, full_except
from support.spmd_cases import SINGLE_OP, TOLERANCE, check, name_of
from support.spmd_programs import called, collectives, compiled, computations, sizes, temp_bytes

from ppctl.executors.reference import reference
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import LOOPED_WHOLE, ON_RING
from ppctl.schedule.tick_lowering import ticks

REMATS = ("none", "layer", "full")


def case(schedule, mesh, *settings, **more):
    return Case(
        schedule, mesh, *settings, num_chunks=SINGLE_OP[schedule], **({"model": "mlp"} | more)
    )


DEFAULT = [
    # every family, remat and loops taking turns
    *(
        case(name, (1, 4, 1), remat=REMATS[i % 3], loops=i % 2 == 0)
        for i, name in enumerate(SINGLE_OP)
    ),
    case("zb_h1", (2, 2, 2), remat="none", model="tied swiglu"),
    case("zb_v", (2, 2, 2), remat="full", model="untied gelu"),
    # 10 layers on 4 x 2 stages, unrolled and scanned
    case("zb_v", (1, 4, 1), remat="none", num_layers=10),
    case("interleaved_zb", (1, 4, 1), remat="layer", num_layers=10, unroll=0),
    case("dualpipe_v", (8, 1, 1), remat="full"),
    case("zb_h1", (8, 1, 1), remat="layer"),
]
MORE = [  # cases of `make test-full`; `make exhaustive` has the whole product
    *(
        case(name, (2, 2, 1), remat=REMATS[(i + 1) % 3], loops=i % 2 == 1)
        for i, name in enumerate(SINGLE_OP)
    ),
    *(case("zb_h1", (1, 4, 1), remat=remat, model="untied swiglu grouped") for remat in REMATS),
    *(case("zb_v", (1, 4, 1), remat=remat, unroll=0) for remat in REMATS),
    *(
        case(name, (1, 3, 1), 6, remat="none", num_layers=7, batch_size=60, unroll=0)
        for name in SINGLE_OP
    ),
    *(case(name, (1, 8, 1), remat="full", num_layers=17) for name in ("v_min", "dualpipe_v")),
    *(case(name, (1, 2, 4), remat=remat) for name in ("zb_h1", "dualpipe_v") for remat in REMATS),
]


def test_every_family_of_the_ring_runs_in_pairs_or_single_ops():
    assert set(SINGLE_OP) | set(LOOPED_WHOLE) == set(ON_RING)
    assert all(case(name, (1, 4, 1)).program().num_chunks == V for name, V in SINGLE_OP.items())


# the covering cases of test_spmd_equals_reference.py have every family
@pytest.mark.full
@pytest.mark.parametrize("one", [*DEFAULT, *MORE], ids=name_of)
def test_loss_and_gradients_equal_the_reference(one):
    check(one)


@pytest.mark.parametrize(("name", "remat"), [("zb_v", "none"), ("zb_h1", "full")])
def test_an_evaluation_has_the_references_loss(name, remat):
    one = case(name, (2, 2, 2), num_layers=7, remat=remat)
    params, batch, loss, _ = run_reference(one.model, one.num_layers, one.batch_size)
    step = jax.jit(staged_step(one, with_grads=False), compiler_options=COMPILE_FAST)
    found, number = step(one.layout().to_staged(params), batch)
    assert number == batch["targets"].size
    assert abs(found - loss) <= TOLERANCE * abs(loss)


@pytest.mark.parametrize(
    ("name", "remat"), [("dualpipe_v", "none"), ("zb_h1", "layer"), full(("zb_v", "full"))]
)
def test_nan_of_empty_slots_and_padding_goes_nowhere(name, remat):
    num_layers = 4 * SINGLE_OP[name] + 1  # one rank of the first chunk has two, the others padding
    one = case(name, (1, 4, 1), 4, num_layers=num_layers, batch_size=8, remat=remat)
    stack, (params, batch) = normalizing_stack(num_layers), normalizing_inputs(num_layers, 8)
    whole = reference(stack, num_microbatches=1, remat="none", unroll=16, dtype=jnp.float64)
    expected_loss, expected = jax.jit(whole)(params, batch)
    layout = one.layout()
    losses, grads = jax.jit(staged_step(one, stack), compiler_options=COMPILE_FAST)(
        layout.to_staged(params), batch
    )
    assert losses["loss"] == pytest.approx(float(expected_loss["loss"]), rel=1e-12)
    assert difference(layout.to_natural(jax.tree.map(np.asarray, grads)), expected) <= TOLERANCE
    padding = np.arange(layout.placement.counts.max()) >= layout.placement.counts[..., None]
    assert not np.asarray(grads["layers"]["kernel"])[
        padding
    ].any()  # zero, so that padding stays zero for ever


# --- the program ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh", "num_hops"),
    [full(("zb_h1", (2, 2, 2), 1)), ("zb_v", (2, 4, 1), 2), full(("zb_v", (8, 1, 1), 0))],
)
def test_a_tick_moves_only_its_output(name, mesh, num_hops):
    whole, loops = collectives(case(name, mesh))
    assert whole.get("collective-permute", 0) == num_hops
    assert not any(loop.keys() - {"collective-permute"} for loop in loops)
    assert whole["all-reduce"] >= 1  # the loss and the gradients, once a step


@pytest.mark.parametrize(
    ("name", "remat"), [("zb_h1", "none"), full(("zb_h1", "full")), full(("zb_v", "none"))]
)
def test_memory_does_not_grow_with_the_number_of_microbatches(name, remat):
    few, many = (temp_bytes(name, SINGLE_OP[name], m, remat) for m in (16, 64))
    assert many <= 1.05 * few
    assert many < 0.5 * temp_bytes("gpipe", 1, 64, remat)


@pytest.mark.parametrize("remat", full_except(REMATS, "none"))
def test_no_tick_copies_the_slots(remat):
    """A copy of all slots in every tick would outweigh the tasks."""
    one = case("zb_h1", (1, 4, 1), 16, batch_size=16 * 64, remat=remat)
    text = compiled(one).as_text()
    program, slots = computations(text), ticks(one.program(), Costs(), one.remat).num_slots
    [body] = re.findall(r" while\(.*body=%?([\w.\-]+)", text)
    shapes = {f"f64[{count},64,16]" for count in slots.values() if count}
    lines = [line for name in called(program, body) for line in program[name]]
    assert any(shape in line for line in lines for shape in shapes)
    assert not [
        line
        for line in lines
        for shape in shapes
        if re.search(rf"= {re.escape(shape)}\S* copy\(", line)
    ]


@pytest.mark.parametrize("name", ["dualpipe_v", full("zb_h1")])
def test_program_size_does_not_depend_on_the_number_of_microbatches(name):
    few, many = (sizes(case(name, (1, 4, 1), m, batch_size=2 * m)) for m in (16, 64))
    assert few == many
