"""The evaluation of a run, on examples that it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppctl.data import DataSet
from ppctl.errors import DataError
from ppctl.training.pipeline.engines.engine_protocol import Engine

Tree = Any


def evaluate(engine: Engine, data: DataSet, num_batches: int, state: Tree) -> float:
    """Return the mean loss of the first held-out batches; after `engine.compile(evaluate=True)`.

    The mean over all their losses, of which batches with prompts or padding have fewer; DataError
    if there are none.
    """
    batches = data.eval_batches(num_batches, engine.examples)
    means = [engine.loss(state, engine.put(batch)) for batch in batches]
    return mean_of([(float(loss), float(number)) for loss, number in means], data.name)


def mean_of(means: Sequence[tuple[float, float]], name: str) -> float:
    """Return the mean over batches, given (mean, number) of each; name: of the data set.

    >>> mean_of([(2.0, 1.0), (5.0, 3.0)], "text")
    4.25
    """
    total = sum(number for _, number in means)
    if not total:
        raise DataError(
            f"data={name}: nothing is to be predicted in the {len(means)} batches of an "
            "evaluation, which has no loss. Use more (run.eval_batches), a longer model.seq_len, "
            "or run.eval_every=null."
        )
    return sum(loss * number for loss, number in means) / total
