"""The MLP of Alpa's tutorial "Distributed Training with Both Shard and Pipeline Parallelism", and
its data.

A model that is no stack: a function, cut at its marks (model.layers=marks), or wherever little
passes between parts of nearly equal cost (model.layers=auto).
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

import ppctl
from ppctl.data.dataset import DataSet, fingerprint, generator


def mlp(*, num_layers, dtype, data):
    """dim -> 4 dim -> dim, twice, relu behind each. Two layers by its mark; num_layers of them with
    layers=auto.
    """
    dim = data.input_dim
    sizes = (dim, 4 * dim, dim, 4 * dim, dim)

    def init(key):
        kernel = jax.nn.initializers.lecun_normal()
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            {"kernel": kernel(key, shape, dtype), "bias": jnp.zeros(shape[1], dtype)}
            for key, shape in zip(keys, pairwise(sizes), strict=True)
        ]

    def apply(params, x):
        for i, dense in enumerate(params):
            x = jax.nn.relu(x @ dense["kernel"] + dense["bias"])
            if i == 1:
                x = ppctl.stage_boundary(x)
        return x

    def loss(outputs, targets):
        errors = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32)) - targets
        return jnp.square(errors).sum(), jnp.asarray(errors.size, errors.dtype)

    return ppctl.Network(init, apply, loss)


def noisy_line(*, batch_size, seed, eval_fraction, dim=64, num_rows=8192, noise=0.1):
    """Rows x of normal numbers, with y = x W + b + noise; W and b are normal too."""
    num_eval = int(eval_fraction * num_rows)
    line = generator(seed, num_rows)
    weights, bias = line.standard_normal((dim, dim)), line.standard_normal(dim)

    def read(numbers):
        drawn = np.array(
            [generator(seed, number).standard_normal((2, dim)) for number in numbers.tolist()]
        )
        inputs, noises = drawn.reshape(-1, 2, dim).swapaxes(0, 1)
        targets = inputs @ weights + bias + noise * noises
        return {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.float32)}

    return DataSet(
        name="noisy_line",
        source=f"{num_rows} rows of {dim} numbers, noise {noise}",
        fingerprint=fingerprint(
            name="noisy_line", rule=[dim, num_rows, noise], batch_size=batch_size, seed=seed
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=num_rows - num_eval,
        num_eval_examples=num_eval,
        read=read,
        input_dim=dim,
        target_dim=dim,
    )
