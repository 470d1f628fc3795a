"""Faults in one process of two: both end or continue, with one message."""

import json
import re
import shutil

import pytest
from support.collective_order import assert_ordered
from support.processes import WORDS, processes
from support.selection import full
from support.small_runs import records

from ppctl import cli

NUM_STEPS = 8
SETTINGS = (  # each process saves megabytes; the records of steps are far from 100 kB
    *("mesh=1x2", "model.num_layers=2", "model.d_model=256", f"run.num_steps={NUM_STEPS}"),
    *("run.checkpoint.every=2", "run.checkpoint.keep=9"),
)
# How long one waits for another that does not save.
QUICK = """
from ppctl import cli
from ppctl.training.checkpoint import orbax_io

orbax_io.SAVE_TIMEOUT_S = 10
"""
PLAIN = QUICK + "cli.console_script()"
# The process's disk is full while step 4 is saved.
FULL = (
    QUICK
    + """
import resource
from ppctl import cli
from ppctl.training.checkpoint.checkpoint import Checkpoints

hard, save = resource.getrlimit(resource.RLIMIT_FSIZE)[1], Checkpoints.save

def limited(self, step, *args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if step == 4 else hard, hard))
    return save(self, step, *args)

Checkpoints.save = limited
cli.console_script()
"""
)
# The process cannot write where the checkpoints are to be. (Rights do not bind the user who may run
# the tests.)
READ_ONLY = (
    QUICK
    + """
import errno, os
from ppctl import cli
from ppctl.training.checkpoint import checkpoint

def probe(directory):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))

checkpoint.probe = probe
cli.console_script()
"""
)
# The process has a separate directory, like a machine that does not share it.
ELSEWHERE = "import os; from ppctl import cli; os.chdir('elsewhere'); cli.console_script()"
# The process cannot read its examples of the batch of step 6, and cannot tell before.
BAD_BATCH = (
    QUICK
    + """
from ppctl import cli
from ppctl.data.dataset import DataSet
from ppctl.errors import DataError

batches = DataSet.batches

def cut_short(self, start_step=0, rows=None):
    for step, batch in enumerate(batches(self, start_step, rows), start_step):
        if step == 5 and rows is not None:
            raise DataError("The file of step 6 is gone. Restore it.")
        yield batch

DataSet.batches = cut_short
cli.console_script()
"""
)
# The process writes the text of each compiled program into a directory.
WRITING = """
from pathlib import Path
from ppctl import cli
from jax.stages import Lowered

out, compiled = Path({!r}), Lowered.compile
out.mkdir()

def written(self, *args, **how):
    program = compiled(self, *args, **how)
    (out / str(len([*out.iterdir()]))).write_text(program.as_text())
    return program

Lowered.compile = written
"""


def results(run_dir):
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [[record[key] for key in ("step", "loss", "grad_norm")] for record in records]


def checksums(run_dir):
    return json.loads(
        (run_dir / "checkpoints" / str(NUM_STEPS) / "meta" / "data.json").read_text()
    )["checksums"]


def steps(run_dir):
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def said_of(started, what):
    """Every line with `what` in it, of all processes."""
    return [line for process in started for line in process.lines if what in line]


@pytest.mark.full
def test_a_full_disk_of_one_process_loses_a_checkpoint_and_a_flipped_byte_another(tmp_path):
    run_dir = tmp_path / "run"
    words = (*SETTINGS, "run.checkpoint.on_failure=continue")
    with processes(2, run_dir, *words, programs={0: PLAIN, 1: FULL}) as started:
        assert [process.end() for process in started] == [0, 0], said_of(started, "")
    [note] = said_of(started, "could not be written")
    assert note.startswith(f"note: Checkpoint {run_dir}/checkpoints/4 could not be written: ")
    assert re.search(r"File too large.* \(process 1\); step 2 is the newest finished one\. ", note)
    assert steps(run_dir) == {"2", "6", "8"}
    wanted = results(run_dir), checksums(run_dir)

    files = (run_dir / "checkpoints" / "8" / "state" / "ocdbt.process_1").rglob("d/*")
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with processes(2, run_dir, *words) as started:
        assert [process.end() for process in started] == [0, 0], said_of(started, "")
    [line] = said_of(started, "cannot be read")
    assert re.fullmatch(
        rf"Checkpoint {run_dir}/checkpoints/8 cannot be read: \S+ does not have the checksum it "
        r"was saved with( \(.*\))?\. It is now 8\.damaged; trying step 6\n",
        line,
    )
    assert len(said_of(started, "resuming after step 6")) == 1
    assert (results(run_dir), checksums(run_dir)) == wanted
    assert steps(run_dir) == {"2", "6", "8", "8.damaged"}


