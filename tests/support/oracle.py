"""Tiny random language models of each family by `transformers`, with its results:
logits, loss, gradients, and five steps of AdamW by a loop of PyTorch.

`make golden` rewrites tests/golden/models where the extra `oracle` is installed. `make test` only
reads the files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
DOCUMENTS = ((0, 5, 13), (0, 9))  # starts of packed documents
LENGTHS = (24, 17)  # lengths of padded sequences
NO_TOKEN = -1  # the target of a token without one
NUM_STEPS, BATCH_SIZE = 5, 8  # steps and sequences of AdamW
LR = {
    "lr": 1e-2,
    "min_lr_fraction": 0.1,
    "warmup_steps": 2,
    "num_steps": NUM_STEPS,
}  # arguments of ppctl's lr_schedule
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 0.5
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
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
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
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": 2},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 2.5,
        },
    ),
}
MIXTURES = [name for name, (_, sizes) in MODELS.items() if "num_experts_per_tok" in sizes]
CHOICE_BIAS = "e_score_correction_bias"  # a buffer, no parameter


def build(name: str, dtype: Any) -> Any:
    """Return the model of this name with random weights that bfloat16 represents, logits around 1."""
    import torch
    import transformers

    family, sizes = MODELS[name]
    config_class = getattr(
        transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    )
    how = {"attn_implementation": "eager"}
    if name in MIXTURES:
        how["experts_implementation"] = "eager"
    config = config_class(**{**SMALL, **sizes, **how})
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
                number *= 0.5 if "embed" in key else tensor.shape[-1] ** -0.5
            else:
                number = number * 0.2 + (1.0 if tensor.mean() > 0.5 else 0.0)
            tensor.copy_(number.to(torch.bfloat16))
        for key, tensor in model.named_buffers():
            if key.endswith(CHOICE_BIAS):
                number = 0.1 * torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
                tensor.copy_(number.to(torch.bfloat16))
    return model.eval()


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Widen what `transformers` computes in float32 whatever the dtype of the model: norms,
    softmax, angles.
    """
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


def as_in_files(model: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors of the model in memory by the names in its files: one for each expert."""
    is_mixtral, found = model.config.model_type == "mixtral", {}
    for key, tensor in tensors.items():
        before, _, kind = key.rpartition(".mlp.experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            gate = ".block_sparse_moe.gate." if is_mixtral else ".mlp.gate."
            found[key.replace(".mlp.gate.", gate)] = tensor
            continue
        for e, matrix in enumerate(tensor):
            if kind == "down_proj":
                parts = {("down_proj", "w2"): matrix}
            else:
                gate, up = np.split(matrix, 2)
                parts = {("gate_proj", "w1"): gate, ("up_proj", "w3"): up}
            for names, part in parts.items():
                folder = "block_sparse_moe" if is_mixtral else "mlp"
                found[f"{before}.{folder}.experts.{e}.{names[is_mixtral]}.weight"] = part
    return found


def computed(
    model: Any, inputs: np.ndarray, targets: np.ndarray, **how: np.ndarray
) -> dict[str, Any]:
    """Return logits, the mean loss of targets that are some, and its gradients by name. how: what
    else it is given.
    """
    import torch

    model.zero_grad()
    how = {key: torch.asarray(value) for key, value in how.items()}
    logits = model(torch.asarray(inputs.astype(np.int64)), use_cache=False, **how).logits
    flat, targets = (
        logits.reshape(-1, logits.shape[-1]),
        torch.asarray(targets.astype(np.int64)).reshape(-1),
    )
    loss = torch.nn.functional.cross_entropy(flat, targets, ignore_index=NO_TOKEN)
    loss.backward()
    grads = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    grads = as_in_files(model, grads)
    return {"logits": logits.detach().numpy(), "loss": loss.detach().numpy(), "grads": grads}


class Case(NamedTuple):
    """Sequences for a model of ppctl, and as `transformers` takes them."""

    inputs: np.ndarray  # [B, T]; packed: the first token of a document is ~id
    targets: np.ndarray  # NO_TOKEN: none
    counts: np.ndarray  # whether logits after a token mean anything
    ids: np.ndarray  # inputs of transformers
    how: dict[str, np.ndarray]  # further arguments


def cases(name: str) -> dict[str, Case]:
    """Return the same tokens whole, packed (three and two documents), and padded at the end."""
    ids = tokens(name)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    everywhere, place = np.ones(inputs.shape, bool), np.arange(inputs.shape[1])
    is_first = np.array([np.isin(place, starts) for starts in DOCUMENTS])
    is_last = np.roll(is_first, -1, axis=1)
    positions = np.array(
        [
            place - np.array(starts)[np.searchsorted(starts, place, "right") - 1]
            for starts in DOCUMENTS
        ]
    )
    is_there = place < np.array(LENGTHS)[:, None]
    of_packed = Case(
        np.where(is_first, ~inputs, inputs),
        np.where(is_last, NO_TOKEN, targets),
        everywhere,
        inputs,
        {"position_ids": positions},
    )
    padded = np.where(is_there, inputs, 0)
    mask = {"attention_mask": is_there.astype(np.int64)}
    of_padded = Case(
        padded,
        np.where(np.roll(is_there, -1, 1) & is_there, targets, NO_TOKEN),
        is_there,
        padded,
        mask,
    )
    return {
        "whole": Case(inputs, targets, everywhere, inputs, {}),
        "packed": of_packed,
        "padded": of_padded,
    }


def trained(model: Any, batches: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return loss and norm of the gradient of each step, and the last parameters by name: AdamW,
    clipped.

    batches: ids [B, tokens + 1]. The rate rises and falls by PyTorch's own schedules.
    """
    import torch
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": ADAMW["weight_decay"],
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LR["lr"], (ADAMW["b1"], ADAMW["b2"]), ADAMW["eps"])
    steps = LR["warmup_steps"]
    rising = LinearLR(optimizer, 1 / (steps + 1), total_iters=steps)
    falling = CosineAnnealingLR(
        optimizer, LR["num_steps"] - steps, LR["lr"] * LR["min_lr_fraction"]
    )
    rate = SequentialLR(optimizer, [rising, falling], [steps])
    losses, norms = [], []
    for ids in batches:
        ids = torch.asarray(np.asarray(ids, np.int64))
        optimizer.zero_grad()
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)
        )
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        losses.append(float(loss.detach()))
        optimizer.step()
        rate.step()
    params = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    params = as_in_files(model, params)
    return {"losses": np.array(losses), "norms": np.array(norms), "params": params}


