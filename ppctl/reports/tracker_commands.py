"""The commands that show what trackers hold of a run."""

from __future__ import annotations

import shlex
from pathlib import Path


def tracker_commands(run_dir: Path) -> list[tuple[str, str]]:
    """Return (tracker, command) for each tracker that has written into a run directory.

    Runs of Weights & Biases that were recorded offline are sent by theirs.
    """
    events, database = run_dir / "tensorboard", run_dir / "mlflow.db"
    offline = sorted(map(str, (run_dir / "wandb").glob("offline-run-*")))
    commands: list[tuple[str, list[str]]] = []
    if events.is_dir():
        commands.append(("TensorBoard", ["tensorboard", "--logdir", str(events)]))
    if offline:
        commands.append(("Weights & Biases", ["wandb", "sync", *offline]))
    if database.is_file():
        words = ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{database}"]
        commands.append(("MLflow", words))
    return [(name, shlex.join(words)) for name, words in commands]
