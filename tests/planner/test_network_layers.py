"""`ppctl plan --json` lists what stands in each layer of a network, by its author's names."""

import json

from ppctl import cli

NET = """
import jax, jax.numpy as jnp, ppctl

def network():
    def init(key):
        return {"first": jnp.ones((6, 32)), "last": {"w": jnp.ones((32, 3)), "bias": jnp.zeros(3)}}
    def apply(params, x):
        x = ppctl.stage_boundary(jax.nn.relu(x @ params["first"]))
        return x @ params["last"]["w"] + params["last"]["bias"]
    def loss(outputs, targets):
        return jnp.square(outputs - targets).sum(), jnp.asarray(float(outputs.size))
    return ppctl.Network(init, apply, loss)
"""
WORDS = [
    *(
        "plan",
        "--config-dir",
        ".",
        "model=custom",
        "model.target=listed_net.network",
        "model.num_layers=2",
        "mesh=1x2",
        "schedule=1f1b",
    ),
    *(
        "data=regression",
        "data.num_features=6",
        "data.num_targets=3",
        "data.batch_size=8",
        "run.platform=cpu",
    ),
]


def test_a_plan_lists_the_contents_of_each_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "listed_net.py").write_text(NET)
    assert cli.main([*WORDS, "--json"]) == 0
    layers = {each.pop("name"): each for each in json.loads(capsys.readouterr().out)["layers"]}
    assert list(layers) == ["embedding", "0", "1", "head"]
    assert (layers["0"]["stage"], layers["0"]["params"]) == (0, {"first": [6, 32]})
    assert layers["0"]["operations"] == {"dot_general": 1, "relu": 1}
    assert (layers["1"]["stage"], layers["1"]["params"]) == (
        1,
        {"last/bias": [3], "last/w": [32, 3]},
    )
    assert layers["1"]["operations"] == {"dot_general": 1, "add": 1}
    assert (layers["embedding"]["params"], layers["head"]["params"]) == ({}, {})
    # forward and gradients of weights each a product; the first layer's inputs have no
    # gradient to make
    assert layers["0"]["cost"] + layers["1"]["cost"] == 2
