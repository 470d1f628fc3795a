"""The spmd program: its size, memory and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import COMPILE_FAST, MLP, Case, make_stack, model_of, run_reference, staged_step
from support.selection import full, full_except
from support.spmd_programs import ROWS, collectives, equations, shapes_of, sizes, temp_bytes

from ppctl.executors.spmd.device_program import padded_sum
from ppctl.executors.spmd.spmd_program import rank_arrays, spmd_of_rank
from ppctl.model.stack import in_microbatches
from ppctl.schedule.costs import Costs
from ppctl.schedule.tick_lowering import ticks

PROGRAMS = [("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved", 2)]
programs = pytest.mark.parametrize(("schedule", "num_chunks"), PROGRAMS)


# --- collectives --------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("schedule", "num_chunks", "mesh"), [("interleaved", 2, (2, 2, 2)), ("1f1b", 1, (2, 4, 1))]
)
def test_a_tick_moves_only_one_activation_and_one_gradient(schedule, num_chunks, mesh, remat):
    case = Case(schedule, mesh, num_chunks=num_chunks, model="mlp", remat=remat)
    whole, loops = collectives(case)
    assert loops == [{"collective-permute": 2}]
    assert whole["all-reduce"] >= 1  # the loss and the gradients, once a step
    if mesh[2] > 1:
        assert whole["all-gather"] >= 2
        assert whole["reduce-scatter"] >= 2


@pytest.mark.parametrize("unroll", [0, 16])
def test_gradients_are_scattered_by_layer_before_stacking(unroll):
    case = Case("interleaved", (2, 2, 2), num_chunks=2, model="mlp", unroll=unroll)
    step = jax.make_jaxpr(staged_step(case))(*shapes_of(case))
    scattered = [
        eqn.invars[0].aval.ndim
        for eqn in equations(step.jaxpr)
        if eqn.primitive.name == "reduce_scatter"
    ]
    assert len(scattered) >= case.num_layers // case.mesh[1]
    assert max(scattered) == 2  # width of a layer's matrix


# --- slots of layers ----------------------------------------------------------------------------


def test_only_slots_that_some_rank_leaves_empty_are_in_conditions():
    def conditions(partition):
        case = Case("1f1b", (1, 4, 1), 8, 1, sum(partition), "mlp", layers=partition)
        step = jax.make_jaxpr(staged_step(case))(*shapes_of(case))
        return sum(eqn.primitive.name == "cond" for eqn in equations(step.jaxpr))

    even = conditions((2, 2, 2, 2))
    of_a_slot = conditions((3, 2, 2, 3)) - even
    assert of_a_slot > 0
    assert conditions((2, 4, 2, 2)) == even + 2 * of_a_slot


# --- a single rank -------------------------------------------------------------------------------


def run_alone(case, rank):
    """(sum of losses, their number, sums of gradients, compiled text) of a rank that runs its ticks
    on one device.
    """
    params, batch, *_ = run_reference(case.model, case.num_layers, case.batch_size)
    layout, lowered = case.layout(), ticks(case.program(), Costs(), case.remat)
    staged = layout.to_staged(params)
    own = {
        "embed_head": staged["embed_head"],
        "layers": jax.tree.map(lambda a: a[:, rank : rank + 1], staged["layers"]),
    }
    model = model_of(case, layout, make_stack(case.model, case.num_layers), params, batch)
    alone = jax.jit(spmd_of_rank(model, layout, lowered))
    batch = in_microbatches(batch, case.num_microbatches)
    program = alone.lower(own, batch, *rank_arrays(layout, lowered, rank)).compile(COMPILE_FAST)
    return *program(own, batch, *rank_arrays(layout, lowered, rank)), program.as_text()


@pytest.mark.parametrize(
    ("remat", "loops", "model"),
    [
        ("full", True, "mlp"),
        full(("none", False, "untied gelu")),
        full(("full", True, "untied gelu")),
    ],
)
def test_the_only_rank_of_a_pipeline_has_the_gradients_of_the_reference(remat, loops, model):
    case = Case("gpipe", (1, 1, 1), num_layers=4, model=model, remat=remat, loops=loops)
    loss, number, grads, _ = run_alone(case, 0)
    _, _, expected_loss, expected = run_reference(case.model, case.num_layers, case.batch_size)
    np.testing.assert_allclose(loss["loss"] / number, expected_loss, rtol=1e-12)
    found = case.layout().to_natural(jax.tree.map(lambda g: np.asarray(g / number), grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected
    )


@pytest.mark.parametrize("schedule", ["zb_h1", full("1f1b")])
def test_ranks_without_replicas_send_no_sums_and_the_last_has_the_losses(schedule):
    case = Case(schedule, (1, 4, 1), model="mlp", remat="none")
    numbers = []
    for rank in (0, 1, 3):
        loss, number, grads, text = run_alone(case, rank)
        numbers.append(float(number))
        assert np.isfinite(float(loss["loss"]))
        assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["layers"]))
        assert "collective-permute" not in text
    assert numbers == [0.0, 0.0, case.batch_size * MLP["target_dim"]]


# --- memory -------------------------------------------------------------------------------------

remats = pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.full)])


@remats
@pytest.mark.parametrize(("schedule", "num_chunks"), full_except(PROGRAMS[1:], ("eager_1f1b", 1)))
def test_memory_does_not_grow_with_the_number_of_microbatches(schedule, num_chunks, remat):
    assert temp_bytes(schedule, num_chunks, 64, remat) <= 1.05 * temp_bytes(
        schedule, num_chunks, 16, remat
    )


@remats
def test_memory_of_gpipe_grows_by_the_activations_of_every_microbatch(remat):
    grown = temp_bytes("gpipe", 1, 64, remat) - temp_bytes("gpipe", 1, 16, remat)
    assert grown >= 48 * ROWS * MLP["d_model"] * 8  # float64


@remats
@pytest.mark.parametrize(("schedule", "num_chunks"), PROGRAMS[1:])
def test_no_schedule_is_gpipe_in_disguise(schedule, num_chunks, remat):
    assert temp_bytes(schedule, num_chunks, 64, remat) < 0.5 * temp_bytes("gpipe", 1, 64, remat)


# --- size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [full(2), 1, full(4)])
@programs
def test_program_size_does_not_depend_on_the_number_of_microbatches(schedule, num_chunks, pp):
    def at(m):
        case = Case(schedule, (1, pp, 1), m, num_chunks, model="mlp", batch_size=2 * m)
        return sizes(case)

    assert at(8) == at(64)


@pytest.mark.parametrize("changes", [{"unroll": 0}, {"remat": "none"}], ids=str)
def test_no_option_makes_program_size_depend_on_the_number_of_microbatches(changes):
    def at(m):
        return sizes(
            Case(
                "interleaved",
                (1, 2, 2),
                m,
                2,
                model="mlp",
                num_layers=7,
                batch_size=2 * m,
                **changes,
            )
        )

    assert at(8) == at(64)


@pytest.mark.parametrize("number", range(1, 5))
def test_a_sum_of_padded_arrays_is_their_stack(number):
    arrays = [jnp.full((2, 3), k + 1.0) for k in range(number)]
    np.testing.assert_array_equal(padded_sum(arrays), jnp.stack(arrays))
