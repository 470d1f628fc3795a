"""Processes that are started together end together, lose no line, leave no orphan, and have each
their devices.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.environment import BY_USER

from ppctl.config import Mesh
from ppctl.errors import ConfigError
from ppctl.launch.local_processes import children, device_groups
from ppctl.launch.supervisor import Ending

# A process that runs a group of small scripts and prints how it ended; the last line of its stderr
# is that.
STARTER = """
import json, sys
from ppctl.launch.supervisor import Child, run_group, stop_requests

scripts, settings = json.loads(sys.argv[1])
with stop_requests() as events:
    children = [Child([sys.executable, "-c", script]) for script in scripts]
    ending = run_group(children, events, **settings)
print(json.dumps(ending), file=sys.stderr)
sys.exit(ending.code)
"""
# Each child holds a lock on a file as long as it lives, whoever is to reap it.
CHILD = """
import fcntl, os, signal, sys, time
from ppctl.launch.supervisor import end_with_starter
end_with_starter()
lock = open({path!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write("x")
lock.flush()
"""
HANG = "time.sleep(60)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"
# Short sleeps: a signal between Python's look for signals and the start of a sleep is answered only
# after that sleep.
SAVING = """
def save(number, _):
    print("saving after", signal.Signals(number).name)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
print("ready")
for _ in range(1200):
    time.sleep(0.05)
"""


class Group:
    """The starter of a group of scripts."""

    def __init__(self, folder, *scripts, crash_grace_s=0.2, exit_grace_s=20.0, **settings):
        self.locks = [folder / f"child{i}" for i in range(len(scripts))]
        whole = [
            CHILD.format(path=str(lock)) + script
            for lock, script in zip(self.locks, scripts, strict=True)
        ]
        settings |= {"crash_grace_s": crash_grace_s, "exit_grace_s": exit_grace_s}
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", STARTER, json.dumps([whole, settings])],
            text=True,
            env=BY_USER,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # in a session with a separate terminal
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.popen.kill()
        self.popen.communicate()

    def wait_until_ready(self):
        """Nothing, after as many lines of stdout as there are children, which are dropped."""
        for _ in self.locks:
            self.popen.stdout.readline()

    def wait_until_started(self):
        wait_until(lambda: all(lock.exists() and lock.read_text() for lock in self.locks))

    def end(self, timeout_s=30.0):
        """(how it ended, stdout, stderr before that); no child is left."""
        self.out, err = self.popen.communicate(timeout=timeout_s)
        *lines, ending = err.splitlines()
        assert not any(is_held(lock) for lock in self.locks)
        *of_group, self.is_lead_killed = json.loads(ending)
        found = Ending(*of_group)
        assert self.popen.returncode == found.code
        return found, self.out.splitlines(), lines


def is_held(path: Path) -> bool:
    if not path.exists():  # ended before it took the lock
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(reached, timeout_s=20.0):
    limit = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < limit
        time.sleep(0.01)


# --- output -------------------------------------------------------------------------------------


def test_every_line_arrives_once_in_order_after_its_childs_number(tmp_path):
    count = 20_000  # a MB each: far more than a pipe holds
    script = f"""
for i in range({count}):
    print("out", i, "." * 40)
    print("err", i, file=sys.stderr)
print("no newline at the end", end="")
"""
    with Group(tmp_path, script, script, script) as group:
        ending, out, err = group.end()
    assert ending == Ending(0, False, None)
    for child in range(3):
        mine = [line for line in out if line.startswith(f"[{child}] ")]
        dots = "." * 40
        assert mine == [
            *(f"[{child}] out {i} {dots}" for i in range(count)),
            f"[{child}] no newline at the end",
        ]
        assert [line for line in err if line.startswith(f"[{child}] ")] == [
            f"[{child}] err {i}" for i in range(count)
        ]
    assert (len(out), len(err)) == (3 * (count + 1), 3 * count)


def test_with_json_only_the_leads_stdout_is_printed_unchanged(tmp_path):
    script = "print('{\"a\": 1}'); print('to a person', file=sys.stderr)"
    with Group(tmp_path, script, script, raw_lead=True) as group:
        ending, out, err = group.end()
    assert (ending.code, out) == (0, ['{"a": 1}'])
    assert sorted(err) == ["[0] to a person", "[1] to a person", '[1] {"a": 1}']


def test_a_single_process_has_unchanged_output(tmp_path):
    with Group(
        tmp_path, "print('a'); print('b', file=sys.stderr); os.kill(os.getpid(), 9)"
    ) as group:
        ending, out, err = group.end()
    assert (out, err) == (["a"], ["b"])
    assert ending == Ending(137, False, "process 0 of 1 was killed by SIGKILL")


def test_a_closed_pipe_ends_all_processes(tmp_path):
    with Group(tmp_path, "while True: print('x' * 100)", HANG) as group:
        group.popen.stdout.readline()
        group.popen.stdout.close()
        assert group.popen.wait(20) == 128 + signal.SIGPIPE
        wait_until(lambda: not any(is_held(lock) for lock in group.locks))


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crashed", "script", "code", "how"),
    [
        (0, "os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        (2, "os.abort()", 134, "was killed by SIGABRT"),
        (0, "raise RuntimeError('boom')", 1, "ended with exit code 1"),
        (2, "sys.exit(7)", 7, "ended with exit code 7"),
    ],
)
def test_the_first_child_that_crashes_ends_all_and_is_named(tmp_path, crashed, script, code, how):
    scripts = [STUBBORN] * 3
    scripts[crashed] = script
    with Group(tmp_path, *scripts) as group:
        ending, _, err = group.end()
    others = " and ".join(str(i) for i in range(3) if i != crashed)
    assert ending == Ending(
        code, False, f"process {crashed} of 3 {how}; processes {others} had to be killed"
    )
    assert group.is_lead_killed == ("raise" not in script)  # also if it had to be killed
    assert any("RuntimeError: boom" in line for line in err) == ("boom" in script)


def test_other_children_may_still_print_their_reason(tmp_path):
    with Group(
        tmp_path,
        "sys.exit(7)",
        "time.sleep(0.5); print('lost process 0'); sys.exit(8)",
        crash_grace_s=10,
    ) as group:
        ending, out, _ = group.end()
    assert (ending, out) == (
        Ending(7, False, "process 0 of 2 ended with exit code 7"),
        ["[1] lost process 0"],
    )


def test_the_cause_is_not_the_child_that_only_noticed(tmp_path):
    scripts = [
        "sys.exit(75)",
        "os.abort()",
        "time.sleep(0.5); os.kill(os.getpid(), signal.SIGSEGV)",
    ]
    with Group(tmp_path, *scripts, crash_grace_s=10, symptoms=[75]) as group:
        ending, _, _ = group.end()
    assert ending == Ending(139, False, "process 2 of 3 was killed by SIGSEGV")


def test_all_processes_finish_after_the_first_one(tmp_path):
    with Group(tmp_path, "pass", "time.sleep(0.5); print('done')") as group:
        assert group.end()[:2] == (Ending(0, False, None), ["[1] done"])
    with Group(tmp_path, HANG, "pass", exit_grace_s=0.3) as group:
        assert group.end()[0] == Ending(
            1, False, "process 1 finished, but process 0 had to be killed"
        )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_request_reaches_each_child_once_as_sigterm(tmp_path, number, code):
    with Group(tmp_path, SAVING, SAVING) as group:
        group.wait_until_ready()
        os.killpg(group.popen.pid, number)  # like a terminal; the children are not in this group
        ending, out, err = group.end()
    assert ending == Ending(code, True, None)
    assert sorted(out) == ["[0] saving after SIGTERM", "[1] saving after SIGTERM"]
    assert err == []


def test_a_stop_request_waits_for_a_long_save_and_a_second_one_does_not(tmp_path):
    with Group(tmp_path, STUBBORN, STUBBORN) as group:
        group.wait_until_ready()
        group.popen.terminate()
        time.sleep(1)
        assert group.popen.poll() is None
        group.popen.terminate()
        assert group.end(5)[0] == Ending(143, True, "processes 0 and 1 had to be killed")


def test_who_hangs_after_the_others_left_is_killed(tmp_path):
    with Group(tmp_path, SAVING, STUBBORN, exit_grace_s=0.3) as group:
        group.wait_until_ready()
        group.popen.terminate()
        assert group.end()[0] == Ending(143, True, "process 1 had to be killed")


def test_a_save_that_fails_is_not_hidden_by_the_stop_request(tmp_path):
    fails = SAVING.replace("sys.exit(143)", "sys.exit(2)")
    with Group(
        tmp_path, fails, SAVING.replace("print(", "time.sleep(0.5); print("), crash_grace_s=10
    ) as group:
        group.wait_until_ready()
        group.popen.terminate()
        assert group.end()[0] == Ending(2, True, "process 0 of 2 ended with exit code 2")


def test_kill_9_of_the_starter_leaves_no_orphan(tmp_path):
    with Group(tmp_path, STUBBORN, STUBBORN, "while True: pass") as group:
        group.wait_until_started()
        assert all(is_held(lock) for lock in group.locks)
        group.popen.kill()
        wait_until(lambda: not any(is_held(lock) for lock in group.locks), timeout_s=5)


CRASH, KILLED, DONE = (Ending(code, False, None) for code in (1, 137, 0))


# --- started processes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "visible", "platform", "groups"),
    [
        (4, None, None, ["0,1", "2,3", "4,5", "6,7"]),
        (2, None, "cuda", ["0,1,2,3", "4,5,6,7"]),
        (2, "7, 6,5,4,3,2,1,0", None, ["7,6,5,4", "3,2,1,0"]),
        (4, "8,9,10,11,12,13,14,15,16", None, ["8,9", "10,11", "12,13", "14,15"]),
        (2, "", None, [None, None]),
        (2, "-1", None, [None, None]),
        (2, None, "cpu", [None, None]),
        (2, "0", "cpu", [None, None]),
        (1, None, None, [None]),
    ],
)
def test_gpus_are_divided_evenly_in_order(processes, visible, platform, groups):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device_groups(processes, Mesh(2, 4), platform, environ) == groups


def test_too_few_visible_gpus_are_refused():
    with pytest.raises(
        ConfigError, match=r"=0,1 names 2 devices, but mesh=2x4 has 8 .*processes=2. Name 8, or use"
    ):
        device_groups(2, Mesh(2, 4), None, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_each_process_gets_its_number_and_devices_and_joins_without_a_proxy(monkeypatch):
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.setenv("no_proxy", "10.0.0.1")
    words = ["train", "--json", "mesh=2x4", "launch.processes=2"]
    first, second = children(words, ["0,1,2,3", "4,5,6,7"], goes_on=False)
    assert first.command[:7] == [sys.executable, "-m", "ppctl.cli", *words]
    assert "launch.processes=1" in first.command[7:]
    assert [child.command[-1] for child in (first, second)] == [
        "run.process_id=0",
        "run.process_id=1",
    ]
    assert first.command[:-1] == second.command[:-1]
    assert [child.env for child in (first, second)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "no_grpc_proxy": "10.0.0.1,127.0.0.1"},
        {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "no_grpc_proxy": "10.0.0.1,127.0.0.1"},
    ]


def test_run_resume_never_becomes_auto_once_the_run_has_begun():
    words = ["train", "run.resume=never"]
    for goes_on in (True, False):
        [child] = children(words, [None], goes_on=goes_on)
        assert (child.command[-1] == "run.resume=auto") == goes_on
