"""`ppctl runs rm`: removed runs, the question, and refused runs, which stay unchanged."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import BY_USER
from support.run_dirs import make

from ppctl import cli
from ppctl.cli.subcommands import runs_remove
from ppctl.reports import run_files
from ppctl.reports.run_status import RunStatus

pytestmark = pytest.mark.usefixtures("in_empty_directory")
BY_PATH = BY_USER | {"PYTHONPATH": os.pathsep.join(sys.path)}


def files():
    """Return every path below the current directory with its content; links are not followed."""
    return {
        path: os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in Path().rglob("*")
    }


def change(capsys, *words):
    assert cli.main(["runs", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def refused(capsys, *words):
    before = files()
    assert cli.main(["runs", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), files()) == ("", 1, before)
    return err.removeprefix("ppctl: ").rstrip()


# --- removal and stops -------------------------------------------------------------------------------


def test_rm_removes_only_the_named_runs(capsys):
    for name in ("a", "b", "sweep/lr=1"):
        run_dir = make(name)
        for file in (
            "checkpoints/3/params/0",
            "tensorboard/events",
            "report.html",
            "output.log",
            ".metrics.jsonl.part",
        ):
            (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / file).write_text("x")
    Path("other").write_text("kept")
    Path("runs/a/checkpoints/link").symlink_to(Path("other").absolute())
    said, err = change(capsys, "rm", "a", "runs/sweep/lr=1/", "-y")
    assert [(each["name"], each["run_dir"]) for each in said["removed"]] == [
        ("a", "runs/a"),
        ("runs/sweep/lr=1/", "runs/sweep/lr=1"),
    ]
    assert all(each["disk_bytes"] > 0 for each in said["removed"])
    assert err.startswith("ppctl: removed runs/a, ")
    assert [path for path in Path("runs").rglob("*") if path.is_dir() and path.parent.name != "b"][
        :2
    ] == [Path("runs/b"), Path("runs/sweep")]
    assert Path("other").read_text() == "kept"


# --- the question -------------------------------------------------------------------------------


def test_without_a_terminal_rm_asks_no_question_and_removes_no_run(capsys, monkeypatch):
    make("a")
    with open(os.devnull) as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        told = refused(capsys, "rm", "a")
    assert told == "`ppctl runs rm` asks first, but it has no terminal. Add --yes."


@pytest.mark.parametrize(
    ("answer", "code", "is_there"),
    [("y", 0, False), ("YES", 0, False), ("n", 1, True), ("", 1, True)],
)
def test_on_a_terminal_one_question_covers_all_runs(answer, code, is_there):
    for name in ("a", "b"):
        make(name)
    leader, follower = pty.openpty()
    with os.fdopen(leader, "w") as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "ppctl.cli", "runs", "rm", "a", "b"],
            env=BY_PATH,
            stdin=follower,
            stderr=follower,
        )
        os.close(follower)
        terminal.write(f"{answer}\n")
        terminal.flush()
        shown = b""
        try:
            while part := os.read(leader, 4096):
                shown += part
        except OSError:  # its other end is closed
            pass
        assert process.wait() == code
    text = shown.decode()
    assert text.count("[y/N]") == 1
    assert "Remove 2 runs for good? [y/N]" in text
    assert "runs/b: no end recorded at step 3 of 200, " in text
    assert ("ppctl: Nothing was changed." in text) == is_there
    assert [Path("runs", name).exists() for name in ("a", "b")] == [is_there] * 2


# --- refused ---------------------------------------------------------------------------


def test_a_run_that_a_process_records_stays(capsys):
    make("other")
    with RunStatus(make("a")) as status:
        status.begin(0)
        told = refused(capsys, "rm", "other", "a", "-y")
    pid = os.getpid()
    assert (
        told == f"a is running, recorded by process {pid}. End it first: kill -INT {pid}, "
        "which saves."
    )


def test_a_run_that_begins_meanwhile_stays(capsys, monkeypatch):
    with RunStatus(make("a", started_s=1.0)):
        summary = run_files.run_summary("a", Path("nowhere"))
        monkeypatch.setattr(run_files, "run_summary", lambda *_: summary)
        assert "a is running, recorded by a process. End it" in refused(capsys, "rm", "a", "-y")


def test_the_lock_is_held_while_a_run_is_renamed(monkeypatch):
    make("a", started_s=1.0)
    held = []

    def rename(path, target):
        with open(Path(path) / "status.jsonl") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        held.append(path)

    monkeypatch.setattr("os.rename", rename)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)
    runs_remove.remove_run("a", Path("runs/a"))
    assert held == [Path("runs/a")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rm", "`ppctl runs rm` needs the names of runs; `ppctl runs` lists them."),
        ("rm nothing", "nothing is no run in runs."),
        ("rm sched", "sched is no run. Did you mean sweep/schedule=gpipe? Use a full name or"),
        ("rm a runs/a", "a and runs/a are the same run. Name each once."),
        ("rm sweep", "sweep is no run. Did you mean sweep/schedule=gpipe? Use"),
        ("rm runs", "runs is no run: it has no metrics.jsonl."),
        ("rm /", "/ is no run: it has no metrics.jsonl. `ppctl runs /` lists the runs below it."),
        ("rm no_run", "no_run is no run in runs. (runs: a, "),
        ("rm linked", "linked is a symlink or below one; the run is in "),
        ("rm behind/far", "behind/far is a symlink or below one; the run is in "),
        ("rm runs/behind/far", "runs/behind/far is a symlink or below one; the run is in "),
        ("rm lnk/far", "lnk/far is a symlink or below one; the run is in "),
        ("rm outer", "outer contains 1 more runs: inner. Remove these first."),
        ("rm mine", "mine holds files that no run wrote: notes.txt, plots. Move them away first."),
    ],
)
def test_foreign_linked_and_nested_directories_are_refused_and_stay(words, message, capsys):
    for name in ("a", "sweep/schedule=gpipe", "outer", "outer/inner", "mine"):
        make(name)
    Path("runs/no_run").mkdir()
    Path("runs/mine/notes.txt").write_text("mine")
    Path("runs/mine/plots").mkdir()
    shutil.move(str(make("far")), "away/far")
    Path("runs/linked").symlink_to(Path("away/far").absolute())
    for link in ("runs/behind", "lnk"):
        Path(link).symlink_to(Path("away").absolute())
    assert refused(capsys, *words.split(), "--yes").startswith(message)


def test_the_directory_of_runs_may_be_a_link_itself(capsys):
    make("a")
    Path("runs").rename("scratch")
    Path("runs").symlink_to("scratch")
    change(capsys, "rm", "a", "-y")
    assert list(Path("scratch").iterdir()) == []


def test_the_run_of_the_current_directory_stays(capsys, monkeypatch):
    monkeypatch.chdir(make("a"))
    assert refused(capsys, "rm", ".", "-y").startswith(". contains the current directory.")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable_keeps_the_run_whole_by_its_mode(capsys):
    run_dir = make("a")
    (run_dir / "tensorboard").mkdir()
    (run_dir / "tensorboard/events").touch()
    (run_dir / "tensorboard").chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert "runs/a/tensorboard: Permission denied" in refused(capsys, "rm", "a", "-y")
    finally:
        (run_dir / "tensorboard").chmod(stat.S_IRWXU)


def test_a_directory_that_is_not_writable_keeps_the_run_whole(capsys, monkeypatch):
    run_dir = make("a")
    (run_dir / "tensorboard").mkdir()
    (run_dir / "tensorboard/events").touch()
    monkeypatch.setattr("os.access", lambda path, mode: "tensorboard" not in str(path))
    told = refused(capsys, "rm", "a", "-y")
    assert (
        told == "a cannot be removed: runs/a/tensorboard: Permission denied. Make it writable, or "
        "leave it."
    )


def test_remains_that_cannot_be_deleted_are_named_and_no_longer_a_run(capsys, monkeypatch):
    make("a")

    def rmtree(path):
        raise OSError(5, "Input/output error", f"{path}/metrics.jsonl")

    monkeypatch.setattr("shutil.rmtree", rmtree)
    assert cli.main(["runs", "rm", "a", "-y"]) == 2
    [remains] = Path("runs").iterdir()
    told = (
        f"a is removed, but {remains}/metrics.jsonl cannot be deleted: Input/output error. "
        f"Delete {remains} yourself."
    )
    assert capsys.readouterr().err == f"ppctl: {told}\n"
    assert run_files.find_runs(Path("runs")) == []
