"""A run that goes on with other processes, another mesh, schedule, partition and executor, as it would have on one."""

import json
import subprocess
import sys

import pytest
from support.environment import BY_USER

from ppctl import cli
from ppctl.schedule.partition.partition import LETTERS

EVERY = 3
WORDS = (
    "model=mlp model.num_layers=16 model.d_model=8 data=regression data.batch_size=32 data.num_rows=256 "
    "data.eval_fraction=0 data.num_features=5 data.num_targets=3 schedule.num_microbatches=4 run.platform=cpu "
    "run.dtype=float64 run.eval_every=null run.checkpoint.every=null run.tensorboard=false "
    "optim.warmup_steps=0 optim.min_lr_fraction=1"  # the learning rate does not depend on where the run is to end
)
CHAIN = (  # (processes, layout), each for EVERY steps; the epoch of 8 steps ends in the third
    (1, "mesh=2x4 schedule=interleaved"),
    (2, "mesh=1x8 schedule=gpipe partition=explicit partition.layers=[3,2,2,2,2,2,2,1]"),
    (4, "mesh=4x2x1 schedule=zb_h1 executor=mpmd"),
    (1, "mesh=8x1 schedule=gpipe"),
)


def train(run_dir, num_steps, processes, layout):
    """What a start that trains until num_steps says."""
    words = ["train", *WORDS.split(), f"run.dir={run_dir}", f"run.num_steps={num_steps}", *layout.split()]
    command = [sys.executable, "-m", "ppctl.cli", *words, f"launch.processes={processes}"]
    done = subprocess.run(command, env=BY_USER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_run_goes_on_with_any_number_of_processes_and_any_layout(tmp_path, capsys):
    for number, (processes, layout) in enumerate(CHAIN):
        said = train(tmp_path / "many", EVERY * (number + 1), processes, layout)
        assert ("resuming after step " + str(EVERY * number) if number else "from the start") in said
        assert (f"partition Et*3|(tt|)*6tL ({LETTERS}); explicit (" in said) == ("explicit" in layout)
        assert ("executor  mpmd" in said) == ("mpmd" in layout)
    num_steps = EVERY * len(CHAIN)
    words = ["train", *WORDS.split(), f"run.dir={tmp_path / 'one'}", f"run.num_steps={num_steps}", *CHAIN[0][1].split()]
    assert cli.main(words) == 0
    found = losses(tmp_path / "many")
    assert len(found) == num_steps
    assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
