"""Functions cut into layers: loss and gradients are those of jax.grad of the whole function on one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import COMPILE_FAST, Case, difference, run_spmd
from mpmd_cases import MpmdCase, engine_of
from networks import NETWORKS, rows_of

from ppctl.model.stack import init
from ppctl.pieces import Pieces, stack_of
from ppctl.runtime.reference import reference

ROWS = 8


@cache
def made(name, auto=False):
    """(stack, its parameters, a batch, (pieces, loss, gradients in the author's form))."""
    make, *num_layers = NETWORKS[name]
    network, batch = make(marked=not auto), rows_of(name, ROWS)
    inputs = jax.ShapeDtypeStruct(batch["inputs"].shape, batch["inputs"].dtype)
    pieces = Pieces(network, num_layers[auto], auto=auto, inputs=inputs, dtype="float64", compute="float64")
    stack = stack_of(pieces)

    def mean_loss(params):
        loss, number = network.loss(network.apply(params, jnp.asarray(batch["inputs"])), batch["targets"])
        return loss / number

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(network.init(jax.random.key(3)))
    return stack, init(stack, 3), batch, (pieces, float(loss), jax.tree.map(np.asarray, grads))


@pytest.mark.parametrize("auto", [False, True], ids=["marks", "auto"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_parts_together_are_the_function(name, auto):
    stack, params, batch, (_, loss, grads) = made(name, auto)
    for number in (1, ROWS):  # microbatches of all rows, and of one
        step = reference(stack, num_microbatches=number, remat="layer", unroll=0, dtype=jnp.float64)
        found, found_grads = jax.jit(step, compiler_options=COMPILE_FAST)(params, batch)
        assert float(found) == pytest.approx(loss, rel=1e-12)
        assert difference(stack.export(found_grads), grads) < 1e-12


def check(name, auto, loss_and_grads):
    stack, _, _, (pieces, loss, grads) = made(name, auto)
    found, found_grads = loss_and_grads
    assert float(found) == pytest.approx(loss, rel=1e-12)
    assert difference(stack.export(jax.tree.map(np.asarray, found_grads)), grads) < 1e-10
    for a, b in zip(*map(jax.tree.leaves, (pieces.to_parts(pieces.from_parts(found_grads)), found_grads)), strict=True):
        np.testing.assert_array_equal(a, b)  # what is no parameter has no gradient


SPMD = [
    ("widths", False, {"mesh": (1, 2, 2), "schedule": "zb_h1", "remat": "none"}),
    ("widths", False, {"mesh": (1, 2, 1), "schedule": "interleaved", "num_chunks": 2, "remat": "layer"}),
    ("widths", True, {"mesh": (2, 3, 1), "schedule": "gpipe", "layers": (1, 2, 1), "remat": "full"}),
    ("widths", False, {"mesh": (1, 2, 1), "schedule": "zb_v", "remat": "none", "unroll": 0}),
    ("images", False, {"mesh": (1, 3, 1), "schedule": "eager_1f1b", "remat": "none"}),
    ("tokens", False, {"mesh": (1, 3, 1), "schedule": "zb_h1", "remat": "full"}),
]


@pytest.mark.parametrize(("name", "auto", "changes"), SPMD, ids=str)
def test_one_program_of_all_ranks_is_the_function(name, auto, changes):
    stack, params, batch, _ = made(name, auto)
    case = Case(**{"num_layers": stack.num_layers, "batch_size": ROWS, "num_microbatches": 4, **changes})
    check(name, auto, run_spmd(case, stack, params, batch))


MPMD = [
    ("widths", False, {"mesh": (2, 2, 1), "schedule": "zb_h1", "remat": "none"}),
    ("widths", False, {"mesh": (1, 2, 2), "schedule": "interleaved", "remat": "full", "unroll": 0}),
    ("images", True, {"mesh": (1, 2, 1), "schedule": "1f1b", "remat": "layer"}),
    ("tokens", False, {"mesh": (1, 3, 1), "schedule": "zb_h1", "remat": "none"}),
]


@pytest.mark.parametrize(("name", "auto", "changes"), MPMD, ids=str)
def test_programs_of_each_stage_are_the_function(name, auto, changes):
    stack, params, batch, _ = made(name, auto)
    case = MpmdCase(**{"num_layers": stack.num_layers, "batch_size": ROWS, "num_microbatches": 4, **changes})
    engine = engine_of(case, stack, params, batch)
    check(name, auto, engine.loss_and_grads(engine.new_state(), engine.put(batch)))
