"""The tests' networks, and pictures for one of them, as `ppctl train` takes them: model.target and
data.target.
"""

import sys
from pathlib import Path

import numpy as np

from ppctl.data import DataSet
from ppctl.data.dataset import fingerprint, generator, num_held_out

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:  # the command line that repeats a request is typed in the root
    sys.path.append(TESTS)

from support.networks import NETWORKS  # noqa: E402

NUM_PICTURES = 512


def network(num_layers, dtype, data, *, name, marked=True):
    """Return a network of the tests, with its marks or without."""
    del num_layers, dtype, data
    return NETWORKS[name][0](marked=marked)


def pictures(batch_size, seed, eval_fraction):
    """Return random pictures, 4 x 4 of 2 channels, each with 80 numbers that follow from it."""
    into = generator(seed, 0).standard_normal((32, 80)) / 8

    def read(examples):
        inputs = np.stack(
            [generator(seed, 1, each).standard_normal((4, 4, 2)) for each in examples.tolist()]
        )
        # one product a picture: of all at once it rounds otherwise
        targets = np.stack([np.tanh(each.reshape(32) @ into) for each in inputs])
        return {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.float32)}

    num_eval = num_held_out(f"{NUM_PICTURES} pictures", NUM_PICTURES, eval_fraction, batch_size)
    return DataSet(
        name="pictures",
        source=f"{NUM_PICTURES} random pictures",
        fingerprint=fingerprint(
            name="pictures", batch_size=batch_size, seed=seed, eval_fraction=eval_fraction
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=NUM_PICTURES - num_eval,
        num_eval_examples=num_eval,
        read=read,
    )
