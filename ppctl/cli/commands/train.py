"""`ppctl train`: train a model into run.dir; the same line resumes."""

from collections.abc import Sequence

from ppctl.config import Config
from ppctl.planner.cost.predict_step import predict_step
from ppctl.training.run import train_run as run


def train(config: Config, *, words: Sequence[str], as_json: bool) -> int:
    """Predict the step, then train; return the exit code. words: typed overrides, to record."""
    return run.train(config, words, predict=predict_step, as_json=as_json)
