"""`ppctl verify` and `ppctl bench`: right gradients pass, wrong ones fail, printed numbers are exact."""

import json
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ppctl import config
from ppctl.cli.commands import bench, verify
from ppctl.config.groups.moe_settings import Experts
from ppctl.training.pipeline import job
from ppctl.training.verification import verification

TINY = config.Config(
    model=config.MLP(num_layers=5, d_model=8),
    mesh=config.Mesh(2, 2, 1),
    schedule=config.Schedule("1f1b", 4),
    executor=config.Spmd(remat="layer"),
    data=config.Regression(
        "regression", batch_size=16, num_features=6, num_targets=3, num_rows=4000
    ),
    verify=config.Verify(steps=0),
)


def broken(change):
    """The assembly of a job whose gradients `change` spoils."""

    def assembled(request, **kwargs):
        found = job.assemble(request, default_dtype="float64", **kwargs)
        right = found.pipe.engine.loss_and_grads_of

        def loss_and_grads(params, batch):
            loss, grads = right(params, batch)
            return loss, change(grads)

        engine = replace(found.pipe.engine, loss_and_grads_of=loss_and_grads)
        return replace(found, pipe=replace(found.pipe, engine=engine))

    return assembled


@pytest.mark.full
def test_right_gradients_pass_in_float64(capsys):
    assert verify.verify(TINY, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert (found["dtype"], found["tolerance"]) == ("float64", 1e-10)
    assert found["training"] is None  # verify.steps=0
    assert found["worst"]["error"] == max(leaf["error"] for leaf in found["gradients"]) < 1e-13
    for leaf in found["gradients"]:
        assert leaf["error"] == leaf["max_difference"] / leaf["max_abs"]
        assert leaf["max_abs"] <= leaf["norm"] * (1 + 1e-9)
    assert {leaf["name"] for leaf in found["gradients"]} >= {
        "layers/kernel",
        "layers/bias",
        "embed_head/head/kernel",
    }


@pytest.mark.full
def test_gradients_are_compared_in_the_requested_dtype(capsys):
    single = replace(TINY, run=config.Run(dtype="float32"))
    assert verify.verify(single, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def test_one_wrong_layer_fails_and_is_named(monkeypatch, capsys):
    def change(grads):  # staged [V, P, K, ...]: the second layer of rank 1 is layer 4 of 5
        layers = grads["layers"] | {
            "kernel": grads["layers"]["kernel"].at[0, 1, 1].multiply(1 + 1e-6)
        }
        return grads | {"layers": layers}

    monkeypatch.setattr(verify, "assemble_to_verify", broken(change))
    assert verify.verify(TINY, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert (found["worst"]["name"], found["worst"]["layer"]) == ("layers/kernel", 4)
    assert verify.verify(TINY, as_json=False) == 1
    shown = capsys.readouterr().out
    assert "NOT EQUAL within 1e-10 (float64)" in shown
    assert [
        " !" in line for line in shown.splitlines() if line.strip().startswith("layers/kernel")
    ] == [True]
    assert sum(" !" in line for line in shown.splitlines()) == 2  # and where the worst is named


@pytest.mark.parametrize(
    ("capacity", "mesh", "is_noted"),
    [(1.5, (1, 2, 1, 2), True), (1.5, (1, 2), False), (None, (1, 2, 1, 2), False)],
)
def test_a_note_names_a_capacity_that_may_drop_other_tokens(capacity, mesh, is_noted):
    moe = Experts(num_experts=4, capacity=capacity)
    note = verify.capacity_note(config.Transformer(moe=moe), config.Mesh(*mesh))
    assert (note is not None) == is_noted
    assert note is None or "verify with model.moe.capacity=null" in note
    assert verify.capacity_note(config.MLP(), config.Mesh(*mesh)) is None


def test_a_gradient_that_is_not_a_number_fails(monkeypatch, capsys):
    spoil = lambda grads: jax.tree.map(lambda g: g * jnp.nan, grads)
    monkeypatch.setattr(verify, "assemble_to_verify", broken(spoil))
    assert verify.verify(TINY, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)  # JSON without NaN
    assert found["worst"]["error"] is None


@pytest.mark.parametrize(("loss", "error"), [(0.0, 0.0), (1e-3, 1e-3)])
def test_a_loss_of_zero_is_compared_too(loss, error):
    assert verification.compared(loss, 0.0).error == error
    assert math.isnan(verification.compared(loss, math.nan).error)


def test_the_reference_verifies_itself(capsys):
    request = replace(TINY, mesh=config.Mesh(), executor=config.Reference(remat="full"))
    assert verify.verify(request, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "equal within 1e-10" in shown
    assert re.search(
        r"gradient +shape +norm +max .reference. +max .difference. +error +worst layer", shown
    )
    assert re.search(
        r"embed_head/head/kernel +8x3 +[\d.]+ "
        r"+\d\.\d{3}e[+-]\d\d "
        r"+\d\.\de[+-]\d\d +\d\.\de[+-]\d\d",
        shown,
    )


@pytest.mark.full
@pytest.mark.slow
def test_bench_compares_every_remat_setting_with_the_reference(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    assert bench.bench(TINY, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["steps"]] == [
        "reference",
        "remat=none",
        "remat=layer",
        "remat=full",
    ]
    assert found["steps"][0]["cpu_ratio"] == 1
    assert all(row["cpu_s"] > 0 and row["temp_bytes"] > 0 for row in found["steps"])


MIXTURE = config.Transformer(
    num_layers=2,
    d_model=8,
    num_heads=2,
    seq_len=4,
    moe=Experts(num_experts=4, top_k=2, width=6, shared_width=5),
)


def test_bench_compares_experts_with_an_mlp_of_as_many_products():
    data = config.Synthetic(vocab_size=8, batch_size=4)
    mixture = replace(TINY, model=MIXTURE, data=data)
    dense = bench.without_experts(mixture)
    assert dense == replace(mixture, model=replace(MIXTURE, moe=Experts(), mlp_width=2 * 6 + 5))
    assert bench.without_experts(dense) is None
    assert bench.without_experts(TINY) is None


@pytest.mark.full
@pytest.mark.slow
def test_bench_has_a_row_without_experts(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    data = config.Synthetic(vocab_size=8, batch_size=8)
    assert bench.bench(replace(TINY, model=MIXTURE, data=data), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"][-1]["name"].startswith("no experts, remat=")
