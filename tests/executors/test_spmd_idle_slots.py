"""Garbage in a slot that no task wrote reaches neither loss nor gradients.

The layer of this model divides by the norm of its product: zeros, which empty slots and padding
hold, give NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import COMPILE_FAST, Case, difference, staged_step
from support.normalizing import WIDTH, normalizing_inputs, normalizing_stack

from ppctl.executors.reference import reference


def test_the_normalizing_layer_gives_nan_for_empty_slots_and_padding():
    layer, rng = normalizing_stack(1).layer, np.random.default_rng(0)
    kernel, zero = rng.standard_normal((WIDTH, WIDTH)), np.zeros((2, WIDTH))
    assert jnp.isnan(layer({"kernel": kernel}, zero)).all()
    assert jnp.isnan(layer({"kernel": 0 * kernel}, np.ones((2, WIDTH)))).all()
    y, pull = jax.vjp(layer, {"kernel": kernel}, zero)
    assert all(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(pull(jnp.ones_like(y))))


SCHEDULES = [("1f1b", 4, 1, 7), ("gpipe", 4, 1, 8), ("interleaved", 2, 2, 5)]  # pp, chunks, layers
CASES = [(*schedule, remat) for schedule in SCHEDULES for remat in ("none", "layer", "full")]
BY_DEFAULT = [(*SCHEDULES[0], "none"), (*SCHEDULES[2], "layer")]


@pytest.mark.parametrize(
    ("schedule", "pp", "num_chunks", "num_layers", "remat"),
    [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.full) for case in CASES],
)
def test_nan_of_empty_slots_goes_nowhere(schedule, pp, num_chunks, num_layers, remat):
    case = Case(schedule, (1, pp, 1), 4, num_chunks, num_layers, batch_size=8, remat=remat)
    stack, (params, batch) = normalizing_stack(num_layers), normalizing_inputs(num_layers, 8)
    expected_loss, expected = jax.jit(
        reference(stack, num_microbatches=1, remat="none", unroll=16, dtype=jnp.float64)
    )(params, batch)
    layout = case.layout()
    losses, grads = jax.jit(staged_step(case, stack), compiler_options=COMPILE_FAST)(
        layout.to_staged(params), batch
    )
    assert losses["loss"] == pytest.approx(float(expected_loss["loss"]), rel=1e-12)
    assert difference(layout.to_natural(jax.tree.map(np.asarray, grads)), expected) <= 1e-10
    padding = np.arange(layout.placement.counts.max()) >= layout.placement.counts[..., None]
    assert not np.asarray(grads["layers"]["kernel"])[
        padding
    ].any()  # zero, so that padding stays zero for ever
