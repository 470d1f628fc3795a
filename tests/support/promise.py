"""The one tiny model of tests/promises/, and the commands that train it."""

import json
import subprocess
import sys

from support.environment import BY_USER

from ppctl import cli

NUM_STEPS, CHECKPOINT_EVERY = 12, 3
# 5 layers: stages are of unequal size. An epoch has 8 steps. The learning rate does not depend on
# run.num_steps.
MODEL = (
    "model=mlp model.num_layers=5 model.d_model=16 data=regression data.batch_size=16 "
    "data.num_rows=128 data.eval_fraction=0 data.num_features=5 data.num_targets=3 "
    "schedule.num_microbatches=4 run.platform=cpu run.dtype=float64 run.eval_every=null "
    "run.trackers=[] optim.warmup_steps=0 optim.min_lr_fraction=1 "
    f"run.checkpoint.every={CHECKPOINT_EVERY}"
).split()
REFERENCE = "mesh=1x1 schedule=gpipe executor=reference"
EXACT = 1e-10  # relative, of float64: sums in another order, nothing else


def train(run_dir, layout, *words, num_steps=NUM_STEPS):
    """Train in this process; return the losses of all steps of the run."""
    request = [*MODEL, *layout.split(), f"run.num_steps={num_steps}", f"run.dir={run_dir}", *words]
    assert cli.main(["train", *request]) == 0
    return losses(run_dir)


def command(run_dir, layout, *words, num_steps=NUM_STEPS):
    """Return the command line of the same in a process."""
    request = [*MODEL, *layout.split(), f"run.num_steps={num_steps}", f"run.dir={run_dir}", *words]
    return [sys.executable, "-m", "ppctl.cli", "train", *request]


def train_by_processes(run_dir, layout, count, num_steps):
    """Train by `count` local processes; return their output."""
    words = command(run_dir, layout, f"launch.processes={count}", num_steps=num_steps)
    done = subprocess.run(words, env=BY_USER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(run_dir, name="metrics.jsonl"):
    """Return the whole lines of a file of records: the last one may be half written where a process
    was killed.
    """
    path = run_dir / name
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def losses(run_dir):
    return [record["loss"] for record in records(run_dir)]


def checkpoints(run_dir):
    return sorted(
        int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()
    )
