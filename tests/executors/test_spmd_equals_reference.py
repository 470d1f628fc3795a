"""Loss and gradients of the spmd executor equal the reference in float64, where a wrong schedule
cannot hide.

`make test` runs a covering selection of cases, `make test-full` every pair of settings.
"""

import jax
import jax.numpy as jnp
import pytest
from support.cases import COMPILE_FAST, Case, make_stack, run_reference, staged_step
from support.selection import full
from support.spmd_cases import (
    ALL_PAIRS,
    FACTORS,
    FEW,
    FEW_PAIRS,
    TOLERANCE,
    case_of,
    check,
    covering_array,
    name_of,
    pairs,
)

from ppctl.executors.reference import reference
from ppctl.schedule.families.registry import ON_RING

DEFAULT = [
    Case("gpipe", (2, 4, 1), remat="none", model="mlp"),
    Case("eager_1f1b", (1, 2, 4), remat="layer", model="mlp", unroll=0),
    Case("interleaved", (2, 2, 2), num_chunks=2, num_layers=4, remat="full", model="tied swiglu"),
    Case(
        "interleaved",
        (1, 4, 1),
        num_chunks=2,
        num_layers=9,
        remat="none",
        model="untied swiglu grouped",
        unroll=0,
    ),
    Case("gpipe", (1, 4, 1), 5, num_layers=7, batch_size=60, model="tied gelu grouped"),
    Case("interleaved", (1, 8, 1), num_chunks=4, num_layers=33, remat="full", model="mlp"),
]
COVERING = [case_of(values) for values in covering_array(FEW, FEW_PAIRS)]
PAIRWISE = [case_of(values) for values in covering_array()]


@pytest.mark.parametrize("case", [*DEFAULT[:3], *map(full, DEFAULT[3:]), *COVERING], ids=name_of)
def test_loss_and_gradients_equal_the_reference(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_loss_and_gradients_equal_the_reference_for_every_pair_of_settings(case):
    check(case)


def test_every_family_on_the_ring_occurs_in_the_covering_cases():
    assert {case.schedule for case in COVERING} == set(ON_RING)
    assert len(DEFAULT) + len(COVERING) <= 25  # each compiles for some seconds


def test_every_pair_of_settings_occurs_in_the_full_cases():
    found = set()
    for case in PAIRWISE:
        num_stages = case.mesh[1] * case.num_chunks
        values = {
            "schedule": (case.schedule, case.num_chunks),
            "mesh": case.mesh,
            "layers": "even" if case.num_layers % num_stages == 0 else "uneven",
        }
        found |= pairs(
            values | {name: getattr(case, name) for name in FACTORS if name not in values}
        )
    assert found == ALL_PAIRS
    schedule_by_mesh = {pair for pair in found if pair[0][0] == "mesh" and pair[1][0] == "schedule"}
    assert len(schedule_by_mesh) == len(FACTORS["mesh"]) * len(FACTORS["schedule"])
    assert len(PAIRWISE) <= 75  # each compiles for some seconds


# --- without gradients --------------------------------------------------------------------------


FORWARD_ONLY = [
    Case("gpipe", (2, 4, 1), remat="none", model="mlp"),
    Case("interleaved", (2, 2, 2), num_chunks=2, num_layers=7, remat="full", model="mlp"),
    Case("1f1b", (8, 1, 1), remat="layer", model="mlp"),
]


@pytest.mark.parametrize("case", FORWARD_ONLY, ids=name_of)
def test_an_evaluation_has_the_references_loss(case):
    params, batch, loss, _ = run_reference(case.model, case.num_layers, case.batch_size)
    step = jax.jit(staged_step(case, with_grads=False), compiler_options=COMPILE_FAST)
    found, number = step(case.layout().to_staged(params), batch)
    assert number == batch["targets"].size
    assert abs(found - loss) <= TOLERANCE * abs(loss)


def test_the_reference_evaluates_without_gradients():
    params, batch, loss, _ = run_reference("mlp", 8, 64)
    stack = make_stack("mlp", 8)
    step = reference(
        stack, num_microbatches=4, remat="none", unroll=16, dtype=jnp.float64, with_grads=False
    )
    found, number = jax.jit(step)(params, batch)
    assert number == batch["targets"].size
    assert abs(found - loss) <= TOLERANCE * abs(loss)
