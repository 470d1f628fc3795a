"""The model and data of a notebook that builds GPipe in NumPy: maps of 128 to 256, 256 to 256 nine
times, 256 to 10.

All but the last are followed by a relu, and the loss is the mean squared error to one-hot labels.
The notebook draws from one generator, in this order: a model; 32 and 16 rows for demonstrations;
256 rows to train on; a second model.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.data.dataset import DataSet, fingerprint
from ppctl.model.stack import Stack

INPUTS, WIDTH, LABELS = 128, 256, 10
NUM_ROWS = {"gradients": 16, "training": 256}  # the first model on 16 rows; the second on 256


def drawn(num_layers, seed):
    """{part: (weights of num_layers+2 maps, inputs, one-hot labels)}, float64; biases are zero."""
    random = np.random.RandomState(seed)
    sizes = [INPUTS, *[WIDTH] * (num_layers + 1), LABELS]

    def weights():
        return [
            random.randn(num_in, num_out) * np.sqrt(2 / num_in)
            for num_in, num_out in pairwise(sizes)
        ]

    def rows(number):
        inputs_BI = random.randn(number, INPUTS)
        return inputs_BI, np.eye(LABELS)[random.randint(0, LABELS, number)]

    first = weights()
    rows(32)
    gradients, training = (rows(NUM_ROWS[part]) for part in ("gradients", "training"))
    return {"gradients": (first, *gradients), "training": (weights(), *training)}


def mlp(*, num_layers, dtype, data, part):
    """The stack: the first map is the embedding, the last one the head, and the others are its
    layers.
    """
    first, *inner, last = (
        jnp.asarray(weight, dtype) for weight in drawn(num_layers, data.seed)[part][0]
    )
    inner_LDD = jnp.stack(inner)

    def linear(weight):
        return {"weight": weight, "bias": jnp.zeros(weight.shape[1], dtype)}

    def apply(params, x):
        return x @ params["weight"] + params["bias"]

    def init_embed_head(_):
        return {"first": linear(first), "last": linear(last)}

    def init_layer(_, index):
        return linear(inner_LDD[index])

    def embed(embed_head, inputs_BI):
        return jax.nn.relu(
            apply(embed_head["first"], inputs_BI.astype(embed_head["first"]["weight"].dtype))
        )

    def layer(params, x_BD):
        return jax.nn.relu(apply(params, x_BD))

    def head(embed_head, x_BD, targets_BO):
        outputs_BO = apply(embed_head["last"], x_BD)
        errors_BO = outputs_BO.astype(jnp.promote_types(outputs_BO.dtype, jnp.float32)) - targets_BO
        return jnp.square(errors_BO).sum(), jnp.asarray(errors_BO.size, errors_BO.dtype)

    return Stack(num_layers, init_embed_head, init_layer, embed, layer, head)


def rows(*, batch_size, seed, eval_fraction, num_layers, part):
    """The rows of a part, in the order in which they were drawn, in every epoch."""
    if part not in NUM_ROWS:
        raise ValueError(f"data.options.part={part} is not one of {', '.join(NUM_ROWS)}")
    if eval_fraction:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} would hold out some of the document's rows: use 0"
        )
    _, inputs_BI, targets_BO = drawn(num_layers, seed)[part]
    return DataSet(
        name="gpipe_notebook",
        source=f"{len(inputs_BI)} rows of {INPUTS} numbers with {LABELS} labels, drawn from seed "
        f"{seed}",
        fingerprint=fingerprint(
            name="gpipe_notebook", rule=[num_layers, part], batch_size=batch_size, seed=seed
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=len(inputs_BI),
        num_eval_examples=0,
        read=lambda numbers: {"inputs": inputs_BI[numbers], "targets": targets_BO[numbers]},
        input_dim=INPUTS,
        target_dim=LABELS,
        is_shuffled=False,
    )
