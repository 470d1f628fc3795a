"""Trackers: their values, and training that neither waits for one nor ends by one."""

from __future__ import annotations

import io
import sqlite3
import threading

import pytest
from rich.console import Console
from support.files import full_disk

from ppctl import cli, config
from ppctl.errors import ConfigError
from ppctl.reports.run_files import tracker_commands
from ppctl.training.run import trackers
from ppctl.training.run.metrics import Metrics
from ppctl.training.run.trackers import BackgroundTracker, RunFacts, check_trackers

TINY = (
    "train model=mlp model.num_layers=2 model.d_model=4 mesh=1x1 schedule=gpipe "
    "schedule.num_microbatches=1 data=regression data.batch_size=4 data.num_features=3 "
    "data.num_targets=3 run.platform=cpu run.eval_every=2 run.eval_batches=1 "
    "run.checkpoint.every=null run.dir=run run.log_every=1 optim.warmup_steps=0"
)


class Recorder:
    """A tracker that keeps its values; `wait` holds it up."""

    place = "in memory"

    def __init__(self, settings, id, wait=None, fails_at=None):
        self.given_id, self.settings, self.wait, self.fails_at = id, settings, wait, fails_at
        self.id, self.records, self.ending = id or "first", [], None

    def log(self, values, step):
        if self.wait is not None:
            self.wait.wait(30)
        if step == self.fails_at:
            raise RuntimeError("the server\nis gone")
        self.records.append((step, dict(values)))

    def end(self, is_finished):
        self.ending = is_finished


def background(monkeypatch, tmp_path, **how):
    """A tracker of `Recorder`, begun; the recorders that it makes, and its lines."""
    made, notes = [], []
    end_s = how.pop("end_s", 30.0)

    def opened(run):
        made.append(Recorder(run.settings, run.id, **how))
        return made[-1]

    monkeypatch.setitem(trackers.TRACKERS, "wandb", opened)
    run = RunFacts(tmp_path, "a run", {"model": {"d_model": 64}}, 1)
    tracker = BackgroundTracker("wandb", run, notes.append, end_s)
    return tracker, made, notes


def test_a_tracker_gets_the_values_and_the_end(monkeypatch, tmp_path):
    tracker, made, notes = background(monkeypatch, tmp_path)
    tracker.log({"train/loss": 2.0}, 1)
    tracker.close(is_finished=True)
    assert made[0].records == [(1, {"train/loss": 2.0})]
    assert made[0].ending
    assert notes == ["wandb     in memory"]


def test_the_next_start_continues_the_same_run(monkeypatch, tmp_path):
    tracker, made, _ = background(monkeypatch, tmp_path)
    tracker.close(is_finished=False)
    assert made[0].given_id is None
    tracker, made, _ = background(monkeypatch, tmp_path)
    tracker.close(is_finished=False)
    assert made[0].given_id == "first"
    (tmp_path / "trackers.json").write_text('["no", "names"]')
    tracker, made, _ = background(monkeypatch, tmp_path)
    tracker.close(is_finished=False)
    assert made[0].given_id is None


def test_training_does_not_wait_for_a_tracker(monkeypatch, tmp_path):
    wait = threading.Event()
    tracker, made, notes = background(monkeypatch, tmp_path, wait=wait, end_s=0.1)
    for step in range(1000):
        tracker.log({"loss": 1.0}, step)
    tracker.close(is_finished=False)
    assert (
        notes[-1] == "note      wandb has not taken all records within 0.1 s: the rest is left out"
    )
    wait.set()
    assert len(made[0].records) < 1000


def test_a_tracker_that_fails_is_named_and_left_out(monkeypatch, tmp_path):
    tracker, made, notes = background(monkeypatch, tmp_path, fails_at=2)
    for step in (1, 2, 3):
        tracker.log({"loss": 1.0}, step)
    tracker.close(is_finished=False)
    assert [step for step, _ in made[0].records] == [1]
    assert notes[-1] == "note      wandb failed: the server is gone. Training goes on without it"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its file, unclosed
