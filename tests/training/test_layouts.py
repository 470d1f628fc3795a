"""The training loop trains the same model on every layout, and goes on with it on any other."""

import json
import shutil

import numpy as np
import pytest

from ppctl import cli
from ppctl.schedule.partition.partition import LETTERS

WORDS = (
    "model=mlp model.d_model=16 data=regression data.batch_size=16 data.num_rows=512 data.num_features=5 "
    "data.num_targets=3 run.platform=cpu run.dtype=float32 run.eval_every=null run.tensorboard=false run.num_steps=20 "
    "model.num_layers=5"  # the stages are of unequal size
)
LAYOUTS = {
    "two ranks": "mesh=1x2 schedule=gpipe schedule.num_microbatches=2",
    "the reference": "mesh=1x1 executor=reference",
    "the reference, other microbatches": "mesh=1x1 executor=reference schedule.num_microbatches=8 executor.remat=full",
    "gpipe": "mesh=1x4 schedule=gpipe schedule.num_microbatches=8",
    "1f1b": "mesh=1x2 schedule=1f1b executor.remat=layer",
    "eager 1f1b, data parallel": "mesh=2x2 schedule=eager_1f1b executor.remat=full",
    "interleaved, sharded": "mesh=2x2x2 schedule=interleaved schedule.num_microbatches=2",
    "a stage without layers": "mesh=1x4 schedule=eager_1f1b partition=explicit partition.layers=E|ttt|t|tL",
}
MICROBATCHES = ("schedule.num_microbatches=4", "executor.unroll=0", "run.checkpoint.every=null")
RELATIVE = 1e-5  # of float32 losses, as promised

pytestmark = pytest.mark.full


def train(run_dir, layout, *words):
    assert cli.main(["train", *WORDS.split(), f"run.dir={run_dir}", *words, *LAYOUTS[layout].split()]) == 0


def records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return [record["loss"] for record in records(run_dir)]


def checkpoints(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal())


@pytest.fixture(scope="module")
def reference_losses(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    train(run_dir, "the reference", *MICROBATCHES)
    return losses(run_dir)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "the reference"])
def test_every_layout_trains_the_same_model(tmp_path, layout, reference_losses):
    assert reference_losses[-1] < reference_losses[0] - 0.05  # it learns, so that a wrong gradient would show
    train(tmp_path / "run", layout, *MICROBATCHES)
    np.testing.assert_allclose(losses(tmp_path / "run"), reference_losses, rtol=RELATIVE)


@pytest.mark.parametrize(
    "layouts",
    [
        ("interleaved, sharded", "a stage without layers"),
        ("gpipe", "interleaved, sharded", "the reference", "a stage without layers", "1f1b"),
    ],
    ids=len,
)
def test_a_run_goes_on_within_rounding_on_any_other_layout(tmp_path, layouts, capsys):
    words = ["model.activation=tanh", "run.checkpoint.every=2", "run.checkpoint.keep=10"]
    train(tmp_path / "one", "two ranks", *words)
    run_dir = tmp_path / "many"
    for start, layout in zip((4, 8, 12, 14, 16), layouts, strict=False):
        source = run_dir if run_dir.exists() else tmp_path / "one"
        shutil.copytree(source, tmp_path / "next")  # as a kill after the save of step `start` leaves it
        for later in [step for step in checkpoints(tmp_path / "next") if step > start]:
            shutil.rmtree(tmp_path / "next" / "checkpoints" / str(later))
        shutil.rmtree(run_dir, ignore_errors=True)
        (tmp_path / "next").rename(run_dir)
        capsys.readouterr()
        train(run_dir, layout, *words)
        out = capsys.readouterr().out
        assert f"resuming after step {start}" in out
        assert (f"partition E|t*3|t|tL ({LETTERS}); explicit (" in out) == (layout == "a stage without layers")
        assert [record["step"] for record in records(run_dir)] == list(range(1, 21))
        np.testing.assert_allclose(losses(run_dir), losses(tmp_path / "one"), rtol=RELATIVE)
