"""The operations of traced programs by hand: written results, values read for reductions, sums of products."""

import jax
import jax.numpy as jnp
import pytest

from ppctl.executors.work.counted_operations import bytes_to_make, ops_of, peak_bytes

M, K, N, SIZE = 64, 32, 16, 4
X, W, A = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((M, K), (K, N), (M, N)))
OPERANDS = (M * K + K * N + M * N) * SIZE  # bytes of x @ w, and its result


def traffic(function, *args):
    """Bytes of the operations that have any, in order."""
    return [op.bytes for op in ops_of(function, *args) if op.bytes]


ELEMENT_WISE = {
    "a view is no traffic": (lambda x, w: x.T.reshape(K, M).T @ w, [OPERANDS]),
    "an operand is written once, whatever it is made by": (
        lambda x, w: jnp.tanh(x * 2 + 1) @ w,
        [2 * M * K * SIZE, OPERANDS],
    ),
    "one that two products read, too": (
        lambda x, w: (lambda y: (y @ w) + (y.reshape(M, K) @ w))(jnp.tanh(x)),
        [2 * M * K * SIZE, OPERANDS, OPERANDS, 2 * M * N * SIZE],
    ),
    "a result is written by its product": (lambda x, w: (x @ w).reshape(N, M), [OPERANDS]),
    "what follows the product is not": (lambda x, w: jnp.tanh(x @ w), [OPERANDS, 2 * M * N * SIZE]),
}


@pytest.mark.parametrize(("function", "found"), ELEMENT_WISE.values(), ids=ELEMENT_WISE)
def test_only_written_results_count(function, found):
    assert traffic(function, X, W) == found


def test_reductions_of_the_same_values_read_them_once():
    read = M * K * SIZE
    assert traffic(lambda x: x.sum(0), X) == [read + 2 * K * SIZE]  # its result is written
    two = traffic(lambda x: (x.max() + (x * x).sum()) * jnp.ones(()), X)
    assert two[0] == read
    assert sum(two) < 1.1 * read


def test_a_softmax_passes_over_its_scores_three_times():
    def softmax(x):
        y = jnp.exp(x - x.max(-1, keepdims=True))
        return y / y.sum(-1, keepdims=True)

    read = M * K * SIZE
    assert traffic(softmax, X) == [read, read, 2 * read]


def test_a_scatter_writes_all_of_its_array():
    def embed_grad(g, index, total):
        return total + jnp.zeros((M, N), jnp.float32).at[index].add(g)

    index, g = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8, N), jnp.float32)
    assert traffic(embed_grad, g, index, A) == [2 * M * N * SIZE] * 2


SUM = 2 * M * N * SIZE
SUMS = {
    "a product": (lambda total, x, w: total + x @ w, [SUM], 0),
    "either way round": (lambda total, x, w: (x @ w) + total, [SUM], 0),
    "cast": (
        lambda total, x, w: (
            total + (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        ),
        [SUM],
        1,
    ),
    "twice the product": (lambda total, x, w: total + 2 * (x @ w), [], 1),
    "one that is read again": (lambda total, x, w: (total + (p := x @ w), p), [], 1),
    "to what is no sum yet": (lambda total, x, w: total * 2 + x @ w, [], 1),
    "on the way": (lambda total, x, w: jnp.tanh(total + x @ w), [], 1),
}


@pytest.mark.parametrize(("function", "added", "passes"), SUMS.values(), ids=SUMS)
def test_a_product_adds_to_a_sum_if_no_other_operation_reads_it(function, added, passes):
    ops = ops_of(function, A, X, W)
    assert [op.sum_bytes for op in ops if op.sum_bytes] == added
    assert bool([op for op in ops if op.bytes and not op.flops]) == bool(passes)


# --- memory -------------------------------------------------------------------------------------


def test_kept_values_are_the_sources_of_element_wise_results():
    wide, narrow, given = M * N * SIZE, M * K * SIZE, M * K * SIZE
    made = {
        "the given array, of which the result is made again": (lambda w, x: x * 2 + 1, given),
        "the weights are there anyway": (lambda w, x: (w * 2, x), given),
        "a product": (lambda w, x: jnp.maximum(x @ w, 0), wide),
        "a product and the operand that it reads": (
            lambda w, x: ((y := x * 2), y @ w),
            narrow + wide,
        ),
        "what is expensive": (lambda w, x: jnp.tanh(x @ w) * 2, wide),
        "and what it is made of, where that is needed too": (
            lambda w, x: ((y := x @ w), jnp.tanh(y)),
            2 * wide,
        ),
    }
    for name, (function, found) in made.items():
        assert bytes_to_make(function, W, X) == found, name


def test_the_peak_is_of_values_alive_at_the_same_time():
    wide, narrow = M * N * SIZE, M * K * SIZE
    assert (
        peak_bytes(lambda x, w: jnp.sin(x @ w), X, W) == 2 * wide
    )  # the product, and the result made of it
    # x @ w is read no more when the second product is there
    assert peak_bytes(lambda x, w: (x @ w) @ w.T, X, W) == wide + narrow
    assert peak_bytes(lambda x, w: ((x @ w) @ w.T) @ w, X, W) == wide + narrow
    assert (
        peak_bytes(lambda x, w: ((y := x @ w), (y @ w.T) @ w), X, W) == 2 * wide + narrow
    )  # y is a result


def test_a_scan_of_one_iteration_has_its_results_once():
    def logits(x, w, times):
        step = lambda total, x: (total + (jnp.exp(x @ w)).T @ x, None)
        return jax.lax.scan(step, jnp.zeros((N, K), jnp.float32), jnp.stack([x] * times))[0]

    once, twice = (peak_bytes(lambda x, w, n=n: logits(x, w, n), X, W) for n in (1, 2))
    assert (
        once < twice <= once + N * K * SIZE + 2 * M * K * SIZE
    )  # the carry, and the stacked inputs