def test_a_disk_that_fills_up_ends_tensorboard_with_one_line(tmp_path, monkeypatch, capfd):
    """Its package's thread ended in a traceback, and the end of the run waited 30 s for it."""
    monkeypatch.setattr(trackers, "FLUSH_S", 0.0)
    notes = []
    tracker = BackgroundTracker("tensorboard", RunFacts(tmp_path, "a run", {}, 1), notes.append, 20)
    with full_disk(20_000):
        for step in range(1000):
            tracker.log({"train/loss": 1.0}, step)
        tracker.close(is_finished=False)
    (line,) = notes
    assert line.startswith("note      tensorboard failed: ")
    assert line.endswith("File too large. Training goes on without it")
    assert capfd.readouterr() == ("", "")


def test_metrics_are_recorded_although_a_tracker_cannot_start(monkeypatch, tmp_path):
    def refuses(*about):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuses)
    console = Console(file=io.StringIO(), width=40)
    settings = {"num_steps": 2, "start_step": 0, "log_every": 1, "console": console}
    with Metrics(tmp_path, trackers=["wandb"], **settings) as metrics:
        for step in (1, 2):
            metrics.log({"step": step, "loss": 1.0})
    assert (
        "note      wandb failed: no route to host. Training goes on without it"
        in console.file.getvalue()
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_setting_takes_every_tracker_and_no_other():
    config.Run(trackers=[*trackers.TRACKERS]).check()
    names = ", ".join(trackers.TRACKERS)
    with pytest.raises(ConfigError, match=rf"run.trackers=wanb is not one of {names}\.$"):
        config.Run(trackers=["wanb"]).check()
    with pytest.raises(ConfigError, match=r"wandb, wandb\] starts one twice. Use \[wandb\]"):
        config.Run(trackers=["wandb", "wandb"]).check()


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"run.trackers=mlflow needs the package mlflow.*pip install 'ppctl\[mlflow",
    ):
        check_trackers(["mlflow"])


@pytest.mark.full  # 10 CPU seconds, most of them imports
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from dependencies of the packages
def test_every_tracker_records_a_run_without_a_server_and_continues_it(
    monkeypatch, tmp_path, capsys
):
    for name in trackers.TRACKERS:
        pytest.importorskip(name)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    names = f"[{','.join(trackers.TRACKERS)}]"
    for num_steps in (2, 3):
        assert cli.main([*TINY.split(), f"run.trackers={names}", f"run.num_steps={num_steps}"]) == 0
        out = capsys.readouterr().out
        assert "wandb     offline in " in out
        assert "failed" not in out
    offline = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(offline) == 2
    assert len({path.name.rpartition("-")[2] for path in offline}) == 1  # the same run
    assert b"train/loss" in next(offline[0].glob("*.wandb")).read_bytes()
    with sqlite3.connect(tmp_path / "run/mlflow.db") as store:
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
        found = store.execute(
            "select step from metrics where key = 'train/loss' order by step"
        ).fetchall()
        assert found == [(1,), (2,), (3,)]
        assert store.execute("select value from params where key = 'model.d_model'").fetchone() == (
            "4",
        )
    # `ppctl runs rm` removes a directory only if it knows every file in it
    assert cli.main(["runs", "rm", "run", "--yes"]) == 0, capsys.readouterr().err


@pytest.mark.full  # 5 CPU seconds, most of them imports
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_kill_while_the_database_of_mlflow_is_made_leaves_none(monkeypatch, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = tracking.MlflowClient.search_experiments

    def killed(client):
        made(client)
        (part,) = tmp_path.rglob("mlflow.db")
        with sqlite3.connect(part) as store:  # as a kill leaves it: without its version
            store.execute("drop table alembic_version")
        raise KeyboardInterrupt

    run = RunFacts(tmp_path, "a run", {"model": {"d_model": 64}}, 0)
    with monkeypatch.context() as patch:
        patch.setattr(tracking.MlflowClient, "search_experiments", killed)
        with pytest.raises(KeyboardInterrupt):
            trackers.mlflow(run)
    assert not (tmp_path / "mlflow.db").exists()
    trackers.mlflow(run).end(True)
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_records_of_a_start_killed_before_the_first_are_not_uploaded(tmp_path):
    for name, content in (("none", None), ("header", b":W&B\0\0\0"), ("some", b"0" * 8)):
        folder = tmp_path / "wandb" / f"offline-run-{name}"
        folder.mkdir(parents=True)
        if content is not None:
            (folder / "run.wandb").write_bytes(content)
    command = f"wandb sync {tmp_path}/wandb/offline-run-some"
    assert tracker_commands(tmp_path) == [("Weights & Biases", command)]
