"""Names that other libraries read as patterns, separators or addresses."""

import os
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.checkpoints import abstract, assert_bit_equal, message
from support.selection import full, full_except

from ppctl import cli
from ppctl.errors import ConfigError, SaveError
from ppctl.reports.foreign_files import check_place
from ppctl.training.checkpoint import checkpoint
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import check_names
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints

STATE = {"params": {"w": jnp.arange(4.0)}}
REFUSED = ("[x]", "a*b", "a?b", "a\\b", "..\\x", "\udcff", "gs:")
READ = ("é", "s3", "{x}", "%20", " ", "~", "$HOME", "a\nb", "-a", "5", "😀")
LETTERS = [f"a{letter}b" for letter in string.punctuation if letter not in "[*?\\/"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_directory_whose_checkpoints_could_not_be_read_is_refused(tmp_path, name):
    directory = tmp_path / name / "run"
    with pytest.raises(ConfigError, match="cannot hold checkpoints: ") as error:
        Checkpoints(directory, keep=1)
    message(error)
    assert not directory.exists()


@pytest.mark.parametrize("name", full_except([*READ, *LETTERS], "é"))
def test_checkpoints_in_a_directory_of_any_other_name_are_read_again(tmp_path, name):
    directory = tmp_path / name / "run"
    with Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(1, STATE, {})
    found = StoredCheckpoints(directory).restore(1, abstract(STATE))
    assert_bit_equal(found, STATE)


def test_a_path_that_looks_like_a_store_is_refused():
    for path in ("/s3/bucket/run", "/gs/run", "/home/az:/run"):
        with pytest.raises(ConfigError, match="as an address"):
            check_place(Path(path), "run.dir")
    check_place(Path("/data/s3/run"), "run.dir")


COMMANDS = (
    "train recipes=tiny",
    "train --multirun recipes=tiny run.seed=0,1",
    "import model --out run",
    "init mine",
)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_that_makes_runs_refuses_a_current_directory_with_a_pattern(
    tmp_path, monkeypatch, capsys, line
):
    (tmp_path / "my [x] 1").mkdir()
    monkeypatch.chdir(tmp_path / "my [x] 1")
    assert cli.main(line.split()) == 2
    err = capsys.readouterr().err
    assert "cannot hold checkpoints: Orbax reads [ as a pattern, in " in err
    assert err.count("\n") == 1
    assert os.listdir() == []


def test_a_symlink_with_another_name_holds_checkpoints(tmp_path):
    (tmp_path / "my [x] 1").mkdir()
    (tmp_path / "plain").symlink_to(tmp_path / "my [x] 1")
    with Checkpoints(tmp_path / "plain" / "run", keep=1) as checkpoints:
        checkpoints.save(1, STATE, {})
    for directory in (tmp_path / "plain" / "run", tmp_path / "my [x] 1" / "run"):
        found = StoredCheckpoints(directory).restore(1, abstract(STATE))
        assert_bit_equal(found, STATE)


def test_the_first_checkpoint_of_a_start_is_opened_after_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "check_place", lambda *place, saves: None)
    checkpoints = Checkpoints(tmp_path / "my [x] 1", keep=1)
    checkpoints.save(1, STATE, {})
    with pytest.raises(SaveError, match="was written, but cannot be opened"):
        checkpoints.wait()


CLASHES = ({"a": {"b": 1}, "a.b": 2}, {"a": {"b": 1}, "a/b": 2}, {"a": [1], "a.0": 3})
BY_SLASH = {"x/": 1, "x": 2}
APART = ({"a": {"b": 1, "c": 2}, "ab": 3}, {"a": 1, "a/c/0": 2}, {"a": 1, "a/zarr.json": 2})
ODD = ({"..": 1}, {"": 1}, {"a\\b": 1}, {"[0]": 1}, {"/x": 1}, {"*": 1}, {"\n": 1})


def filled(tree):
    return {"params": jax.tree.map(lambda value: jnp.full(3, float(value)), tree)}


@pytest.mark.parametrize("tree", [*CLASHES, BY_SLASH, {"\udcff": 1}], ids=repr)
def test_parameters_that_share_a_name_in_a_checkpoint_are_refused(tree):
    with pytest.raises(ConfigError, match=r"in a checkpoint\. Rename one|UTF-8 cannot"):
        check_names(filled(tree))


@pytest.mark.parametrize("tree", [APART[0], *map(full, (*APART[1:], *ODD))])
def test_parameters_of_any_other_names_are_read_again(tmp_path, tree):
    state = filled(tree)
    check_names(state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
    assert_bit_equal(StoredCheckpoints(tmp_path).restore(1, abstract(state)), state)


CLASH = """
import jax.numpy as jnp, numpy as np, ppctl

def stack(*, num_layers, dtype, data):
    embed_head = lambda key: {"a": {"b": jnp.eye(2, dtype=dtype)}, "a.b": jnp.ones(2, dtype)}
    layer = lambda key, index: {"w": jnp.eye(2, dtype=dtype)}
    embed = lambda of, x: x @ of["a"]["b"]
    head = lambda of, x, t: (jnp.sum((x + of["a.b"] - t) ** 2), jnp.asarray(t.size, x.dtype))
    return ppctl.Stack(num_layers, embed_head, layer, embed, lambda w, x: x @ w["w"], head)

def network():
    init = lambda key: {"a": {"b": jnp.eye(2)}, "a/b": jnp.ones(2)}
    apply = lambda params, x: ppctl.stage_boundary(x @ params["a"]["b"]) + params["a/b"]
    return ppctl.Network(init, apply, lambda y, t: (jnp.sum((y - t) ** 2), jnp.float32(y.size)))

def rows():
    return {"inputs": np.ones((64, 2), np.float32), "targets": np.ones((64, 2), np.float32)}
"""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("stack", "params/embed_head/a/b and params/embed_head/a.b have the same name in a check"),
        ("network", "init makes two parameters with the path a/b. Rename one."),
    ],
)
def test_a_run_is_refused_before_its_first_step_if_parameters_share_a_name(
    tmp_path, monkeypatch, capsys, target, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "clashing.py").write_text(CLASH)
    of_model = ["model=custom", f"model.target=clashing.{target}", "model.num_layers=2"]
    of_data = ["data=custom", "data.target=clashing.rows", "data.eval_fraction=0.5"]
    assert cli.main(["train", *of_model, *of_data, "mesh=1x2", "schedule=gpipe"]) == 2
    out, err = capsys.readouterr()
    assert message in err, err
    assert "compiling" not in out
    assert not (tmp_path / "runs").exists()
