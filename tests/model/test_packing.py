"""Documents packed into sequences have the losses and gradients of separate documents, with any
executor.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import state_of
from support.selection import full

import ppctl
from ppctl.data.token_examples import packed
from ppctl.errors import ConfigError
from ppctl.executors.reference import reference
from ppctl.model.attention import chunked_attention
from ppctl.model.attention.attention_kernels import choose, kernel_named
from ppctl.model.attention.attention_scores import PLAIN, Scoring
from ppctl.model.cross_entropy import NO_TOKEN
from ppctl.model.packed_sequences import Documents, num_rows, split_starts, with_starts
from ppctl.model.stack import init

VOCAB_SIZE, SEQ_LEN, END = 61, 20, 0
SIZES = {"num_layers": 2, "d_model": 12, "num_heads": 2, "activation": "swiglu", "mlp_width": 24}


@pytest.fixture(scope="module")
def documents():
    """Return documents of 1 to 20 tokens, each followed by the end token."""
    draw = np.random.default_rng(0)
    return [
        np.append(draw.integers(1, VOCAB_SIZE, size=n), END)
        for n in (20, 7, 9, 4, 12, 1, 3, 16, 5, 2)
    ]


def batch_of(documents, **how):
    how = {
        "name": "t",
        "source": "t",
        "content": "",
        "batch_size": 1,
        "seed": 0,
        "eval_fraction": 0.0,
    } | how
    ids, ends = np.concatenate(documents), np.cumsum([len(each) for each in documents])
    dataset = packed(ids, ends, end=END, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN, **how)
    return dataset.read(np.arange(dataset.num_examples))


def rows_of(documents):
    """A row a document, filled up with what no token before it sees and no loss counts."""
    fill = lambda a, value: np.pad(a, (0, SEQ_LEN - len(a)), constant_values=value)
    inputs, targets = zip(
        *((fill(d[:-1], END), fill(d[1:], NO_TOKEN)) for d in documents), strict=True
    )
    return {"inputs": np.stack(inputs), "targets": np.stack(targets)}


def mean_of(stack):
    return jax.jit(reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64))


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def expected(documents):
    stack = ppctl.transformer(vocab_size=VOCAB_SIZE, dtype=jnp.float64, **SIZES)
    params = jax.jit(lambda: init(stack, 0))()
    return params, mean_of(stack)(params, rows_of(documents))


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["chunked", full("xla")])
def test_packed_documents_have_the_losses_and_gradients_of_separate_documents(
    documents, expected, kernel, monkeypatch
):
    monkeypatch.setattr(chunked_attention, "BLOCK", 6)  # four blocks, the last one padded
    stack = ppctl.transformer(
        vocab_size=VOCAB_SIZE, dtype=jnp.float64, packed=True, attention=kernel, **SIZES
    )
    params, wanted = expected
    batch = batch_of(documents)
    assert len(batch["inputs"]) < len(documents)
    assert_same(mean_of(stack)(params, batch), wanted)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["xla", full("chunked")])
def test_windows_and_caps_stay_within_documents(documents, expected, kernel, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 6)
    extras = {
        "window": 4,
        "window_pattern": "WF",
        "attention_softcap": 5.0,
        "logit_softcap": 2.0,
        "attention": kernel,
    }
    alone, stack = (
        ppctl.transformer(
            vocab_size=VOCAB_SIZE, dtype=jnp.float64, packed=packed, **SIZES, **extras
        )
        for packed in (False, True)
    )
    wanted = mean_of(alone)(expected[0], rows_of(documents))
    assert abs(wanted[0]["loss"] - expected[1][0]["loss"]) > 1e-5
    assert_same(mean_of(stack)(expected[0], batch_of(documents)), wanted)


def test_documents_without_marked_starts_are_not_separated(documents, expected):
    stack = ppctl.transformer(vocab_size=VOCAB_SIZE, dtype=jnp.float64, packed=True, **SIZES)
    batch = batch_of(documents)
    batch["inputs"] = np.where(batch["inputs"] < 0, ~batch["inputs"], batch["inputs"])
    assert abs(mean_of(stack)(expected[0], batch)[0]["loss"] - expected[1][0]["loss"]) > 1e-5


@pytest.mark.parametrize(
    ("executor", "schedule", "remat", "axes"),
    [
        full(("spmd", "1f1b", "none", {"pp": 2})),
        ("mpmd", "zb_h1", "full", {"pp": 2}),
        full(("spmd", "zb_h1", "layer", {"pp": 2})),
        full(("spmd", "eager_1f1b", "full", {"dp": 2, "pp": 2})),
        full(("mpmd", "1f1b", "none", {"pp": 2, "tp": 2})),
        full(("spmd", "1f1b", "full", {"pp": 2, "tp": 2})),
        full(("spmd", "gpipe", "none", {"pp": 1, "fsdp": 2, "tp": 2})),
    ],
)
def test_packed_documents_equal_separate_ones_in_both_executors(
    documents, expected, executor, schedule, remat, axes
):
    batch = batch_of(documents)
    rows = (
        -len(batch["inputs"]) % 4
    )  # rows of padding, equally many for each microbatch and replica
    batch = {
        name: np.pad(a, ((0, rows), (0, 0)), constant_values=NO_TOKEN) for name, a in batch.items()
    }
    pipe = ppctl.pipeline(
        ppctl.transformer(vocab_size=VOCAB_SIZE, dtype=jnp.float64, packed=True, **SIZES),
        mesh=ppctl.mesh(**axes),
        schedule=schedule,
        num_microbatches=2,
        batch=batch,
        optimizer=optax.sgd(0.1),
        executor=executor,
        remat=remat,
        dtype="float64",
    )
    params, wanted = expected
    assert_same(pipe.loss_and_grads(state_of(pipe, params), batch), wanted)


def there_and_back(kernel, q, k, v, documents):
    mixed, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, documents), q, k, v)
    return mixed, *pull(jnp.cos(mixed))


@pytest.mark.full
@pytest.mark.parametrize("scoring", [PLAIN, Scoring(softcap=5.0, window=40)])
def test_the_kernel_of_tpus_keeps_documents_apart_too(scoring):
    draw = np.random.default_rng(1)
    with jax.enable_x64(False):  # the platform of Pallas's kernels
        q, k, v = (
            jnp.asarray(draw.standard_normal((2, 128, heads, 128)), "float32")
            for heads in (4, 2, 2)
        )
        documents = jnp.cumsum(jnp.asarray(draw.random((2, 128)) < 0.2), axis=1, dtype=jnp.int32)
        run = partial(kernel_named("pallas", scoring), interpret=True)
        found, plain = (
            there_and_back(f, q, k, v, documents) for f in (run, kernel_named("xla", scoring))
        )
        for a, b in zip(found, plain, strict=True):
            assert jnp.linalg.norm(a - b) < 1e-5 * jnp.linalg.norm(b)
        on_tpu = jax.jit(partial(there_and_back, kernel_named("pallas", scoring))).trace(
            q, k, v, documents
        )
        assert on_tpu.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3


@pytest.mark.parametrize(
    ("num_tokens", "parts", "width"), [(7, 1, 4), (8, 2, 4), (16, 4, 3), (5, 1, 16)]
)
def test_where_documents_start_goes_with_the_activations_exactly(num_tokens, parts, width):
    inputs = jnp.asarray(
        [[~5] + [6] * (num_tokens - 1), [6, ~5] * (num_tokens // 2) + [6] * (num_tokens % 2)]
    )
    ids, is_first = split_starts(inputs)
    assert set(np.unique(ids)) == {5, 6}
    x = with_starts(jnp.ones((2, num_tokens // parts, width), jnp.bfloat16), is_first)
    assert num_rows(x.shape, parts) == num_tokens // parts
    marks = x[:, num_tokens // parts :]
    index = Documents.of(marks, num_tokens).index_BT
    np.testing.assert_array_equal(index, np.cumsum(inputs < 0, axis=1))


def test_the_model_of_packed_sequences_knows_documents_or_is_refused():
    h100 = type(
        "H100", (), {"platform": "gpu", "compute_capability": "9.0", "device_kind": "H100"}
    )()
    assert choose("auto", h100, jnp.dtype("bfloat16"), 64, 512) == "cudnn"
    assert choose("auto", h100, jnp.dtype("bfloat16"), 64, 512, packed=True) == "xla"
    assert choose("auto", h100, jnp.dtype("bfloat16"), 64, 4096, packed=True) == "chunked"
    with pytest.raises(
        ConfigError, match=r"=cudnn: cuDNN's .* packed documents apart\. Use attention=auto"
    ):
        choose("cudnn", h100, jnp.dtype("bfloat16"), 64, 512, packed=True)
    stack = ppctl.transformer(vocab_size=VOCAB_SIZE, packed=True, **SIZES)
    with pytest.raises(
        ConfigError, match=r"cp=2 divides a sequence over devices.* Use (mesh\.)?cp=1"
    ):
        ppctl.pipeline(
            stack,
            mesh=ppctl.mesh(pp=1, cp=2),
            schedule="gpipe",
            num_microbatches=2,
            batch={name: np.zeros((4, SEQ_LEN), np.int32) for name in ("inputs", "targets")},
            optimizer=optax.sgd(0.1),
        )
