"""Pipelines of small transformers, and how far their gradients are from the reference's, in
float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.cases import make_params, state_of

import ppctl
from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.reference import reference
from ppctl.schedule.mesh_axes import MeshSizes

TOLERANCE = 1e-10
SMALL = {
    "num_layers": 4,
    "d_model": 16,
    "num_heads": 4,
    "mlp_width": 32,
    "activation": "swiglu",
    "attention": "auto",
}


def make(vocab_size=32, **changes):
    return ppctl.transformer(**(SMALL | changes), vocab_size=vocab_size, dtype=jnp.float64)


def make_batch(num_tokens, vocab_size, batch_size=8):
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, batch_size, num_tokens), np.int32)
    return {"inputs": tokens[0], "targets": tokens[1]}


def make_pipe(stack, batch, mesh, **how):
    how = {
        "schedule": "gpipe",
        "num_microbatches": 2,
        "remat": "none",
        "optimizer": optax.sgd(0.1),
    } | how
    how = {"dtype": jnp.float64} | how
    sizes = {"dp": 1, "pp": 1, "fsdp": 1} | mesh
    return ppctl.pipeline(stack, mesh=make_mesh(MeshSizes(**sizes)), batch=batch, **how)


def difference(mesh, model=None, num_tokens=16, vocab_size=32, batch_size=8, **how):
    """The largest relative difference of the loss, or of a leaf of the gradients, from the
    reference's.
    """
    stack, batch = make(vocab_size, **(model or {})), make_batch(num_tokens, vocab_size, batch_size)
    pipe = make_pipe(stack, batch, mesh, **how)
    params = make_params(stack)
    loss, grads = pipe.loss_and_grads(state_of(pipe, params), batch)
    plain = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    expected = jax.jit(plain)(params, batch)
    pairs = zip(jax.tree.leaves((loss, grads)), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))) for a, b in pairs)


ODD = {"num_tokens": 131, "vocab_size": 257}  # sizes that no mesh divides
