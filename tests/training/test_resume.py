"""Runs that are interrupted: what real processes lose to real signals, and that the rest goes on
bit for bit.
"""

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from support.environment import BY_USER
from support.selection import full

from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints

NUM_STEPS, EVERY = 240, 40
WORDS = (
    "model=mlp model.num_layers=2 model.d_model=16 data=regression data.batch_size=8 "
    "data.num_rows=1024 data.num_features=5 data.num_targets=3 mesh=1x2 schedule=gpipe "
    f"schedule.num_microbatches=2 run.platform=cpu run.num_steps={NUM_STEPS} run.eval_every=50 "
    f"run.checkpoint.every={EVERY} run.trackers=[]"
).split()

# A process whose checkpoint directory turns into a file just when Orbax is about to write the
# second checkpoint.
VANISHING = """
import shutil, sys
from ppctl import cli
from ppctl.training.checkpoint import checkpoint

def probe(directory):
    if any(each.name.isdecimal() for each in directory.iterdir()):
        shutil.rmtree(directory)
        directory.write_text("")

checkpoint.probe = probe
cli.console_script()
"""
SLOW_TO_SAVE = """
import time
from ppctl import cli
from ppctl.training.checkpoint.checkpoint import Checkpoints

Checkpoints.wait = lambda self: time.sleep(600)
cli.console_script()
"""
INTERRUPTED_IMPORT = """
import os, signal, sys
from ppctl import cli

def interrupt(event, args):
    if event == "import" and args[0] == "{module}" and "jax" in sys.modules:
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
cli.console_script()
"""


class Process:
    """`ppctl train` with these tests' settings, in a separate process; `lines` grows as it
    prints.
    """

    def __init__(self, run_dir, *words, program=("-m", "ppctl.cli")):
        self.run_dir, self.lines = run_dir, []
        command = [sys.executable, *program, "train", *WORDS, f"run.dir={run_dir}", *words]
        self.popen = subprocess.Popen(
            command,
            env=BY_USER | {"PYTHONUNBUFFERED": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.popen.stdout.readline, ""))
        )
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.popen.kill()
        self.end()

    def wait_until(self, reached):
        """Nothing, once reached() holds; fails if the process ends first."""
        while not reached():
            assert self.popen.poll() is None, "".join(self.lines)
            time.sleep(0.02)

    def has_printed(self, text):
        return any(text in line for line in self.lines)

    def has_trained(self, step):
        return len(records(self.run_dir)) >= step

    def end(self, timeout_s=120):
        """The exit code."""
        code = self.popen.wait(timeout_s)
        self._reader.join()
        self.popen.stdout.close()
        return code


def complete(run_dir, *words):
    """The output of a process that trains to the end."""
    with Process(run_dir, *words) as process:
        assert process.end() == 0, "".join(process.lines)
    return "".join(process.lines)


def records(run_dir, name="metrics.jsonl"):
    """The whole lines of a file of records; a line may be half written where the process was
    killed.
    """
    path = run_dir / name
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def results(run_dir):
    """What must be the same in any two runs that train the same: no times."""
    return [
        {key: record[key] for key in ("step", "loss", "grad_norm", "lr")}
        for record in records(run_dir)
    ]


def arrays(run_dir, step=NUM_STEPS):
    """The bytes of every array of a checkpoint, by name."""
    path = str(run_dir / "checkpoints" / str(step))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    described = ocp.checkpointables_metadata(path).metadata["state"]
    wanted = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), described
    )
    state = ocp.load_checkpointables(path, {"state": wanted})["state"]
    return {
        jax.tree_util.keystr(key): np.asarray(a).tobytes()
        for key, a in jax.tree.leaves_with_path(state)
    }


def latest(run_dir):
    return StoredCheckpoints(run_dir / "checkpoints").latest() or 0


def going_on_from(step):
    """The words of a start; a busy machine may have finished no checkpoint before a kill."""
    return f"resuming after step {step}" if step else "from the start"


def assert_same_run(run_dir, uninterrupted):
    assert [record["step"] for record in records(run_dir)] == list(range(1, NUM_STEPS + 1))
    assert results(run_dir) == results(uninterrupted)
    assert records(run_dir, "eval.jsonl") == records(uninterrupted, "eval.jsonl")
    assert arrays(run_dir) == arrays(uninterrupted)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    complete(run_dir)
    return run_dir


@pytest.mark.full
def test_a_run_ended_by_signals_saves_its_last_step_and_resumes_bit_for_bit(
    tmp_path, uninterrupted
):
    run_dir, start = tmp_path / "run", 0
    for number in (signal.SIGTERM, signal.SIGINT):
        name = number.name
        with Process(run_dir) as process:
            process.wait_until(lambda: process.has_trained(start + 33))  # noqa: B023  called at once
            process.popen.send_signal(number)
            assert process.end() == 128 + number
        step = latest(run_dir)
        assert start + 33 <= step < NUM_STEPS
        assert [record["step"] for record in records(run_dir)] == list(range(1, step + 1))
        assert process.lines[-3].startswith(f"{name}: saving step {step} and leaving; ")
        assert process.lines[-2].startswith("plan ")
        assert (
            process.lines[-1]
            == f"interrupted at step {step}; checkpoints, metrics and logs are in {run_dir}\n"
        )
        assert process.has_printed(going_on_from(start))
        start = step
    assert going_on_from(start) in complete(run_dir)
    assert_same_run(run_dir, uninterrupted)


