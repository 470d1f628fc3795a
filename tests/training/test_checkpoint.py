"""Checkpoints: bit-equal, on any mesh, through kill -9, and one line for each thing that can be wrong."""

import contextlib
import errno
import gc
import itertools
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.selection import few

from ppctl.errors import CheckpointError
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.checksum import digest

CONFIG = {"model": {"d_model": 8}, "schedule": {"name": "gpipe"}}


def mesh(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("a", "b")[: len(sizes)])


def state(step=1, sharding=None):
    """A tree with the kinds of nodes and dtypes that a train state has, different at every step."""
    sharding = sharding or NamedSharding(mesh(1), PartitionSpec())
    keys = jax.random.split(jax.random.key(step), 3)
    params = {
        "blocks": (jax.random.normal(keys[0], (8, 16), jnp.float32), jax.random.normal(keys[1], (8,), jnp.bfloat16)),
        "head": jax.random.normal(keys[2], (8, 4), jnp.float32),
    }
    return jax.device_put({"params": params, "count": jnp.full((8,), step, jnp.int32)}, sharding)


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def assert_bit_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved(directory, steps=(1,), keep=3):
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"config": CONFIG, "step": step})
    return Checkpoints(directory, keep=None)


def message(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_state_and_meta_come_back_as_they_were_saved(tmp_path):
    checkpoints = saved(tmp_path, steps=(1, 2))
    assert checkpoints.steps() == (1, 2)
    assert checkpoints.latest() == 2
    for step in (1, 2):
        assert_bit_equal(checkpoints.restore(step, abstract(state())), state(step))
        assert checkpoints.meta(step) == {"config": CONFIG, "step": step}


def test_a_fresh_directory_holds_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert checkpoints.steps() == ()
        assert checkpoints.latest() is None


def test_a_relative_directory_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("runs/a")
    assert (tmp_path / "runs" / "a" / "1" / "state").is_dir()


@pytest.mark.parametrize(
    ("sizes", "spec"), few([((8,), ("a",)), ((2, 4), ("b", "a")), ((4, 2), (("a", "b"),)), ((1,), ())], 2), ids=str
)
def test_a_checkpoint_restores_bit_equal_onto_another_mesh(tmp_path, sizes, spec):
    there = NamedSharding(mesh(2, 2), PartitionSpec("b"))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(sharding=there), {})
        checkpoints.wait()
        here = NamedSharding(mesh(*sizes), PartitionSpec(*spec[:1]))
        got = checkpoints.restore(1, abstract(state(), here))
    assert_bit_equal(got, state())
    assert all(leaf.sharding == here for leaf in jax.tree.leaves(got))


def test_retention_keeps_exactly_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 3, 7, 10):
            checkpoints.save(step, state(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == (7, 10)
    assert saved(tmp_path, steps=(11,), keep=2).steps() == (10, 11)


def test_buffers_donated_right_after_save_leave_the_checkpoint_intact(tmp_path):
    sharding = NamedSharding(mesh(8), PartitionSpec("a"))
    erase = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)

    def big():
        return {f"w{i}": jnp.full((1024, 512), i + 1, jnp.float32, device=sharding) for i in range(8)}

    other = big()
    erase(other)
    assert all(leaf.is_deleted() for leaf in other.values())  # donation happens on this backend
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        tree = big()
        checkpoints.save(1, tree, {})
        jax.block_until_ready(erase(tree))
        checkpoints.wait()
        got = checkpoints.restore(1, abstract(other))
    for i in range(8):
        np.testing.assert_array_equal(got[f"w{i}"], i + 1)


def test_meta_is_what_it_was_when_save_was_called(tmp_path):
    meta = {"losses": [1.5, None], "nested": {"a": {}}}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(), meta)
        meta["losses"].append(3)
        checkpoints.wait()
        assert checkpoints.meta(1) == {"losses": [1.5, None], "nested": {"a": {}}}


def test_numpy_scalars_and_random_keys_come_back(tmp_path):
    tree = {"scalar": np.float32(0.5), "key": jax.random.key(3)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, tree, {})
        checkpoints.wait()
        sharding = NamedSharding(mesh(1), PartitionSpec())
        want = {"scalar": jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding), "key": abstract(tree["key"])}
        got = checkpoints.restore(1, want)
    assert got["scalar"] == tree["scalar"]
    assert got["key"] == tree["key"]


def test_saving_the_current_step_again_writes_nothing(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(), {"first": True})
        checkpoints.save(1, state(), {"first": False})
        assert checkpoints.meta(1) == {"first": True}
    with Checkpoints(tmp_path, keep=2) as resumed:
        resumed.restore(1, abstract(state()))
        resumed.save(1, state(), {"first": False})
        assert resumed.meta(1) == {"first": True}


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_is_not_newer_than_what_is_there_is_refused(tmp_path, step):
    saved(tmp_path, steps=(1, 2))
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(step, state(), {})
    held = "steps 1, 2" if step == 1 else "step 2"
    assert message(error) == (
        f"Step {step} cannot be saved: {tmp_path} holds {held}, not older, of another run. "
        "Use another run.dir, or move them away."
    )
    assert saved(tmp_path, steps=()).meta(2)["step"] == 2


