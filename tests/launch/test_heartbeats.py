"""Lines about processes that are slow or lost: by heartbeats, and of XLA's last words."""

import json
import subprocess
import sys
import time

import pytest

from ppctl.launch import xla_stderr
from ppctl.launch.xla_stderr import LOST, readable
from ppctl.reports.run_files import FAILED_FILE
from ppctl.training.run.heartbeat import Heartbeat, late_text


def test_messages_of_newer_coordination_services_over_several_lines_are_dropped():
    printed = """E1121 22:20:01.123456   12345 coordination_service_agent.cc:353] Polled an error
:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/tsl/distributed_runtime/rpc/grpc_util.h:89
. This is only expected if one of the tasks is unhealthy. Check the logs for the actual root cause.
=== Source Location Trace: ===
external/xla+/xla/util.h:302

step 8/9  loss 1.0
"""
    assert list(readable(printed.splitlines(keepends=True), "1")) == ["step 8/9  loss 1.0\n"]


# XLA's output in a process after another one was lost
OTHER_GONE = """\
E1121 17:04:16.910985   10149 coordination_service_agent.cc:289] Polled an error from coordination service.
F1121 17:04:16.911191   10149 client.h:80] Terminating process because of fatal errors. \
absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
2
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption).

RPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/tensorflow.CoordinationServiceError='']
*** Check failure stack trace: ***
    @     0x7f0297e40634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
FIRST_GONE = """\
[Gloo] Rank 1 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2
W1121 17:04:08.460218   10136 preemption_sync_manager.cc:147] Failed to retrieve preemption notice: Socket closed
Additional GRPC error information from remote target coordination_service while calling /xla.coordination:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}. This is only expected if one
F1121 17:04:08.460899   10136 client.h:80] Terminating process because. absl::Status: UNAVAILABLE: Socket closed
*** Check failure stack trace: ***
"""


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (OTHER_GONE, "ppctl: process 1: lost contact; process 2 stopped responding.\n"),
        (
            f"{LOST}stuck in step 4\n{OTHER_GONE}",
            "ppctl: process 1: stuck in step 4; process 2 stopped responding",
        ),
        (
            FIRST_GONE,
            "ppctl: process 1: lost contact; process 0, which all others need, has ended.\n",
        ),
        (
            FIRST_GONE.replace("Socket closed", "recvmsg:Connection reset by peer"),
            "ppctl: process 1: lost contact; process 0, which all others need, has ended.\n",
        ),
        (
            "F1121 17:04:08.460899   10136 cpu_client.cc:80] Check failed: a == b\n",
            "F1121 17:04:08.460899",
        ),
    ],
    ids=[
        "another",
        "another, in a collective",
        "the first",
        "the first, by a reset",
        "a fault of XLA's own",
    ],
)
def test_the_last_words_of_xla_become_a_single_line(printed, expected):
    [line] = readable(printed.splitlines(keepends=True), "1")
    assert line.startswith(expected)


def note(step, doing, since, at=100.0):
    return {"step": step, "doing": doing, "since": since, "at": at}


@pytest.mark.parametrize(
    ("notes", "line"),
    [
        (
            [note(8, "run", 40), note(7, "run", 38), note(8, "run", 40)],
            "process 1 is slow: running step 7 for 62 s; 2 of 3 pro",
        ),
        (
            [note(8, "run", 40), note(8, "read", 39), note(8, "read", 39)],
            "processes 1, 2 are slow: reading the data of s",
        ),
        (
            [note(8, "run", 40), note(8, "run", 40, at=41.0)],
            "process 1 is slow: running step 8 for 60 s, without a sign of life for 59 s; 1 "
            "of 2 processes wait.",
        ),
        ([note(8, "run", 40), note(8, "run", 41)], "all 2 processes are running step 8 for 60 s."),
        (
            [note(0, "start", 40), note(0, "compile", 9)],
            "process 1 is slow: compiling for 91 s; 1 of 2 processes wait.",
        ),
        ([note(0, "start", 40), None], "process 1 is slow: no heartbeat; 1 of 2 processes wait."),
    ],
)
def test_slow_processes_are_named(notes, line):
    assert late_text(dict(enumerate(notes)), 100.0, silent_after_s=30.0).startswith(line)


def test_no_process_counts_as_slow_while_all_compile():
    assert (
        late_text({0: note(0, "compile", 1), 1: note(0, "compile", 2)}, 100.0, silent_after_s=30.0)
        is None
    )


def test_the_first_process_to_find_a_common_fault_prints_it(tmp_path):
    first, second, third = (
        Heartbeat(tmp_path, process=i, num_processes=4, slow_after_s=60.0) for i in (1, 2, 3)
    )
    assert first.fail("loss=nan")
    assert not second.fail("loss=nan")
    assert third.fail("the disk is full")
    assert json.loads((tmp_path / FAILED_FILE).read_text()) == {"process": 1, "message": "loss=nan"}


def test_a_heartbeat_reports_at_growing_intervals_and_leaves_no_file(tmp_path):
    lines, events = [], []
    heartbeat = Heartbeat(tmp_path, process=0, num_processes=2, slow_after_s=0.2, say=lines.append)
    heartbeat.tell = lambda *event: events.append(event)
    heartbeat.start()
    heartbeat.note("run", 3)
    time.sleep(2)
    assert 2 <= len(lines) <= 4, lines
    assert events == [("stalled", line) for line in lines]
    assert all(line.startswith("process 1 is slow: no heartbeat") for line in lines)
    heartbeat.note("run", 4)
    assert heartbeat.text == "running step 4"
    heartbeat.stop()
    assert list(tmp_path.iterdir()) == []


def test_the_child_that_filters_output_takes_any_bytes():
    command = [sys.executable, "-S", "-E", xla_stderr.__file__, "0"]
    found = subprocess.run(command, input=b"caf\xe9\nnext\n", capture_output=True, check=True)
    assert found.stdout == b"caf\\xe9\nnext\n"
