"""The commands that show what trackers hold of a run."""

from __future__ import annotations

import shlex
from pathlib import Path


def tracker_commands(run_dir: Path) -> list[tuple[str, str]]:
    """Return (tracker, command) for each tracker that has written into a run directory.

    Runs of Weights & Biases that were recorded offline are sent by theirs.
    """
    offline = sorted(map(str, (run_dir / "wandb").glob("offline-run-*")))
    found = {
        "TensorBoard": (run_dir / "tensorboard").is_dir() and ["tensorboard", "--logdir", str(run_dir / "tensorboard")],
        "Weights & Biases": offline and ["wandb", "sync", *offline],
        "MLflow": (run_dir / "mlflow.db").is_file()
        and ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{run_dir / 'mlflow.db'}"],
    }
    return [(name, shlex.join(words)) for name, words in found.items() if words]
