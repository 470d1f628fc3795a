"""The families of language models compared with what `transformers` computed of tiny ones: tests/golden/models."""

import json

import jax
import numpy as np
import pytest
from safetensors import safe_open
from support.oracle import FOLDER, MODELS, summary
from support.selection import few

import ppctl
from ppctl.executors.reference import outputs_of, reference
from ppctl.model.stack import init
from ppctl.training.exchange.families import model_settings
from ppctl.training.exchange.names import named_parameters

NAMES = sorted(MODELS, key=lambda name: name not in ("gemma2", "gemma3", "qwen2", "qwen3", "llama3"))


def read(name, dtype):
    """The stack of a golden model, its parameters, and what transformers found of it."""
    folder = FOLDER / name
    settings = model_settings(json.loads((folder / "config.json").read_text()))
    stack = ppctl.transformer(**settings, dtype=dtype)
    params = jax.tree.map(lambda a: np.zeros(a.shape, dtype), jax.eval_shape(lambda: init(stack, 0)))
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        names = set(tensors.keys())
        for each in named_parameters(params):
            tensor = tensors.get_tensor(each.name)
            names.remove(each.name)
            leaf = params
            for key in each.path:
                leaf = leaf[key]
            leaf[... if each.layer is None else each.layer] = tensor.T if each.is_transposed else tensor
    assert not names
    return stack, params, np.load(folder / "expected.npz")


def computed(stack, params, ids, dtype):
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    step = reference(stack, num_microbatches=1, remat="none", unroll=8, dtype=dtype)
    logits = jax.jit(outputs_of(stack, unroll=8, dtype=dtype))(params, batch["inputs"])
    return logits, *jax.jit(step)(params, batch)


def own(tree, path, layer):
    for key in path:
        tree = tree[key]
    return np.asarray(tree if layer is None else tree[layer])


def compare(name, dtype, logits_within, loss_within, grads_within):
    stack, params, expected = read(name, dtype)
    logits, loss, grads = computed(stack, params, expected["ids"], dtype)
    assert np.abs(logits - expected[f"logits_{dtype}"]).max() < logits_within
    assert np.std(logits) > 0.5  # of logits around 1
    assert loss == pytest.approx(float(expected[f"loss_{dtype}"]), rel=loss_within)
    compared = 0
    for each in named_parameters(params):
        gradient = own(grads, each.path, each.layer)
        wanted = expected[f"grad {each.name}"]
        found = summary(gradient.T if each.is_transposed else gradient)
        assert np.abs(found - wanted).max() < grads_within * wanted[0], each.name
        compared += 1
    assert compared == sum(key.startswith("grad ") for key in expected)


@pytest.mark.parametrize("name", few(NAMES, 5))
def test_logits_loss_and_gradients_are_those_of_transformers_in_float64(name):
    compare(name, "float64", 1e-9, 1e-10, 1e-8)


@pytest.mark.parametrize("name", few(NAMES, 1))
def test_logits_loss_and_gradients_are_those_of_transformers_in_float32(name):
    compare(name, "float32", 1e-4, 1e-5, 1e-5)
