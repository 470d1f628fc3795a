"""Loss and gradients of the spmd executor equal the reference in float64, where a wrong schedule cannot hide.

A few cases run by default; the slow ones hold every pair of settings.
"""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from support.cases import COMPILE_FAST, MODELS, Case, difference, make_stack, run_reference, run_spmd, staged_step

from ppctl.executors.reference import reference
from ppctl.schedule import LOOPED_WHOLE

TOLERANCE = 1e-10

FACTORS = {
    "schedule": [
        (name, V) for name in LOOPED_WHOLE for V in ((1, 2, 4) if name in ("interleaved", "looped_bfs") else (1,))
    ],
    "mesh": [(1, 4, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 3, 1), (1, 8, 1)],
    "remat": ["none", "layer", "full"],
    "layers": ["even", "uneven"],
    "model": list(MODELS),
    "unroll": [16, 0],
    "gather_each_tick": [False, True],
    "skip_idle": [True, False],
}


def possible(values):
    """Whether a (partial) choice of factor values can be run: one stage cannot be uneven."""
    one_stage = values.get("mesh", (1, 2, 1))[1] * values.get("schedule", ("", 2))[1] == 1
    return not (one_stage and values.get("layers") == "uneven")


def pairs(values):
    return set(itertools.combinations(sorted(values.items()), 2))


ALL_PAIRS = {
    pair
    for (a, a_values), (b, b_values) in itertools.combinations(sorted(FACTORS.items()), 2)
    for pair in itertools.product([(a, value) for value in a_values], [(b, value) for value in b_values])
}


def covering_array():
    """Choices of factor values in which every pair occurs: each next one, of 60 random ones, has the most new pairs."""
    rng, chosen, left = random.Random(0), [], sorted(ALL_PAIRS, key=repr)
    while left:
        missing = set(left)
        options = [{k: rng.choice(v) for k, v in FACTORS.items()} | dict(left[0]) for _ in range(60)]
        best = max(filter(possible, options), key=lambda values: len(pairs(values) & missing))
        chosen.append(best)
        left = [pair for pair in left if pair not in pairs(best)]
    return chosen


def num_layers_of(num_stages, layers):
    """The fewest sizes that serve all numbers of stages, since each needs a reference of its own."""
    if layers == "even":
        return next(n for n in (8, 6, 12, 16, 32) if n % num_stages == 0)
    return next(n for n in (7, 9, 13, 17, 33) if n > num_stages)


def case_of(values):
    (schedule, num_chunks), mesh = values["schedule"], values["mesh"]
    return Case(
        schedule,
        mesh,
        num_microbatches=6 if mesh[1] == 3 else 8,
        num_chunks=num_chunks,
        num_layers=num_layers_of(mesh[1] * num_chunks, values["layers"]),
        model=values["model"],
        batch_size=60 if mesh[1] == 3 else 64,
        **{name: values[name] for name in ("remat", "unroll", "gather_each_tick", "skip_idle")},
    )


def name_of(case):
    mesh = "x".join(map(str, case.mesh))
    flags = ["scan"] * (case.unroll == 0) + ["gather"] * case.gather_each_tick + ["compute"] * (not case.skip_idle)
    chunks = str(case.num_chunks) * (case.schedule in ("interleaved", "looped_bfs"))
    return " ".join([case.schedule + chunks, mesh, f"L{case.num_layers}", case.remat, case.model, *flags])


def check(case):
    params, batch, loss, grads = run_reference(case.model, case.num_layers, case.batch_size)
    found_loss, found_grads = run_spmd(case, make_stack(case.model, case.num_layers), params, batch)
    assert abs(found_loss - loss) <= TOLERANCE * abs(loss)
    assert difference(found_grads, grads) <= TOLERANCE


DEFAULT = [
    Case("gpipe", (2, 4, 1), remat="none", model="mlp"),
    Case("1f1b", (1, 3, 1), 6, num_layers=7, batch_size=60, model="mlp", skip_idle=False),
    Case("eager_1f1b", (1, 2, 4), remat="layer", model="mlp", unroll=0, gather_each_tick=True),
    Case("interleaved", (2, 2, 2), num_chunks=2, remat="full", model="tied swiglu"),
    Case("interleaved", (1, 4, 1), num_chunks=2, num_layers=9, remat="none", model="untied swiglu grouped", unroll=0),
    Case("1f1b", (8, 1, 1), remat="layer", model="mlp"),
    Case("gpipe", (1, 4, 1), 5, num_layers=7, batch_size=60, model="tied gelu grouped"),
    Case("interleaved", (1, 8, 1), num_chunks=4, num_layers=33, remat="full", model="mlp"),
]
PAIRWISE = [case_of(values) for values in covering_array()]


@pytest.mark.parametrize("case", DEFAULT, ids=name_of)
def test_loss_and_gradients_equal_the_reference(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_loss_and_gradients_equal_the_reference_for_every_pair_of_settings(case):
    check(case)


def test_every_pair_of_settings_occurs_in_the_slow_cases():
    found = set()
    for case in PAIRWISE:
        num_stages = case.mesh[1] * case.num_chunks
        values = {
            "schedule": (case.schedule, case.num_chunks),
            "mesh": case.mesh,
            "layers": "even" if case.num_layers % num_stages == 0 else "uneven",
        }
        found |= pairs(values | {name: getattr(case, name) for name in FACTORS if name not in values})
    assert found == ALL_PAIRS
    schedule_by_mesh = {pair for pair in found if pair[0][0] == "mesh" and pair[1][0] == "schedule"}
    assert len(schedule_by_mesh) == len(FACTORS["mesh"]) * len(FACTORS["schedule"])
    assert len(PAIRWISE) <= 75  # each compiles for some seconds


# --- without gradients -----------------------------------------------------------------------------------------------


FORWARD_ONLY = [
    Case("gpipe", (2, 4, 1), remat="none", model="mlp"),
    Case("interleaved", (2, 2, 2), num_chunks=2, num_layers=7, remat="full", model="mlp", skip_idle=False),
    Case("1f1b", (8, 1, 1), remat="layer", model="mlp"),
]


@pytest.mark.parametrize("case", FORWARD_ONLY, ids=name_of)
def test_forwards_alone_give_the_loss_of_the_reference(case):
    params, batch, loss, _ = run_reference(case.model, case.num_layers, case.batch_size)
    step = jax.jit(staged_step(case, with_grads=False), compiler_options=COMPILE_FAST)
    found, grads = step(case.layout().to_staged(params), batch)
    assert grads is None
    assert abs(found - loss) <= TOLERANCE * abs(loss)


def test_the_reference_alone_gives_the_loss_without_gradients():
    params, batch, loss, _ = run_reference("mlp", 8, 64)
    stack = make_stack("mlp", 8)
    step = reference(stack, num_microbatches=4, remat="none", unroll=16, dtype=jnp.float64, with_grads=False)
    found, grads = jax.jit(step)(params, batch)
    assert grads is None
    assert abs(found - loss) <= TOLERANCE * abs(loss)
