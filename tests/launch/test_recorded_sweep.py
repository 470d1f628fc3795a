"""`ppctl runs show SWEEP`: jobs, axes and best by the directory of a sweep, also of jobs that left
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.run_dirs import make

from ppctl import cli
from ppctl.launch.sweep.sweep_records import read_sweep


@pytest.fixture(autouse=True)
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lr, ending in (
        ("gpipe", "0.001", "finished"),
        ("gpipe", "0.003", "finished"),
        ("1f1b", "0.001", "failed"),
    ):
        words = (
            "recipes=tiny",
            f"schedule={name}",
            "schedule.num_microbatches=4",
            f"optim.lr={lr}",
            "run.name=s",
        )
        end = (
            {"status": ending, "reason": "disk full."} if ending == "failed" else {"status": ending}
        )
        place = f"s/schedule={name},optim.lr={lr}"
        make(place, *words, "run.resume=auto", started_s=1.0, ending=end, loss=1000 * float(lr))
    Path("runs/s/multirun.yaml").touch()


def show(capsys, *words):
    assert cli.main(["runs", "show", *words]) == 0
    return capsys.readouterr().out


def test_jobs_states_axes_and_best_are_shown(capsys):
    lines = show(capsys, "s").splitlines()
    again = "recipes=tiny schedule=gpipe schedule.num_microbatches=4 optim.lr=0.001 run.name=s"
    for line in (
        "sweep     runs/s",
        "jobs      3 jobs: 2 finished, 1 failed",
        "axis      schedule: 1f1b, gpipe",
        "axis      optim.lr: 0.001, 0.003",
        "best      lowest final_loss: 0.3333, job 1 (schedule=gpipe optim.lr=0.001)",
        "  in      runs/s/schedule=gpipe,optim.lr=0.001",
        f"  anew    ppctl train {again} run.dir=runs/s/best_final_loss",
        "0: disk full.",
    ):
        assert line in lines
    [row] = [line for line in lines if "2: schedule" in line]
    assert row.split() == [
        "2:",
        "schedule=gpipe",
        "optim.lr=0.003",
        "finished",
        "3",
        "of",
        "30",
        "1.0000",
        "0.5",
        "10,000",
    ]


def test_a_sweep_may_be_named_by_its_path_and_shown_as_json(capsys):
    found = json.loads(show(capsys, "runs/s", "--json"))
    assert found["axes"] == {"schedule": ["1f1b", "gpipe"], "optim.lr": ["0.001", "0.003"]}
    assert found["counts"] == {"finished": 2, "failed": 1}
    assert [
        (job["status"], job["values"]["optim.lr"], job["final_loss"]) for job in found["jobs"]
    ] == [("failed", "0.001", 1 / 3), ("finished", "0.001", 1 / 3), ("finished", "0.003", 1.0)]
    assert [(best["what"], best["job"], best["value"]) for best in found["best"]] == [
        ("lowest final_loss", 1, 1 / 3),
        ("fastest, in tok/s", 1, 1e4),
    ]


def test_jobs_that_left_no_run_come_from_the_summary_and_in_its_order(capsys):
    record = {
        "schedule": "zb_v",
        "optim.lr": 0.001,
        "status": "failed",
        "exit_code": 2,
        "error": "refused.",
        "steps": None,
    }
    records = [
        {"job": 0, **record, "run_dir": "runs/s/schedule=zb_v,optim.lr=0.001"},
        {"job": 1, "run_dir": "runs/s/schedule=gpipe,optim.lr=0.003", "status": "finished"},
    ]
    Path("runs/s/sweep.json").write_text(json.dumps(records))
    found = json.loads(show(capsys, "s", "--json"))
    assert [job["values"]["schedule"] for job in found["jobs"]] == [
        "zb_v",
        "gpipe",
        "1f1b",
        "gpipe",
    ]
    assert (found["jobs"][0]["reason"], found["jobs"][0]["final_loss"]) == ("refused.", None)
    assert found["files"] == ["runs/s/sweep.json"]


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1}', '[{"run_dir": 1}]'])
def test_a_damaged_summary_is_left_out(text):
    Path("runs/s/sweep.json").write_text(text)
    assert len(read_sweep(Path("runs/s"), lambda path: ())["jobs"]) == 3


def test_a_sweep_whose_jobs_have_left_nothing_is_no_error(capsys):
    Path("runs/new").mkdir()
    Path("runs/new/multirun.yaml").touch()
    assert show(capsys, "new") == "sweep     runs/new\njobs      0 jobs: none has left anything\n"
