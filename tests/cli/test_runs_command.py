"""`ppctl runs`: the list, one run, the words that resume it, faults, and that it is fast and starts
no JAX.
"""

from __future__ import annotations

import calendar
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.environment import BY_USER
from support.run_dirs import make

from ppctl import cli
from ppctl.cli.command_options import examples_of
from ppctl.cli.compose import compose

BY_PATH = BY_USER | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def ask(capsys, *words):
    assert cli.main(["runs", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def ask_json(capsys, *words):
    return json.loads(ask(capsys, *words, "--json"))


# --- the list -----------------------------------------------------------------------------------


def test_the_newest_record_comes_first_and_runs_of_sweeps_are_listed(capsys):
    make("old", age_s=200_000, ending={"status": "finished", "step": 3})
    make(
        "sweep/schedule=gpipe",
        "schedule=gpipe",
        age_s=200,
        ending={"status": "failed", "reason": "disk full."},
    )
    make("new", "run.num_steps=9")
    lines = ask(capsys).splitlines()
    assert lines[0].strip() == "3 runs in runs"
    rows = [line.split("  ") for line in lines if " of " in line]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows == [
        ["new", "no end recorded", "3 of 9", "1.3333", "2x4", "interleaved", "0.002", "0 s"],
        ["sweep/schedule=gpipe", "failed", "3 of 200", "1.3333", "2x4", "gpipe", "0.002", "3 min"],
        ["old", "finished", "3 of 200", "1.3333", "2x4", "interleaved", "0.002", "2 d"],
    ]
    assert lines[-1] == "sweep/schedule=gpipe: disk full."
    found = ask_json(capsys)["runs"]
    assert [run["name"] for run in found] == ["new", "sweep/schedule=gpipe", "old"]
    settings = found[1].pop("settings")
    assert (settings["schedule"]["name"], settings["optim"]["lr"]) == ("gpipe", 0.002)
    last_active = time.strptime(found[1].pop("last_active"), "%Y-%m-%dT%H:%M:%SZ")
    written_s = Path("runs/sweep/schedule=gpipe/metrics.jsonl").stat().st_mtime
    assert calendar.timegm(last_active) == int(written_s)
    assert found[1] == {
        "name": "sweep/schedule=gpipe",
        "run_dir": "runs/sweep/schedule=gpipe",
        "status": "failed",
        "reason": "disk full.",
        "step": 3,
        "num_steps": 200,
        "loss": 4 / 3,
        "eval_loss": None,
        "eval_step": None,
        "started": None,
        "age_s": pytest.approx(200, abs=20),
        "problems": [],
    }


def test_broken_runs_are_listed_with_their_faults(capsys):
    make("torn")
    with open("runs/torn/metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    make("bare")
    Path("runs/bare/config.yaml").unlink()
    make("empty", steps=0)
    make("[bold]odd[/bold]")
    text = ask(capsys)
    for line in (
        "torn: the last line of metrics.jsonl is torn",
        "bare: config.yaml is missing",
        "empty: metrics.jsonl is empty",
    ):
        assert f"\n{line}\n" in text
    assert "[bold]odd[/bold]" in text
    assert re.search(r"bare +no end recorded +3 of \? ", text)


def test_a_directory_without_runs_is_no_error(capsys):
    Path("runs/later").mkdir(parents=True)
    assert ask(capsys) == "No run is in runs.\n"
    assert ask_json(capsys) == {"runs": [], "problems": []}


def test_names_of_any_bytes_are_listed(capsys):
    run_dir = Path("runs", os.fsdecode(b"a\xff"))
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").touch()
    assert re.search(r"^ *a\\udcff +not started", ask(capsys), re.MULTILINE)
    assert ask_json(capsys)["runs"][0]["name"] == os.fsdecode(b"a\xff")
    assert r"run       a\udcff: runs/a\udcff" + "\n" in ask(capsys, "show", "a")


def test_several_directories_give_whole_paths(capsys):
    make("a")
    os.rename("runs", "first")
    make("a")
    names = {run["name"] for run in ask_json(capsys, "first", "runs")["runs"]}
    assert names == {"first/a", "runs/a"}
    assert [run["name"] for run in ask_json(capsys, "first/a")["runs"]] == ["a"]


# --- one run ------------------------------------------------------------------------------------


def test_show_prints_the_request_the_end_and_the_command_to_resume(capsys):
    words = ["mesh=1x2", "schedule=gpipe", "optim.lr=1e-05", "run.name=x", "data.eval_fraction=0.1"]
    run_dir = make(
        "x", *words, started_s=1.8e9, ending={"status": "interrupted", "reason": "SIGINT"}
    )
    (run_dir / "eval.jsonl").write_text(
        '{"step": 2, "eval_loss": 3.0}\n{"step": 3, "eval_loss": 3.5}\n'
    )
    for name in (
        "checkpoints/2",
        "checkpoints/3",
        "checkpoints/1.damaged",
        "tensorboard",
        "profile",
    ):
        (run_dir / name).mkdir(parents=True)
    text = ask(capsys, "show", "x")
    for line in (
        r"run       x: runs/x",
        r"status    interrupted at step 3 of 200, recorded \d s ago: SIGINT",
        r"request   mesh=1x2 schedule=gpipe optim.lr=1e-05 run.name=x data.eval_fraction=0.1",
        r"loss      first 4.0000 \(step 1\), last 1.3333 \(step 3\), least 1.3333 \(step 3\)",
        r"eval loss first 3.0000 \(step 2\), last 3.5000 \(step 3\), least 3.0000 \(step 2\)",
        r"speed     500 ms a step, 10,000 tok/s \(medians\)",
        r"saved     checkpoints of steps 2, 3 in runs/x/checkpoints",
        r"size      [\d.]+ KiB on disk",
        r"scalars   tensorboard --logdir runs/x/tensorboard",
        r"profile   runs/x/profile",
        r"resume    ppctl train mesh=1x2 schedule=gpipe optim.lr=1e-05 run.name=x "
        r"data.eval_fraction=0.1",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    said = ask_json(capsys, "show", "runs/x")
    assert said["checkpoints"] == [2, 3]
    assert said["losses"]["least"] == {"step": 3, "loss": 4 / 3}
    assert (said["step_time_s"], said["tokens_per_s"], said["profile"]) == (
        0.5,
        1e4,
        "runs/x/profile",
    )
    assert said["resume"] == f"ppctl train {' '.join(said['asked'])}"


def test_a_name_may_be_a_path_a_name_or_a_part_that_is_unique(capsys):
    for name in ("a", "ab", "sweep/lr=1"):
        make(name)
    for name, expected in {
        "a": "a",
        "b": "ab",
        "lr=1": "sweep/lr=1",
        "runs/ab": "runs/ab",
        "./runs/ab/": "runs/ab",
    }.items():
        assert ask_json(capsys, "show", name)["name"] == expected
    os.mkdir("ab")  # next to runs, and not a run
    assert ask_json(capsys, "show", "ab")["name"] == "ab"
    assert ask_json(capsys, "show", "lr", "runs/sweep")["name"] == "lr=1"


def test_show_names_missing_records_and_settings(capsys):
    make("a", steps=0)
    text = ask(capsys, "show", "a")
    assert "saved     no checkpoint" in text
    assert "note      metrics.jsonl is empty" in text
    assert "note      no checkpoint: it starts anew" in text
    Path("runs/a/config.yaml").write_text("run: [\n")
    text = ask(capsys, "show", "a")
    assert "note      config.yaml cannot be read: while parsing" in text
    assert "resume" not in text
    Path("runs/a/config.yaml").unlink()
    assert "note      config.yaml is missing" in ask(capsys, "show", "a")
    Path("runs/a/config.yaml").write_text("3\n")
    assert "note      config.yaml holds no settings" in ask(capsys, "show", "a")
    assert ask_json(capsys, "show", "a")["resume"] is None


# --- what resumes a run -------------------------------------------------------------------------


def test_a_run_that_was_moved_resumes_where_it_is(capsys):
    make("a", "recipes=tiny", started_s=1.8e9)
    os.rename("runs", "moved, there")
    words = ask_json(capsys, "show", "a", "moved, there")["asked"]
    config = compose(words)
    assert not isinstance(config, int)
    assert config.run.dir == "moved, there/a"


FROM_START = {
    "code": ("model=custom", "model.target=mine.model", "data=regression"),
    "config-dir": ("--config-dir=.", "recipes=tiny"),
    "optimizer": ("optim=custom", "optim.target=mine.optimizer", "recipes=tiny"),
    "command": ("run.on_event=./tell.sh", "recipes=tiny"),
    "held-out file": ("data=text", "data.path=/train.txt", "data.eval_path=eval.txt"),
}


@pytest.mark.parametrize("words", FROM_START.values(), ids=FROM_START)
def test_a_run_with_relative_paths_is_resumed_from_where_it_was_started(
    words, tmp_path, monkeypatch, capsys
):
    here = tmp_path / "my project"
    here.mkdir()
    monkeypatch.chdir(here)
    run_dir = make(
        "a", *[word for word in words if not word.startswith("-")], started_s=1.8e9, directory=here
    ).absolute()
    status = run_dir / "status.jsonl"
    status.write_text(
        status.read_text().replace(json.dumps(words[-1]), ", ".join(map(json.dumps, words)))
    )
    assert ask_json(capsys, "show", "a")["resume"].startswith("ppctl train ")
    monkeypatch.chdir(tmp_path)
    command = ask_json(capsys, "show", str(run_dir))["resume"]
    there, _, line = command.partition(" && ")
    assert shlex.split(there) == ["cd", str(here)]
    assert shlex.split(line)[:2] == ["ppctl", "train"]
    assert "run.dir" not in line  # relative to that directory, too
    os.rename(run_dir, tmp_path / "b")
    assert f"run.dir={tmp_path}/b" in ask_json(capsys, "show", "b", str(tmp_path))["resume"]


def test_a_run_without_relative_paths_is_resumed_from_the_current_directory(tmp_path, capsys):
    make("a", "recipes=tiny", started_s=1.8e9, directory=tmp_path / "other")
    assert ask_json(capsys, "show", "a")["resume"].startswith("ppctl train recipes=tiny")


# --- faults -------------------------------------------------------------------------------------

FAULTS = [
    (
        "nowhere",
        "nowhere cannot be read: No such file or directory. Name a directory that holds runs",
    ),
    ("runs nowhere", "nowhere cannot be read: No such file or directory"),
    ("file", "file cannot be read: Not a directory. Name a directory that holds runs"),
    ("show", "`ppctl runs show` needs the name of a run; `ppctl runs` lists them"),
    ("show ab", "ab is a part of 3 names: cab, dab, abc. Use a longer part of one, or a path"),
    ("show cba", r"cba is no run in runs. Did you mean (cab|abc)\?"),
    ("show qqqqqqqq", r"qqqqqqqq is no run in runs. \(runs: cab, dab, abc\)"),
    ("show file", "file is no run in runs"),
    ("show /nonexist", "/nonexist is no run: there is no such directory. `ppctl runs DIR` lists"),
    ("show a/b nowhere", "a/b is no run: there is no such directory. `ppctl runs DIR` lists"),
    (
        "show empty",
        "empty is no run: it has no metrics.jsonl. `ppctl runs empty` lists the runs below it",
    ),
    ("show x empty", "x: no run is in empty. Name the directory: ppctl runs show x DIR"),
    ("x" * 5000, "x cannot be read: File name too long"),
    ("show " + "x" * 5000, "x is no run in runs"),
    ("show x nowhere", "nowhere cannot be read: No such file or directory"),
    ("--jsn", "--jsn is not an option. Did you mean --json"),
    ("--json=1", "argument --json: ignored explicit argument"),
    ("--config-dir x", "--config-dir is not an option"),
    ("run.dir=x", "run.dir=x cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS, ids=[line[:30] for line, _ in FAULTS])
def test_a_wrong_request_is_refused_in_one_line_with_exit_code_2(line, message, capsys):
    for name in ("abc", "cab", "dab"):
        (Path("runs") / name).mkdir(parents=True)
        (Path("runs") / name / "metrics.jsonl").touch()
    Path("file").touch()
    Path("empty").mkdir()
    assert cli.main(["runs", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ppctl: ")
    assert err.count("\n") == 1
    message = message.replace("cab, dab, abc", "abc, cab, dab")
    assert re.search(message, err), err


def test_without_runs_the_default_directory_is_named(capsys):
    assert cli.main(["runs"]) == 2
    assert capsys.readouterr().err.startswith(
        "ppctl: runs cannot be read: No such file or directory"
    )


# --- help, speed --------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["runs --help", "runs show -h"])
def test_help_has_every_example_within_120_columns(line, capsys):
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    for text in (*examples_of("runs"), "broken off", "no end recorded"):
        assert text in out


def test_only_the_end_of_a_long_file_is_read(capsys):
    run_dir = make("a", ending={"status": "started", "host": "x"})
    last = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1]
    with (run_dir / "metrics.jsonl").open("r+b") as file:
        file.seek(
            2**40
        )  # a hole: it takes no space, and a reader of the whole file would be here for minutes
        file.write(b"\n" * 10 + last)
    [run] = ask_json(capsys)["runs"]
    assert (run["step"], run["status"]) == (3, "no end recorded")


def test_neither_jax_nor_hydra_is_loaded():
    make("a", "recipes=tiny")
    code = (
        "import sys; from ppctl.cli import main; main(['runs']); main(['runs', 'show', 'a']); "
        "main(['examples']); print([name for name in ('jax', 'numpy', 'flax', 'hydra', "
        "'omegaconf', 'orbax') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=BY_PATH, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\n[]\n")
