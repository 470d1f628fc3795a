"""The state of a run: written at its start and end, and found after a kill."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from support.files import full_disk
from support.run_pages import make, write
from support.small_runs import ROWS

from ppctl import cli
from ppctl.reports import run_files, run_status
from ppctl.reports.run_status import FINISHED, INTERRUPTED, HeldError, RunStatus


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "status.jsonl").read_text().splitlines()]


def started(run_dir, step=0):
    """The record of a start that has begun."""
    status = RunStatus(run_dir)
    status.begin(step)
    return status


def state(run_dir):
    """Return (status, reason) as in the list of runs."""
    found = run_files.run_summary("x", run_dir)
    return found.status, found.reason


def test_a_run_is_running_until_its_end_is_recorded(tmp_path):
    with started(tmp_path, 3) as status:
        assert state(tmp_path) == ("running", None)
        status.end(INTERRUPTED, step=7, reason="SIGINT")
    assert state(tmp_path) == ("interrupted", "SIGINT")
    with started(tmp_path, 7) as status:
        assert state(tmp_path) == ("running", None)
        status.end(FINISHED, step=9)
    assert state(tmp_path) == ("finished", None)
    found = lines(tmp_path)
    assert [(line["status"], line["step"]) for line in found] == [
        *(("started", 3), ("interrupted", 7), ("started", 7), ("finished", 9))
    ]
    assert found[0]["pid"] == os.getpid()
    assert all(before["at"] <= after["at"] for before, after in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("the disk\nis full."), "the disk is full."), (KeyError(), "KeyError")],
)
def test_an_exception_is_recorded_in_one_line_and_raised_again(tmp_path, error, reason):
    with pytest.raises(type(error)), started(tmp_path):
        raise error
    assert state(tmp_path) == ("failed", reason)


def say_finished_and_fail(run_dir):
    with started(run_dir) as status:
        status.end(FINISHED, step=1)
        raise ValueError


def test_a_recorded_end_stays_if_a_later_action_fails(tmp_path):
    with pytest.raises(ValueError):
        say_finished_and_fail(tmp_path)
    assert state(tmp_path) == ("finished", None)


KILLED = (
    "import os, pathlib, sys, time; from ppctl.reports.run_status import RunStatus\n"
    "with RunStatus(pathlib.Path(sys.argv[1])) as status:\n"
    "    status.begin(0)\n"
    "    print('up', flush=True)\n"
    "    time.sleep(60)\n"
)


def start(run_dir):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_is_running_before_and_broken_off_after(tmp_path, number):
    process = start(tmp_path)
    try:
        assert state(tmp_path) == ("running", None)
    finally:
        process.send_signal(number)
        process.communicate()
    assert state(tmp_path) == ("broken off", None)
    assert len(lines(tmp_path)) == 1
    with started(tmp_path) as status:
        assert state(tmp_path) == ("running", None)
        status.end(FINISHED)
    assert state(tmp_path) == ("finished", None)


def test_a_stopped_process_still_holds_its_run(tmp_path):
    process = start(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        assert state(tmp_path) == ("running", None)
    finally:
        process.kill()
        process.communicate()


def test_a_child_of_the_run_that_outlives_it_does_not_hold_it(tmp_path):
    with started(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert state(tmp_path) == ("broken off", None)  # left without a word
    finally:
        child.kill()
        child.wait()


def test_a_start_on_another_machine_without_an_end_is_not_claimed_to_be_broken_off(
    tmp_path, monkeypatch
):
    with started(tmp_path):
        pass
    assert state(tmp_path) == ("broken off", None)
    monkeypatch.setattr(run_status.platform, "node", lambda: "elsewhere")
    assert state(tmp_path) == ("no end recorded", None)


UNLOCKED = (
    "import fcntl\n"
    "def no_locks(*_): raise OSError(37, 'No locks available')\n"
    "fcntl.flock = no_locks\n"
)


@pytest.fixture
def unlocked(tmp_path, request):
    """A process that records a run in `tmp_path`, which had no lock for it."""
    line = [sys.executable, "-c", UNLOCKED + KILLED, str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


@pytest.fixture(params=[True, False], ids=["reader without locks", "reader with locks"])
def maybe_without_locks(request, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    if request.param:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(run_status, "LOCK_S", 0.05)


@pytest.mark.usefixtures("maybe_without_locks")
def test_without_locks_host_and_process_decide_whether_a_run_is_running(unlocked, tmp_path, capsys):
    assert lines(tmp_path)[0]["is_locked"] is False
    assert state(tmp_path) == ("running", None)
    assert run_status.held_by(tmp_path) == unlocked.pid
    for line in ("train recipes=tiny run.dir={}", "runs rm {} --yes", "runs prune {} --keep 1"):
        assert cli.main(line.format(tmp_path).split()) == 2
        assert str(unlocked.pid) in capsys.readouterr().err
    with pytest.raises(HeldError) as error, RunStatus(tmp_path):
        raise AssertionError("a second process records the run")
    assert error.value.pid == unlocked.pid
    with pytest.raises(HeldError), run_status.kept_still(tmp_path):
        raise AssertionError("the run is removed while its process lives")
    unlocked.kill()
    unlocked.wait()
    assert state(tmp_path) == ("broken off", None)
    with RunStatus(tmp_path) as status:
        status.begin(0)


@pytest.mark.usefixtures("maybe_without_locks")
def test_without_locks_file_times_decide_whether_a_remote_run_is_running(
    unlocked, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_status.platform, "node", lambda: "elsewhere")
    assert state(tmp_path) == ("running", None)
    long_ago_s = os.stat(tmp_path).st_mtime - 2 * run_status.SILENT_S
    for path in tmp_path.iterdir():
        os.utime(path, (long_ago_s, long_ago_s))
    assert state(tmp_path) == ("no end recorded", None)
    (tmp_path / "metrics.jsonl").write_text("")
    assert state(tmp_path) == ("running", None)


@pytest.mark.usefixtures("maybe_without_locks")
def test_without_locks_a_later_process_with_the_number_of_a_run_is_not_the_run(tmp_path):
    line = {"status": "started", **run_status.here(), "pid": os.getppid(), "is_locked": False}
    (tmp_path / "status.jsonl").write_text(json.dumps(line | {"at": 1e9}) + "\n")
    assert state(tmp_path) == ("broken off", None)


def test_a_start_without_locks_prints_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_status, "_lock", lambda _: False)
    assert cli.main(["train", *ROWS.split(), f"run.dir={tmp_path}", "run.num_steps=1"]) == 0
    assert "note      run.dir is on a file system without locks" in capsys.readouterr().out


def test_a_second_process_in_the_same_run_dir_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "LOCK_S", 0.05)
    with started(tmp_path) as first:
        before = (tmp_path / "status.jsonl").read_bytes()
        with pytest.raises(HeldError) as error:
            RunStatus(tmp_path)
        assert error.value.pid == os.getpid()
        assert (tmp_path / "status.jsonl").read_bytes() == before
        assert state(tmp_path) == ("running", None)  # the first one is
        first.end(FINISHED)


def test_the_holder_of_a_directory_is_not_named_after_an_older_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "LOCK_S", 0.05)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / "status.jsonl").write_text(
        json.dumps({"status": "started", **run_status.here(), "pid": child.pid})
    )
    with RunStatus(tmp_path), pytest.raises(HeldError) as error:
        RunStatus(tmp_path)
    assert error.value.pid is None


def test_a_run_that_never_begins_leaves_no_trace(tmp_path):
    with RunStatus(tmp_path / "runs/new"):
        assert (tmp_path / "runs/new/status.jsonl").exists()
    assert list(tmp_path.iterdir()) == []
    with started(tmp_path / "runs/old"):
        pass
    before = (tmp_path / "runs/old/status.jsonl").read_bytes()
    with RunStatus(tmp_path / "runs/old"):
        pass
    assert (tmp_path / "runs/old/status.jsonl").read_bytes() == before


def test_a_file_that_its_run_took_away_is_not_held(tmp_path, monkeypatch):
    """The other run leaves between the opening of the file and its lock."""
    other, lock = RunStatus(tmp_path), run_status._lock

    def late(file):
        if not left:
            left.append(other.__exit__(None, None, None))
        return lock(file)

    left = []
    monkeypatch.setattr(run_status, "_lock", late)
    with RunStatus(tmp_path) as status:
        status.begin(0)
        assert [line["is_locked"] for line in lines(tmp_path)] == [True]


def test_a_torn_line_is_dropped_at_the_next_start(tmp_path):
    (tmp_path / "status.jsonl").write_text('{"status": "finished", "at": 1.0}\n{"status": "sta')
    found = run_files.run_summary("x", tmp_path)
    assert (found.status, found.problems) == (
        "finished",
        ("config.yaml is missing", "the last line of status.jsonl is torn"),
    )
    with started(tmp_path):
        pass
    assert [line["status"] for line in lines(tmp_path)] == ["finished", "started"]


def test_a_disk_that_is_full_hides_no_error(tmp_path, monkeypatch):
    def full(self, record):
        raise OSError(28, "No space left on device")

    def fill_and_fail():
        with started(tmp_path):
            monkeypatch.setattr(RunStatus, "_write", full)
            raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        fill_and_fail()


HOLD = """
import sys, time
from pathlib import Path
from ppctl.reports.run_status import RunStatus
with RunStatus(Path(sys.argv[1])) as status:
    status.begin(0)
    print(flush=True)
    time.sleep(60)
