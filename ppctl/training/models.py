"""The models that ppctl ships, by their settings, and the model that a config names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config import Config
from ppctl.config.checks import above_zero, at_least, choice
from ppctl.data import DataSet
from ppctl.errors import ConfigError
from ppctl.model import mlp as mlp_model
from ppctl.model import transformer as transformer_model
from ppctl.model.attention import Kernel, choose
from ppctl.model.attention import attention as attention_of
from ppctl.model.lora import Lora
from ppctl.model.rotary import rotation
from ppctl.model.scoring import Scoring
from ppctl.model.stack import Stack
from ppctl.training.user_code import custom_stack


def transformer(
    *, vocab_size: int, dtype: Any = jnp.float32, packed: bool = False, lora: Lora | None = None, **sizes: Any
) -> Stack:
    """Return a decoder-only transformer as a `Stack`. inputs, targets: token ids [batch, tokens].

    A target of -1 is none: it counts neither in the sum of losses nor in their number.

    Args:
        vocab_size: Number of token ids.
        dtype: Of parameters.
        packed: Sequences may hold several documents, of which none attends to another. The first token of each is
            written as its complement, ~id.
        lora: Adapters beside the linear maps of the blocks, which alone are trained: `ppctl.Lora(rank=16, alpha=32)`.
        sizes: num_layers, d_model, num_heads, activation, window and all else that `ppctl.config.Transformer` has
            (`ppctl train --help model=transformer` lists it), with its defaults.

    Raises:
        ConfigError: A size is unknown or does not fit the others.
    """
    checked = _checked(settings.Transformer, {**sizes, "vocab_size": vocab_size}, drop=("name", "seq_len"))
    wanted = checked.pop("attention")
    return transformer_model.transformer(**checked, dtype=dtype, mix=_mix(wanted, None), packed=packed, lora=lora)


def attention(
    kernel: str = "auto",
    *,
    device: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Kernel:
    """Return causal grouped-query attention for a model of one's own, by the kernels that the transformer has.

    It maps q [batch, tokens, heads, width], k and v [batch, tokens, kv heads, width], with kv heads dividing heads,
    to [batch, tokens, heads, width]. A fourth argument, int [batch, tokens], numbers the documents of packed sequences,
    none of which attends to another. It runs in both executors, and compiles for devices that are not here.

    Args:
        kernel: auto, xla, chunked, cudnn or pallas, as `model.attention`.
        device: One of those that the model is for, by which auto chooses; None: the first that is here.
        scale: Of the scores; None: 1 / sqrt(width).
        softcap: c of scores c * tanh(score / c); None: no cap.
        window: Last tokens that each attends to, itself included; None: all before it.

    Raises:
        ConfigError: When it is called: the device, the dtype or the shapes do not allow the kernel.
    """
    choice("kernel", kernel, settings.Transformer.ATTENTIONS)
    above_zero("scale", scale)
    above_zero("softcap", softcap)
    at_least("window", window, 1)
    return attention_of(kernel, device, scoring=Scoring(scale, softcap, window))


def mlp(*, input_dim: int, target_dim: int, dtype: Any = jnp.float32, **sizes: Any) -> Stack:
    """Return a multi-layer perceptron for regression as a `Stack`. inputs [batch, input_dim], targets [.., target_dim].

    Args:
        dtype: Of parameters.
        sizes: num_layers, d_model, activation (relu | tanh | gelu), as in `ppctl.config.MLP`, with its defaults.

    Raises:
        ConfigError: A size is unknown or impossible.
    """
    known = _checked(settings.MLP, sizes, drop=("name",))
    return mlp_model.mlp(**known, input_dim=input_dim, target_dim=target_dim, dtype=dtype)


def _checked(schema: type, sizes: dict[str, Any], drop: tuple[str, ...]) -> dict[str, Any]:
    """Return all sizes of a model, checked."""
    defaults = asdict(schema())
    unknown = [name for name in sizes if name not in defaults or name in drop]
    if unknown:
        names = ", ".join(name for name in defaults if name not in drop)
        raise ConfigError(f"{unknown[0]} is no size of this model. It has {names}.")
    model = schema(**sizes)
    model.check()
    return {name: value for name, value in asdict(model).items() if name not in drop}


def make_stack(config: Config, data: DataSet, compute: jnp.dtype, device: Any) -> Stack:
    """Return the model that the config names, of the size that the data needs.

    compute: the dtype of compute. device: one of those that it is for, which may be described only.
    """
    dtype = jnp.promote_types(compute, jnp.float32)  # of parameters
    sizes = asdict(config.model)
    name = sizes.pop("name")
    if name == "custom":
        sizes.pop("seq_len")
        return custom_stack(**sizes, data=data, dtype=dtype, compute=compute, device=device)
    if name == "mlp":
        input_dim, target_dim = data.input_dim, data.target_dim
        if input_dim is None or target_dim is None:
            raise ConfigError(
                f"model=mlp needs rows of numbers, but data={data.name} states no input_dim and no target_dim."
            )
        return mlp_model.mlp(**sizes, input_dim=input_dim, target_dim=target_dim, dtype=dtype)
    del sizes["seq_len"]
    num_ids = data.vocab_size
    if num_ids is None:
        raise ConfigError(f"model=transformer needs token ids, but data={data.name} states no vocab_size.")
    vocab_size = sizes.pop("vocab_size") or num_ids
    if vocab_size < num_ids:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is less than the {num_ids} token ids of data={data.name}. "
            f"Use model.vocab_size=null, which takes the data's, or {num_ids} or more."
        )
    attention_kernels(config, compute, device, data)  # refuses those that cannot run
    mix = _mix(sizes.pop("attention"), device, data.most_documents)
    return transformer_model.transformer(
        **sizes,
        vocab_size=vocab_size,
        dtype=dtype,
        mix=mix,
        rotate=rotation(device),
        packed=data.is_packed,
        lora=lora_of(config.optim),
    )


def lora_of(optim: settings.AdamW | settings.SGD) -> Lora | None:
    """Return the adapters that a config asks for, or None."""
    if optim.train != "lora":
        return None
    targets = None if optim.lora_targets is None else tuple(optim.lora_targets)
    return Lora(optim.lora_rank, optim.lora_alpha, targets)


def _mix(wanted: str, device: Any, most_documents: int | None = None) -> transformer_model.Mix:
    return lambda axes, scoring: attention_of(wanted, device, axes, scoring, most_documents)


def attention_kernels(config: Config, compute: jnp.dtype, device: Any, data: DataSet) -> tuple[str, ...]:
    """Return the attention kernels that the config's transformer has on a device: that of its first layer, and others.

    ConfigError where one cannot run.
    """
    model = config.model
    assert isinstance(model, settings.Transformer), "other models have no attention of ours"
    cp = config.mesh.cp
    length = model.seq_len if cp == 1 else -(-model.seq_len // (2 * cp))
    scorings = [Scoring(None, model.attention_softcap, window) for window in dict.fromkeys(model.windows)]
    of_model = model.attention, device, compute, model.head_width, length, cp
    documents = {"packed": data.is_packed, "most_documents": data.most_documents}
    return tuple(dict.fromkeys(choose(*of_model, each, **documents) for each in scorings))
