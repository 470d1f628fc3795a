"""`executor=mpmd` by the commands: the same run as spmd's, also through its checkpoints."""

import json
import os
import signal
import time
from dataclasses import replace

import jax
import pytest

from ppctl import cli, config
from ppctl.cli.commands import bench, verify
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd
from ppctl.training.run.metrics import Metrics

TINY = (
    "mesh=1x2 data=regression data.batch_size=8 data.num_rows=4096 model=mlp model.num_layers=3 "
    "model.d_model=16 schedule.num_microbatches=4 run.platform=cpu run.dtype=float32 "
    "run.trackers=[] run.checkpoint.every=null"
)


def train(run_dir, *words):
    return cli.main(["train", *TINY.split(), f"run.dir={run_dir}", *words])


def records(run_dir, name="metrics"):
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def losses(run_dir):
    return [record["loss"] for record in records(run_dir)]


def stop_after(run_dir, words, step):
    """Whether a run, interrupted by SIGTERM once `step` steps were logged, has saved and left."""
    log = Metrics.log

    def interrupted(self, record, *attached):
        log(self, record, *attached)
        if (
            record["step"] == step - 1
        ):  # the loop reads a step's numbers when the next one is under way
            os.kill(os.getpid(), signal.SIGTERM)

    Metrics.log = interrupted
    try:
        code = train(run_dir, *words)
    finally:
        Metrics.log = log
    return code == 128 + signal.SIGTERM


CONFIG = config.Config(
    model=config.MLP(num_layers=5, d_model=8),
    mesh=config.Mesh(1, 2),
    schedule=config.Schedule("zb_h1", 4),
    executor=config.Mpmd(remat="layer"),
    data=config.Regression(
        "regression", batch_size=16, num_features=6, num_targets=3, num_rows=4000
    ),
    verify=config.Verify(steps=0),
)


@pytest.mark.full
def test_verify_compares_mpmd_with_the_reference(capsys):
    assert verify.verify(CONFIG, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["worst"]["error"] < 1e-13
    assert {leaf["name"] for leaf in found["gradients"]} >= {
        "layers/kernel",
        "embed_head/embed/kernel",
        "embed_head/head/kernel",
    }


@pytest.mark.full
@pytest.mark.slow
def test_bench_shows_dispatch_and_the_compile_time_of_spmd(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    assert bench.bench(replace(CONFIG, schedule=config.Schedule("1f1b", 4)), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["steps"]}
    assert [*rows] == ["reference", "remat=none", "remat=layer", "remat=full", "executor=spmd"]
    assert [row["dispatch_us_per_task"] is None for row in rows.values()] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert all(row["temp_bytes"] > 0 and row["compile_cpu_s"] > 0 for row in rows.values())


@pytest.mark.full
def test_a_step_takes_as_long_as_its_dispatch_where_that_is_the_longer_part(tmp_path, monkeypatch):
    dispatch_s, step = 0.2, Mpmd.step

    def slow(self, state, batch):
        found = jax.block_until_ready(step(self, state, batch))
        time.sleep(dispatch_s)
        return found

    monkeypatch.setattr(Mpmd, "step", slow)
    assert (
        train(tmp_path, "executor=mpmd", "schedule=1f1b", "run.num_steps=4", "run.eval_every=2")
        == 0
    )
    assert all(record["step_time_s"] > 0.9 * dispatch_s for record in records(tmp_path))


def test_a_timeline_of_several_processes_is_refused(tmp_path, capsys):
    words = [
        "run.distributed=explicit",
        "run.coordinator=127.0.0.1:8476",
        "run.num_processes=2",
        "run.process_id=0",
    ]
    words += ["run.timeline=true", "mesh=1x2", "schedule=1f1b", f"run.dir={tmp_path}"]
    assert cli.main(["train", *TINY.split(), "executor=mpmd", *words]) == 2
    assert "run.timeline=true measures the ranks of one process" in capsys.readouterr().err
