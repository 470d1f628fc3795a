"""Attention of sequences divided over cp: the whole sequence's, however keys and values travel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import full

from ppctl.model.attention.attention_kernels import attention, kernel_named
from ppctl.model.parallel import StageAxes, own_pieces

CP = 4
MESH = jax.make_mesh((CP,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))


def divided(context, arrays):
    """Return the lowered (output, gradients of q, k, v) of a device's pieces, [cp, ...]."""
    mix = attention("chunked", axes=StageAxes(cp=CP, context=context))

    def on_device(*arrays):
        q, k, v, g = (own_pieces(a, CP, 1) for a in arrays)
        out, pull = jax.vjp(mix, q, k, v)
        return jax.tree.map(lambda a: a[None], (out, *pull(g)))

    cut = partial(jax.shard_map, mesh=MESH, in_specs=jax.P(), out_specs=jax.P("cp"))
    return jax.jit(cut(on_device, check_vma=False)).lower(*arrays)


@pytest.mark.parametrize("context", [full("gather"), full("ring")])
def test_output_and_gradients_equal_the_whole_sequences(context):
    arrays = [
        jax.random.normal(jax.random.key(i), (2, 6 * CP, heads, 4), jnp.float64)
        for i, heads in enumerate((4, 2, 2, 4))
    ]
    out, pull = jax.vjp(kernel_named("xla"), *arrays[:3])
    pieces = partial(jax.shard_map, mesh=MESH, in_specs=jax.P(), out_specs=jax.P("cp"))
    cut = pieces(lambda a: own_pieces(a, CP, 1)[None], check_vma=False)
    found = divided(context, arrays).compile()(*arrays)
    for name, a, b in zip(["out", "dq", "dk", "dv"], found, (out, *pull(arrays[3])), strict=True):
        np.testing.assert_allclose(a, cut(b), rtol=1e-12, atol=1e-13, err_msg=name)


def test_a_ring_never_holds_the_keys_of_all_devices():
    shape = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.float32)

    def temp_bytes(context):
        compiled = divided(context, [shape] * 4).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    keys_bytes = 2 * shape.size * 4  # bytes of keys and values of the whole sequence
    assert temp_bytes("gather") - temp_bytes("ring") > keys_bytes
