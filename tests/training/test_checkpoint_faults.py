"""One line for each thing that can be wrong with a checkpoint, or with the disk under it."""

import errno
import gc
import os
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.checkpoints import abstract, assert_bit_equal, mesh, message, saved, state
from support.files import full_disk

from ppctl.errors import CheckpointError
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import digest
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints


def test_a_missing_checkpoint_is_named_with_the_existing_ones(tmp_path):
    with pytest.raises(CheckpointError) as error:
        StoredCheckpoints(tmp_path).restore(5, abstract(state()))
    assert message(error) == (
        f"No checkpoint of step 5 in {tmp_path}: it holds none. Use another run.dir, "
        "or run.resume=auto to take the newest one, if any."
    )
    with pytest.raises(CheckpointError) as error:
        saved(tmp_path, steps=(1, 2)).meta(5)
    assert "it holds steps 1, 2. Use one of them" in message(error)


def changed(path, leaf):
    """The abstract state with the leaf at `path` (keys joined by /) replaced, or removed when it is
    None.
    """
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
        (
            "params/head",
            ((8, 5), "float32"),
            "params/head is stored as float32[8,4], wanted float32[8,5]",
        ),
        ("params/head", None, "params/head is stored as float32[8,4], not wanted"),
        ("params/norm", ((8,), "float32"), "params/norm is not stored, wanted float32[8]"),
        (
            "params/head",
            ((8, 4), "bfloat16"),
            "params/head is stored as float32[8,4], wanted bfloat16[8,4]",
        ),
        ("count", ((8,), "float32"), "count is stored as int32[8], wanted float32[8]"),
    ],
    ids=["shape", "not wanted", "missing", "dtype", "int"],
)
def test_each_array_that_does_not_fit_is_named(tmp_path, path, leaf, said):
    assert saved(tmp_path).unlike(1, changed(path, leaf)) == [said]


ARRAYS = ("state/manifest.ocdbt", "state/_METADATA", "state/array_metadatas/*", "state/d/*")


@pytest.mark.full  # tests/training/test_damaged.py cuts each file of a checkpoint
@pytest.mark.parametrize("pattern", ARRAYS)
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


@pytest.mark.full
def test_a_truncated_array_among_many_is_one_error_without_other_output(tmp_path, capfd):
    noise = {
        f"w{i}": jax.random.normal(jax.random.key(i), (256, 256), jnp.float32) for i in range(16)
    }
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, noise, {})
        checkpoints.wait()
        biggest = max(
            (tmp_path / "1" / "state" / "ocdbt.process_0" / "d").iterdir(),
            key=lambda path: path.stat().st_size,
        )
        os.truncate(biggest, biggest.stat().st_size // 2)
        with pytest.raises(CheckpointError) as error:
            checkpoints.stored.restore(1, abstract(noise))
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


@pytest.mark.parametrize("limit_bytes", [10, 100_000], ids=["no file fits", "arrays do not fit"])
@pytest.mark.parametrize("asked", ["wait", "close", "save"])
def test_a_save_that_fails_in_the_background_is_raised_later_and_once(
    tmp_path, asked, limit_bytes, capfd
):
    noise = {
        "w": jax.random.normal(jax.random.key(0), (256, 256), jnp.float32)
    }  # 1 MB that does not compress
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(), {})
    checkpoints.wait()
    digest(noise)  # compiled while JAX's compilation cache can be written
    ask = {
        "wait": checkpoints.wait,
        "close": checkpoints.close,
        "save": lambda: checkpoints.save(3, noise, {}),
    }
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
    assert checkpoints.stored.steps() == (1,)
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_vanishes_is_an_error_of_the_next_save(tmp_path):
    directory = tmp_path / "checkpoints"
    with Checkpoints(directory, keep=1) as checkpoints:
        directory.rmdir()
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(1, state(), {})
        assert message(error) == (
            f"Checkpoint {directory / '1'} could not be written: No such file or directory; no "
            "checkpoint is finished. Use another run.dir, or make this one writable."
        )