def test_reading_neither_creates_nor_removes_anything(tmp_path):
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert Checkpoints(tmp_path, keep=None).steps() == ()
    assert Checkpoints(tmp_path / "new", keep=None).latest() is None
    assert list(tmp_path.iterdir()) == [unfinished]


def test_a_checkpoint_half_removed_by_a_kill_does_not_stop_the_run(tmp_path):
    saved(tmp_path, steps=(1, 2), keep=2)
    shutil.rmtree(tmp_path / "1" / "state")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(CheckpointError, match=r"/1 cannot be read: .*Requested checkpointables"):
            checkpoints.restore(1, abstract(state()))
        assert_bit_equal(checkpoints.restore(2, abstract(state())), state(2))
        checkpoints.save(3, state(3), {})
        checkpoints.wait()
        assert checkpoints.steps() == (2, 3)


# Errors


def test_a_missing_checkpoint_is_named_with_those_there(tmp_path):
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, keep=None).restore(5, abstract(state()))
    assert message(error) == (
        f"No checkpoint of step 5 in {tmp_path}: it holds none. Use another run.dir, "
        "or run.resume=auto to take what is there."
    )
    with pytest.raises(CheckpointError) as error:
        saved(tmp_path, steps=(1, 2)).meta(5)
    assert "it holds steps 1, 2. Use one of them" in message(error)


def changed(path, leaf):
    """The abstract state with the leaf at `path` (keys joined by /) replaced, or removed when it is None."""
    tree = abstract(state())
    *parents, last = path.split("/")
    node = tree
    for key in parents:
        node = node[key]
    if leaf is None:
        del node[last]
    else:
        node[last] = jax.ShapeDtypeStruct(*leaf, sharding=NamedSharding(mesh(1), PartitionSpec()))
    return tree


@pytest.mark.parametrize(
    ("path", "leaf", "said"),
    [
        ("params/head", ((8, 5), "float32"), "params/head is stored as float32[8,4], wanted float32[8,5]"),
        ("params/head", None, "params/head is stored as float32[8,4], not wanted"),
        ("params/norm", ((8,), "float32"), "params/norm is not stored, wanted float32[8]"),
        ("params/head", ((8, 4), "bfloat16"), "params/head is stored as float32[8,4], wanted bfloat16[8,4]"),
        ("count", ((8,), "float32"), "count is stored as int32[8], wanted float32[8]"),
    ],
    ids=["shape", "not wanted", "missing", "dtype", "int"],
)
def test_a_state_that_does_not_fit_is_refused_with_the_leaf(tmp_path, path, leaf, said):
    checkpoints = saved(tmp_path)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(1, changed(path, leaf))
    assert message(error) == (
        f"Checkpoint {tmp_path / '1'} does not fit: {said}. Set run.resume=never and another run.dir, or restore the "
        'settings it was trained with: {"model":{"d_model":8},"schedule":{"name":"gpipe"}}.'
    )


def test_of_several_leaves_that_differ_the_first_is_named(tmp_path):
    with pytest.raises(CheckpointError) as error:
        saved(tmp_path).restore(1, {})
    assert "count is stored as int32[8], not wanted (the first of 4 leaves that differ)" in message(error)


ARRAYS = ("state/manifest.ocdbt", "state/_METADATA", "state/array_metadatas/*", "state/d/*")


@pytest.mark.parametrize("pattern", few(ARRAYS, 1))
def test_truncated_arrays_are_an_error(tmp_path, pattern, capfd):
    checkpoints = saved(tmp_path, steps=(1, 2))
    truncate(tmp_path / "2", pattern)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(2, abstract(state()))
    assert message(error).startswith(f"Checkpoint {tmp_path / '2'} cannot be read: ")
    assert message(error).endswith(". Move it away to resume from step 1.")
    del error
    gc.collect()
    assert_bit_equal(checkpoints.restore(1, abstract(state())), state(1))
    assert capfd.readouterr() == ("", "")


