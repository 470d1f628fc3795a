"""Loss and gradients of the mpmd executor equal the reference in float64; so do its steps and its
evaluation.
"""

import jax
import numpy as np
import pytest
from support.cases import COMPILE_FAST, make_params, make_stack
from support.mpmd_cases import (
    LR_SCHEDULE,
    MESHES,
    REMAT,
    MpmdCase,
    check,
    make_engine,
    make_optimizer,
    name_of,
)
from support.selection import full

from ppctl.executors.reference import reference
from ppctl.schedule.families.registry import FAMILIES
from ppctl.training.pipeline.optimizers import init_state, train_step

DEFAULT = [
    MpmdCase("1f1b", (2, 4, 1), remat="none", model="mlp"),
    MpmdCase("interleaved_zb", (2, 2, 2), num_layers=7, remat="full", model="mlp"),
    MpmdCase(
        "zb_v", (1, 2, 2), num_layers=4, remat="none", model="tied swiglu"
    ),  # embedding and head on one rank
    MpmdCase(
        "zb_h1", (1, 4, 1), remat="layer", model="mlp", sizes=(0, 5, 2, 1), unroll=2
    ),  # a stage without layers
    MpmdCase("gpipe", (1, 1, 1), remat="layer", model="mlp"),  # a single stage
    MpmdCase(
        "zb_h1", (1, 2, 1), num_layers=5, remat="none", model="mlp", unroll=0
    ),  # layers scanned
    MpmdCase("1f1b", (1, 4, 1), num_layers=10, remat="layer", model="mlp"),  # 3 + 3 + 2 + 2 layers
]


@pytest.mark.parametrize("case", [*DEFAULT[:-1], full(DEFAULT[-1])], ids=name_of)
def test_loss_and_gradients_equal_the_reference(case):
    check(case)


# every family, remat and mesh; `make exhaustive` runs their product
FAMILY_CASES = [
    MpmdCase(name, MESHES[i % 3], num_layers=9, remat=REMAT[i // 3 % 3], model="mlp")
    for i, name in enumerate(FAMILIES)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case if case.schedule == "looped_bfs" else full(case)  # DEFAULT and fused tasks have others
        for case in FAMILY_CASES
    ],
    ids=name_of,
)
def test_loss_and_gradients_of_every_schedule_equal_the_reference(case):
    check(case)


CLIPPED = [
    MpmdCase("interleaved", (2, 2, 1), num_layers=5, remat="full", model="mlp"),
    MpmdCase("zb_h1", (1, 2, 2), num_layers=3, remat="layer", model="tied gelu grouped"),
]


@pytest.mark.full
@pytest.mark.parametrize("case", [CLIPPED[0], full(CLIPPED[1])], ids=name_of)
def test_clipped_steps_equal_the_references(case):
    """Parameters, optimizer state and metrics; the norm is over all ranks, a tied leaf counts once."""
    engine, batch = make_engine(case)
    engine.compile(evaluate=True)
    state, placed = engine.new_state(), engine.batches.put(batch)
    stack = make_stack(case.model, case.num_layers)
    optimizer = make_optimizer()
    plain = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype="float64")
    expected = init_state(jax.tree.map(np.asarray, make_params(stack)), optimizer)
    step = jax.jit(train_step(plain, optimizer, LR_SCHEDULE), compiler_options=COMPILE_FAST)
    for _ in range(3):
        evaluated = float(engine.loss(state, placed)[0])
        state, metrics = engine.step(state, placed)
        expected, wanted = step(expected, batch)
        assert evaluated == pytest.approx(float(wanted["loss"]), rel=1e-10)
        assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
            {k: float(v) for k, v in wanted.items()}, rel=1e-9
        )
    for found, wanted in zip(
        *map(jax.tree.leaves, (engine.to_natural(state), expected)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-8, atol=1e-12)


def test_a_state_survives_the_way_to_natural_order_and_back_bit_for_bit():
    case = MpmdCase("zb_v", (1, 2, 2), num_layers=5, model="tied swiglu")
    engine, _ = make_engine(case)
    natural = jax.tree.map(np.asarray, engine.to_natural(engine.new_state()))
    params = make_params(make_stack(case.model, case.num_layers))
    for found, wanted in zip(*map(jax.tree.leaves, (natural["params"], params)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    again = engine.to_natural(engine.from_natural(jax.tree.map(jax.numpy.asarray, natural)))
    for found, wanted in zip(*map(jax.tree.leaves, (again, natural)), strict=True):
        np.testing.assert_array_equal(found, wanted)
