"""`ppctl train`."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config import Config
from ppctl.planner.predict import predict_step
from ppctl.training import run


def train(config: Config, *, words: Sequence[str], as_json: bool) -> int:
    """Train a config with the planner's prediction beside it; return the exit code of `training.run.train`."""
    return run.train(config, words, predict=predict_step, as_json=as_json)
