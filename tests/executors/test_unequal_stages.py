"""Loss and gradients of the spmd executor equal the reference in float64, however many layers a
stage holds.
"""

import itertools

import pytest
from support.cases import Case, difference, make_stack, run_reference, run_spmd
from support.selection import full

TOLERANCE = 1e-10
NUM_LAYERS, BATCH_SIZE = 10, 32
PARTITIONS = {
    "3 2 2 3": ("1f1b", (1, 4, 1), 1, (3, 2, 2, 3)),
    "1 4 4 1": ("eager_1f1b", (2, 4, 1), 1, (1, 4, 4, 1)),
    "0 5 4 1": ("1f1b", (1, 4, 2), 1, (0, 5, 4, 1)),
    "1 3 2 4, two chunks": ("interleaved", (1, 2, 2), 2, (1, 3, 2, 4)),
    "0 4 6 0, two chunks": ("looped_bfs", (2, 2, 2), 2, (0, 4, 6, 0)),
    "E|...|L": ("gpipe", (1, 4, 1), 1, "E|(tt|)*2,t*6L"),
    "all on the last": ("1f1b", (1, 2, 1), 1, (0, 10)),
    "Et*10|L": ("1f1b", (1, 2, 2), 1, "Et*10|L"),
}
REMAT = ("none", "layer", "full")
FLAGS = tuple(itertools.product((16, 0), ("step", "layer")))  # unroll, gather


def check(partition, remat, flags, model="mlp"):
    schedule, mesh, num_chunks, layers = PARTITIONS[partition]
    case = Case(schedule, mesh, 8, num_chunks, NUM_LAYERS, model, BATCH_SIZE, remat, *flags, layers)
    params, batch, loss, grads = run_reference(model, NUM_LAYERS, BATCH_SIZE)
    found_loss, found_grads = run_spmd(case, make_stack(model, NUM_LAYERS), params, batch)
    assert abs(found_loss - loss) <= TOLERANCE * abs(loss)
    assert difference(found_grads, grads) <= TOLERANCE


def flags_of(i):
    """Flags for case i; any 4 cases in a row have all of them."""
    return FLAGS[3 * i % 4]


QUICK = ("3 2 2 3", "0 5 4 1")
DEFAULT = [(partition, REMAT[i % 3], flags_of(i)) for i, partition in enumerate(PARTITIONS)]
OTHERS = [
    (partition, REMAT[(i + more) % 3], flags_of(i + 3 * more))
    for i, partition in enumerate(PARTITIONS)
    for more in (1, 2)
]


@pytest.mark.parametrize(
    ("partition", "remat", "flags"), [case if case[0] in QUICK else full(case) for case in DEFAULT]
)
def test_any_division_of_the_layers_gives_the_gradients_of_the_reference(partition, remat, flags):
    check(partition, remat, flags)


@pytest.mark.full
@pytest.mark.parametrize(("partition", "remat", "flags"), OTHERS)
def test_any_division_does_so_with_every_remat(partition, remat, flags):
    check(partition, remat, flags)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition", "remat"), [("1 3 2 4, two chunks", "none"), ("0 5 4 1", "full")]
)
def test_any_division_of_a_transformer_does_too(partition, remat):
    check(partition, remat, FLAGS[0], model="tied swiglu")
