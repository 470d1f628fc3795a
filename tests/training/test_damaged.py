"""Damaged checkpoints: never wrong numbers, never lost, and the one before goes on."""

import errno
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp
from support.selection import full

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.errors import CheckpointError, DamagedError
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import digest
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints
from ppctl.training.pipeline.job import assemble

META = {"config": {"model": {"d_model": 8}}, "losses": [1.5, None]}
WORDS = (
    "model=mlp model.num_layers=4 model.d_model=8 data=regression data.batch_size=8 "
    "data.num_rows=256 data.num_features=5 data.num_targets=3 mesh=1x1 executor=reference "
    "schedule.num_microbatches=2 run.platform=cpu run.dtype=float32 run.eval_every=null "
    "run.trackers=[] run.checkpoint.every=2 run.num_steps=6"
)


def sharded():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    return NamedSharding(mesh, PartitionSpec("b"))


def state():
    """Arrays that Orbax stores in files of their process, and small ones that it stores in one for
    all.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    tree = {
        "large": jax.random.normal(keys[0], (128, 64), jnp.float32),
        "small": jax.random.normal(keys[1], (8, 16), jnp.bfloat16),
        "zeros": jnp.zeros((64, 8), jnp.float32),  # compress to a few bytes
        "count": jnp.full((8,), 7, jnp.int32),
    }
    return jax.device_put(tree, sharded())


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def same(got, want):
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def damages(content, chance):
    """Yield (name, the rest of a file, None if removed) for several ways to damage it."""
    yield "deleted", None
    for length in (0, len(content) // 2):
        yield f"cut to {length}", content[:length]
    for place in {0, len(content) - 1, *(chance.randrange(len(content)) for _ in range(2))}:
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        yield f"flipped at {place}", bytes(flipped)


@pytest.mark.slow
def test_damage_anywhere_is_refused_or_has_no_effect(tmp_path, capfd):
    want = state()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, want, META)
    files = [path for path in sorted((tmp_path / "1").rglob("*")) if path.is_file()]
    kinds = {"commit_success.txt", "_METADATA", "data.json", "manifest.ocdbt", "d"}
    assert kinds <= {path.name for path in files} | {
        path.parent.name for path in files
    }  # Orbax's present format
    chance, refused, lines, unread = random.Random(0), [], [], []
    checkpoints = StoredCheckpoints(tmp_path)
    for file in files:
        content = file.read_bytes()
        for name, left in damages(content, chance):
            file.unlink() if left is None else file.write_bytes(left)
            damage = f"{file.relative_to(tmp_path)} {name}"
            try:
                meta = checkpoints.meta(1)
                got = checkpoints.restore(1, abstract(want))
            except DamagedError as error:
                refused.append(damage)
                lines.append(str(error))
            else:
                assert meta == META, damage
                assert same(got, want), damage
                unread.append(damage)
            file.write_bytes(content)
    assert same(checkpoints.restore(1, abstract(want)), want)
    for line in lines:
        assert line.startswith(f"Checkpoint {tmp_path / '1'} cannot be read: ")
        assert "\n" not in line
        assert len(line) < 600
    assert len(refused) > 25
    assert len(unread) > 15
    assert not [damage for damage in unread if "meta/data.json" in damage]
    assert capfd.readouterr() == ("", "")


def flip(file):
    """Flips the highest bit of the byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x80
    file.write_bytes(bytes(content))


def flip_arrays(checkpoint):
    """Flips a bit in each file with numbers: Orbax keeps small arrays twice and reads one."""
    files = [path for path in checkpoint.rglob("d/*") if path.is_file()]
    assert files
    for file in files:
        flip(file)


def test_a_flipped_byte_among_the_numbers_is_refused_with_the_array(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(), META)
        checkpoints.save(2, state(), META)
    flip(max((tmp_path / "2").rglob("d/*"), key=lambda path: path.stat().st_size))
    with pytest.raises(DamagedError) as error:
        StoredCheckpoints(tmp_path).restore(2, abstract(state()))
    assert str(error.value) == (
        f"Checkpoint {tmp_path / '2'} cannot be read: large does not have the checksum it was "
        "saved with. Move it away to resume from step 1."
    )


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(), META)
    (tmp_path / "1").rename(tmp_path / "7")
    with pytest.raises(DamagedError, match="/7 cannot be read: it was saved as step 1"):
        StoredCheckpoints(tmp_path).meta(7)


