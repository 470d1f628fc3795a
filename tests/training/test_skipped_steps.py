"""Steps whose gradients are not finite: skipped alike by every executor and layout."""

import json

import jax
import numpy as np
import pytest
from support.selection import full
from support.small_runs import checkpoints, records

from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints

BAD = 17  # the example that makes its step's gradients not finite
WORDS = (
    "model=mlp model.num_layers=2 model.d_model=16 data=custom data.target=bad_rows.rows "
    "data.batch_size=16 data.eval_fraction=0 schedule.num_microbatches=2 run.platform=cpu "
    "run.dtype=float64 run.eval_every=null run.trackers=[] run.checkpoint.every=1 "
    "run.checkpoint.keep=9 run.num_steps=4 run.on_nonfinite=skip"
)
CODE = """
import numpy as np

def rows(number=64, bad=({bad},)):
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((number, 5)).astype(np.float32)
    targets = draw.standard_normal((number, 3)).astype(np.float32)
    inputs[list(bad)] = np.nan
    return {{"inputs": inputs, "targets": targets}}
"""


@pytest.fixture
def skipping(train, tmp_path, monkeypatch):
    """Return a function that trains on rows, one of them not finite."""
    (tmp_path / "bad_rows.py").write_text(CODE.format(bad=BAD))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *words, **how: train(*words, tiny=WORDS, **how)


def params(run_dir, step):
    found = StoredCheckpoints(run_dir / "checkpoints")
    return jax.device_get(found.restore_params(step, jax.devices("cpu")[0]))


def difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(np.abs(x - y).max() for x, y in pairs)


LAYOUTS = [
    (  # spmd: tests/launch/test_launch_train.py
        "executor=mpmd executor.post_validation=true mesh=1x2 schedule=1f1b",
    ),
    full((("mesh=1x2x2 schedule=1f1b", "executor=mpmd mesh=2x2 schedule=zb_h1"),)),
]


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_bad_batch_is_skipped_and_named_equally_by_all(skipping, tmp_path, layouts):
    found = []
    for number, layout in enumerate(("executor=reference mesh=1x1", *layouts)):
        run_dir = tmp_path / f"run{number}"
        code, out, err = skipping(*layout.split(), run_dir=run_dir)
        assert code == 0, err
        (skipped,) = records(run_dir, "skipped.jsonl")
        step = skipped["step"]
        assert skipped["examples"].count(BAD) == 1  # a row of the user's array
        assert len(skipped["examples"]) == 16
        assert "grad_norm=nan: skipped, see skipped.jsonl" in out
        # the state before and after are equal, the rate goes by updates
        assert checkpoints(run_dir) == [1, 2, 3, 4]
        if step > 1:
            assert difference(params(run_dir, step - 1), params(run_dir, step)) == 0
        lines = records(run_dir)
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert lines[step - 1]["loss"] is None
        warm_up = np.diff([line["lr"] for line in lines if line["step"] != step])
        assert np.allclose(warm_up, warm_up[0])
        assert lines[-1]["skipped_steps"] == 1 if step < 4 else True
        found.append((skipped, params(run_dir, 4)))
    for skipped, end in found[1:]:
        assert skipped == found[0][0]
        assert difference(end, found[0][1]) < 1e-12


@pytest.mark.full
def test_a_resumed_run_counts_on(skipping, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert skipping("mesh=1x1", run_dir=whole)[0] == 0
    # step 3 is skipped; the rate of step 4 goes by updates with on_nonfinite=stop, too
    for words in (("run.num_steps=3",), ("run.num_steps=4", "run.on_nonfinite=stop")):
        # the cosine of another length is another rate: the warm-up lasts longer than both
        code, out, _ = skipping("mesh=1x1", *words, "--json", run_dir=parts)
        assert code == 0
        assert "NaN" not in out
        assert (json.loads(out)["loss"] is None) == (json.loads(out)["step"] == 3)
    assert records(whole, "skipped.jsonl") == records(parts, "skipped.jsonl")
    rates = [[line["lr"] for line in records(run_dir)] for run_dir in (whole, parts)]
    assert rates[0][-1] == rates[1][-1] > rates[0][1]
    assert len(rates[0]) == len(rates[1]) == 4


ALL_BAD = "+data.options.bad=[" + ",".join(map(str, range(64))) + "]"


@pytest.mark.full
@pytest.mark.parametrize(
    "at", ["run.checkpoint.every=null", full("run.num_steps=2"), full("run.checkpoint.every=2")]
)
def test_too_many_in_a_row_save_and_stop(skipping, tmp_path, tells, at):
    run_dir, words = tmp_path / "run", ("mesh=1x2", "schedule=1f1b", "optim.warmup_steps=1")
    words += ALL_BAD, f"run.on_event={tells}"
    code, _, err = skipping(*words, "run.max_skipped=2", "run.checkpoint.every=null", at)
    assert code == 4, err
    assert "2 steps in a row have gradients that are not finite (run.max_skipped=2)" in err
    assert err.count("\n") == 1
    saved = checkpoints(run_dir)[-1]
    assert f"Step {saved} is saved" in err
    # each saved step has its records and its event, also the one in flight when training ended
    found = records(tmp_path, "events.jsonl")
    steps = [each["step"] for each in found if each["event"] == "skipped"]
    skipped = [each["step"] for each in records(run_dir, "skipped.jsonl")]
    trained = [each["step"] for each in records(run_dir)]
    assert steps == skipped == trained == [*range(1, saved + 1)]
    assert [each["event"] for each in found[-2:]] == ["non_finite", "failed"]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(params(run_dir, saved)))
    # after a resume the rate is still that of the first update
    assert skipping(*words, "run.num_steps=4", "run.max_skipped=9")[0] == 0
    rates = [line["lr"] for line in records(run_dir)]
    assert len(rates) == 4
    assert len(set(rates)) == 1


@pytest.mark.full
def test_without_skipping_a_bad_step_ends_the_run(skipping, tmp_path, tells):
    code, _, err = skipping("mesh=1x1", "run.on_nonfinite=stop", f"run.on_event={tells}")
    assert code == 4
    assert "loss=nan" in err
    found = {each["event"]: each for each in records(tmp_path, "events.jsonl")}
    assert "loss=nan" in found["non_finite"]["reason"]
    assert (found["failed"]["kind"], "skipped" in found) == ("non_finite", False)
    assert not (tmp_path / "run/skipped.jsonl").exists()
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["loss"] is None
    # the same run goes on with skipping, and is the run that skipped from the start
    runs = tmp_path / "run", tmp_path / "skipping"
    for run_dir in runs:
        assert skipping("mesh=1x1", run_dir=run_dir)[0] == 0
    assert difference(*(params(run_dir, 4) for run_dir in runs)) < 1e-15
    assert records(runs[0], "skipped.jsonl") == records(runs[1], "skipped.jsonl")