def test_a_truncated_array_among_many_is_an_error_and_nothing_else_is_printed(tmp_path, capfd):
    noise = {f"w{i}": jax.random.normal(jax.random.key(i), (512, 512), jnp.float32) for i in range(16)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, noise, {})
        checkpoints.wait()
        biggest = max(
            (tmp_path / "1" / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size
        )
        os.truncate(biggest, biggest.stat().st_size // 2)
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(1, abstract(noise))
    assert message(error).startswith(f"Checkpoint {tmp_path / '1'} cannot be read: ")
    del error
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_truncated_meta_is_an_error(tmp_path):
    checkpoints = saved(tmp_path)
    truncate(tmp_path / "1", "meta/data.json")
    with pytest.raises(CheckpointError) as error:
        checkpoints.meta(1)
    assert "line 1 column" in message(error)
    assert message(error).endswith(". Move it away to start from the beginning.")


def truncate(directory, pattern):
    (file,) = directory.glob(pattern)
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_directory_that_cannot_be_written_is_an_error_at_once(tmp_path, below):
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / below
    with pytest.raises(CheckpointError) as error:
        Checkpoints(directory, keep=1)
    assert message(error).startswith(f"Checkpoints cannot be written to {directory}: ")
    assert message(error).endswith(". Use another run.dir, or make this one writable.")


def test_a_read_only_directory_is_an_error_at_once(tmp_path, monkeypatch):
    def refused(prefix, dir):  # by changed permissions only where the tests do not run as root
        raise PermissionError(errno.EACCES, "Permission denied", dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*: Permission denied\."):
        Checkpoints(tmp_path, keep=1)


@contextlib.contextmanager
def full_disk(limit_bytes):
    """Files stop growing at a size, as all do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit_bytes", [10, 100_000], ids=["no file fits", "arrays do not fit"])
@pytest.mark.parametrize("asked", ["wait", "close", "save"])
def test_a_save_that_fails_in_the_background_is_raised_later_and_once(tmp_path, asked, limit_bytes, capfd):
    noise = {"w": jax.random.normal(jax.random.key(0), (512, 512), jnp.float32)}  # 1 MB that does not compress
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(), {})
    checkpoints.wait()
    digest(noise)  # compiled while JAX's compilation cache can be written
    ask = {"wait": checkpoints.wait, "close": checkpoints.close, "save": lambda: checkpoints.save(3, noise, {})}
    with full_disk(limit_bytes):
        checkpoints.save(2, noise, {})
        with pytest.raises(CheckpointError) as error:
            ask[asked]()
    assert message(error).startswith(f"Checkpoint {tmp_path / '2'} could not be written: ")
    assert "File too large" in message(error)
    assert message(error).endswith(
        "; step 1 is the newest finished one. Free or extend the disk, or use another run.dir."
    )
    checkpoints.close()
    assert checkpoints.steps() == (1,)
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_vanishes_is_an_error_of_the_next_save(tmp_path):
    directory = tmp_path / "checkpoints"
    with Checkpoints(directory, keep=1) as checkpoints:
        directory.rmdir()
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(1, state(), {})
        assert message(error) == (
            f"Checkpoint {directory / '1'} could not be written: No such file or directory; no checkpoint is finished. "
            "Free or extend the disk, or use another run.dir."
        )


def test_saving_and_restoring_log_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)  # what Hydra sets for the root logger
    saved(tmp_path).restore(1, abstract(state()))
    assert [record for record in caplog.records if "orbax" in record.pathname] == []


# kill -9

VICTIM = """
import itertools, sys
import jax, numpy
from ppctl.training.checkpoint.checkpoint import Checkpoints
with Checkpoints(sys.argv[1], keep=1) as checkpoints:
    for step in itertools.count(1):
        values = numpy.random.default_rng(step).random((4, 1 << 20), numpy.float32)  # 16 MB
        checkpoints.save(step, {"w": [jax.numpy.asarray(row) for row in values]}, {"step": step})
        print(step, flush=True)
"""


@pytest.mark.full
@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_finished_checkpoint(tmp_path):
    rng = random.Random(0)
    delays = [0.0, 0.0] + [rng.uniform(0.0, 0.5) for _ in range(6)]
    directories = [tmp_path / str(i) for i in range(len(delays))]
    victims = [start_victim(directory) for directory in directories]
    interrupted = 0
    for victim, directory, delay in zip(victims, directories, delays, strict=True):
        # A save returns after the one before it is finished: once "2" is printed, step 1 is on disk.
        next(line for line in victim.stdout if int(line) >= 2)
        time.sleep(delay)
        victim.send_signal(signal.SIGKILL)
        started = max([2, *map(int, victim.stdout)])
        victim.wait()
        victim.stdout.close()
        interrupted += any(directory.glob("*.orbax-checkpoint-tmp"))
        check_after_kill(directory, started)
    assert interrupted > 0


def start_victim(directory):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(directory)], stdout=subprocess.PIPE, text=True, env=environment
    )


def check_after_kill(directory, started):
    sharding = NamedSharding(mesh(1), PartitionSpec())
    wanted = {"w": [jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=sharding)] * 4}
    with Checkpoints(directory, keep=1) as checkpoints:
        last = checkpoints.latest()
        assert last is not None
        assert last >= started - 1
        got = checkpoints.restore(last, wanted)
        want = np.random.default_rng(last).random((4, 1 << 20), np.float32)
        for row, leaf in itertools.zip_longest(want, got["w"]):
            np.testing.assert_array_equal(leaf, row)
        assert checkpoints.meta(last) == {"step": last}
        checkpoints.save(last + 1, got, {})
    assert [path.name for path in directory.iterdir()] == [str(last + 1)]
