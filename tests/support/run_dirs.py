"""Run directories as `ppctl train` leaves them, made without training."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import yaml

from ppctl.cli.compose import compose
from ppctl.config import Config


@functools.cache
def settings(words):
    """What WORDS compose to; composing takes half a second."""
    config = compose([*words])
    assert isinstance(config, Config)
    return asdict(config)


def make(name, *words, steps=3, age_s=0.0, started_s=None, ending=None, loss=4.0, directory=None):
    """A run below runs/ as `ppctl train WORDS` leaves it, with this age and this last line of
    status.jsonl.
    """
    run_dir = Path("runs") / name
    run_dir.mkdir(parents=True)
    config = settings(words)
    (run_dir / "config.yaml").write_text(
        yaml.safe_dump({**config, "run": {**config["run"], "dir": str(run_dir)}}, sort_keys=False)
    )
    lines = [
        {"step": step, "loss": loss / step, "step_time_s": 0.5, "tokens_per_s": 1e4}
        for step in range(1, steps + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    started = {
        "status": "started",
        "step": 0,
        "host": "elsewhere",
        "pid": 1,
        "overrides": [*words],
        "at": started_s,
    }
    started |= {} if directory is None else {"directory": str(directory)}
    status = [each for each in (None if started_s is None else started, ending) if each is not None]
    if status:
        (run_dir / "status.jsonl").write_text("".join(json.dumps(each) + "\n" for each in status))
    then = time.time() - age_s
    for file in run_dir.iterdir():
        os.utime(file, (then, then))
    return run_dir
