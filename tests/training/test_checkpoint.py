"""Checkpoints: bit-equal, on any mesh, in order, and through kill -9."""

import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.checkpoints import CONFIG, abstract, assert_bit_equal, mesh, message, saved, state
from support.selection import full

from ppctl.errors import CheckpointError
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints


def test_state_and_meta_are_restored_as_saved(tmp_path):
    checkpoints = saved(tmp_path, steps=(1, 2))
    assert checkpoints.steps() == (1, 2)
    assert checkpoints.latest() == 2
    for step in (1, 2):
        assert_bit_equal(checkpoints.restore(step, abstract(state())), state(step))
        assert checkpoints.meta(step) == {"config": CONFIG, "step": step}


def test_a_fresh_directory_holds_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert checkpoints.stored.steps() == ()
        assert checkpoints.stored.latest() is None


def test_a_relative_directory_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("runs/a")
    assert (tmp_path / "runs" / "a" / "1" / "state").is_dir()


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [((8,), ("a",)), ((2, 4), ("b", "a")), full(((4, 2), (("a", "b"),))), full(((1,), ()))],
    ids=str,
)
def test_a_checkpoint_restores_bit_equal_onto_another_mesh(tmp_path, sizes, spec):
    there = NamedSharding(mesh(2, 2), PartitionSpec("b"))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(sharding=there), {})
        checkpoints.wait()
        here = NamedSharding(mesh(*sizes), PartitionSpec(*spec[:1]))
        got = checkpoints.stored.restore(1, abstract(state(), here))
    assert_bit_equal(got, state())
    assert all(leaf.sharding == here for leaf in jax.tree.leaves(got))


def test_retention_keeps_exactly_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 3, 7, 10):
            checkpoints.save(step, state(step), {})
        checkpoints.wait()
        assert checkpoints.stored.steps() == (7, 10)
    assert saved(tmp_path, steps=(11,), keep=2).steps() == (10, 11)


def test_buffers_donated_right_after_save_leave_the_checkpoint_intact(tmp_path):
    sharding = NamedSharding(mesh(8), PartitionSpec("a"))
    erase = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)

    def big():
        return {
            f"w{i}": jnp.full((1024, 512), i + 1, jnp.float32, device=sharding) for i in range(8)
        }

    other = big()
    erase(other)
    assert all(leaf.is_deleted() for leaf in other.values())  # donation happens on this backend
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        tree = big()
        checkpoints.save(1, tree, {})
        jax.block_until_ready(erase(tree))
        checkpoints.wait()
        got = checkpoints.stored.restore(1, abstract(other))
    for i in range(8):
        np.testing.assert_array_equal(got[f"w{i}"], i + 1)


def test_meta_is_saved_as_of_the_call(tmp_path):
    meta = {"losses": [1.5, None], "nested": {"a": {}}}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(), meta)
        meta["losses"].append(3)
        checkpoints.wait()
        assert checkpoints.stored.meta(1) == {"losses": [1.5, None], "nested": {"a": {}}}


def test_numpy_scalars_and_random_keys_come_back(tmp_path):
    tree = {"scalar": np.float32(0.5), "key": jax.random.key(3)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, tree, {})
        checkpoints.wait()
        sharding = NamedSharding(mesh(1), PartitionSpec())
        want = {
            "scalar": jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding),
            "key": abstract(tree["key"]),
        }
        got = checkpoints.stored.restore(1, want)
    assert got["scalar"] == tree["scalar"]
    assert got["key"] == tree["key"]


def test_saving_the_current_step_again_writes_no_file(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(), {"first": True})
        checkpoints.save(1, state(), {"first": False})
        assert checkpoints.stored.meta(1) == {"first": True}
    with Checkpoints(tmp_path, keep=2) as resumed:
        resumed.stored.restore(1, abstract(state()))
        resumed.save(1, state(), {"first": False})
        assert resumed.stored.meta(1) == {"first": True}


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_not_newer_than_the_saved_ones_is_refused(tmp_path, step):
    saved(tmp_path, steps=(1, 2))
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(step, state(), {})
    held = "steps 1, 2" if step == 1 else "step 2"
    assert message(error) == (
        f"Step {step} cannot be saved: {tmp_path} already holds {held} of another run. "
        "Use another run.dir, or move these checkpoints away."
    )
    assert saved(tmp_path, steps=()).meta(2)["step"] == 2


def test_reading_neither_creates_nor_removes_anything(tmp_path):
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert StoredCheckpoints(tmp_path).steps() == ()
    assert StoredCheckpoints(tmp_path / "new").latest() is None
    assert list(tmp_path.iterdir()) == [unfinished]


def test_a_checkpoint_half_removed_by_a_kill_does_not_stop_the_run(tmp_path):
    saved(tmp_path, steps=(1, 2), keep=2)
    shutil.rmtree(tmp_path / "1" / "state")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(
            CheckpointError, match=r"/1 cannot be read: .*Requested checkpointables"
        ):
            checkpoints.stored.restore(1, abstract(state()))
        assert_bit_equal(checkpoints.stored.restore(2, abstract(state())), state(2))
        checkpoints.save(3, state(3), {})
        checkpoints.wait()
        assert checkpoints.stored.steps() == (2, 3)


def test_saving_and_restoring_log_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)  # Hydra's setting of the root logger
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
        # A save returns after the one before it is finished: once "2" is printed, step 1 is on
        # disk.
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
        [sys.executable, "-c", VICTIM, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def check_after_kill(directory, started):
    sharding = NamedSharding(mesh(1), PartitionSpec())
    wanted = {"w": [jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=sharding)] * 4}
    with Checkpoints(directory, keep=1) as checkpoints:
        last = checkpoints.stored.latest()
        assert last is not None
        assert last >= started - 1
        got = checkpoints.stored.restore(last, wanted)
        want = np.random.default_rng(last).random((4, 1 << 20), np.float32)
        for row, leaf in itertools.zip_longest(want, got["w"]):
            np.testing.assert_array_equal(leaf, row)
        assert checkpoints.stored.meta(last) == {"step": last}
        checkpoints.save(last + 1, got, {})
    assert [path.name for path in directory.iterdir()] == [str(last + 1)]
