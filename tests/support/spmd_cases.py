"""Choices of settings for one step by the spmd executor, and the comparison of each with the
reference.

`make test` runs a few of them, `make test-full` every pair of settings, `make exhaustive` their
product.
"""

import itertools
import random

from support.cases import MODELS, Case, difference, make_stack, run_reference, run_spmd

from ppctl.schedule.families.registry import FAMILIES, LOOPED_WHOLE, ON_RING

TOLERANCE = 1e-10
# the families that run in single-op ticks, with a number of chunks; the others run in
# forward-backward ticks
SINGLE_OP = {name: FAMILIES[name].num_chunks for name in ON_RING if name not in LOOPED_WHOLE}
HAS_CHUNKS = tuple(name for name in LOOPED_WHOLE if FAMILIES[name].knobs_for(1))

FACTORS = {
    "schedule": [
        (name, V) for name in LOOPED_WHOLE for V in ((1, 2, 4) if name in HAS_CHUNKS else (1,))
    ],
    "mesh": [
        (1, 4, 1),
        (2, 4, 1),
        (4, 2, 1),
        (2, 2, 2),
        (1, 2, 4),
        (8, 1, 1),
        (1, 3, 1),
        (1, 8, 1),
    ],
    "remat": ["none", "layer", "full"],
    "layers": ["even", "uneven"],
    "model": list(MODELS),
    "unroll": [16, 0],
    "gather": ["step", "layer"],
    "loops": [False, True],
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
    for pair in itertools.product(
        [(a, value) for value in a_values], [(b, value) for value in b_values]
    )
}


def covering_array(factors=FACTORS, wanted=ALL_PAIRS, possible=possible):
    """Choices of values with every wanted pair: each has the most new pairs of 60 random ones."""
    rng, chosen, left = random.Random(0), [], sorted(wanted, key=repr)
    while left:
        missing = set(left)
        options = [
            {k: rng.choice(v) for k, v in factors.items()} | dict(left[0]) for _ in range(60)
        ]
        best = max(filter(possible, options), key=lambda values: len(pairs(values) & missing))
        chosen.append(best)
        left = [pair for pair in left if pair not in pairs(best)]
    return chosen


# `make test`: every family, and every pair of flags, but not of the meshes that cost most; the
# models that are not perceptrons compile for 3 times as long and are in a few separate cases
FEW = FACTORS | {
    "schedule": [
        *(
            max(each for each in FACTORS["schedule"] if each[0] == name and each[1] < 4)
            for name in LOOPED_WHOLE
        ),
        *SINGLE_OP.items(),
    ],
    "mesh": [(1, 4, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 3, 1)],
    "model": ["mlp"],
    "gather": ["step"],  # layer by layer: tests/executors/test_gather_by_layer.py
}
FEW_PAIRS = {
    pair
    for pair in ALL_PAIRS
    if all(name not in ("schedule", "mesh") and value in FEW[name] for name, value in pair)
    or ((pair[0][0], pair[1][0]) == ("layers", "mesh") and pair[1][1] in FEW["mesh"])
} | {
    (("remat", FEW["remat"][i % 3]), ("schedule", schedule))
    for i, schedule in enumerate(FEW["schedule"])
}


def num_layers_of(num_stages, layers):
    """The fewest sizes that serve all numbers of stages, since each needs a separate reference."""
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
        **{name: values[name] for name in ("remat", "unroll", "gather", "loops")},
    )


def name_of(case):
    mesh = "x".join(map(str, case.mesh))
    flags = ["scan"] * (case.unroll == 0) + [case.gather] * (case.gather != "step")
    flags += ["loops"] * case.loops
    chunks = str(case.num_chunks) * (case.schedule in HAS_CHUNKS)
    return " ".join(
        [case.schedule + chunks, mesh, f"L{case.num_layers}", case.remat, case.model, *flags]
    )


def check(case):
    params, batch, loss, grads = run_reference(case.model, case.num_layers, case.batch_size)
    found_loss, found_grads = run_spmd(case, make_stack(case.model, case.num_layers), params, batch)
    assert abs(found_loss - loss) <= TOLERANCE * abs(loss)
    assert difference(found_grads, grads) <= TOLERANCE
