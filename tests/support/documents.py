"""The answers of commands, and gradients, of the recipes of documents."""

import json

import jax
import numpy as np

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.training.pipeline.job import assemble


def answer(capsys, *words):
    """The JSON that a command prints; it must succeed."""
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def gradients(*words):
    """(loss, gradients in natural order) of the first batch, in float64."""
    config = compose([*words, "run.dtype=float64"])
    job = assemble(config)
    loss, grads = job.pipe.engine.loss_and_grads(
        job.pipe.engine.new_state(),
        job.pipe.engine.batches.put(next(job.data.batches(rows=job.pipe.engine.batches.examples))),
    )
    return float(loss), jax.tree.map(np.asarray, grads)
