"""Reading runs: every run is found, and a damaged one is reported and harms no other."""

from __future__ import annotations

import json
import os

import pytest

from ppctl.reports import run_files
from ppctl.reports.run_page.read_run import read_run
from ppctl.reports.run_status import RunStatus
from ppctl.reports.runs_table import extremes

CONFIG = "model:\n  name: mlp\nrun:\n  name: x\n  num_steps: 9\n  profile:\n    num_steps: 2\n"


def make(run_dir, steps=3, config=CONFIG, last="", **files):
    """A run as it is on disk."""
    run_dir.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "loss": 4.0 / step, "step_time_s": 0.5}) + "\n"
        for step in range(1, steps + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(lines) + last)
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    for name, text in files.items():
        (run_dir / f"{name}.jsonl").write_text(text)
    return run_dir


def found(run_dir):
    return run_files.run_summary(run_dir.name, run_dir)


def test_runs_are_found_at_any_depth_and_once(tmp_path):
    make(tmp_path / "sweep")  # a run, then a sweep of the same name
    make(tmp_path / "sweep/schedule=gpipe")
    make(tmp_path / "sweep/deep/er/lr=1")
    make(tmp_path / "sweep/checkpoints/3")  # nothing of a run is a run
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text("defaults: []\n")  # another program's
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    make(tmp_path / "zz")
    (tmp_path / "zz_again").symlink_to(tmp_path / "zz")
    names = [name for name, _ in run_files.find_runs(tmp_path)]
    assert names == ["sweep", "sweep/deep/er/lr=1", "sweep/schedule=gpipe", "zz"]
    assert run_files.find_runs(tmp_path / "zz") == [("zz", tmp_path / "zz")]


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="a system without /proc")
def test_the_file_system_of_processes_is_not_searched(tmp_path, monkeypatch):
    make(tmp_path / "a")
    monkeypatch.chdir(tmp_path)  # /proc/self/cwd leads here, /proc/self/root to all there is
    (tmp_path / "zz").symlink_to("/proc/self")
    assert [name for name, _ in run_files.find_runs(tmp_path)] == ["a"]


def test_the_tails_of_files_hold_the_progress_of_a_run(tmp_path):
    run = found(
        make(tmp_path / "a", eval='{"step": 1, "eval_loss": 3.5}\n{"step": 3, "eval_loss": 2.5}\n')
    )
    assert (run.step, run.num_steps, run.loss, run.eval_loss, run.problems) == (
        3,
        9,
        4 / 3,
        2.5,
        (),
    )
    assert run.status == "no end recorded"


def test_an_evaluation_of_an_earlier_step_is_marked(tmp_path):
    now = '{"step": 3, "eval_loss": 2.5}\n'
    assert found(make(tmp_path / "a", eval=now)).eval_note == ""
    first = '{"step": 0, "eval_loss": 5.5}\n'
    assert found(make(tmp_path / "b", eval=first)).eval_note == "at step 0"


def test_long_lines_are_read_whole(tmp_path):
    line = json.dumps({"step": 7, "x": "y" * 20_000, "loss": 1.0}) + "\n"
    run = found(make(tmp_path / "a", last=line))
    assert (run.step, run.loss, run.problems) == (7, 1.0, ())


@pytest.mark.parametrize(
    ("made", "problem", "step"),
    [
        ({"last": '{"step": 4, "lo'}, "the last line of metrics.jsonl is torn", 3),
        ({"last": "hello\n"}, "the last line of metrics.jsonl is no record", 3),
        ({"last": "[1]\n"}, "the last line of metrics.jsonl is no record", 3),
        ({"last": "[" * 3000 + "\n"}, "the last line of metrics.jsonl is no record", 3),
        ({"last": "\0\xff\n"}, "the last line of metrics.jsonl is no record", 3),
        ({"last": '{"step": 4}\n'}, "the last line of metrics.jsonl has no step or no loss", 4),
        (
            {"last": '{"loss": 1.0, "step": "4"}\n'},
            "the last line of metrics.jsonl has no step or no loss",
            0,
        ),
        ({"steps": 0, "last": "x\ny\n"}, "the last line of metrics.jsonl is no record", 0),
        ({"steps": 0}, "metrics.jsonl is empty", 0),
        ({"config": None}, "config.yaml is missing", 3),
        ({"config": "run: [\n"}, "config.yaml cannot be read: while parsing a flow node", 3),
        ({"config": "3\n"}, "config.yaml holds no settings", 3),
        ({"config": CONFIG.replace("  num_steps: 9\n", "")}, "config.yaml has no run.num_steps", 3),
        ({"eval": '{"step": 1, "eval'}, "the last line of eval.jsonl is torn", 3),
        ({"status": "?\n"}, "the last line of status.jsonl is no record", 3),
    ],
)
def test_faults_of_a_run_are_listed(tmp_path, made, problem, step):
    run = found(make(tmp_path / "a", **made))
    [found_problem] = run.problems
    assert (found_problem[: len(problem)], run.step) == (problem, step)


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "status.jsonl", "config.yaml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    run_dir = make(tmp_path / "a")
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    assert found(run_dir).problems == (f"{name} cannot be read: Is a directory",)
    assert [each for each, _ in run_files.find_runs(tmp_path)] == ["a"]


