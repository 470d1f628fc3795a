"""Saves that fail while a run trains: noted at once, then handled by run.checkpoint.on_failure."""

import os
import re
import resource
import subprocess
import sys
import textwrap
import time

import pytest
from support.selection import full

from ppctl import cli
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints
from ppctl.training.run.metrics import Metrics

WORDS = (  # a state of megabytes; the records of steps are far from 100 kB
    "model=mlp model.num_layers=2 model.d_model=256 data=regression data.batch_size=8 "
    "data.num_rows=256 data.num_features=5 data.num_targets=3 mesh=1x1 executor=reference "
    "schedule.num_microbatches=2 run.platform=cpu run.dtype=float32 run.eval_every=null "
    "run.trackers=[] run.checkpoint.every=2 run.checkpoint.keep=9"
)


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """A function that trains and calls `at[step]` when that step is logged and the first save, if
    any, is finished.

    It gives the exit code, stdout, stderr and the steps saved.
    """

    def train(at, *words):
        log = Metrics.log

        def spy(self, record, *attached):
            log(self, record, *attached)
            if record["step"] in at:
                while (tmp_path / "run" / "checkpoints" / "2.orbax-checkpoint-tmp").exists():
                    time.sleep(0.001)
                at[record["step"]]()

        monkeypatch.setattr(Metrics, "log", spy)
        try:
            code = cli.main(["train", *WORDS.split(), f"run.dir={tmp_path / 'run'}", *words])
        finally:
            disk(full=False)
        return (
            code,
            *capsys.readouterr(),
            StoredCheckpoints(tmp_path / "run" / "checkpoints").steps(),
        )

    return train