def test_a_checkpoint_set_aside_is_kept_but_no_longer_listed(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(), META | {"step": step})
        checkpoints.wait()
        assert checkpoints.set_aside(3) == "3.damaged"
        assert (checkpoints.stored.steps(), checkpoints.stored.aside("damaged")) == (
            (2,),
            ("3.damaged",),
        )
        for step in (3, 4, 5):  # retention counts good ones only, and a step may come again
            checkpoints.save(step, state(), META | {"again": step})
        checkpoints.wait()
        assert checkpoints.set_aside(5) == "5.damaged"
        checkpoints.save(5, state(), META)
        checkpoints.wait()
        assert checkpoints.set_aside(5) == "5.damaged.2"
        assert checkpoints.stored.steps() == (4,)
        assert checkpoints.stored.meta(4) == META | {"again": 4}
        assert checkpoints.stored.aside("damaged") == ("3.damaged", "5.damaged", "5.damaged.2")
    (tmp_path / "3.damaged").rename(tmp_path / "3")
    assert StoredCheckpoints(tmp_path).meta(3) == META | {"step": 3}


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EACCES, "Permission denied"),
        MemoryError("no room"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."),
    ],
    ids=str,
)
def test_a_machine_that_cannot_read_now_is_no_damage(tmp_path, monkeypatch, cause):
    def refused(*_):
        raise RuntimeError("some handler") from cause  # Orbax's error

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(), META)
    checkpoints = StoredCheckpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ocp, "load_checkpointables", refused)
        with pytest.raises(
            CheckpointError, match=r"/1 cannot be read: .*\. Start again once it can\."
        ) as error:
            checkpoints.restore(1, abstract(state()))
    assert not isinstance(error.value, DamagedError)
    assert same(checkpoints.restore(1, abstract(state())), state())


# runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run with checkpoints of steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert cli.main(["train", *WORDS.split(), f"run.dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def train(run_dir, capsys):
    def train(*words):
        code = cli.main(["train", *WORDS.split(), f"run.dir={run_dir}", *words])
        return code, *capsys.readouterr()

    return train


def numbers(run_dir):
    """The bytes of the last checkpoint's arrays."""
    job = assemble(compose([*WORDS.split(), f"run.dir={run_dir}"]))
    restored = StoredCheckpoints(run_dir / "checkpoints").restore(6, job.pipe.states.natural)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(restored)]


@pytest.mark.full
@pytest.mark.parametrize("resume", ["auto", full("must")])
def test_a_run_resumes_from_the_newest_good_checkpoint_bit_for_bit(train, run_dir, trained, resume):
    flip_arrays(run_dir / "checkpoints" / "6")
    flip(run_dir / "checkpoints" / "4" / "meta" / "data.json")
    code, out, err = train(f"run.resume={resume}")
    assert (code, err) == (0, "")
    first, second, *_ = out.splitlines()
    assert first.startswith(f"Checkpoint {run_dir}/checkpoints/6 cannot be read: ")
    assert first.endswith("It is now 6.damaged; trying step 4")
    assert second.startswith(f"Checkpoint {run_dir}/checkpoints/4 cannot be read: ")
    assert second.endswith("It is now 4.damaged; trying step 2")
    assert "resuming after step 2" in out
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {
        "2",
        "4",
        "6",
        "4.damaged",
        "6.damaged",
    }
    assert numbers(run_dir) == numbers(trained)
    assert "has finished all" in train()[1]


def test_a_run_without_a_good_checkpoint_is_refused_except_with_resume_never(train, run_dir):
    for step in (2, 4, 6):
        flip(run_dir / "checkpoints" / str(step) / "meta" / "data.json")
    for again in (False, True):  # the second time, nothing but the damaged ones is there
        code, out, err = train()
        assert code == 2
        assert out.count("is now") == (0 if again else 3)
        assert err == (
            f"ppctl: There is no good checkpoint in {run_dir}/checkpoints, only 2.damaged, "
            "4.damaged, 6.damaged. Use run.resume=never to start anew next to them, or another "
            "run.dir.\n"
        )
    code, out, _ = train("run.resume=never")
    assert code == 0
    assert "from the start" in out
    assert "has finished all" in train()[1]


def test_another_model_is_refused_and_not_taken_for_damage(train, run_dir):
    code, _, err = train("model.d_model=16")
    assert code == 2
    assert "holds other arrays: model.d_model: " in err
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4", "6"]


LAYOUTS = (
    "mesh=2x2x2 executor=spmd schedule=interleaved",
    "mesh=2x2 executor=mpmd schedule=1f1b",
    "mesh=1x2 executor=spmd schedule=gpipe",
    "mesh=1x4 executor=spmd schedule=1f1b partition=explicit partition.layers=E|ttt|t|L",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [LAYOUTS[:2], pytest.param(LAYOUTS, marks=pytest.mark.full)], ids=len
)
def test_a_checkpoint_is_the_same_state_on_every_layout(trained, layouts):
    found = []
    for layout in layouts:
        job = assemble(compose([*WORDS.split(), f"run.dir={trained}", *layout.split()]))
        restored = StoredCheckpoints(trained / "checkpoints").restore(6, job.pipe.states.natural)
        engine = job.pipe.engine
        found += [digest(restored), digest(engine.to_natural(engine.from_natural(restored)))]
    assert found == found[:1] * 2 * len(layouts)
    assert len(set(found[0].checksums.values())) > 8