def kill_moments(names):
    """(name, when to kill a process given its start step); random, but the same in every run of
    this test.
    """
    chance = random.Random(0)

    def after(seconds, text=""):
        def wait(process, _start):
            process.wait_until(lambda: process.has_printed(text) or not text)
            time.sleep(seconds)

        return wait

    def trained(steps):
        return lambda process, start: process.wait_until(lambda: process.has_trained(start + steps))

    def saving(process, start):
        files = process.run_dir / "checkpoints"
        process.wait_until(lambda: process.has_trained(start + EVERY) and any(files.glob("*tmp*")))
        time.sleep(chance.uniform(0, 0.03))

    def evaluating(process, start):
        process.wait_until(lambda: process.has_trained((start // 50 + 1) * 50))

    moments = {
        "importing": after(chance.uniform(0.2, 1.0)),
        "compiling": after(chance.uniform(0, 1.5), "compiling"),
        "stepping": trained(chance.randrange(EVERY + 5, EVERY + 40)),
        "saving": saving,
        "evaluating": evaluating,
        "saving again": saving,
        "stepping again": trained(chance.randrange(1, 45)),
    }
    return [(name, moment) for name, moment in moments.items() if name in names]


MOMENTS = (
    "importing",
    "compiling",
    "stepping",
    "saving",
    "evaluating",
    "saving again",
    "stepping again",
)


@pytest.mark.full
@pytest.mark.parametrize("moments", ["stepping", full(", ".join(MOMENTS))])
def test_kill_9_at_any_moment_loses_only_steps_since_the_last_checkpoint(
    tmp_path, uninterrupted, moments
):
    run_dir, was_killed_in = tmp_path / "run", []
    for name, wait in kill_moments(moments.split(", ")):
        start = latest(run_dir)
        with Process(run_dir) as process:
            wait(process, start)
            process.popen.kill()
            assert process.end() == -signal.SIGKILL, name
        for line in process.lines:  # none if it was killed before
            if line.startswith("run "):
                assert line.endswith(f"{going_on_from(start)}\n")
        assert start <= latest(run_dir) < NUM_STEPS, name
        assert len(records(run_dir)) >= latest(run_dir), name
        was_killed_in.append(name)
    assert was_killed_in
    assert going_on_from(latest(run_dir)) in complete(run_dir)
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.parametrize(
    "module", ["numpy.linalg", full("jaxlib.xla_client"), full("orbax.checkpoint")]
)
def test_ctrl_c_while_jax_is_imported_ends_the_process_with_one_line(tmp_path, module):
    """Raised there, a KeyboardInterrupt would become an ImportError, or be lost."""
    with Process(
        tmp_path / "run", program=("-c", INTERRUPTED_IMPORT.format(module=module))
    ) as process:
        assert process.end() == 130
    assert process.lines == ["ppctl: interrupted.\n"]
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_the_process_without_a_traceback(tmp_path, number):
    with Process(tmp_path / "run") as process:
        process.wait_until(lambda: process.has_printed("compiling"))
        process.popen.send_signal(number)
        code = process.end()
    if number == signal.SIGTERM:
        assert code == -signal.SIGTERM  # 143 in a shell
        assert process.lines[-1] == "compiling ...\n"
    else:
        assert code == 130
        assert process.lines[-2:] == ["compiling ...\n", "ppctl: interrupted.\n"]
    assert records(tmp_path / "run") == []


@pytest.mark.full
def test_a_run_with_a_closed_pipe_saves_its_last_step(tmp_path):
    run_dir, words = (
        tmp_path / "run",
        [*WORDS, "run.num_steps=100000", "run.checkpoint.every=null", "run.log_every=1"],
    )
    train = shlex.join([sys.executable, "-m", "ppctl.cli", "train", *words, f"run.dir={run_dir}"])
    command = f"set -o pipefail; {train} | grep -m 1 'step  *3/'"
    ended = subprocess.run(
        ["bash", "-c", command], env=BY_USER, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
    last = records(run_dir, "status.jsonl")[-1]
    assert (last["status"], last["reason"]) == ("interrupted", "SIGPIPE")
    assert last["step"] == latest(run_dir) > 2


@pytest.mark.full
def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path):
    run_dir = tmp_path / "run"
    with Process(
        run_dir, "run.checkpoint.every=null", "run.num_steps=100000", program=("-c", SLOW_TO_SAVE)
    ) as process:
        process.wait_until(lambda: process.has_trained(5))
        process.popen.send_signal(signal.SIGINT)
        process.wait_until(lambda: process.has_printed("SIGINT: saving step"))
        time.sleep(0.3)
        assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGINT)
        assert process.end() == -signal.SIGINT  # 130 in a shell
    assert process.lines[-1].endswith("leaving; a second SIGINT ends it at once, unsaved\n")
    assert latest(run_dir) == 0


@pytest.mark.full
@pytest.mark.slow
def test_a_save_that_fails_ends_the_process_with_one_line(tmp_path):
    run_dir = tmp_path / "run"
    with Process(run_dir, "run.eval_every=null", program=("-c", VANISHING)) as process:
        process.wait_until(lambda: process.has_trained(EVERY))
        process.wait_until(lambda: (run_dir / "checkpoints").is_file())
        assert process.end() == 2
    errors = [
        line
        for line in process.lines
        if not re.match(r"(model|data|mesh|schedule|run|plan|step|comp)", line)
    ]
    assert len(errors) == 1, errors
    assert re.fullmatch(
        rf"ppctl: Checkpoint {run_dir}/checkpoints/\d+ could not be written: Not a directory; no "
        r"checkpoint is finished\. Use another run\.dir, or make this one writable\. Training "
        r"stopped after step \d+; run\.checkpoint\.on_failure=continue goes on\.\n",
        errors[0],
    )
