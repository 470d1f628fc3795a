"""Checkpoints that are kept for good, going back to one, and pruning."""

import json
import shutil

import numpy as np
import pytest
from support.small_runs import checkpoints, losses, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ppctl import cli
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints


def aside(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("*after-*"))


def test_a_run_goes_back_once_and_keeps_later_records(train, copy, six_steps):
    # 1. back to step 2, with another rate
    run_dir = copy(6)
    again = "run.resume=2", "run.checkpoint.every=2", "optim.lr=1e-4"
    code, out, _ = train(*again)
    assert code == 0
    kept = "6.after-2, 4.after-2"
    assert f"going back to step 2; later checkpoints are kept as {kept}" in out
    assert "resuming after step 2" in out
    assert aside(run_dir) == ["4.after-2", "6.after-2", "metrics.after-2.jsonl"]
    # 2. later records are unchanged, new ones continue from step 2
    of_before = run_dir / "checkpoints/metrics.after-2.jsonl"
    assert of_before.read_text() == (six_steps / "metrics.jsonl").read_text()
    assert [record["step"] for record in records(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert losses(run_dir)[:3] == losses(six_steps)[:3]  # the same data at step 3
    assert losses(run_dir)[3:] != losses(six_steps)[3:]
    old, new = (
        StoredCheckpoints(folder).meta(step)["config"]["optim"]["lr"]
        for folder, step in ((six_steps / "checkpoints", 6), (run_dir / "checkpoints", 6))
    )
    assert (old, new) == (0.002, 1e-4)


@pytest.mark.full
def test_tensorboard_shows_new_losses_after_a_run_went_back(train, tmp_path):
    run_dir, words = tmp_path / "run", ("run.checkpoint.every=2", "run.trackers=[tensorboard]")
    assert train(*words)[0] == 0
    before = losses(run_dir)
    assert train(*words, "run.resume=2", "optim.lr=1e-4")[0] == 0
    # read like TensorBoard: records of an earlier start from step 3 on are hidden
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in shown] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([event.value for event in shown], losses(run_dir), rtol=1e-6)
    assert losses(run_dir)[3:] != before[3:]


def test_going_back_is_completed_after_a_kill(copy):
    run_dir = copy(6)
    folder = run_dir / "checkpoints"
    (folder / "6").rename(folder / "6.after-2")
    with Checkpoints(folder, keep=3) as found:
        assert not found.stored.went_back(2)
        assert found.go_back(2) == ["4.after-2"]
        assert found.stored.steps() == (2,)
        assert found.stored.went_back(2)


@pytest.mark.full
def test_a_run_goes_back_to_a_step_again_after_it_went_back_to_another(train, copy):
    run_dir = copy(6)
    every = "run.checkpoint.every=2", "run.checkpoint.keep=9"
    for step, last in ((4, 7), (2, 6), (4, 7)):
        words = *every, f"run.resume={step}", f"run.num_steps={last}"
        code, out, _ = train(*words)
        assert code == 0
        assert f"resuming after step {step}" in out
        assert checkpoints(run_dir)[-1] == last
    kept = {"6.after-4", "7.after-2", "6.after-4.2", "metrics.after-4.2.jsonl"}
    assert kept <= {*aside(run_dir)}
    # a repeated command goes on from the newest checkpoint
    code, out, _ = train("run.resume=4", "run.num_steps=8")
    assert (code, "resuming after step 7" in out) == (0, True)
    assert "run.resume=4: an earlier start went back, and this one goes on from it. To go" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.resume=3", "no checkpoint of this step in"),
        ("run.resume=6", "run.resume=6 goes back to a step that is not before run.num_steps=6"),
        ("run.resume=often", "is not one of auto, must, never, STEP"),
        ("run.checkpoint.keep_every=5", "run.checkpoint.keep_every=5 is not a multiple of"),
    ],
)
def test_impossible_steps_to_go_back_to_are_refused(train, copy, word, message):
    run_dir = copy(6)
    code, _, err = train(word, *(() if "keep_every" in word else ("run.checkpoint.every=2",)))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert checkpoints(run_dir) == [2, 4, 6]


def prune(capsys, *words):
    code = cli.main(["runs", "prune", *map(str, words)])
    return code, *capsys.readouterr()


def test_prune_keeps_the_newest_and_permanent_checkpoints(train, tmp_path, capsys):
    run_dir = tmp_path / "run"
    words = "run.checkpoint.every=1", "run.checkpoint.keep=6", "run.checkpoint.keep_every=2"
    assert train(*words)[0] == 0
    shutil.copytree(run_dir / "checkpoints/6", run_dir / "checkpoints/9.after-6")
    code, out, err = prune(capsys, run_dir, "--keep", "2", "--yes", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["removed"] == ["1", "3", "9.after-6"]
    told = f"ppctl: removed 3 checkpoints in {run_dir / 'checkpoints'}: 1, 3, 9.after-6, "
    assert err.startswith(told), err
    assert found["kept"] == [2, 4, 5, 6]
    assert found["disk_bytes"] > 0
    assert checkpoints(run_dir) == [2, 4, 5, 6]
    assert train(*words, "run.checkpoint.keep=1", "run.num_steps=7")[0] == 0
    assert checkpoints(run_dir) == [2, 4, 6, 7]
    code, out, _ = prune(capsys, run_dir, "--keep", "9", "--yes")
    assert code == 0
    assert "nothing to prune" in out
    code, out, err = prune(capsys, run_dir, "--keep", "9", "--yes", "--json")
    assert code == 0
    assert json.loads(out) == {"removed": [], "kept": [2, 4, 6, 7], "disk_bytes": 0}
    assert "nothing to prune" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs one run and the number of checkpoints to keep"),
        (("--keep", "0"), "--keep 0 leaves no checkpoint"),
        (("--keep", "1"), "asks first, but it has no terminal. Add --yes"),
    ],
)
def test_prune_removes_only_after_a_yes(copy, capsys, words, message):
    run_dir = copy(6)
    code, _, err = prune(capsys, run_dir, *words)
    assert code == 2
    assert message in err
    assert checkpoints(run_dir) == [2, 4, 6]


def test_the_list_has_sizes(copy, capsys):
    run_dir = copy(6)
    assert cli.main(["runs", str(run_dir.parent), "--columns", "size"]) == 0
    out = capsys.readouterr().out
    assert np.any([unit in out for unit in (" KiB", " MiB")])