def test_a_non_finite_loss_differs_from_a_missing_one(tmp_path):
    run = found(make(tmp_path / "a", last='{"step": 4, "loss": null}\n'))
    assert (run.loss, run.is_finite, run.problems) == (None, False, ())
    run = found(make(tmp_path / "b", steps=0))
    assert (run.loss, run.is_finite) == (None, True)


def test_runs_without_a_record_of_a_start_are_finished_where_their_last_step_is_saved_and_only_then(
    tmp_path,
):
    run_dir = make(tmp_path / "a", steps=9)
    assert found(run_dir).status == "no end recorded"  # its last save may have failed
    for name in ("6", "9.damaged", "9.orbax-checkpoint-tmp"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    assert found(run_dir).status == "no end recorded"
    (run_dir / "checkpoints/9").mkdir()
    assert (found(run_dir).status, found(run_dir).checkpoints) == ("finished", (6, 9))


def test_a_run_with_only_settings_has_not_started(tmp_path):
    run_dir = make(tmp_path / "a")
    (run_dir / "metrics.jsonl").unlink()
    assert (found(run_dir).status, found(run_dir).step, found(run_dir).problems) == (
        "not started",
        0,
        (),
    )


def test_the_failure_of_another_process_is_the_reason_of_the_run(tmp_path):
    started = {
        "status": "started",
        "step": 0,
        "host": "elsewhere",
        "pid": 1,
        "is_locked": True,
        "at": 100.0,
    }
    run_dir = make(tmp_path / "a", status=json.dumps(started) + "\n")
    (run_dir / "processes").mkdir()
    file = run_dir / "processes/failed.json"
    file.write_text('{"process": 2, "message": "the disk is full."}')
    assert (found(run_dir).status, found(run_dir).reason) == (
        "failed",
        "process 2: the disk is full.",
    )
    os.utime(file, (50.0, 50.0))  # torn by an earlier start
    assert (found(run_dir).status, found(run_dir).reason) == ("no end recorded", None)


def test_a_torn_line_of_a_running_run_is_not_a_fault(tmp_path):
    run_dir = make(tmp_path / "a", last='{"step": 4, "lo')
    with RunStatus(run_dir) as status:
        status.begin(0)
        assert (found(run_dir).status, found(run_dir).problems) == ("running", ())


def test_history_has_first_last_and_least_values_and_counts_invalid_lines(tmp_path):
    last = (
        '{"step": '
        '4, "loss": 9.0, "step_time_s": 2.5, "rows_per_s": '
        '8}\nx\n{"step": '
        '5, "loss": '
        'null}\n{"st'
    )
    run = read_run("a", make(tmp_path / "a", last=last), (), "", (), "")
    assert extremes(run.points("loss")) == {
        "first": {"step": 1, "loss": 4.0},
        "last": {"step": 4, "loss": 9.0},
        "least": {"step": 3, "loss": 4 / 3},
    }
    assert (run.median("step_time_s"), run.speed, run.median("rows_per_s")) == (
        0.5,
        "rows_per_s",
        8.0,
    )
    assert "eval_loss" not in run.curves
    assert "1 line of metrics.jsonl is no record" in run.problems


def test_the_size_is_of_all_files(tmp_path):
    run_dir = make(tmp_path / "a")
    before = run_files.disk_bytes(run_dir)
    (run_dir / "checkpoints/1").mkdir(parents=True)
    (run_dir / "checkpoints/1/x").write_bytes(b"x" * 1_000_000)
    assert 1_000_000 <= run_files.disk_bytes(run_dir) - before < 1_100_000


@pytest.mark.parametrize(
    "before",
    ["", '{"status": "interrupted", "step": 2, "reason": "SIGTERM"}\n'],
    ids=["new", "again"],
)
def test_a_run_that_a_process_is_about_to_begin_is_running(tmp_path, before):
    run_dir = make(tmp_path / "x", status=before)
    with RunStatus(run_dir):
        assert found(run_dir).status == "running"
    assert found(run_dir).status != "running"
