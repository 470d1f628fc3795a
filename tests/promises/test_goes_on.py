"""README: processes, kill -9, and a run that goes on with another layout, executor and number of
processes.
"""

import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from support.environment import BY_USER
from support.promise import EXACT, checkpoints, command, losses, records, train, train_by_processes

CHAIN = (  # (processes, layout), each for 3 steps: the epoch of 8 steps ends in the third
    (1, "mesh=2x2 schedule=interleaved"),
    (2, "mesh=1x4 schedule=zb_h1 executor=mpmd partition=explicit partition.layers=[2,1,1,1]"),
    (4, "mesh=2x2x1 schedule=gpipe"),
    (1, "mesh=1x2 schedule=1f1b executor.remat=layer"),
)
EVERY = 3


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """(run directory, output of each start) of a run that goes on with another layout after every 3
    steps.
    """
    run_dir, outputs = tmp_path_factory.mktemp("chain") / "run", []
    for number, (processes, layout) in enumerate(CHAIN, start=1):
        if processes > 1:
            outputs.append(train_by_processes(run_dir, layout, processes, EVERY * number))
        else:
            train(run_dir, layout, num_steps=EVERY * number)
            outputs.append(None)
    return run_dir, outputs


def test_one_two_and_four_processes_train_the_same(chain, reference_losses):
    """simulated CPU devices, 1 to 4 processes"""
    run_dir, _ = chain
    started = [
        record for record in records(run_dir, "status.jsonl") if record["status"] == "started"
    ]
    assert [record["num_processes"] for record in started] == [processes for processes, _ in CHAIN]
    np.testing.assert_allclose(losses(run_dir), reference_losses, rtol=EXACT)


def test_a_run_resumes_with_another_mesh_schedule_partition_and_executor(chain):
    """the same command resumes from the last complete checkpoint, on another mesh if you like."""
    run_dir, outputs = chain
    assert [record["step"] for record in records(run_dir)] == list(range(1, EVERY * len(CHAIN) + 1))
    started = [
        record["step"]
        for record in records(run_dir, "status.jsonl")
        if record["status"] == "started"
    ]
    assert started == [EVERY * number for number in range(len(CHAIN))]
    for number, output in enumerate(outputs):
        assert output is None or f"resuming after step {EVERY * number}" in output
    assert "; explicit (" in outputs[1]


def test_either_executor_resumes_a_checkpoint_of_the_other(chain, reference_losses):
    """one program for all ranks / a program each | either"""
    run_dir, outputs = chain
    executors = ["mpmd" if "executor=mpmd" in layout else "spmd" for _, layout in CHAIN]
    assert executors == ["spmd", "mpmd", "spmd", "spmd"]
    assert "executor  mpmd" in outputs[1]
    assert "executor  mpmd" not in outputs[2]
    found = np.reshape(losses(run_dir), (len(CHAIN), EVERY))
    expected = np.reshape(reference_losses, (len(CHAIN), EVERY))
    for number, executor in enumerate(executors):
        np.testing.assert_allclose(found[number], expected[number], rtol=EXACT, err_msg=executor)


LONG = 100  # steps of the run that is killed
LAYOUT, WORDS = (
    "mesh=1x2 schedule=1f1b executor.remat=layer",
    ["run.checkpoint.every=10", "run.log_every=1"],
)


def killed(run_dir):
    """Train until after a checkpoint in a process that kill -9 ends; return the step of the last
    whole checkpoint.
    """
    words = command(run_dir, LAYOUT, *WORDS, num_steps=LONG)
    with subprocess.Popen(words, env=BY_USER, stdout=subprocess.DEVNULL) as process:
        while len(records(run_dir)) < 15 or not checkpoints(run_dir):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    return checkpoints(run_dir)[-1]


def test_kill_9_loses_only_steps_since_the_last_checkpoint(tmp_path, capsys):
    """**`kill -9` at any moment**: the same command resumes from the last complete checkpoint, on
    another mesh
    """
    run_dir, whole_dir, elsewhere_dir = (tmp_path / name for name in ("run", "whole", "elsewhere"))
    step = killed(run_dir)
    assert 10 <= step < LONG
    shutil.copytree(run_dir, elsewhere_dir)

    uninterrupted = train(whole_dir, LAYOUT, *WORDS, num_steps=LONG)
    capsys.readouterr()
    assert train(run_dir, LAYOUT, *WORDS, num_steps=LONG) == uninterrupted  # bit for bit
    assert f"resuming after step {step}\n" in capsys.readouterr().out
    assert [record["step"] for record in records(run_dir)] == list(range(1, LONG + 1))

    found = train(elsewhere_dir, "mesh=2x2 schedule=interleaved", *WORDS, num_steps=LONG)
    assert f"resuming after step {step}\n" in capsys.readouterr().out
    np.testing.assert_allclose(found, uninterrupted, rtol=1e-7)
