"""The evaluation of a run, on examples that it is not trained on."""

from __future__ import annotations

from typing import Any

from ppctl.data import DataSet
from ppctl.training.engines import Engine

Tree = Any


def evaluate(engine: Engine, data: DataSet, num_batches: int, state: Tree) -> float:
    """Return the mean loss of the first held-out batches; after `engine.compile(evaluate=True)`."""
    batches = data.eval_batches(num_batches, engine.examples)
    losses = [engine.loss(state, engine.put(batch)) for batch in batches]
    return sum(map(float, losses)) / len(losses)
