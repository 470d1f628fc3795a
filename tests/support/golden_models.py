"""The models of tests/golden/models as ppctl's, and what `transformers` computed of them."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from support.oracle import CHOICE_BIAS, FOLDER

import ppctl
from ppctl.executors.reference import outputs_of, reference
from ppctl.language.tensor_names import named_parameters
from ppctl.language.transformers_config import model_settings
from ppctl.model.stack import Stack, init


def read_model(name: str, dtype: str, *, packed: bool = False) -> tuple[Stack, Any]:
    """Return the stack of a golden model and its parameters."""
    folder = FOLDER / name
    stack = ppctl.transformer(**sizes_of(name), dtype=dtype, packed=packed)
    params = jax.tree.map(
        lambda a: np.zeros(a.shape, dtype), jax.eval_shape(lambda: init(stack, 0))
    )
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        names = set(tensors.keys())
        for each in named_parameters(params, config_of(name)):
            tensor = tensors.get_tensor(each.name)
            names.remove(each.name)
            leaf = params
            for key in each.path:
                leaf = leaf[key]
            leaf[each.place or ...] = tensor.T if each.is_transposed else tensor
    assert not names
    return stack, params


def sizes_of(name: str) -> dict[str, Any]:
    """Return the settings of a golden model."""
    return model_settings(config_of(name))


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a golden model."""
    return json.loads((FOLDER / name / "config.json").read_text())


def expected_of(name: str) -> dict[str, np.ndarray]:
    """Return what transformers and PyTorch computed of a golden model."""
    return dict(np.load(FOLDER / name / "expected.npz"))


def computed(
    stack: Stack, params: Any, inputs: np.ndarray, targets: np.ndarray, dtype: str
) -> tuple[Any, Any, Any]:
    """Return logits, loss and gradients by the reference executor."""
    batch = {"inputs": inputs, "targets": targets}
    step = reference(stack, num_microbatches=1, remat="none", unroll=8, dtype=dtype)
    logits = jax.jit(outputs_of(stack, dtype=dtype))(params, inputs)
    losses, grads = jax.jit(step)(params, batch)
    return logits, losses["loss"], grads


def by_name(tree: Any, name: str) -> dict[str, np.ndarray]:
    """Return parameters of a golden model, or their gradients, as `transformers` names and stores
    them.
    """
    found = {}
    for each in named_parameters(tree, config_of(name)):
        if each.name.endswith(CHOICE_BIAS):  # no gradient, but a count of tokens
            continue
        leaf = tree
        for key in each.path:
            leaf = leaf[key]
        tensor = np.asarray(leaf[each.place])
        found[each.name] = tensor.T if each.is_transposed else tensor
    return found
