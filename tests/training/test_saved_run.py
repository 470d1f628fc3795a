"""`ppctl.load_run`: settings, records and parameters of a run, as the run has them, and the model
that they make.
"""

import json
import logging
import shutil
import sys
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from support.selection import full

import ppctl
from ppctl.config import (
    MLP,
    Config,
    CustomModel,
    Mesh,
    Regression,
    Run,
    Schedule,
    Synthetic,
    Text,
    Tokens,
    Transformer,
)
from ppctl.config.changed_settings import model_and_data
from ppctl.config.groups.data_settings import CustomData, Mixture, Part
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.orbax_io import silence_orbax
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints
from ppctl.training.pipeline.job import assemble
from ppctl.training.run.loop import metadata

OWN = """
import jax, jax.numpy as jnp, numpy as np
import ppctl

def network(width=4):
    def init(key):
        normal = lambda a, b: jax.random.normal(jax.random.fold_in(key, a), (a, b))
        dense = lambda a, b: {"w": normal(a, b) / a, "bias": jnp.ones(b)}
        return {"blocks": [dense(6, width), dense(width, 3)], "gain": (jnp.full(3, 2.0),)}

    def apply(params, x):
        first, last = params["blocks"]
        x = ppctl.stage_boundary(jnp.tanh(x.reshape(len(x), -1) @ first["w"] + first["bias"]))
        return {"logits": (x @ last["w"] + last["bias"]) * params["gain"][0]}

    def loss(outputs, targets):
        log_p = jax.nn.log_softmax(outputs["logits"])
        found = -jnp.take_along_axis(log_p, targets[:, None], axis=-1)
        return found.sum(), jnp.asarray(found.size, float)

    return ppctl.Network(init, apply, loss)

def rows():
    rng = np.random.default_rng(0)
    return {"inputs": rng.standard_normal((64, 2, 3)), "targets": rng.integers(0, 3, 64)}
"""


