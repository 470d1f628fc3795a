"""`ppctl train`: train a model; metrics and checkpoints go to run.dir, and the same line resumes."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config import Config
from ppctl.planner.predict import predict_step
from ppctl.training import run


def train(config: Config, *, words: Sequence[str], as_json: bool) -> int:
    """Train a config, which the planner predicts first; return the exit code of `training.run.train`.

    words: what the run was started with, as typed, to be stored.
    """
    return run.train(config, words, predict=predict_step, as_json=as_json)
