"""Checksums: those of the definition, on every layout, and another one for every damage."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ppctl.training.checkpoint.manifest import H, R, digest

DTYPES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int8",
    "uint16",
    "int32",
    "int64",
    "bool",
    "complex64",
)
LAYOUTS = {
    "one device": ((1,), ()),
    "whole on 8": ((8,), ()),
    "8": ((8,), ("a",)),
    "2x4": ((2, 4), ("b", "a")),
    "columns": ((4, 2), (None, ("a", "b"))),
}


def mix(x, h):
    shift_1, factor_1, shift_2, factor_2, shift_3 = h
    x = (x ^ (x >> shift_1)) * factor_1 % 2**32
    x = (x ^ (x >> shift_2)) * factor_2 % 2**32
    return x ^ (x >> shift_3)


def by_definition(array):
    """The checksum of a numpy array, one word after the other."""
    size = {"b": 1}.get(array.dtype.kind, min(array.dtype.itemsize, 4))
    words = np.frombuffer(array.tobytes(), f"<u{size}").tolist()
    return "".join(
        f"{sum(mix(w ^ (k * R % 2**32), h) for k, w in enumerate(words)) % 2**32:08x}" for h in H
    )


def checksum(array):
    return digest({"a": array}).checksums["a"]


def values(dtype, shape=(8, 16)):
    numbers = np.random.default_rng(0).normal(0, 50, shape)
    return jnp.asarray(numbers > 0 if dtype == "bool" else numbers).astype(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksums_follow_the_definition_on_every_layout(layout):
    sizes, spec = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("a", "b")[: len(sizes)])
    arrays = {dtype: values(dtype) for dtype in (DTYPES if layout == "one device" else DTYPES[:4])}
    placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(*spec)))
    assert digest(placed).checksums == {
        dtype: by_definition(np.asarray(a)) for dtype, a in arrays.items()
    }


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4, 5)], ids=str)
def test_every_shape_has_a_checksum(shape):
    assert checksum(values("float32", shape)) == by_definition(np.asarray(values("float32", shape)))
    assert digest({}) == (True, {})


def test_a_random_key_has_the_checksum_of_its_integers():
    key = jax.random.key(3)
    assert checksum(key) == by_definition(np.asarray(jax.random.key_data(key)))


def test_checksums_are_the_same_without_64_bit_types():
    array = np.asarray(values("float32"))
    with jax.enable_x64(False):
        assert checksum(jnp.asarray(array)) == by_definition(array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_every_flipped_bit_changes_both_halves(dtype):
    array = np.asarray(values(dtype, (6,)))
    good = checksum(jnp.asarray(array))
    assert good == by_definition(array)
    for bit in range(8 * array.nbytes):
        flipped = np.frombuffer(array.tobytes(), np.uint8).copy()
        flipped[bit // 8] ^= 1 << bit % 8
        wrong = checksum(jnp.asarray(flipped.view(array.dtype)))
        assert wrong[:8] != good[:8], bit
        assert wrong[8:] != good[8:], bit


def test_numbers_that_change_places_or_signs_change_the_checksum():
    array = np.array([1, -1, 2, 3, 0, 5, 7, -5], np.float32)
    good = checksum(jnp.asarray(array))
    for i, j in itertools.combinations(range(8), 2):
        swapped, negated = array.copy(), array.copy()
        swapped[[i, j]] = swapped[[j, i]]
        negated[[i, j]] *= -1  # two flipped sign bits
        assert checksum(jnp.asarray(swapped)) != good
        assert checksum(jnp.asarray(negated)) != good
    assert checksum(jnp.asarray(np.roll(array, 1))) != good
    assert checksum(jnp.asarray(array.reshape(2, 4).T)) != good


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_a_number_that_is_not_finite_is_seen(wrong, dtype):
    good = {"b": jnp.arange(3), "a": values(dtype), "key": jax.random.key(0)}
    assert digest(good).is_finite
    assert not digest(good | {"a": good["a"].at[7, 3].set(wrong)}).is_finite


def test_a_second_digest_compiles_nothing():
    heard = []

    def hear(event, *_args, **_rest):
        if event == "/jax/core/compile/backend_compile_duration":
            heard.append(event)

    trees = [{"w": values("float32") + i, "n": jnp.full((), i)} for i in range(2)]
    monitoring.register_event_duration_secs_listener(hear)
    try:
        digest(trees[0])
        assert len(heard) == 1
        digest(trees[1])
    finally:
        monitoring.unregister_event_duration_listener(hear)
    assert len(heard) == 1
