"""run.on_event: a command that gets each event, and is never in the way. `ppctl stop`."""

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest
from support.selection import full
from support.small_runs import ROWS, checkpoints, losses, records

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.launch import event_command
from ppctl.launch.event_command import event_document, fault_of_call
from ppctl.training.run import events
from ppctl.training.run.events import Events

FAILS = "sys.exit('no route to the pager')"


def test_events_are_the_start_saves_evaluations_and_end_of_a_run(train, tmp_path, tells):
    words = f"run.on_event={tells}", "run.eval_every=3", "run.checkpoint.every=3"
    assert train(*words)[0] == 0
    found = records(tmp_path, "events.jsonl")
    names = [(each["event"], each["step"]) for each in found]
    assert names[0] == ("started", 0)
    assert names[-1] == ("finished", 6)
    assert sorted(names[1:-1]) == [("evaluated", 3), ("evaluated", 6), ("saved", 3), ("saved", 6)]
    assert {each["run_dir"] for each in found} == {str(tmp_path / "run")}
    of_step_3 = next(each for each in found if each["event"] == "evaluated")
    assert of_step_3["eval_loss"] == records(tmp_path / "run", "eval.jsonl")[0]["eval_loss"]


def test_a_failure_is_an_event_with_its_reason(train, tmp_path, tells):
    code, _, err = train(f"run.on_event={tells}", "run.resume=must")
    assert code == 2
    (found,) = records(tmp_path, "events.jsonl")
    assert (found["event"], found["kind"]) == ("failed", "checkpoint")
    assert found["reason"] in err


def test_a_signal_is_an_event_with_its_name(train, tmp_path, command):
    """The command itself sends it, when the first checkpoint is saved."""
    line = command(
        "event = json.loads(sys.stdin.read())\n"
        f"open({str(tmp_path / 'events.jsonl')!r}, 'a').write(json.dumps(event) + '\\n')\n"
        "(event['event'], event.get('step')) == ('saved', 1) and os.kill(os.getppid(), 15)"
    )
    words = "run.checkpoint.every=1", "run.num_steps=100000"
    assert train(f"run.on_event={line}", *words)[0] == 128 + 15
    end = records(tmp_path, "events.jsonl")[-1]
    assert (end["event"], end["reason"]) == ("interrupted", "SIGTERM")
    assert end["step"] == checkpoints(tmp_path / "run")[-1] == len(records(tmp_path / "run"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "message"),
    [
        full((FAILS, "code 1, no route to the pager")),
        ("/no/such/program", "No such file or directory: /no/such/program"),
    ],
)
def test_a_failing_command_is_named_once_and_the_run_is_unchanged(
    train, tmp_path, command, given, message
):
    line = command(FAILS) if given == FAILS else given
    code, out, _ = train(f"run.on_event={line}", "run.checkpoint.every=1")
    assert code == 0
    assert out.count("run.on_event at started:") == out.count("run.on_event at") == 1
    assert message in out
    plain = tmp_path / "plain"
    assert train("run.checkpoint.every=1", run_dir=plain)[0] == 0
    assert losses(tmp_path / "run") == losses(plain)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "names no program"),
        ("' '", "names no program"),
        ("python 'tell", "cannot be split into words: no closing quotation"),
        ("python tell\\", "cannot be split into words: no escaped character"),
    ],
)
def test_a_command_that_names_no_program_is_refused(train, value, reason):
    code, _, err = train(f"run.on_event={value}")
    assert code == 2
    assert f"{reason}. Write a program and its arguments" in err
    assert err.count("\n") == 1


def test_a_command_has_the_quotes_that_a_shell_reads():
    value = "sh -c 'cat >> \"a b\", x=1'"
    assert compose([*ROWS.split(), f"run.on_event={value}"]).run.on_event == value


def test_a_call_may_print_any_bytes_and_leave_a_process_that_keeps_stderr_open(
    tmp_path, monkeypatch, command
):
    document = event_document("evaluated", tmp_path, step=1, eval_loss=math.nan)
    line = command("sys.stderr.buffer.write(b'caf\\xe9'); sys.exit(1)")
    assert fault_of_call(line, document) == "code 1, caf\ufffd"
    monkeypatch.setattr(event_command, "CALL_S", 20.0)
    assert fault_of_call("sh -c 'sleep 40 & exit 3'", document) == "code 3"
    assert fault_of_call(f"cp /dev/stdin {tmp_path / 'event'}", document) is None
    assert json.loads((tmp_path / "event").read_text())["eval_loss"] is None


def test_a_run_does_not_wait_for_slow_calls_and_drops_them_at_its_end(
    tmp_path, monkeypatch, command
):
    monkeypatch.setattr(events, "END_S", 0.2)
    lines, go = [], tmp_path / "go"
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.02)"
    try:
        with Events(command(waits), tmp_path, lines.append) as told:
            for step in range(100):
                told.tell("saved", step=step)  # no call ends before this test does
    finally:
        go.touch()
    assert lines == ["note      run.on_event: calls left after 0.2 s were dropped"]


def stop(capsys, *words):
    code = cli.main(["stop", *map(str, words)])
    return code, *capsys.readouterr()


def test_stop_saves_and_ends_a_run_that_can_resume(train, tmp_path, capsys, tells):
    run_dir, stopped = tmp_path / "run", []

    def ask():
        until = time.monotonic() + 120
        while not (run_dir / "metrics.jsonl").exists() or not records(run_dir):
            assert time.monotonic() < until
            time.sleep(0.1)
        line = [sys.executable, "-m", "ppctl.cli", "stop", str(run_dir), "--wait"]
        stopped.append(subprocess.run(line, capture_output=True, text=True, check=False))

    asking = threading.Thread(target=ask)
    asking.start()
    code, out, err = train(f"run.on_event={tells}", "run.num_steps=100000", "--json")
    asking.join()
    assert code == 0, err
    [answer] = stopped
    assert answer.returncode == 0, answer.stderr
    assert "stopped at step" in answer.stdout
    found = json.loads(out)
    assert found["status"] == "stopped"
    assert checkpoints(run_dir)[-1] == found["step"] == len(records(run_dir))
    assert not (run_dir / "stop").exists()
    *_, saved, end = records(tmp_path, "events.jsonl")
    assert (saved["event"], end["event"]) == ("saved", "stopped")
    assert saved["step"] == end["step"] == found["step"]
    # an ended run is not asked to stop; its command continues
    code, _, err = stop(capsys, run_dir)
    assert code == 2
    assert f"is not running but stopped at step {found['step']}" in err
    code, out, _ = train(f"run.num_steps={found['step'] + 1}")
    assert code == 0
    assert f"resuming after step {found['step']}" in out


def test_stop_needs_one_run(tmp_path, capsys):
    code, _, err = stop(capsys)
    assert code == 2
    assert "needs the name of one run" in err


@pytest.mark.full
def test_on_a_terminal_a_bar_shows_steps_and_the_time_left(tmp_path):
    words = *ROWS.split(), f"run.dir={tmp_path / 'run'}", "run.num_steps=30"
    shown, environment = bytearray(), os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    lead, own = pty.openpty()
    line = [sys.executable, "-m", "ppctl.cli", "train", *words]
    run = subprocess.Popen(line, stdout=own, stderr=own, env=environment)
    os.close(own)
    with contextlib.suppress(OSError):  # its end
        while part := os.read(lead, 4096):
            shown += part
    assert run.wait() == 0
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())
    assert "30/30" in text
    assert "left" in text
    assert re.search(r"[\r\n]step 30/30  loss \d", text)
    assert text.rstrip().endswith(f"are in {tmp_path / 'run'}")
