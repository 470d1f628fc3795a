"""`executor=mpmd` by the commands: the same run as spmd's, also through checkpoints of each other."""

import json
import os
import signal
import time
from dataclasses import replace

import jax
import pytest

from ppctl import cli, config
from ppctl.cli.commands import bench, verify
from ppctl.training.engines.mpmd import Mpmd
from ppctl.training.metrics import Metrics

TINY = (
    "mesh=1x2 data=regression data.batch_size=8 data.num_rows=4096 model=mlp model.num_layers=3 model.d_model=16 "
    "schedule.num_microbatches=4 run.platform=cpu run.dtype=float32 run.tensorboard=false run.checkpoint.every=null"
)


def train(run_dir, *words):
    return cli.main(["train", *TINY.split(), f"run.dir={run_dir}", *words])


def records(run_dir, name="metrics"):
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def losses(run_dir):
    return [record["loss"] for record in records(run_dir)]


@pytest.mark.full
def test_a_run_goes_from_spmd_to_mpmd_and_back_through_its_checkpoints(tmp_path, capsys):
    steps = ["run.num_steps=6", "run.eval_every=3", "run.eval_batches=1", "optim.warmup_steps=2"]
    assert train(tmp_path / "spmd", *steps, "schedule=1f1b") == 0
    mixed = tmp_path / "mixed"
    chain = [("spmd", "1f1b", 2), ("mpmd", "zb_h1", 4), ("spmd", "gpipe", 6)]
    for executor, schedule, until in chain:
        words = [*steps, f"executor={executor}", f"schedule={schedule}"]
        words += ["executor.post_validation=true"] * (executor == "mpmd")
        assert train(mixed, *words) == 0 if until == 6 else stop_after(mixed, words, until)
    assert losses(mixed) == pytest.approx(losses(tmp_path / "spmd"), rel=1e-5)
    for found, wanted in zip(*(records(run_dir, "eval") for run_dir in (mixed, tmp_path / "spmd")), strict=True):
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
    assert "executor  mpmd: a program for each stage and kind of task" in capsys.readouterr().out


def stop_after(run_dir, words, step):
    """Whether a run, interrupted by SIGTERM once `step` steps were logged, has saved and left."""
    log = Metrics.log

    def interrupted(self, record):
        log(self, record)
        if record["step"] == step - 1:  # the loop reads a step's numbers when the next one is under way
            os.kill(os.getpid(), signal.SIGTERM)

    Metrics.log = interrupted
    try:
        code = train(run_dir, *words)
    finally:
        Metrics.log = log
    return code == 128 + signal.SIGTERM


@pytest.mark.full
def test_fifty_steps_of_mpmd_have_the_losses_of_spmd(tmp_path):
    words = ["run.num_steps=50", "run.eval_every=null", "optim.warmup_steps=5", "mesh=2x2", "model.num_layers=4"]
    assert train(tmp_path / "spmd", *words, "schedule=interleaved") == 0
    assert train(tmp_path / "mpmd", *words, "schedule=zb_v", "executor=mpmd") == 0
    found, expected = losses(tmp_path / "mpmd"), losses(tmp_path / "spmd")
    assert len(found) == len(expected) == 50
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.9 * expected[0]


CONFIG = config.Config(
    model=config.MLP(num_layers=5, d_model=8),
    mesh=config.Mesh(1, 2),
    schedule=config.Schedule("zb_h1", 4),
    executor=config.Mpmd(remat="layer"),
    data=config.Regression("regression", batch_size=16, num_features=6, num_targets=3, num_rows=4000),
    verify=config.Verify(steps=0),
)


def test_verify_compares_mpmd_with_the_reference(capsys):
    assert verify.verify(CONFIG, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["worst"]["error"] < 1e-13
    assert {leaf["name"] for leaf in found["gradients"]} >= {"layers/kernel", "ends/embed/kernel", "ends/head/kernel"}


@pytest.mark.full
@pytest.mark.slow
def test_bench_shows_dispatch_and_the_compile_time_of_spmd(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "GROWTH", (2, 4, 8))
    assert bench.bench(replace(CONFIG, schedule=config.Schedule("1f1b", 4)), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["steps"]}
    assert [*rows] == ["reference", "remat=none", "remat=layer", "remat=full", "executor=spmd"]
    assert [row["dispatch_us_per_task"] is None for row in rows.values()] == [True, False, False, False, True]
    assert all(row["temp_bytes"] > 0 and row["compile_cpu_s"] > 0 for row in rows.values())
    [grown] = found["growth"]
    assert (grown["name"], grown["temp_ratio"]) == ("1f1b", 1.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("executor.idle=skip", "executor.idle is not a setting of executor=mpmd"),
        ("executor.gather=tick", "executor.gather=tick is not one of step, layer"),
    ],
)
def test_what_belongs_to_spmd_is_refused(setting, message, capsys):
    assert cli.main(["train", *TINY.split(), "executor=mpmd", setting]) == 2
    assert message in capsys.readouterr().err


def test_a_step_takes_as_long_as_its_dispatch_where_that_is_the_longer_part(tmp_path, monkeypatch):
    dispatch_s, step = 0.2, Mpmd.step

    def slow(self, state, batch):
        found = jax.block_until_ready(step(self, state, batch))
        time.sleep(dispatch_s)
        return found

    monkeypatch.setattr(Mpmd, "step", slow)
    assert train(tmp_path, "executor=mpmd", "schedule=1f1b", "run.num_steps=4", "run.eval_every=2") == 0
    assert all(record["step_time_s"] > 0.9 * dispatch_s for record in records(tmp_path))