"""


def test_a_run_that_another_process_writes_is_refused_and_unchanged(tmp_path, capsys, monkeypatch):
    saving = tmp_path / "checkpoints/5.orbax-checkpoint-tmp"
    saving.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert run_status.held_by(tmp_path) == process.pid
            assert cli.main(["train", "recipes=tiny", f"run.dir={tmp_path}"]) == 2
            said = (
                f"run.dir={tmp_path} is written by process {process.pid} now. Use another "
                "run.name, or end that run"
            )
            assert said in capsys.readouterr().err
            assert sorted(path.name for path in tmp_path.iterdir()) == [
                "checkpoints",
                "status.jsonl",
            ]
            assert saving.exists()
            monkeypatch.setattr(run_status, "here", lambda: {"host": "another"})
            assert run_status.held_by(tmp_path) is None
            monkeypatch.undo()
        finally:
            process.kill()
    assert run_status.held_by(tmp_path) is None
    (tmp_path / "status.jsonl").unlink()
    assert run_status.held_by(tmp_path) is None


def test_a_line_truncated_by_a_full_disk_is_an_error(tmp_path):
    """An unbuffered write of a part of a line raises nothing: the next line followed it."""
    with (tmp_path / "lines").open("ab", buffering=0) as file, full_disk(10):
        with pytest.raises(OSError, match="File too large"):
            run_status.append(file, b"0123456789abcdef\n")
    assert (tmp_path / "lines").read_bytes() == b"0123456789"


def test_the_page_of_a_run_states_when_to_resume_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = RunStatus(make("long"))
    status.begin(0, overrides=["run.name=long"], directory=str(tmp_path))
    page = write(capsys, "long", "--out", "page.html")[0]
    assert "To resume it (running: resume it when it has ended):" in page
    status.end(FINISHED, step=9)
    status.__exit__(None, None, None)
    page = write(capsys, "long", "--out", "page.html")[0]
    assert "To resume it (finished: it goes on with a larger run.num_steps):" in page
