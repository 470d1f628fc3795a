"""A small train state, and checkpoints of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints

CONFIG = {"model": {"d_model": 8}, "schedule": {"name": "gpipe"}}


def mesh(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("a", "b")[: len(sizes)])


def state(step=1, sharding=None):
    """A tree with the kinds of nodes and dtypes that a train state has, different at every step."""
    sharding = sharding or NamedSharding(mesh(1), PartitionSpec())
    keys = jax.random.split(jax.random.key(step), 3)
    params = {
        "blocks": (
            jax.random.normal(keys[0], (8, 16), jnp.float32),
            jax.random.normal(keys[1], (8,), jnp.bfloat16),
        ),
        "head": jax.random.normal(keys[2], (8, 4), jnp.float32),
    }
    return jax.device_put({"params": params, "count": jnp.full((8,), step, jnp.int32)}, sharding)


def abstract(tree, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def assert_bit_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved(directory, steps=(1,), keep=3):
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"config": CONFIG, "step": step})
    return StoredCheckpoints(directory)


def message(error):
    text = str(error.value)
    assert "\n" not in text
    return text
