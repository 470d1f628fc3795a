"""Attention by each kernel: the numbers of plain softmax attention, residuals, lowered programs."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import full, full_except

from ppctl.config.groups.model_settings import ATTENTIONS
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.executors.stage.stage import Stage
from ppctl.model.attention import attention_kernels as attention, chunked_attention
from ppctl.model.attention.attention_kernels import PAIR_KERNELS, choose, kernel_named
from ppctl.model.attention.attention_scores import PLAIN, Scoring
from ppctl.model.transformer import transformer
from ppctl.schedule.remat import Remat

SIZES = [
    (20, 4, 2),
    (8, 4, 4),
    (5, 6, 1),
    (1, 2, 2),
]  # tokens, heads, kv heads; blocks have 8 tokens
SCORINGS = [
    Scoring(scale=0.4, softcap=1.5, window=6),
    PLAIN,
    Scoring(window=1),
    Scoring(window=17),
    Scoring(softcap=2),
]


def arrays_of(tokens, heads, kv_heads, dtype, width=16, width_of_values=16):
    """Queries, keys, values, and a gradient of the output."""
    keys, widths = jax.random.split(jax.random.key(0), 4), (*[width] * 2, *[width_of_values] * 2)
    numbers = zip((heads, kv_heads, kv_heads, heads), widths, strict=True)
    shapes = [(2, tokens, *each) for each in numbers]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def oracle(q, k, v, scoring=PLAIN):
    """One query at a time, as the formula has it."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, n in np.ndindex(q.shape[:3]):
        first = 0 if scoring.window is None else max(0, t + 1 - scoring.window)
        scores = (
            k[b, first : t + 1, n // group]
            @ q[b, t, n]
            * (scoring.scale or 1 / np.sqrt(q.shape[3]))
        )
        if scoring.softcap is not None:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ v[b, first : t + 1, n // group] / weights.sum()
    return out


def there_and_back(kernel, q, k, v, g):
    out, pull = jax.vjp(kernel, q, k, v)
    return out, *pull(g)


def ran(kernel, *arrays):
    return jax.jit(partial(there_and_back, kernel))(*arrays)


@pytest.mark.parametrize(
    "size", full_except([(size,) for size in SIZES], ((8, 4, 4),), ((1, 2, 2),)), ids=str
)
@pytest.mark.parametrize("kernel", ["xla", "chunked"])
def test_attention_is_the_formula(kernel, size, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    q, k, v, _ = arrays_of(*size, jnp.float64)
    found = jax.jit(kernel_named(kernel))(q, k, v)
    np.testing.assert_allclose(found, oracle(q, k, v), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "scoring", full_except(SCORINGS, Scoring(scale=0.4, softcap=1.5, window=6)), ids=str
)
@pytest.mark.parametrize("kernel", ["xla", "chunked"])
def test_windows_caps_and_scales_follow_the_formula(kernel, scoring, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    q, k, v, _ = arrays_of(*SIZES[0], jnp.float64, width_of_values=12)
    found = jax.jit(kernel_named(kernel, scoring))(q, k, v)
    np.testing.assert_allclose(found, oracle(q, k, v, scoring), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "scoring", full_except(SCORINGS, Scoring(scale=0.4, softcap=1.5, window=6)), ids=str
)
def test_windows_and_caps_have_the_gradients_of_the_plain_form(scoring, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    arrays = arrays_of(*SIZES[0], jnp.float64, width_of_values=12)
    kernels = (kernel_named(name, scoring) for name in ("chunked", "xla"))
    for found, wanted in zip(*(ran(kernel, *arrays) for kernel in kernels), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_chunked_computes_only_the_blocks_of_a_window(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    shapes = [jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    flops = lambda window: matmul_flops(kernel_named("chunked", Scoring(window=window)), *shapes)
    pairs = {
        None: 36,
        64: 36,
        8: 15,
        9: 15,
        10: 21,
        1: 8,
    }  # number of 8 blocks: a query at a block's start sees the previous block
    assert {window: flops(window) / flops(1) * 8 for window in pairs} == pairs


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"),
    [
        pytest.param(
            size,
            dtype,
            tolerance,
            marks=()
            if (size, dtype)
            in ((SIZES[0], "float64"), (SIZES[2], "float64"), (SIZES[0], "bfloat16"))
            else pytest.mark.full,
        )
        for size in SIZES
        for dtype, tolerance in (("float64", 1e-13), ("float32", 2e-6), ("bfloat16", 2e-2))
    ],
)
def test_chunked_has_the_gradients_of_the_plain_form(size, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    arrays = arrays_of(*size, dtype)
    exact = ran(kernel_named("xla"), *(a.astype("float64") for a in arrays))
    for found, wanted in zip(ran(kernel_named("chunked"), *arrays), exact, strict=True):
        assert found.dtype == dtype
        error = jnp.linalg.norm(found.astype("float64") - wanted) / jnp.linalg.norm(wanted)
        assert error < tolerance or jnp.linalg.norm(wanted) < 1e-12


@pytest.mark.parametrize(
    "scoring", [Scoring(scale=0.2, softcap=1.5, window=130), full(PLAIN)], ids=str
)
def test_the_kernel_of_tpus_has_the_numbers_of_the_plain_form(scoring):
    """By interpretation, and in 32 bits: Pallas's kernels do not lower with 64-bit integers."""
    with jax.enable_x64(False):
        arrays = arrays_of(256, 4, 2, jnp.float32, width=128)
        found = ran(partial(attention.pallas, scoring=scoring, interpret=True), *arrays)
        for one, wanted in zip(found, ran(kernel_named("xla", scoring), *arrays), strict=True):
            assert jnp.linalg.norm(one - wanted) < 1e-5 * jnp.linalg.norm(wanted)
        shapes = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in arrays]
        text = lowered(
            lambda *a: there_and_back(kernel_named("pallas", scoring), *a), *shapes, platform="tpu"
        )
    assert text.count("tpu_custom_call") == 3  # forward, gradients of q, gradients of k and v


@pytest.mark.parametrize(("tokens", "block"), [(1024, 512), (384, 384), (1280, 256), (640, 128)])
def test_the_kernel_of_tpus_counts_the_products_of_all_its_blocks(tokens, block):
    shapes = [jax.ShapeDtypeStruct((2, tokens, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]
    plain = matmul_flops(kernel_named("xla"), *shapes)
    with jax.enable_x64(False):
        forward = matmul_flops(attention.pallas, *shapes)
        both = matmul_flops(lambda *a: there_and_back(attention.pallas, *a), *shapes, shapes[0])
        text = str(jax.make_jaxpr(attention.pallas)(*shapes))
    assert forward == plain
    # 2 products forward, 4 and 3 backward, as both kernels form the scores again; and row sums
    # outside of them
    assert both == pytest.approx(9 / 2 * plain, rel=1e-3)
    assert f"grid=(2, 4, {tokens // block}, {tokens // block})" in text


def test_memory_of_chunked_grows_with_the_tokens():
    def temp_bytes(kernel, tokens):
        shapes = [jax.ShapeDtypeStruct((1, tokens, 2, 32), jnp.float32)] * 4
        program = (
            jax.jit(lambda *a: there_and_back(kernel_named(kernel), *a)).lower(*shapes).compile()
        )
        return program.memory_analysis().temp_size_in_bytes

    assert temp_bytes("chunked", 8192) < 2.2 * temp_bytes("chunked", 4096)
    assert temp_bytes("xla", 2048) > 2.9 * temp_bytes("xla", 1024)


def test_cudnn_counts_flops_of_the_plain_form_and_chunked_of_its_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    arrays = [jax.ShapeDtypeStruct((2, 24, heads, 16), jnp.bfloat16) for heads in (4, 2, 2, 4)]
    forward = lambda kernel: matmul_flops(kernel_named(kernel), *arrays[:3])
    both = lambda kernel: matmul_flops(lambda *a: there_and_back(kernel_named(kernel), *a), *arrays)
    assert forward("cudnn") == forward("xla") == 4 * 2 * 4 * 24 * 24 * 16
    assert both("cudnn") == both("xla") == 3 * forward("xla")
    assert forward("chunked") == forward("xla") * 6 / 9  # pairs of blocks
    assert both("chunked") == forward("chunked") * 7 / 2  # the backward computes the scores again


# --- devices that are not here ------------------------------------------------------------------


def block_of(kernel, tokens=128):
    """(a transformer's layer with this kernel, its parameters' shapes, its input's)."""
    stack = transformer(
        Architecture(
            num_layers=1, d_model=256, num_kv_heads=2, mlp_width=512, vocab_size=8, tied=True
        ),
        dtype=jnp.bfloat16,
        mix=lambda *_: kernel_named(kernel),
    )
    w = jax.eval_shape(stack.init_layer, jax.random.key(0), 0)
    return stack.layer_of(0), w, jax.ShapeDtypeStruct((2, tokens, 256), jnp.bfloat16)


def lowered(function, *shapes, platform):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    return text.count("@__cudnn$fmhaSoftmax("), text.count("@__cudnn$fmhaSoftmaxBackward(")


@pytest.mark.parametrize("remat", Remat)
def test_cudnns_kernels_run_once_forward_and_once_backward(remat):
    layer, w, x = block_of("cudnn")
    stage = Stage(layer, remat, w, x)
    forward = lambda w, x: stage.forward([w], None, x)
    _, stash = jax.eval_shape(forward, w, x)
    again = int(remat.recomputes)
    assert calls(lowered(forward, w, x, platform="cuda")) == (1, 0)
    backward = lambda w, stash, g: stage.backward([w], None, stash, lambda _: (g, None))[:2]
    assert calls(lowered(backward, w, stash, x, platform="cuda")) == (again, 1)
    input_grad = lambda w, stash, g: stage.input_grad([w], None, stash, lambda _: (g, None))[:2]
    assert calls(lowered(input_grad, w, stash, x, platform="cuda")) == (again, 1)
    pending = stage.programs.pending_shapes([w])
    assert calls(
        lowered(lambda w, p: stage.weight_grad([w], None, p), w, pending, platform="cuda")
    ) == (0, 0)


H100 = SimpleNamespace(
    platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100 80GB HBM3"
)
V100 = SimpleNamespace(platform="gpu", compute_capability="7.0", device_kind="Tesla V100")
A100 = SimpleNamespace(platform="cuda", compute_capability="8.0", device_kind="NVIDIA A100")
AMD = SimpleNamespace(
    platform="gpu", compute_capability="gfx942", device_kind="AMD Instinct MI300X"
)
CPU, TPU = SimpleNamespace(platform="cpu"), SimpleNamespace(platform="tpu")

CHOICES = [  # device, dtype, width of a head, tokens, kernel
    (H100, "bfloat16", 128, 2048, "cudnn"),
    (H100, "float16", 256, 100, "cudnn"),
    (A100, "bfloat16", 256, 100, "xla"),
    (H100, "float32", 128, 2048, "chunked"),
    (V100, "float16", 64, 512, "xla"),
    (TPU, "bfloat16", 128, 2048, "pallas"),
    (TPU, "bfloat16", 64, 2048, "chunked"),
    (TPU, "float64", 128, 512, "xla"),  # dtype of `ppctl verify`
    (AMD, "bfloat16", 128, 512, "xla"),
    (CPU, "bfloat16", 64, 512, "xla"),
    (CPU, "float32", 64, 8192, "chunked"),
]


def test_the_config_names_every_kernel():
    assert ("auto", "xla", *PAIR_KERNELS, "pallas") == ATTENTIONS


@pytest.mark.parametrize(("device", "dtype", "width", "tokens", "kernel"), CHOICES)
def test_auto_takes_the_kernel_of_the_device(device, dtype, width, tokens, kernel):
    assert choose("auto", device, jnp.dtype(dtype), width, tokens) == kernel


def test_auto_avoids_kernels_without_windows_or_caps():
    sizes = jnp.dtype("bfloat16"), 128, 2048
    for scoring in (Scoring(window=64), Scoring(softcap=50.0)):
        assert choose("auto", H100, *sizes, scoring=scoring) == "chunked"
        assert choose("auto", TPU, *sizes, scoring=scoring) == "pallas"
    assert choose("auto", H100, *sizes, scoring=Scoring(scale=0.1)) == "cudnn"
    with pytest.raises(
        ConfigError, match=r"neither windows nor caps of scores, and the model has window=64\. Use"
    ):
        choose("cudnn", H100, *sizes, scoring=Scoring(window=64))


REFUSALS = [
    (
        "cudnn",
        CPU,
        "bfloat16",
        64,
        512,
        r"cudnn: cuDNN runs on NVIDIA GPUs, and the platform is cpu\. Use .*=auto",
    ),
    ("cudnn", V100, "float16", 64, 512, "needs compute capability 8.0, and Tesla V100 has 7.0"),
    ("cudnn", H100, "float32", 64, 512, "computes in bfloat16, and dtype=float32"),
    (
        "cudnn",
        A100,
        "float16",
        136,
        512,
        "a head width of at most 128 that is divisible by 8, not 136",
    ),
    ("pallas", H100, "float16", 128, 512, "is for TPUs, and the platform is gpu"),
    ("pallas", TPU, "float64", 128, 512, "at most 32 bits, and dtype=float64"),
    ("pallas", TPU, "float32", 128, 100, "divisible by 128, not heads 128 wide and 100 tokens"),
]


@pytest.mark.parametrize(("kernel", "device", "dtype", "width", "tokens", "said"), REFUSALS)
def test_requests_that_a_kernel_does_not_support_are_refused(
    kernel, device, dtype, width, tokens, said
):
    with pytest.raises(ConfigError, match=said):
        choose(kernel, device, jnp.dtype(dtype), width, tokens)
