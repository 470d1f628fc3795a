"""Cross-entropy of a vocabulary in parts, first all sums and then the gradients, against the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import full

from ppctl.model import cross_entropy as module
from ppctl.model.cross_entropy import NO_TOKEN, HeadForm, cross_entropy
from ppctl.model.stack import log_sums_of_parts

WIDTH, VOCAB_SIZE, NUM_PARTS, HELD, NUM_TOKENS = 6, 11, 3, 4, 13


@pytest.mark.full
@pytest.mark.parametrize(
    ("is_kept", "is_tied", "cap"),
    [(True, False, None), (False, True, 1.5), full((False, False, None)), full((True, True, 1.5))],
)
def test_parts_sum_to_the_loss_and_the_gradients_of_the_whole(is_kept, is_tied, cap, monkeypatch):
    """Logits are kept, or computed again in chunks of five tokens. The last part has an id of
    padding.
    """
    draw = np.random.default_rng(3)
    x, w = (
        jnp.asarray(draw.standard_normal((NUM_TOKENS, WIDTH))),
        draw.standard_normal((WIDTH, VOCAB_SIZE)),
    )
    targets = jnp.asarray([*draw.integers(VOCAB_SIZE, size=NUM_TOKENS - 1), NO_TOKEN])
    padded = np.pad(w, ((0, 0), (0, NUM_PARTS * HELD - VOCAB_SIZE)))
    parts = [jnp.asarray(part.T if is_tied else part) for part in np.split(padded, NUM_PARTS, 1)]
    whole = HeadForm(is_tied, cap, VOCAB_SIZE)

    def of_whole(x, w):
        return cross_entropy(x, jnp.asarray(w.T if is_tied else w), targets, whole)

    loss, (gx, gw) = jax.jit(jax.value_and_grad(of_whole, (0, 1)))(x, jnp.asarray(w))
    if not is_kept:
        monkeypatch.setattr(module, "MOST_LOGITS", 1)
        monkeypatch.setattr(module, "LEAST_TOKENS", 5)
    head = HeadForm(is_tied, cap, VOCAB_SIZE, num_ranks=NUM_PARTS)
    sums = [module.part_log_sums(x, part, jnp.int32(i), head) for i, part in enumerate(parts)]
    assert [logits is not None for _, logits in sums] == [is_kept] * NUM_PARTS
    of_all = log_sums_of_parts(jnp.stack([each for each, _ in sums]))

    def of_part(i, x, part):
        return cross_entropy(x, part, targets, head, of_all, sums[i][1], jnp.int32(i))

    found = [
        jax.jit(jax.value_and_grad(lambda x, w, i=i: of_part(i, x, w), (0, 1)))(x, parts[i])
        for i in range(3)
    ]
    assert sum(of_part(i, x, parts[i]) for i in range(3)) == pytest.approx(
        float(loss), rel=1e-13
    )  # without gradients
    assert sum(loss for loss, _ in found) == pytest.approx(float(loss), rel=1e-13)
    np.testing.assert_allclose(sum(gx for _, (gx, _) in found), gx, rtol=1e-11, atol=1e-13)
    columns = np.concatenate([part.T if is_tied else part for _, (_, part) in found], axis=1)
    np.testing.assert_allclose(columns[:, :VOCAB_SIZE], gw, rtol=1e-11, atol=1e-13)
    assert not columns[:, VOCAB_SIZE:].any()  # padding has no gradient


def test_a_frozen_matrix_gets_no_gradient():
    x, w, targets = (
        jnp.ones((NUM_TOKENS, WIDTH)),
        jnp.ones((WIDTH, VOCAB_SIZE)),
        jnp.zeros(NUM_TOKENS, jnp.int32),
    )
    head = HeadForm(False, None, VOCAB_SIZE)
    sums, logits = module.part_log_sums(x, w, jnp.int32(0), head)

    def loss(x):
        return cross_entropy(x, w, targets, head, sums, logits, jnp.int32(0))

    traced = jax.make_jaxpr(jax.grad(loss))(x)
    products = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.shape for eqn in products] == [x.shape]
