"""README: every layout trains the same model, and `ppctl verify` proves it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.promise import EXACT, MODEL, train

from ppctl import cli
from ppctl.cli.commands import verify
from ppctl.training.pipeline import job

README = (Path(__file__).parents[2] / "README.md").read_text()
LAYOUTS = {  # num_steps=6
    "dp x pp, interleaved": "mesh=2x2 schedule=interleaved",
    "dp x pp x fsdp, a schedule of mpmd": "mesh=1x2x2 schedule=zb_v executor=mpmd executor.remat=full",
    "pp, 1F1B, layers recomputed": "mesh=1x2 schedule=1f1b executor.remat=layer",
    "pp, a stage without layers": "mesh=1x4 schedule=eager_1f1b partition=explicit partition.layers=E|ttt|t|tL",
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_the_same_model(tmp_path, layout, reference_losses):
    """trains; `mesh` is dp x pp, or dp x pp x fsdp"""
    np.testing.assert_allclose(
        train(tmp_path / "run", layout, num_steps=6), reference_losses[:6], rtol=EXACT
    )


def test_stages_divided_over_tp_and_cp_train_the_same_model(capsys):
    """`mesh.tp=2 mesh.cp=2` divide stages"""
    words = (
        "data=synthetic data.batch_size=4 data.vocab_size=18 data.num_sequences=64 "
        "data.eval_fraction=0 model.num_layers=2 model.d_model=8 model.num_heads=2 "
        "model.seq_len=8 mesh=1x2 mesh.tp=2 mesh.cp=2 schedule=1f1b schedule.num_microbatches=2 "
        "run.platform=cpu run.eval_every=null verify.steps=0 --json"
    )
    assert cli.main(["verify", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["worst"]["error"] < EXACT


def test_a_schedule_from_a_csv_file_trains_the_same_model(tmp_path, reference_losses):
    """custom ones from a CSV file"""
    file = tmp_path / "mine.csv"
    assert (
        cli.main(
            f"schedule show schedule=zb_h1 mesh=1x2 schedule.num_microbatches=4 --out {file}".split()
        )
        == 0
    )
    layout = f"mesh=1x2 schedule=csv schedule.path={file}"
    np.testing.assert_allclose(
        train(tmp_path / "run", layout, num_steps=6), reference_losses[:6], rtol=EXACT
    )


def test_verify_compares_every_gradient_and_whole_train_steps(capsys):
    """`ppctl verify` compares every gradient and whole train steps with the un-pipelined model, in
    float64.
    """
    assert (
        cli.main(["verify", *MODEL, "mesh=1x2", "schedule=1f1b", "executor.remat=layer", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["dtype"]) == (True, "float64")
    assert found["worst"]["error"] == max(leaf["error"] for leaf in found["gradients"]) < EXACT
    assert len(found["gradients"]) == 6  # weights and biases of embedding, layers, head
    assert len(found["training"]["steps"]) >= 2


def test_verify_exits_with_1_where_a_gradient_differs(monkeypatch, capsys):
    """compares gradients and train steps with the un-pipelined model; exit code 1 if they differ"""

    def broken(request, **kwargs):
        found = job.assemble(request, default_dtype="float64", **kwargs)
        right = found.pipe.engine.loss_and_grads_of

        def wrong(params, batch):
            loss, grads = right(params, batch)
            return loss, grads | {
                "layers": {name: leaf * (1 + 1e-6) for name, leaf in grads["layers"].items()}
            }

        return replace(
            found,
            pipe=replace(found.pipe, engine=replace(found.pipe.engine, loss_and_grads_of=wrong)),
        )

    monkeypatch.setattr(verify, "assemble_to_verify", broken)
    words = ["mesh=1x2", "schedule=1f1b", "executor.remat=layer", "verify.steps=0", "--json"]
    assert cli.main(["verify", *MODEL, *words]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["worst"]["name"].split("/")[0]) == (False, "layers")


def test_twelve_lines_of_python_train(capsys):
    """From one command, or twelve lines of Python, it draws the schedule, predicts step time and
    memory
    """
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = [line for line in example.splitlines() if line]
    assert len(lines) <= 12
    exec(example, {"__name__": "__main__"})
    first, *_, last = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert last < first
