"""A single device of a divided stage: the same shapes as with the others, without sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppctl.errors import ConfigError
from ppctl.model.parallel import StageAxes
from ppctl.planner.rehearsal.rank_on_device import alone

AXES = StageAxes(tp=2, cp=3)
X = np.arange(12.0).reshape(6, 2)


def gathers(x):
    return jax.lax.all_gather(x, "cp", axis=1, tiled=True), jax.lax.all_gather(x, "cp", axis=0)


def sums(x):
    return jax.lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True), jax.lax.psum(
        x, ("tp", "cp")
    )


def in_bodies(x):
    """Sends inside a scan, a branch, a loop, a call, and both ways of a derivative."""

    def body(carry, _):
        carry = jax.lax.cond(
            carry.sum() > 0, lambda a: jax.lax.psum(a, "tp") / 2, lambda a: a, carry
        )
        return jax.lax.fori_loop(
            0, 2, lambda _, a: jax.lax.ppermute(a, "cp", [(0, 1), (1, 2), (2, 0)]), carry
        ), None

    carry, _ = jax.lax.scan(body, x, length=2)
    called = jax.jit(
        lambda a: jax.checkpoint(lambda b: jnp.sin(jax.lax.all_gather(b, "tp", tiled=True)))(
            a
        ).sum()
    )
    return jax.grad(called)(carry), jax.lax.axis_index("cp")


def exchanges(x):
    parts = x.reshape(2, 3, 2)
    rows = jax.lax.all_to_all(x, ("tp", "cp"), 0, 1, tiled=True)
    return jax.lax.all_to_all(parts, "tp", 0, 1), jax.lax.all_to_all(parts, "cp", 1, 0), rows


@pytest.mark.parametrize("function", [gathers, sums, exchanges, in_bodies])
def test_stand_ins_have_the_shapes_of_results_and_send_nothing(function):
    expected = jax.make_jaxpr(function, axis_env=list(AXES.sizes), return_shape=True)(X)[1]
    text = str(jax.make_jaxpr(function, axis_env=list(AXES.sizes))(X))
    program = jax.jit(alone(function, AXES))
    found = program(X)
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert shapes(found) == shapes(expected)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(found))
    sends = ("all_gather", "psum", "reduce_scatter", "all_to_all", "ppermute", "axis_index")
    assert any(name in text for name in sends)
    assert not any(f" {name}[" in str(jax.make_jaxpr(alone(function, AXES))(X)) for name in sends)


def test_received_values_are_made_of_local_ones():
    beside, before = alone(gathers, AXES)(X)
    np.testing.assert_array_equal(np.asarray(beside)[:, :2], X)
    np.testing.assert_array_equal(np.asarray(before)[0], X)
    assert not (np.asarray(before)[1] == X).all()  # a compiler would make a view of equal parts
    scattered, total = alone(sums, AXES)(X)
    np.testing.assert_array_equal(scattered, X[:3] + X[3:])
    np.testing.assert_array_equal(total, X)
    of_two, of_three, rows = map(np.asarray, alone(exchanges, AXES)(X))
    np.testing.assert_array_equal(of_two, X.reshape(2, 3, 2).transpose(1, 0, 2))
    np.testing.assert_array_equal(of_three, X.reshape(2, 3, 2).transpose(1, 0, 2))
    np.testing.assert_array_equal(rows, X.reshape(1, 12))


def test_a_whole_stage_is_left_as_it_is():
    assert alone(gathers, StageAxes()) is gathers


def test_collectives_without_a_stand_in_are_refused():
    offsets = jnp.zeros(2, jnp.int32)
    to_all = lambda x: jax.lax.ragged_all_to_all(x, x, *[offsets] * 4, axis_name="tp")
    message = r"has no stand-in for values received by ragged_all_to_all. Use `ppctl plan`"
    with pytest.raises(ConfigError, match=message):
        alone(to_all, AXES)(X)