def save(config, path, seed=0):
    """Save the initial state as a run's, and return its parameters in natural order."""
    job = assemble(replace(config, run=replace(config.run, dir=str(path))))
    state = job.pipe.to_natural(job.pipe.init(seed=seed))
    with Checkpoints(path / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(1, state, metadata(job, 1))
    (path / "config.yaml").write_text(yaml.safe_dump(asdict(job.config)))
    return jax.device_get(state["params"])


@pytest.fixture(scope="module")
def network_run(tmp_path_factory):
    """A run of a user's network in three stages; the module is imported as it was trained."""
    home = tmp_path_factory.mktemp("own")
    (home / "own_net.py").write_text(OWN)
    config = Config(
        model=CustomModel(target="own_net.network", num_layers=2),
        data=CustomData(target="own_net.rows", batch_size=8, eval_fraction=0.25),
        mesh=Mesh(1, 2),
        schedule=Schedule("1f1b", 2),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(sys, "path", [*sys.path])
        save(config, home / "run", seed=3)
        yield home / "run"
        sys.modules.pop("own_net", None)


@pytest.mark.full
def test_parameters_of_a_network_are_the_tree_that_its_init_returns(network_run):
    network = sys.modules["own_net"].network()
    found = ppctl.load_run(network_run).params()
    with jax.enable_x64(False):  # drawn in float32, like in `ppctl train`
        expected = network.init(jax.random.key(3))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # compiled and not: the last digit


def test_a_network_predicts_without_its_data(network_run, monkeypatch):
    monkeypatch.delattr(sys.modules["own_net"], "rows")
    network, run = sys.modules["own_net"].network(), ppctl.load_run(network_run)
    rng = np.random.default_rng(1)
    batch = {"inputs": rng.standard_normal((5, 2, 3)), "targets": rng.integers(0, 3, 5)}
    wanted = network.apply(run.params(), jnp.asarray(batch["inputs"], jnp.float32))
    np.testing.assert_allclose(run.predict(batch["inputs"])["logits"], wanted["logits"], rtol=1e-5)
    np.testing.assert_allclose(
        run.predict(batch["inputs"][:1])["logits"], wanted["logits"][:1], rtol=1e-5
    )
    total, number = network.loss(wanted, batch["targets"])
    assert run.loss(batch) == pytest.approx(float(total / number), rel=1e-5)
    with pytest.raises(ppctl.PpctlError, match="own_net has no function rows"):
        _ = run.data


def test_code_that_changed_is_warned_of_and_other_parameters_are_refused(network_run, monkeypatch):
    file = network_run.parent / "own_net.py"
    file.write_text(OWN.replace("2.0", "3.0"))
    with pytest.warns(
        UserWarning, match="own_net changed after .* was trained; its results may differ now"
    ):
        ppctl.load_run(network_run).predict(np.zeros((1, 2, 3)))
    file.write_text(OWN)
    monkeypatch.setattr(sys.modules["own_net"].network, "__defaults__", (5,))
    with pytest.raises(
        ppctl.PpctlError,
        match=r"other parameters now than at step 1: .* restore own_net\.network\.",
    ):
        ppctl.load_run(network_run).params()


def test_missing_user_code_is_looked_for_where_the_run_was_started(network_run, tmp_path):
    away = shutil.copytree(network_run, tmp_path / "run")
    settings = away / "config.yaml"
    settings.write_text(settings.read_text().replace("own_net.", "away_net."))
    with pytest.raises(ppctl.PpctlError, match=r"no module away_net, neither in .* packages\.$"):
        ppctl.load_run(away).params()
    (away / "status.jsonl").write_text(
        '{"status": "started", "step": 0, "directory": "/of/hers"}\n'
    )
    where = r"packages\. .*/run was started in /of/hers: go there, or name it in PYTHONPATH\."
    with pytest.raises(ppctl.PpctlError, match=where):
        ppctl.load_run(away).params()
    with pytest.raises(ppctl.PpctlError, match=where):
        _ = ppctl.load_run(away).data


@pytest.mark.parametrize("dtype", ["float32", full("float64")])
def test_a_loaded_transformer_predicts_logits_with_the_loss_of_the_run(tmp_path, dtype):
    config = Config(
        model=Transformer(num_layers=2, d_model=8, num_heads=2, seq_len=6),
        data=Synthetic(batch_size=4, vocab_size=16, num_sequences=128),
        schedule=Schedule("1f1b", 2),
        run=Run(dtype=dtype),
    )
    save(config, tmp_path)
    run = ppctl.load_run(tmp_path)
    batch = next(run.data.batches())
    logits = run.predict(batch["inputs"])
    assert logits.shape == (4, 6, 16)
    expected = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
    ).mean()
    assert run.loss(batch) == pytest.approx(float(expected), rel=1e-5)
    if dtype == "float64":
        with (
            jax.enable_x64(False),
            pytest.raises(ppctl.PpctlError, match=r"run\.dtype=float64, but JAX is set to 32"),
        ):
            ppctl.load_run(tmp_path).params()


@pytest.mark.full
def test_an_mlp_predicts_and_a_stack_without_outputs_is_refused(saved, monkeypatch):
    run, rng = ppctl.load_run(saved[0]), np.random.default_rng(0)
    batch = {"inputs": rng.standard_normal((4, 3)), "targets": rng.standard_normal((4, 2))}
    error = np.square(run.predict(batch["inputs"]) - batch["targets"]).mean()
    assert run.loss(batch) == pytest.approx(error, rel=1e-5)
    with pytest.raises(ppctl.PpctlError, match="batch is inputs; it must be"):
        run.loss({"inputs": batch["inputs"]})
    stack, params = run._trained(5)
    without = stack.with_options(outputs=None), params
    monkeypatch.setitem(vars(run), "_trained", lambda step: without)
    with pytest.raises(
        ppctl.PpctlError,
        match=r"returns a Stack without outputs, only with a loss\. Give it outputs",
    ):
        run.predict(batch["inputs"])


def test_settings_of_another_version_are_refused():
    settings = asdict(Config())
    assert model_and_data(settings).model == Config().model
    with pytest.raises(
        ppctl.PpctlError, match=r"this version of ppctl has no model=rnn, which this run uses\."
    ):
        model_and_data(settings | {"model": {"name": "rnn"}})
    with pytest.raises(ppctl.PpctlError, match=r"data\.colour is not a setting of this version"):
        model_and_data(settings | {"data": {"name": "stdlib", "colour": 3}})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two checkpoints on 2 x 2 devices, and the parameters of each in natural order."""
    path = tmp_path_factory.mktemp("run")
    config = Config(
        model=MLP(num_layers=4, d_model=8),
        data=Regression(batch_size=8, num_features=3, num_targets=2, num_rows=512),
        mesh=Mesh(2, 2),
        schedule=Schedule("1f1b", 2),
        run=Run(dir=str(path), dtype="float32"),
    )
    job = assemble(config)
    pipe = job.pipe
    params = {}
    with Checkpoints(path / "checkpoints", keep=3) as checkpoints:
        for step in (3, 5):
            state = pipe.to_natural(pipe.init(seed=step))
            params[step] = jax.device_get(state["params"])
            checkpoints.save(step, state, metadata(job, step))
    (path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    (path / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 0.5}) + '\n{"step": 6, "lo')
    return path, params


def test_a_loaded_run_has_its_settings_records_and_checkpoints(saved):
    run = ppctl.load_run(saved[0])
    assert run.settings["model"] == {
        "name": "mlp",
        "num_layers": 4,
        "d_model": 8,
        "activation": "relu",
        "dropout": 0.0,
    }
    assert run.metrics == [{"step": 5, "loss": 0.5}]  # not the half of one that a kill left
    assert run.evaluations == []
    assert run.steps == (3, 5)


@pytest.mark.parametrize("step", [3, 5, None])
def test_parameters_are_whole_and_in_model_order(saved, step):
    path, params = saved
    found = ppctl.load_run(path).params(step)
    assert jax.tree.structure(found) == jax.tree.structure(params[step or 5])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params[step or 5]), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.device_set == {jax.devices()[0]}


@pytest.fixture
def saving(saved, tmp_path, monkeypatch):
    """A run that replaces its only checkpoint, of step 3, by that of step 5 at the next reading."""
    path = shutil.copytree(saved[0], tmp_path / "run")
    (path / "checkpoints/5").rename(tmp_path / "5")
    load = StoredCheckpoints._load

    def loading(self, step, items):
        if (path / "checkpoints/3").is_dir() and "state" in items:
            (tmp_path / "5").rename(path / "checkpoints/5")
            shutil.rmtree(path / "checkpoints/3")
        return load(self, step, items)

    def path_of(self, step):  # known before the run replaces it
        return self.directory / str(step)

    monkeypatch.setattr(StoredCheckpoints, "_load", loading)
    monkeypatch.setattr(StoredCheckpoints, "_path", path_of)
    return path


def test_a_checkpoint_that_a_run_replaces_is_read_from_the_newest(saved, saving):
    found = ppctl.load_run(saving).params()
    jax.tree.map(np.testing.assert_array_equal, found, saved[1][5])


@pytest.mark.parametrize(
    ("text", "is_shown"),
    [
        ("cannot read x [tensorstore_spec='{...}']", False),
        ("Encountered error while reading array index: (). See full TensorStore details", False),
        ("the user's task", True),
    ],
)
def test_arrays_that_orbax_still_reads_after_a_failure_end_without_a_traceback(text, is_shown):
    silence_orbax()
    fault = Exception, Exception(text), None
    record = logging.LogRecord("asyncio", logging.ERROR, "base.py", 1, "never", (), fault)
    assert bool(logging.getLogger("asyncio").filter(record)) is is_shown


def test_a_requested_checkpoint_that_a_run_replaces_is_removed_not_damaged(saving):
    with pytest.raises(ppctl.PpctlError, match=r"checkpoints/3 was removed while it was read"):
        ppctl.load_run(saving).params(3)


def test_missing_parts_of_a_run_are_refused(saved, tmp_path):
    with pytest.raises(ppctl.PpctlError, match=r"has no checkpoint of step 4; it has steps 3, 5\."):
        ppctl.load_run(saved[0]).params(4)
    with pytest.raises(ppctl.PpctlError, match=r"is no run: it has no config\.yaml"):
        ppctl.load_run(tmp_path)
    for call in (ppctl.load_run, ppctl.read_schedule):
        with pytest.raises(ppctl.PpctlError, match=r"=None is not a path\. Use a text or"):
            call(None)


def test_a_flipped_byte_is_found(saved, tmp_path):
    run = ppctl.load_run(saved[0])
    data = max(
        (saved[0] / "checkpoints/3/state").rglob("*"),
        key=lambda file: file.stat().st_size * file.is_file(),
    )
    whole = data.read_bytes()
    try:
        data.write_bytes(
            whole[: len(whole) // 2]
            + bytes([whole[len(whole) // 2] ^ 1])
            + whole[len(whole) // 2 + 1 :]
        )
        with pytest.raises(ppctl.PpctlError, match="cannot be read"):
            run.params(3)
    finally:
        data.write_bytes(whole)


@pytest.mark.parametrize("place", ["started", "moved", "alone"])
def test_paths_of_a_run_are_of_the_directory_of_its_start(place, tmp_path, monkeypatch):
    """Also if the project moved with the run; a run moved by itself has the recorded one."""
    started, moved = tmp_path / "started", tmp_path / "moved"
    run_dir = {"started": started / "runs/a", "moved": moved / "runs/a", "alone": tmp_path / "b"}
    root = moved if place == "moved" else started
    run_dir[place].mkdir(parents=True)
    run = Run(dir="runs/a", start_from="runs/base")
    line = {"status": "started", "step": 0, "directory": str(started)}
    (run_dir[place] / "status.jsonl").write_text(json.dumps(line) + "\n")

    def config_of(data):
        stored = asdict(Config(data=data, run=run))
        (run_dir[place] / "config.yaml").write_text(yaml.safe_dump(stored))
        return ppctl.load_run(run_dir[place]).config

    monkeypatch.chdir(tmp_path)
    found = config_of(Text(path="t/*.txt", eval_path="e", tokenizer="tok", cache_dir="/cache"))
    files = {"path": f"{root}/t/*.txt", "eval_path": f"{root}/e"}
    expected = Text(**files, tokenizer=f"{root}/tok", cache_dir="/cache")
    assert found.data == expected
    assert found.run.start_from == f"{root}/runs/base"
    parts = [Part(path="a"), Part(path="/b", weight=2.0)]
    found = config_of(Mixture(parts=parts, tokenizer="bytes")).data
    assert found.parts == [Part(path=f"{root}/a"), parts[1]]
    assert found.tokenizer == "bytes"
    assert config_of(Tokens(path="ids.npy")).data == Tokens(path=f"{root}/ids.npy")
    root.mkdir(exist_ok=True)
    monkeypatch.chdir(root)  # as typed
    assert config_of(Tokens(path="ids.npy")).data == Tokens(path="ids.npy")
