"""Runs whose stages are divided over tp and cp: saved, gone on with on other axes, traced and
timed.
"""

import csv
import json

import numpy as np
import pytest
from support.selection import full
from support.traced_run import traced_run

from ppctl import cli
from ppctl.reports.measured_timeline_file import TASKS_FILE
from ppctl.schedule.families.registry import build

COMMON = (
    "schedule.num_microbatches=2 data.batch_size=8 data.eval_fraction=0 run.platform=cpu "
    "run.dtype=float64 run.eval_every=null run.trackers=[] run.checkpoint.every=null "
    "optim.warmup_steps=0 optim.min_lr_fraction=1"
)
MODELS = {
    "transformer": "data=synthetic data.vocab_size=18 data.num_sequences=64 model.num_layers=2 "
    "model.d_model=16 model.num_heads=2 model.seq_len=8",
    "stack divided by XLA": "model=custom model.target=support.sharded_models.of_config "
    "model.num_layers=2 data=regression data.num_rows=64 data.num_features=6 data.num_targets=4",
}
STEPS = 2  # words of each start
CHAINS = {
    "transformer": (
        "mesh=1x2x1x1x2x2 schedule=1f1b",  # the vocabulary is padded over tp
        "mesh=1x1x1x1x1x4 schedule=gpipe executor=mpmd executor.context=ring",
        "mesh=1x2x2x1x2x1 schedule=zb_h1 executor.gather=layer",
    ),
    "stack divided by XLA": (
        "mesh=1x2x1x1x4x1 schedule=1f1b executor=mpmd",
        "mesh=1x2x1x1x2x1 schedule=zb_h1 executor=mpmd",
        "mesh=2x1x1x1x1x1 schedule=gpipe",
    ),
}


def train(run_dir, model, num_steps, layout):
    words = f"{COMMON} {MODELS[model]} {layout} run.num_steps={num_steps} run.dir={run_dir}"
    assert cli.main(["train", *words.split()]) == 0
    return [
        json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(("model", "starts"), [full((model, 3)) for model in CHAINS])
def test_a_divided_run_resumes_over_other_axes_like_the_reference(tmp_path, model, starts, capsys):
    chain = CHAINS[model][:starts]
    for number, layout in enumerate(chain):
        losses = train(tmp_path / "divided", model, STEPS * (number + 1), layout)
        assert number == 0 or f"resuming after step {STEPS * number}" in capsys.readouterr().out
    expected = train(
        tmp_path / "whole", model, STEPS * len(chain), "mesh=1x1 schedule=gpipe executor=reference"
    )
    assert len(losses) == STEPS * len(chain)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)


@pytest.mark.full
def test_tasks_of_divided_stages_are_traced(tmp_path):
    words = "mesh=1x2x1x1x2x2 schedule=1f1b schedule.num_microbatches=2 model.num_layers=2"
    assert traced_run(tmp_path, *words.split()) == 0
    trace = json.loads((tmp_path / "profile" / TASKS_FILE).read_text())["traceEvents"]
    tracks = {
        event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"
    }
    assert len(tracks) == 8
    schedule = build("1f1b", 2, 2)
    for tid, name in tracks.items():
        found = [event["name"] for event in trace if event["ph"] == "X" and event["tid"] == tid]
        assert {str(task) for task in schedule.ranks[int(name.split()[1])]} == set(found)


@pytest.mark.full
def test_a_step_of_divided_stages_is_drawn(tmp_path):
    words = "mesh=1x2x1x1x2x1 schedule=1f1b executor=mpmd run.timeline=true"
    train(tmp_path, "transformer", 3, words)
    with (tmp_path / "timeline" / "timeline.csv").open() as file:
        found = [(int(row["rank"]), row["task"]) for row in csv.DictReader(file)]
    schedule = build("1f1b", 2, 2)
    assert sorted(found) == sorted(
        (rank, str(task)) for rank, tasks in enumerate(schedule.ranks) for task in tasks
    )