def disk(*, full):
    """Files stop growing at a size, as all do on a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if full else hard, hard))


@pytest.mark.full
def test_continue_prints_a_note_and_saves_again_when_possible(train, tmp_path, monkeypatch):
    say = Metrics.note

    def note(self, text):
        say(self, text)
        disk(full=False)

    monkeypatch.setattr(Metrics, "note", note)
    at = {3: lambda: disk(full=True)}
    code, out, err, steps = train(at, "run.num_steps=8", "run.checkpoint.on_failure=continue")
    assert (code, err, steps) == (0, "", (2, 6, 8))
    (note,) = [line for line in out.splitlines() if line.startswith("note")]
    assert note.startswith(f"note: Checkpoint {tmp_path}/run/checkpoints/4 could not be written: ")
    assert "File too large" in note
    assert note.endswith(
        "; step 2 is the newest finished one. Free or extend the disk, or use another run.dir. "
        "The next save tries again (run.checkpoint.on_failure=continue)."
    )


@pytest.mark.full
def test_continue_ends_with_the_error_if_the_last_save_fails(train, tmp_path):
    def full_after_the_save_of_step_4():
        while not (tmp_path / "run" / "checkpoints" / "4").exists():
            time.sleep(0.001)
        disk(full=True)

    at = {5: full_after_the_save_of_step_4}
    code, out, err, steps = train(at, "run.num_steps=8", "run.checkpoint.on_failure=continue")
    assert (code, steps) == (2, (2, 4))
    assert out.count("note: ") == 1  # step 6
    assert err.startswith(f"ppctl: Checkpoint {tmp_path}/run/checkpoints/8 could not be written: ")
    assert "; step 4 is the newest finished one. " in err
    assert err.count("\n") == 1


@pytest.mark.full
def test_stop_ends_the_run_long_before_the_next_save(train, tmp_path):
    words = ("run.num_steps=200", "run.checkpoint.every=100", "run.log_every=100")
    code, _, err, steps = train({99: lambda: disk(full=True)}, *words)
    assert (code, steps) == (2, ())
    found = re.fullmatch(
        rf"ppctl: Checkpoint {tmp_path}/run/checkpoints/100 could not be written: .*; no "
        r"checkpoint is finished\. Free or extend the disk, or use another run\.dir\. Training "
        r"stopped after step (\d+); run\.checkpoint\.on_failure=continue goes on\.\n",
        err,
    )
    assert found is not None, err
    assert 100 <= int(found[1]) < 200


@pytest.mark.parametrize("on_failure", ["stop", full("continue")])
def test_a_directory_that_cannot_be_written_for_a_while(train, tmp_path, on_failure):
    directory, away = tmp_path / "run" / "checkpoints", tmp_path / "away"

    def take_away():
        directory.rename(away)
        directory.touch()  # permissions do not bind the user who may run the tests

    def bring_back():
        if away.exists():
            directory.unlink()
            away.rename(directory)

    words = ("run.num_steps=8", f"run.checkpoint.on_failure={on_failure}")
    code, out, err, steps = train({3: take_away, 5: bring_back}, *words)
    said = (
        f"Checkpoint {directory}/4 could not be written: Not a directory; no checkpoint is "
        "finished. "
    )
    if on_failure == "continue":
        assert (code, err, steps) == (0, "", (2, 6, 8))
        assert f"note: {said}" in out
    else:
        bring_back()
        assert code == 2
        assert err.startswith(f"ppctl: {said}")
        assert "Training stopped after step 4;" in err
        assert StoredCheckpoints(directory).steps() == (2,)


def test_settings_are_checked(capsys):
    assert cli.main(["train", "run.checkpoint.on_failure=ignore"]) == 2
    assert "run.checkpoint.on_failure=ignore" in capsys.readouterr().err


# several processes

TWO = textwrap.dedent(
    """
    import os, pathlib, resource, sys
    directory, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
    said = open(f"{directory}.{index}", "w")  # not stdout, where Gloo prints too
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, shutdown_timeout_seconds=5)
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from ppctl.training.checkpoint import orbax_io
    from ppctl.training.checkpoint.checkpoint import Checkpoints
    from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints
    from ppctl.launch.join_processes import gather
    from ppctl.errors import DamagedError, SaveError

    mesh = Mesh(np.array(jax.devices()), ("x",))
    def place(array, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        shape, read = array.shape, lambda i: array[i]
        return jax.make_array_from_callback(shape, sharding, read, dtype=array.dtype)
    def state(step):
        rng = np.random.default_rng(step)
        w, b = (rng.random(shape, np.float32) for shape in ((512, 128), (8, 8)))
        return {"w": place(w, "x"), "b": place(b)}
    def same(got, step):
        def shards(tree):
            return [shard.data for a in jax.tree.leaves(tree) for shard in a.addressable_shards]
        return all((a == b).all() for a, b in zip(shards(got), shards(state(step)), strict=True))
    def failed(error, do):
        try:
            do()
        except error as found:
            return str(found)
        raise SystemExit("nothing failed")

    orbax_io.SAVE_TIMEOUT_S = 4
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
    wanted = jax.tree.map(like, state(0))
    checkpoints = Checkpoints(directory, keep=5, gather=gather)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.wait()
    assert same(checkpoints.stored.restore(2, wanted), 2)

    # only one process reads the damaged file; both refuse the checkpoint
    for damage in ("flip", "cut"):
        if index == 0:
            files = pathlib.Path(directory, "2", "state", "ocdbt.process_1").rglob("d/*")
            file = max(files, key=os.path.getsize)
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 128
            file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
        gather("")
        error = failed(DamagedError, lambda: checkpoints.stored.restore(2, wanted))
        print(damage, error, file=said, flush=True)
    assert checkpoints.set_aside(2).startswith("2.damaged")
    gather("")
    assert checkpoints.stored.steps() == (1,)
    assert same(checkpoints.stored.restore(1, wanted), 1)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    def full(process):
        if index == process:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        checkpoints.save(3, state(3), {})
        while True:
            checkpoints.poll()
    for process in (1, 0):  # the other waits for it as long as SAVE_TIMEOUT_S
        print("full", failed(SaveError, lambda: full(process)), file=said, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert checkpoints.stored.steps() == (1,)
    checkpoints.save(4, state(4), {})
    checkpoints.close()
    assert checkpoints.stored.steps() == (1, 4)
    assert same(StoredCheckpoints(directory, gather=gather).restore(4, wanted), 4)
    print("done", file=said, flush=True)
    os._exit(0)
    """
)


@pytest.mark.full
@pytest.mark.slow
def test_several_processes_decide_the_same(tmp_path, free_port):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_ENABLE_X64": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tmp_path / "checkpoints"), str(free_port), str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        results = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (out, err) in enumerate(results):
        assert processes[index].returncode == 0, out + err
        flipped, cut, first, second, done = (
            (tmp_path / f"checkpoints.{index}").read_text().splitlines()
        )
        assert "w does not have the checksum it was saved with" in flipped
        assert re.search(r"OUT_OF_RANGE.* \(process 1\)", cut)
        assert re.search(r"File too large.* \(process 1\);", first)
        assert re.search(r"File too large.* \(process 0\);", second)
        assert done == "done"


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
