"""`ppctl.load_run`: settings, records and parameters of a run, as the run has them."""

import json

import jax
import numpy as np
import pytest

import ppctl
from ppctl.config import MLP, Config, Mesh, Regression, Run, Schedule
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.job import assemble
from ppctl.training.run import as_yaml


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
    pipe = assemble(config).pipe
    params = {}
    with Checkpoints(path / "checkpoints", keep=3) as checkpoints:
        for step in (3, 5):
            state = pipe.to_natural(pipe.init(seed=step))
            params[step] = jax.device_get(state["params"])
            checkpoints.save(step, state, {"step": step})
    (path / "config.yaml").write_text(as_yaml(config))
    (path / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 0.5}) + '\n{"step": 6, "lo')
    return path, params


def test_settings_records_and_checkpoints_are_those_of_the_run(saved):
    run = ppctl.load_run(saved[0])
    assert run.settings["model"] == {"name": "mlp", "num_layers": 4, "d_model": 8, "activation": "relu"}
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


def test_what_is_not_there_is_refused(saved, tmp_path):
    with pytest.raises(ppctl.PpctlError, match=r"has no checkpoint of step 4; there are of steps 3, 5\."):
        ppctl.load_run(saved[0]).params(4)
    with pytest.raises(ppctl.PpctlError, match=r"is no run: it has no config\.yaml"):
        ppctl.load_run(tmp_path)


def test_a_flipped_byte_is_found(saved, tmp_path):
    run = ppctl.load_run(saved[0])
    data = max((saved[0] / "checkpoints/3/state").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    whole = data.read_bytes()
    try:
        data.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
        with pytest.raises(ppctl.PpctlError, match="cannot be read"):
            run.params(3)
    finally:
        data.write_bytes(whole)