@pytest.mark.full
def test_a_full_disk_of_the_first_process_ends_both(tmp_path):
    run_dir = tmp_path / "run"
    with processes(2, run_dir, *SETTINGS, programs={0: FULL, 1: PLAIN}) as started:
        assert [process.end(timeout_s=100) for process in started] == [2, 2]
    [line] = said_of(started, "could not be written")
    assert line.startswith(f"ppctl: Checkpoint {run_dir}/checkpoints/4 could not be written: ")
    assert re.search(
        r"File too large.* \(process 0\); step 2 is the newest .* Training stopped after step "
        r"\d+; ",
        line,
    )
    assert said_of(started, "Traceback") == []
    assert {name for name in steps(run_dir) if name.isdecimal()} == {"2"}


@pytest.mark.full
def test_a_directory_that_a_process_cannot_write_ends_both_before_compilation(tmp_path):
    run_dir = tmp_path / "run"
    with processes(2, run_dir, *SETTINGS, programs={0: PLAIN, 1: READ_ONLY}) as started:
        assert [process.end(timeout_s=100) for process in started] == [2, 2]
    [line] = said_of(started, "Read-only file system")
    assert line.startswith(
        f"ppctl: Checkpoints cannot be written to {run_dir}/checkpoints: Read-only file system "
        "(process 1)"
    )
    assert said_of(started, "Checkpoints cannot be written") == [line]
    assert said_of(started, "compiling") == said_of(started, "Traceback") == []


@pytest.fixture(
    scope="module",
    params=[
        "mesh=1x2x2 schedule=1f1b executor.gather=layer executor.remat=full optim=lamb",
        full("mesh=1x2x2 schedule=1f1b executor=mpmd optim=lamb"),
        full("mesh=2x2 schedule=zb_h1"),
        full("mesh=1x2"),
    ],
)
def bad_batch(request, tmp_path_factory):
    """Two processes that end at an unreadable batch of one.

    Returns (run directory, settings, lines, their programs: a directory for each process).
    """
    run_dir = tmp_path_factory.mktemp("bad_batch") / "run"
    settings = ("model.num_layers=4", f"run.num_steps={NUM_STEPS}", *request.param.split())
    texts = [run_dir.with_name(f"programs{process}") for process in range(2)]
    programs = {
        process: WRITING.format(str(out)) + program
        for process, (out, program) in enumerate(zip(texts, (PLAIN, BAD_BATCH), strict=True))
    }
    with processes(2, run_dir, *settings, programs=programs) as failed:
        assert [process.end(timeout_s=200) for process in failed] == [2, 2]
    return run_dir, settings, said_of(failed, ""), texts


def test_an_unreadable_batch_of_one_process_ends_both_after_saving_the_step_before(bad_batch):
    """Both ended at once, and lost all steps since the last save."""
    run_dir, _, lines, _ = bad_batch
    [line] = [line for line in lines if "The file of step 6 is gone" in line]
    assert line == "ppctl: process 1: The file of step 6 is gone. Restore it. Step 5 is saved.\n"
    assert "Traceback" not in "".join(lines)
    assert steps(run_dir) == {"5"}
    assert [step for step, *_ in results(run_dir)] == [1, 2, 3, 4, 5]
    reason, status = line.removeprefix("ppctl: ").strip(), records(run_dir, "status.jsonl")[-1]
    assert (status["status"], status["reason"]) == ("failed", reason)


def test_data_orders_the_collectives_of_each_process(bad_batch):
    """tests/executors/test_order_of_collectives.py reads the programs of one process."""
    for texts in bad_batch[-1]:
        assert_ordered([path.read_text() for path in texts.iterdir()])


@pytest.mark.full
def test_both_resume_after_the_step_before_an_unreadable_batch(bad_batch):
    run_dir, settings, *_ = bad_batch
    with processes(2, run_dir, *settings) as resumed:
        assert [process.end(timeout_s=200) for process in resumed] == [0, 0]
    assert "".join(said_of(resumed, "")).count("resuming after step 5") == 1


@pytest.mark.full
def test_parameters_to_start_from_are_of_one_step(tmp_path, monkeypatch):
    """Each process reads the newest checkpoint that it sees of run.start_from."""
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "mesh=1x2", "model.num_layers=2", "run.checkpoint.every=1", "run.num_steps=2"]
    assert cli.main(["train", *words, "run.dir=base"]) == 0
    shutil.copytree("base", "elsewhere/base", ignore=shutil.ignore_patterns("2"))
    settings = ("mesh=1x2", "model.num_layers=2", "run.start_from=base", "run.num_steps=1")
    with processes(2, tmp_path / "run", *settings, programs={1: ELSEWHERE}) as started:
        assert [process.end(timeout_s=200) for process in started] == [2, 2]
    [line] = said_of(started, "ppctl: ")
    assert line == (
        "ppctl: the step of run.start_from is 2 on process 0 and 1 on process 1. All processes "
        "need the same settings, data and versions.\n"
    )
