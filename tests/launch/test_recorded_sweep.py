"""`ppctl runs show SWEEP`: jobs, axes and best by the directory of a sweep, also of jobs that left
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.run_dirs import make

from ppctl import cli
from ppctl.errors import ConfigError
from ppctl.launch.sweep.sweep_jobs import Job, Result
from ppctl.launch.sweep.sweep_records import read_sweep, write_records

SWEEP = Path("runs/s")
JOBS = (
    ("1f1b", 0.001, "failed"),
    ("gpipe", 0.001, "finished"),
    ("gpipe", 0.003, "finished"),
    ("zb_v", 0.001, "refused"),
    ("zb_v", 0.003, "not started"),
)


@pytest.fixture(autouse=True)
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = []
    for index, (schedule, lr, end) in enumerate(JOBS):
        name = f"schedule={schedule} optim.lr={lr}"
        place = name.replace(" ", ",")
        values = {"schedule": schedule, "optim.lr": lr}
        job = Job(index, values, name, SWEEP / place)
        if end in ("failed", "finished"):
            words = ("recipes=tiny", *name.split(), "schedule.num_microbatches=4", "run.name=s")
            ending = {"status": end} | ({"reason": "disk full."} if end == "failed" else {})
            make(f"s/{place}", *words, started_s=1.0, ending=ending, loss=1000 * lr)
            results.append(Result(job, "running"))  # state after a killed sweep
        elif end == "refused":
            results.append(Result(job, "failed", ConfigError.exit_code, error="odd."))
        else:
            results.append(Result(job))
    write_records(SWEEP, results)


def show(capsys, *words):
    assert cli.main(["runs", "show", *words]) == 0
    return capsys.readouterr().out


def test_jobs_states_axes_and_best_are_shown(capsys):
    lines = show(capsys, "s").splitlines()
    for line in (
        "sweep     runs/s",
        "axis      schedule: 1f1b, gpipe, zb_v",
        "axis      optim.lr: 0.001, 0.003",
        "best      lowest final_loss: 0.3333, job 1 (schedule=gpipe optim.lr=0.001)",
        "  in      runs/s/schedule=gpipe,optim.lr=0.001",
        "ppctl: job 0: schedule=1f1b optim.lr=0.001: disk full.",
        "ppctl: job 3: schedule=zb_v optim.lr=0.001: odd.",
    ):
        assert line in lines
    assert any("5 jobs: 2 finished, 2 failed, 1 not started" in line for line in lines)
    [row] = [line for line in lines if "2: schedule" in line]
    numbers = ["finished", "3", "1.0000", "500", "ms", "10,000"]
    assert row.split() == ["2:", "schedule=gpipe", "optim.lr=0.003", *numbers]


def test_a_sweep_may_be_named_by_its_path_and_shown_as_json(capsys):
    found = json.loads(show(capsys, "runs/s", "--json"))
    assert found["axes"] == {"schedule": ["1f1b", "gpipe", "zb_v"], "optim.lr": ["0.001", "0.003"]}
    assert found["counts"] == {"failed": 2, "finished": 2, "not started": 1}
    assert [
        (job["status"], job["values"]["optim.lr"], job["final_loss"]) for job in found["jobs"]
    ] == [
        ("failed", "0.001", 1 / 3),
        ("finished", "0.001", 1 / 3),
        ("finished", "0.003", 1.0),
        ("failed", "0.001", None),
        ("not started", "0.003", None),
    ]
    assert [job["reason"] for job in found["jobs"]] == ["disk full.", None, None, "odd.", None]
    assert [(best["what"], best["job"], best["value"]) for best in found["best"]] == [
        ("lowest final_loss", 1, 1 / 3),
        ("fastest, in tok/s", 1, 1e4),
    ]
    assert found["files"] == ["runs/s/sweep.json"]
    assert found["errors"] == [
        *({"error": e, "jobs": [i]} for e, i in (("disk full.", 0), ("odd.", 3)))
    ]


def test_the_name_of_a_sweep_lists_all_of_its_jobs(capsys):
    assert cli.main(["runs", "s", "--json"]) == 0
    found = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    names = [f"schedule={schedule},optim.lr={lr}" for schedule, lr, _ in JOBS]
    assert {*found} == {*names}
    ends = [(found[name]["status"], found[name]["reason"]) for name in names]
    assert ends == [
        *(("failed", "disk full."), ("finished", None), ("finished", None)),
        *(("failed", "odd."), ("not started", None)),
    ]
    assert cli.main(["runs", "s"]) == 0
    assert "5 runs in runs/s" in capsys.readouterr().out


def test_the_report_of_a_sweep_is_its_page_as_its_jobs_are_now(capsys):
    assert cli.main(["report", "s"]) == 0
    assert "5 jobs: 2 finished, 2 failed, 1 not started" in (SWEEP / "sweep.html").read_text()
    assert cli.main(["report", "runs/s", "--out", "other.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "other.html", "sweep_dir": "runs/s"}
    assert Path("other.html").exists()
    (SWEEP / "sweep.html").unlink()
    (SWEEP / "sweep.html").symlink_to("/etc/hostname")
    assert cli.main(["report", "s"]) == 2


def test_a_moved_sweep_has_its_jobs():
    SWEEP.rename("moved")
    found = read_sweep(Path("moved"))
    assert [each.status for each in found][:3] == ["failed", "finished", "finished"]
    assert found[1].job.run_dir.parent == Path("moved")


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1}', '[{"run_dir": 1}]', "[{}]"])
def test_a_damaged_record_shows_no_jobs(capsys, text):
    (SWEEP / "sweep.json").write_text(text)
    assert "0 jobs" in show(capsys, "s")