def summary(tensor: np.ndarray) -> np.ndarray:
    """Return (norm, projection on a fixed vector, sum) of a tensor: three numbers that stand for
    it.
    """
    flat = np.asarray(tensor, np.float64).ravel()
    return np.array([np.linalg.norm(flat), flat @ np.cos(0.7 * np.arange(flat.size)), flat.sum()])


def of_each(logits: np.ndarray) -> np.ndarray:
    """Return three numbers that stand for the logits after each token [..., 3]."""
    return np.apply_along_axis(summary, -1, logits)


def tokens(name: str) -> np.ndarray:
    """Token ids above 0: Gemma pads with 0, and torch makes no gradient for it."""
    return np.random.default_rng(len(name)).integers(
        1, SMALL["vocab_size"], (2, NUM_TOKENS + 1), np.int32
    )


def batches(name: str) -> np.ndarray:
    """Token ids of each step [NUM_STEPS, BATCH_SIZE, tokens + 1]: each 7 above the one before,
    which can be learned.
    """
    last = SMALL["vocab_size"] - 1
    starts = np.random.default_rng(100 + len(name)).integers(last, size=(NUM_STEPS, BATCH_SIZE, 1))
    return (1 + (starts + 7 * np.arange(NUM_TOKENS // 2 + 1)) % last).astype(np.uint8)


def rewrite(name: str) -> None:
    """Write a model of this name, and what transformers and PyTorch compute of it."""
    import torch

    folder, of_cases, ids = FOLDER / name, cases(name), batches(name)
    shutil.rmtree(folder, ignore_errors=True)
    arrays: dict[str, np.ndarray] = {"ids": tokens(name), "steps_ids": ids}
    found, steps = {}, {}
    for dtype in (torch.float32, torch.float64):
        with in_double() if dtype == torch.float64 else contextlib.nullcontext():
            key = str(dtype).removeprefix("torch.")
            found[key] = {
                case: computed(build(name, dtype), of.ids, of.targets, **of.how)
                for case, of in of_cases.items()
            }
            steps[key] = trained(build(name, dtype), ids)
        whole = found[key]["whole"]
        arrays |= {f"logits_{key}": whole["logits"], f"loss_{key}": whole["loss"]}
        arrays |= {
            f"steps_losses_{key}": steps[key]["losses"],
            f"steps_norms_{key}": steps[key]["norms"],
        }
    exact = found["float64"]
    arrays |= {f"grad {key}": summary(grad) for key, grad in exact["whole"]["grads"].items()}
    arrays |= {
        f"steps_param {key}": summary(param) for key, param in steps["float64"]["params"].items()
    }
    for case in ("packed", "padded"):
        arrays |= {
            f"{case}_loss": exact[case]["loss"],
            f"{case}_logits": of_each(exact[case]["logits"]),
        }
    narrow = build(name, torch.float32).to(torch.bfloat16)
    for key, tensor in narrow.named_buffers():
        if key.endswith(CHOICE_BIAS):
            tensor.data = tensor.float()  # the dtype in the files of the models
    narrow.save_pretrained(folder)
    np.savez_compressed(folder / "expected.npz", **arrays)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    rounding = np.abs(found["float32"]["whole"]["logits"] - exact["whole"]["logits"]).max()
    losses = steps["float64"]["losses"]
    print(
        f"{name}: {kind}, logits {exact['whole']['logits'].std():.2f} around 0, float32 off by "
        f"{rounding:.1e}; loss of {NUM_STEPS} steps from {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"float32 off by {np.abs(steps['float32']['losses'] - losses).max():.1e}"
    )


if __name__ == "__main__":
    if (
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("torch") is None
    ):
        sys.exit(
            "tests/golden/models stays as it is: rewriting it needs pip install -e '.[oracle]'"
        )
    for each in sys.argv[1:] or MODELS:
        rewrite(each)
