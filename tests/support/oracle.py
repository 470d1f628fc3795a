"""Tiny random language models of each family by `transformers`, with what it computes of them: logits, loss, gradients.

`make golden` rewrites tests/golden/models where the extra `oracle` is installed. `make test` reads the files alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden" / "models"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
NUM_TOKENS = 24  # more than original lengths and windows
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name: class of transformers, its config
    "llama2": ("Llama", {"num_key_value_heads": 4, "rope_theta": 10000.0}),
    "llama3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_theta": 5000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "smollm2": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_theta": 100000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 12, "rope_theta": 10000.0}),
    "qwen2": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_theta": 1e6,
        },
    ),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 12,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 4,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


def build(name: str, dtype: Any) -> Any:
    """Return the model of this name with random weights that bfloat16 represents, logits around 1."""
    import torch
    import transformers

    family, sizes = MODELS[name]
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**SMALL, **sizes, "attn_implementation": "eager"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for key, tensor in sorted(model.named_parameters()):
            number = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
            if tensor.ndim > 1:
                number *= 0.5 if "embed" in key else tensor.shape[1] ** -0.5
            else:
                number = number * 0.2 + (1.0 if tensor.mean() > 0.5 else 0.0)
            tensor.copy_(number.to(torch.bfloat16))
    return model.eval()


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Widen what `transformers` computes in float32 whatever the dtype of the model: norms, softmax, angles."""
    import torch

    names = {"float32": torch.float64, "float": torch.float64}
    before = {name: getattr(torch, name) for name in names}
    method = torch.Tensor.float
    for name, dtype in names.items():
        setattr(torch, name, dtype)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        for name, dtype in before.items():
            setattr(torch, name, dtype)
        torch.Tensor.float = method


def computed(model: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return logits, the loss of each token's next one, and its gradients by name."""
    import torch

    ids = torch.asarray(np.asarray(ids, np.int64))
    model.zero_grad()
    logits = model(ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    grads = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    return {"logits": logits.detach().numpy(), "loss": loss.detach().numpy(), "grads": grads}


def summary(gradient: np.ndarray) -> np.ndarray:
    """Return (norm, projection on a fixed vector, sum) of a gradient: three numbers that stand for it."""
    flat = np.asarray(gradient, np.float64).ravel()
    return np.array([np.linalg.norm(flat), flat @ np.cos(0.7 * np.arange(flat.size)), flat.sum()])


def tokens(name: str) -> np.ndarray:
    """Token ids; none is 0, which Gemma pads with, and of which torch makes no gradient."""
    return np.random.default_rng(len(name)).integers(1, SMALL["vocab_size"], (2, NUM_TOKENS + 1), np.int32)


def rewrite(name: str) -> None:
    """Write a model of this name, and what transformers computes of it."""
    import torch

    folder, ids = FOLDER / name, tokens(name)
    shutil.rmtree(folder, ignore_errors=True)
    found = {"float32": computed(build(name, torch.float32), ids)}
    with in_double():
        found["float64"] = computed(build(name, torch.float64), ids)
    arrays: dict[str, np.ndarray] = {"ids": ids}
    for dtype, values in found.items():
        arrays |= {f"logits_{dtype}": values["logits"], f"loss_{dtype}": values["loss"]}
    exact = found["float64"]["grads"]
    arrays |= {f"grad {key}": summary(grad) for key, grad in exact.items()}
    build(name, torch.float32).to(torch.bfloat16).save_pretrained(folder)
    np.savez_compressed(folder / "expected.npz", **arrays)
    config = json.loads((folder / "config.json").read_text())
    rounding = np.abs(found["float32"]["logits"] - found["float64"]["logits"]).max()
    spread = found["float64"]["logits"].std()
    print(f"{name}: {config['model_type']}, logits {spread:.2f} around 0, float32 off by {rounding:.1e}")


if __name__ == "__main__":
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        sys.exit("tests/golden/models stays as it is: rewriting it needs pip install -e '.[oracle]'")
    for each in sys.argv[1:] or MODELS:
        rewrite(each)
