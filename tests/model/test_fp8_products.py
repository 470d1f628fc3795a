"""Products in 8 bits: exact products of the rounded values, with scales that do not depend on other
tokens, on microbatches or on devices.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.selection import full

from ppctl.model.fp8_products import gather_rounded, product, rounded as rounded_to, scale_of

RNG = np.random.default_rng(0)


def wide(*shape):
    """Values of many magnitudes, so that some are subnormal after their scale."""
    return RNG.standard_normal(shape) * 2.0 ** RNG.integers(-24, 8, shape)


def rounded(a, axis):
    """Oracle: (values in 8 bits, scale): the smallest power of 2 without overflow."""
    most = np.abs(a).max(axis, keepdims=True)
    scale = np.full(most.shape, 2.0**-140)
    while True:
        with np.errstate(over="ignore", invalid="ignore"):
            high = np.abs((most / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
        fits = (most == 0) | (high <= 448)  # nan does not fit
        if fits.all():
            return (a / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64), scale
        scale = np.where(fits, scale, 2 * scale)


def gradients(multiply, x, w, g):
    @jax.jit
    def run(x, w, g):
        y, pull = jax.vjp(multiply, x, w)
        return y, *pull(g)

    return [*map(np.asarray, run(x, w, g))]


@pytest.mark.parametrize("tp_divides", ["outputs", "inputs"])
def test_results_are_exact_products_of_the_rounded_values(tp_divides):
    x, w, g = wide(12, 16), wide(16, 8), wide(12, 8)
    y, dx, dw = gradients(product(tp_divides), *map(jnp.asarray, (x, w, g)))
    wq, of_w = rounded(w, 0 if tp_divides == "outputs" else 1)
    if tp_divides == "outputs":
        (xq, of_x), (gq, of_g) = rounded(x, 1), rounded(g * of_w, 1)
        want = (xq @ wq) * of_x * of_w, (gq @ wq.T) * of_g
    else:
        (xq, of_x), (gq, of_g) = rounded(x * of_w.T, 1), rounded(g, 1)
        want = (xq @ wq) * of_x, (gq @ wq.T) * of_g * of_w.T
    for found, expected in zip((y, dx, dw), (*want, x.T @ g), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


def test_scales_are_the_smallest_powers_of_two_without_overflow():
    a = wide(4096, 3)
    np.testing.assert_array_equal(np.asarray(scale_of(jnp.asarray(a), 1)), rounded(a, 1)[1])


def test_a_token_does_not_depend_on_others():
    x, w, g = (jnp.asarray(wide(*shape)) for shape in ((8, 16), (16, 8), (8, 8)))
    multiply = product("outputs")
    *whole, _ = gradients(multiply, x, w, g)
    halves = [gradients(multiply, x[rows], w, g[rows]) for rows in (slice(4), slice(4, 8))]
    for i, rows in enumerate(whole):  # y, then the gradient of x
        np.testing.assert_array_equal(rows, np.concatenate([half[i] for half in halves]))


def test_zeros_stay_zeros_and_non_finite_values_stay_visible():
    w = jnp.asarray(wide(4, 4), jnp.float32)
    multiply = product("outputs")
    assert not gradients(multiply, jnp.zeros((2, 4)), w, jnp.zeros((2, 4)))[0].any()
    for value in (jnp.nan, jnp.inf):
        y, dx, dw = gradients(multiply, jnp.ones((2, 4)).at[0, 1].set(value), w, jnp.ones((2, 4)))
        assert not np.isfinite(y[0]).any()
        assert not np.isfinite(dw[1]).any()
        assert np.isfinite(dx).all()
    tiny = jnp.full((2, 4), 1e-38, jnp.float32)
    assert np.isfinite(gradients(multiply, tiny, w, tiny)[0]).all()


def test_values_above_the_scales_largest_are_clipped():
    # in bfloat16 XLA may compute the scale from rounded values, and divide unrounded ones by it
    scale = scale_of(jnp.array([[1.8125]]), 1)
    assert float(rounded_to(jnp.array([[1.8156]]), scale)[0, 0]) == 448


def test_noise_of_float64_chooses_no_number():
    numbers = np.arange(1, 0x7E, dtype=np.uint8).view(jnp.float8_e4m3fn)
    numbers = numbers.astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    below, above = middles * (1 - 2.0**-50), middles * (1 + 2.0**-50)
    found = [rounded_to(jnp.asarray(a), jnp.ones(())) for a in (below, middles, above)]
    assert (found[0] == found[1]).all()
    assert (found[2] == found[1]).all()
    halves = np.concatenate([2.0 ** np.arange(-6, 9) * 29 / 16, [464]])[:, None]  # rounded: 28, 30
    scales = [np.asarray(scale_of(jnp.asarray(halves * each), 1)) for each in (1, 1 - 2.0**-50)]
    np.testing.assert_array_equal(*scales)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_errors_are_of_four_significant_bits(dtype):
    x, w, g = (
        jnp.asarray(RNG.standard_normal(shape), dtype) for shape in ((64, 256), (256, 64), (64, 64))
    )
    y, dx, dw = gradients(product("outputs"), x, w, g)
    exact = gradients(jnp.matmul, *(jnp.asarray(a, jnp.float64) for a in (x, w, g)))
    errors = [
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip((y, dx, dw), exact, strict=True)
    ]
    assert 0.03 < errors[0] < 0.045
    assert 0.03 < errors[1] < 0.045
    assert errors[2] < (1e-6 if dtype == "float32" else 4e-3)
    assert (y.dtype, dw.dtype) == (jnp.dtype(dtype), jnp.dtype(dtype))


@pytest.mark.full
@pytest.mark.parametrize("tp_divides", ["inputs", full("outputs")])
@pytest.mark.parametrize("dim", [0, full(1)])
def test_a_gathered_matrix_gives_the_same_bits_as_the_whole_one(tp_divides, dim):
    """Rounding twice, for the gather and for the product, rounds as once."""
    x, w = jnp.asarray(wide(16, 32), jnp.float32), jnp.asarray(wide(32, 24), jnp.bfloat16)
    multiply, summed = product(tp_divides), -2 if tp_divides == "outputs" else -1
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def gathered(shard):
        axes = ("fsdp",) if dim == 2 + summed else ()
        return gather_rounded(shard, ("fsdp",), dim, summed, axes)

    sharded = P(*[None] * dim, "fsdp")
    run = jax.shard_map(gathered, mesh=mesh, in_specs=sharded, out_specs=P(), check_vma=False)
    text = jax.jit(run).lower(w).as_text()
    assert "all_gather" in text
    assert "f8E4M3FN" in text.partition("all_gather")[2].partition("\n")[0]
    whole = run(w)
    assert whole.dtype == w.dtype
    assert not np.array_equal(np.asarray(whole), np.asarray(w))
    found, expected = (np.asarray(multiply(x, each.astype(jnp.float32))) for each in (whole, w))
    np.testing.assert_array_equal(found, expected)
