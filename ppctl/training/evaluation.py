"""The evaluation of a run, on examples that it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppctl.data import DataSet
from ppctl.errors import DataError
from ppctl.training.engines import Engine

Tree = Any


def evaluate(engine: Engine, data: DataSet, num_batches: int, state: Tree) -> float:
    """Return the mean loss of the first held-out batches; after `engine.compile(evaluate=True)`.

    The mean is over all their losses: of batches with prompts or padding some have more of them than others.
    Raises DataError where nothing in them is to be predicted.
    """
    batches = data.eval_batches(num_batches, engine.examples)
    found = [engine.loss(state, engine.put(batch)) for batch in batches]
    return mean_of([(float(loss), float(number)) for loss, number in found], data.name)


def mean_of(found: Sequence[tuple[float, float]], name: str) -> float:
    """Return the mean over batches of a data set of that name, of each of which (mean, number) is known.

    >>> mean_of([(2.0, 1.0), (5.0, 3.0)], "text")
    4.25
    """
    total = sum(number for _, number in found)
    if not total:
        raise DataError(
            f"data={name}: nothing is to be predicted in the {len(found)} batches of an evaluation, which has no loss. "
            "Use more (run.eval_batches), a longer model.seq_len, or run.eval_every=null."
        )
    return sum(loss * number for loss, number in found) / total
