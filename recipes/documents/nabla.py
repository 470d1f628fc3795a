"""The model and data of two documents on GPipe (Nabla's examples 6 and 7): numbers drawn once, all
of them given.

relu(x W_s + b_s), one layer a stage, S of them, and the mean squared error. NumPy's old generator
draws W [S, D, D], b [S, D], inputs and targets [B, D] one after another, and they are rounded to
float32, as in the documents.

The documents differentiate by the inputs too. So these are parameters here: rows of a table, of
which an example names one, and their gradient is the gradient of the table.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.data.dataset import DataSet, fingerprint
from ppctl.model.stack import Stack


def drawn(num_layers, num_rows, dim, seed):
    """W, b, inputs and targets, float32."""
    random = np.random.RandomState(seed)
    shapes = (num_layers, dim, dim), (num_layers, dim), (num_rows, dim), (num_rows, dim)
    return [random.randn(*shape).astype(np.float32) for shape in shapes]


def mlp(*, num_layers, dtype, data):
    """The stack on the examples of `rows` with as many layers."""
    given = drawn(num_layers, data.num_examples, data.target_dim, data.seed)
    weight_SDD, bias_SD, inputs_BD, _ = (jnp.asarray(array, dtype) for array in given)

    def init_embed_head(_):
        return {"inputs": inputs_BD}

    def init_layer(_, index):
        return {"weight": weight_SDD[index], "bias": bias_SD[index]}

    def embed(embed_head, rows_B):
        return embed_head["inputs"][rows_B]

    def layer(params, x_BD):
        return jax.nn.relu(x_BD @ params["weight"] + params["bias"])

    def head(_, x_BD, targets_BD):
        errors_BD = x_BD.astype(jnp.promote_types(x_BD.dtype, jnp.float32)) - targets_BD
        return jnp.square(errors_BD).sum(), jnp.asarray(errors_BD.size, errors_BD.dtype)

    return Stack(num_layers, init_embed_head, init_layer, embed, layer, head)


def rows(*, batch_size, seed, eval_fraction, num_layers, dim):
    """Row numbers as inputs, and the targets drawn after `num_layers` layers; one batch is all
    there is.
    """
    if eval_fraction:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} would hold out some of the document's rows: use 0"
        )
    targets_BD = drawn(num_layers, batch_size, dim, seed)[-1]
    return DataSet(
        name="nabla",
        source=f"{batch_size} rows of {dim} numbers drawn from seed {seed}",
        fingerprint=fingerprint(
            name="nabla", rule=[num_layers, dim], batch_size=batch_size, seed=seed
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=batch_size,
        num_eval_examples=0,
        read=lambda numbers: {"inputs": numbers.astype(np.int32), "targets": targets_BD[numbers]},
        target_dim=dim,
        is_shuffled=False,
    )
