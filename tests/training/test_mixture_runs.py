"""Runs of mixtures of experts: resumed over other axes and by several processes, killed, evaluated,
verified; the bias that chooses experts is kept in checkpoints as weights are.
"""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.environment import BY_USER
from support.promise import checkpoints, losses, records
from support.selection import full

import ppctl
from ppctl import cli

WORDS = (
    "data=synthetic data.vocab_size=18 data.num_sequences=64 data.batch_size=8 "
    "data.eval_fraction=0.125 model.num_layers=2 model.d_model=8 model.num_heads=2 "
    "model.mlp_width=8 model.seq_len=8 model.moe.num_experts=4 model.moe.score=sigmoid "
    "model.moe.choice_bias=true model.moe.bias_update=0.01 model.moe.balance_loss=0.01 "
    "schedule.num_microbatches=2 run.platform=cpu run.dtype=float64 run.eval_every=null "
    "run.trackers=[] optim.warmup_steps=0 optim.min_lr_fraction=1"
)
MODEL = WORDS.split()
REFERENCE = "mesh=1x1 schedule=gpipe executor=reference"
STEPS = 2  # words of each start
CHAIN = (  # (processes, layout)
    (1, "mesh=1x2x1x2 schedule=zb_h1"),
    (2, "mesh=1x1x1x4 schedule=gpipe executor=mpmd model.moe.dispatch=alltoall"),
    (1, "mesh=1x2x2x1x2 schedule=1f1b executor.remat=layer"),
)


def request(run_dir, layout, num_steps, *words):
    return [*MODEL, *layout.split(), f"run.num_steps={num_steps}", f"run.dir={run_dir}", *words]


def command(*of_request):
    return [sys.executable, "-m", "ppctl.cli", "train", *request(*of_request)]


def bias_of(run_dir):
    return np.asarray(ppctl.load_run(run_dir).params()["layers"]["router"]["bias"])


@pytest.mark.parametrize("starts", [full(3)])
def test_a_mixture_resumes_over_other_axes_and_processes_like_the_reference(tmp_path, starts):
    run_dir, whole_dir = tmp_path / "run", tmp_path / "whole"
    for number, (processes, layout) in enumerate(CHAIN[:starts], start=1):
        words = command(run_dir, layout, STEPS * number, f"launch.processes={processes}")
        done = subprocess.run(words, env=BY_USER, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert number == 1 or f"resuming after step {STEPS * (number - 1)}" in done.stdout
    assert cli.main(["train", *request(whole_dir, REFERENCE, STEPS * starts)]) == 0
    np.testing.assert_allclose(losses(run_dir), losses(whole_dir), rtol=1e-9)
    found, expected = (
        [record["balance_loss"] for record in records(path)] for path in (run_dir, whole_dir)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for name in "expert_load", "expert_entropy_nats":
        found, expected = (
            [record[name] for record in records(path)] for path in (run_dir, whole_dir)
        )
        assert found == expected
    np.testing.assert_array_equal(bias_of(run_dir), bias_of(whole_dir))
    assert np.abs(bias_of(run_dir)).max() >= 0.01


LONG, KILLED = 40, "mesh=1x2x1x2 schedule=1f1b"


@pytest.mark.full
def test_a_killed_mixture_resumes_bit_for_bit(tmp_path, capsys):
    words = ["run.checkpoint.every=5", "run.log_every=1"]
    run_dir, whole_dir, elsewhere_dir = (tmp_path / name for name in ("run", "whole", "elsewhere"))
    start = command(run_dir, KILLED, LONG, *words)
    with subprocess.Popen(start, env=BY_USER, stdout=subprocess.DEVNULL) as process:
        while len(records(run_dir)) < 7 or not checkpoints(run_dir):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    step = checkpoints(run_dir)[-1]
    assert 5 <= step < LONG
    shutil.copytree(run_dir, elsewhere_dir)
    for path, layout in (
        (whole_dir, KILLED),
        (run_dir, KILLED),
        (elsewhere_dir, "mesh=1x1x1x4 schedule=gpipe executor=mpmd"),
    ):
        assert cli.main(["train", *request(path, layout, LONG, *words)]) == 0
    assert capsys.readouterr().out.count(f"resuming after step {step}\n") == 2
    assert losses(run_dir) == losses(whole_dir)
    np.testing.assert_array_equal(bias_of(run_dir), bias_of(whole_dir))
    np.testing.assert_allclose(losses(elsewhere_dir), losses(whole_dir), rtol=1e-7)


@pytest.mark.full
def test_a_mixture_is_evaluated_and_trained_on(tmp_path, capsys):
    base, more = tmp_path / "base", tmp_path / "more"
    words = ["run.eval_every=2"]
    assert cli.main(["train", *request(base, CHAIN[0][1], STEPS, *words)]) == 0
    evaluated = ppctl.load_run(base).evaluations[-1]["eval_loss"]
    capsys.readouterr()
    assert cli.main(["evaluate", str(base), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found["loss"], evaluated, rtol=1e-9)
    # a new run begins with its parameters, the bias among them
    start = [f"run.start_from={base}", "optim.lr=1e-12", "model.moe.bias_update=0"]
    assert cli.main(["train", *request(more, "mesh=1x1x1x4 schedule=gpipe", 1, *start)]) == 0
    np.testing.assert_array_equal(bias_of(more), bias_of(base))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [CHAIN[0][1], "mesh=1x2x1x2x2 schedule=1f1b executor=mpmd model.moe.dispatch=alltoall"],
)
def test_a_mixture_is_verified(layout, capsys):
    words = [word for word in MODEL if not word.startswith("run.") or "platform" in word]
    assert cli.main(["verify", *words, *layout.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["worst"]["error"] < 1e-10


@pytest.mark.full
def test_masks_and_padding_are_verified(tmp_path, capsys):
    lines = ({"question": "ab" * (n % 3), "text": "cdefg"[: 1 + n % 5]} for n in range(60))
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = [word for word in MODEL if word.startswith(("model.", "schedule.", "optim."))]
    words += f"data=text data.path={tmp_path}/chats.jsonl data.prompt_field=question".split()
    words += ["data.packing=true", "data.batch_size=4", "data.eval_fraction=0", "run.platform=cpu"]
    words += ["mesh=1x2x1x2", "schedule=1f1b", "model.moe.z_loss=0.01", "run.eval_every=null"]
    assert cli.main(["verify", *words, "verify.steps=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["worst"]["error"] < 1e-10
    (step,) = found["training"]["steps"]
    assert {*step["attached"]} == {"balance_loss", "z_loss"}


PADDED = "mesh=1x2x1x1x2x1 schedule=1f1b model.seq_len=7"


@pytest.mark.parametrize("command", ["train", "plan"])
def test_sequences_that_need_padding_are_refused(command, tmp_path, capsys):
    words = [*MODEL, *PADDED.split(), *([f"run.dir={tmp_path}"] if command == "train" else [])]
    words = [word for word in words if not word.startswith("model.seq_len=8")]
    assert cli.main([command, *words]) == 2
    err = capsys.readouterr().err
    assert "sequences of 7 tokens are padded to 8 for mesh.tp=2, and padding" in err
    assert "Use model.seq_len=8." in err
    assert err.count("\n") == 1
