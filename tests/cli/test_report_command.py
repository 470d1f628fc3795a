"""`ppctl report`: the page of one run, notes on damaged ones, faults and size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import BY_USER
from support.run_pages import make, record, words_of, write

from ppctl import cli
from ppctl.cli.command_options import examples_of

BY_PATH = BY_USER | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- one run ------------------------------------------------------------------------------------


def test_the_page_of_a_run_shows_its_state_and_predicted_vs_measured(capsys):
    run_dir = make("a")
    (run_dir / "eval.jsonl").write_text(
        '{"step": 4, "eval_loss": 2.5}\n{"step": 8, "eval_loss": 1.5}\n'
    )
    started = {
        "status": "started",
        "step": 0,
        "host": "node7",
        "pid": 1,
        "is_locked": True,
        "at": 1.8e9,
    }
    started |= {"num_devices": 8, "num_processes": 1, "num_cores": 2}
    started["versions"] = {"jax": "0.99.1"}
    started["overrides"] = [
        "mesh=1x2",
        "model.num_layers=4",
        "schedule=gpipe",
        "schedule.num_microbatches=4",
    ]
    (run_dir / "status.jsonl").write_text(
        json.dumps(started) + '\n{"status": "failed", "reason": "disk full.", "at": 1}\n'
    )
    for step in (4, 8):
        (run_dir / f"checkpoints/{step}").mkdir(parents=True)
    for name in ("tensorboard", "profile", "timeline"):
        (run_dir / name).mkdir()
    (run_dir / "timeline/timeline.html").touch()
    (run_dir / "timeline/timeline.csv").write_text(
        "rank,task,start_s,end_s\n0,0F0,0,2\n0,0B0,3,4\n1,1F0,0,2\n1,1B0,3,4\n"
    )
    text, said = write(capsys, "a")
    seen = words_of(text)
    for expected in (
        "failed at step 9 of 9: disk full.",
        "Loss 0.4444 of the newest step",
        "Eval loss 1.5000 at step 8",
        "Step time 500 ms median, predicted 400 ms",
        "Speed 10,000 tok/s median",
        "Bubble 25.0% 12.5% ideal, 20.0% predicted, 25.0% measured",
        "step time 400 ms 500 ms 1.25",
        "bubble 20.0% 25.0% 1.25",
        "memory of a device 1.0 MiB 1.5 MiB 1.5",
        "mesh=1x2 model.num_layers=4 schedule=gpipe",
        "ppctl train mesh=1x2 model.num_layers=4 schedule=gpipe schedule.num_microbatches=4",
        "checkpoints steps 4, 8",
        "tensorboard --logdir runs/a/tensorboard",
        "jax 0.99.1",
        "2027-01-15T08:00:00Z step 0 node7",
    ):
        assert expected in seen, expected
    assert '<a href="timeline/timeline.html">' in text
    assert '<a href="profile">' in text
    for title in ("Loss", "Gradient norm", "Learning rate", "Speed, tok/s"):
        assert f"<figcaption>{title}</figcaption><svg" in text
    assert "MFU" not in seen  # it is not recorded
    assert said["file"] == "runs/a/report.html"
    (run,) = said["runs"]
    assert (run["status"], run["step"], run["loss"], run["eval_loss"]) == ("failed", 9, 4 / 9, 1.5)
    assert (run["measured_bubble_fraction"], run["predicted_bubble_fraction"]) == (0.25, 0.2)
    assert run["medians"]["tokens_per_s"] == 1e4
    assert run["checkpoints"] == [4, 8]
    assert run["resume"] == "ppctl train " + " ".join(run["asked"])


def test_mfu_and_rows_per_second_are_shown_if_recorded(capsys):
    rows = [
        {"step": step, "loss": 1.0, "step_time_s": 0.1, "rows_per_s": 80.0, "mfu_fraction": 0.4}
        for step in (1, 2)
    ]
    make("a", rows)
    seen = words_of(write(capsys, "a")[0])
    assert "Speed 80 rows/s median" in seen
    assert "MFU 40.0% median" in seen


def test_losses_that_are_not_finite_are_crosses_and_a_warning(capsys):
    records = [
        record(step, **({"loss": None, "grad_norm": None} if step in (5, 9) else {}))
        for step in range(1, 10)
    ]
    make("a", records)
    text, said = write(capsys, "a")
    assert "the loss is not finite at 2 steps, first at step 5" in words_of(text)
    assert text.count('class="lost"') == 2  # two figures
    assert "Loss not finite" in words_of(text)
    loss = text[text.index("<figcaption>Loss</figcaption>") :]
    assert re.search(r'class="data"> <path d="M[^M]*M[^M]*"', loss)  # the curve has a gap
    assert said["runs"][0]["loss"] is None


def test_texts_from_files_are_escaped(capsys):
    evil = "<script>alert(1)</script>\"'&"
    run_dir = make("a&b <i>", last=json.dumps(record(10, loss=evil)) + "\n")
    run_dir.joinpath("config.yaml").write_text(
        json.dumps(
            {
                "run": {"num_steps": 9, "name": evil},
                "schedule": {"name": evil},
                "mesh": {"dp": evil, "pp": 1, "fsdp": 1},
            }
        )
    )
    status = (
        {"status": "started", "host": evil, "step": evil, "at": 1.0, "versions": {evil: evil}},
        {"status": "failed", "reason": evil},
    )
    (run_dir / "status.jsonl").write_text("".join(json.dumps(each) + "\n" for each in status))
    make("other")
    for words in (["a&b <i>"], ["a&b <i>", "other"]):
        text, _ = write(capsys, *words)
        assert "<script" not in text
        assert "<i>" not in text
        assert "alert(1)" in text


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"records": []}, "metrics.jsonl is empty"),
        ({"records": []}, "no step is recorded"),
        ({"last": '{"step": 10, "lo'}, "the last line of metrics.jsonl is torn"),
        ({"last": "?\n" + json.dumps(record(10)) + "\n"}, "1 line of metrics.jsonl is no record"),
        ({"last": '{"loss": 1.0}\n'}, "1 record of metrics.jsonl without a step, left out"),
        (
            {"last": json.dumps(record(3)) + "\n"},
            "steps of metrics.jsonl are out of order or repeated",
        ),
        (
            {"last": '{"step": 10, "loss": 1e999, "step_time_s": NaN}\n'},
            "the loss is not finite at step 10",
        ),
        (
            {"last": '{"step": 10, "loss": 1e300, "lr": -1e300}\n'},
            "the loss is not finite at step 10",
        ),
        ({"records": [record(1, loss=None)]}, "the loss is not finite at step 1"),
        ({"records": [{"step": 10**400, "loss": 1.0}]}, "1 record of metrics.jsonl without a step"),
        ({"records": [record(1, step_time_s=0.0, tokens_per_s=0, grad_norm=-1.0)]}, "step 1 of 9"),
        (
            {"records": [record(1, memory_bytes="x", predicted_step_time_s=[], loss={})]},
            "not finite at step 1",
        ),
    ],
)
def test_the_page_of_a_damaged_run_names_the_damage(made, told, capsys):
    make("a", **made)
    assert told in words_of(write(capsys, "a")[0])
    make("b")
    write(capsys, "a", "b")


def test_a_run_without_metrics_or_settings_is_a_page_too(capsys):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/status.jsonl").write_text('{"status": "started", "at": "x"}\n?\n')
    seen = words_of(write(capsys, "a")[0])
    assert "config.yaml is missing" in seen
    assert "no step is recorded" in seen
    assert "not known: its settings cannot be read" in seen
    Path("runs/a/config.yaml").write_text("- 1\n")
    assert "config.yaml holds no settings" in words_of(write(capsys, "a")[0])
    Path("runs/a/timeline").mkdir()
    Path("runs/a/timeline/timeline.csv").write_text("rank\n\0")
    Path("runs/a/checkpoints/3/meta").mkdir(parents=True)
    Path("runs/a/checkpoints/3/meta/data.json").write_text("[]")
    assert "checkpoints step 3" in words_of(write(capsys, "a")[0])


# --- faults -------------------------------------------------------------------------------------

FAULTS = [
    ("", r"the following arguments are required: RUNS"),
    ("nowhere", r"nowhere is no run in runs. \(runs: abc, cab\)"),
    ("ab", "ab is a part of 2 names: abc, cab. Use a longer part of one, or a path"),
    ("abc runs/abc", "abc and runs/abc are the same run. Name each once"),
    ("abc abc", "abc and abc are the same run"),
    ("abc --out x.pdf", "--out x.pdf: a report is html. Name a FILE.html"),
    ("abc --out no/x.html", "--out no/x.html cannot be written: there is no directory no"),
    ("abc --out dir.html", "--out dir.html cannot be written: it is a directory"),
    (
        "abc --out mine.html",
        "--out mine.html: the file exists and is not a report of ppctl. Move it away",
    ),
    ("abc --out pipe.html", "--out pipe.html: the file exists and is not a report"),
    ("cab", "runs/cab/report.html: the file exists and is not a report"),
    ("abc --out", "argument --out: expected one argument"),
    ("abc --jsn", "--jsn is not an option. Did you mean --json"),
    ("x" * 5000, "x is no run in runs"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS, ids=[line[:30] for line, _ in FAULTS])
def test_a_wrong_request_is_refused_in_one_line_and_overwrites_no_file(line, message, capsys):
    make("abc")
    make("cab")
    for file in ("mine.html", "runs/cab/report.html"):
        Path(file).write_text("<main>mine</main>")
    Path("dir.html").mkdir()
    os.mkfifo("pipe.html")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert cli.main(["report", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ppctl: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_report_without_runs_requests_a_path(capsys):
    assert cli.main(["report", "tiny"]) == 2
    assert "tiny is no run, and runs/ has no runs. Give the path of one" in capsys.readouterr().err


def test_a_report_is_written_again_and_a_run_may_be_anywhere(capsys):
    make("a")
    os.rename("runs", "there <now>")
    for _ in range(2):
        _, said = write(capsys, "there <now>/a")
    assert said["file"] == "there <now>/a/report.html"
    text, _ = write(capsys, "there <now>/a", "--out", "x.html")
    assert '<a href="there%20%3Cnow%3E/a">' in text


# --- help, size, speed --------------------------------------------------------------


def test_help_has_every_example_within_120_columns(capsys):
    assert cli.main(["report", "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    assert all(line in out for line in examples_of("report"))


def test_a_page_of_many_steps_is_small_and_starts_no_jax():
    make(
        "long",
        [record(1 + step, loss=1 / (1 + step % 977)) for step in range(10_000)],
        num_steps=10_000,
    )
    code = (
        "import sys; from ppctl import cli; code = cli.main(sys.argv[1:]); print(code, 'jax' in "
        "sys.modules)"
    )
    words = [sys.executable, "-c", code, "report", "long"]
    done = subprocess.run(words, env=BY_PATH, capture_output=True, text=True, check=True)
    assert done.stdout == "0 False\n"
    assert Path("runs/long/report.html").stat().st_size < 1_000_000
