"""Cross-entropy by chunks of tokens against the plain formula, forward and gradients, and its memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import full

from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.model import cross_entropy as module
from ppctl.model.cross_entropy import HeadForm, cross_entropy

WIDTH, VOCAB_SIZE = 6, 11


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of five tokens."""
    monkeypatch.setattr(module, "LEAST_TOKENS", 5)
    monkeypatch.setattr(module, "MOST_LOGITS", 1)


def arrays(num_tokens, is_tied, dtype="float64"):
    draw = np.random.default_rng(num_tokens)
    x, w = draw.standard_normal((num_tokens, WIDTH)), draw.standard_normal((WIDTH, VOCAB_SIZE))
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(w.T if is_tied else w, dtype),
        draw.integers(VOCAB_SIZE, size=num_tokens),
    )


def formula(x, w, targets, is_tied, cap=None):
    logits = np.asarray(x) @ (np.asarray(w).T if is_tied else np.asarray(w))
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    return -(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[
        np.arange(len(targets)), targets
    ].sum()


def plain(x, w, targets, is_tied, cap=None):
    logits = module.logits(x, w, HeadForm(is_tied, cap, VOCAB_SIZE))
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()


def by_chunks(x, w, targets, is_tied, cap=None):
    return cross_entropy(x, w, targets, HeadForm(is_tied, cap, w.shape[0 if is_tied else 1]))


@pytest.mark.parametrize(
    ("num_tokens", "is_tied", "cap"),
    [(5, False, None), (10, True, 1.5), full((5, True, 1.5)), full((10, False, None))]
    + [full((number, *how)) for number in (6, 13) for how in ((False, None), (True, 1.5))],
)
def test_any_number_of_tokens_has_the_loss_and_the_gradients_of_the_formula(
    num_tokens, is_tied, cap, chunks
):
    x, w, targets = arrays(num_tokens, is_tied)

    def function(f):
        three = lambda x, w: 3.0 * f(x, w, jnp.asarray(targets), is_tied=is_tied, cap=cap)
        return jax.jit(jax.value_and_grad(three, (0, 1)))

    loss, grads = function(by_chunks)(x, w)
    assert loss == pytest.approx(3.0 * formula(x, w, targets, is_tied, cap), rel=1e-13)
    assert by_chunks(x, w, targets, is_tied=is_tied, cap=cap) * 3.0 == pytest.approx(
        float(loss), rel=1e-13
    )  # without gradients
    wanted_loss, wanted = function(plain)(x, w)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-13)
    for found, exact in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-11, atol=1e-13)


def test_bfloat16_sums_in_float32(chunks):
    x, w, targets = arrays(64, False, "bfloat16")
    function = jax.jit(jax.value_and_grad(partial(by_chunks, is_tied=False), (0, 1)))
    loss, grads = function(x, w, targets)
    exact, wanted = function(x.astype("float64"), w.astype("float64"), targets)
    assert loss.dtype == "float32"
    assert loss == pytest.approx(float(exact), rel=1e-5)  # the logits are not rounded to bfloat16
    for found, right in zip(grads, wanted, strict=True):
        assert found.dtype == "bfloat16"
        assert jnp.linalg.norm(found.astype("float64") - right) < 1e-2 * jnp.linalg.norm(right)


def test_no_product_of_the_head_runs_twice(chunks):
    x, w, targets = arrays(20, False)
    there_and_back = lambda f: jax.grad(lambda x, w: f(x, w, targets, is_tied=False), (0, 1))
    assert matmul_flops(there_and_back(by_chunks), x, w) == matmul_flops(
        there_and_back(plain), x, w
    )


def test_logits_of_a_large_vocabulary_exist_for_a_chunk_at_a_time():
    tokens, vocab_size, width = 2**15, 2**15, 8
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, width), (width, vocab_size))
    )
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def temporary(f):
        step = jax.jit(
            jax.value_and_grad(lambda x, w, targets: f(x, w, targets, is_tied=False), (0, 1))
        )
        return step.lower(x, w, targets).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * tokens * vocab_size
    assert temporary(plain) >= logits
    assert temporary(by_chunks) < 0.4 * logits  # eight chunks, and the temporaries of one
