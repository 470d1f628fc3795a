"""The built-in models, made from their settings, and the model of a config."""

from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config.field_checks import above_zero, choice, settings_from
from ppctl.config.groups.model_settings import ATTENTIONS, AnyModel
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.data import DataSet
from ppctl.errors import ConfigError
from ppctl.model import mlp as mlp_model, transformer as transformer_model
from ppctl.model.attention.attention_kernels import Kernel, attention as attention_of, choose
from ppctl.model.attention.attention_scores import Scoring
from ppctl.model.experts import grouped_products
from ppctl.model.lora import Lora
from ppctl.model.stack import Stack
from ppctl.training.pipeline.call_checks import whole_number
from ppctl.training.pipeline.user_code import custom_stack


def transformer(
    *,
    vocab_size: int,
    dtype: Any = jnp.float32,
    packed: bool = False,
    lora: Lora | None = None,
    **sizes: Any,
) -> Stack:
    """Return a decoder-only transformer as a `Stack`.

    Inputs and targets are token ids [batch, tokens]. Targets of -1 have no loss and are not counted
    in the number of losses.

    Args:
        vocab_size: Number of token ids.
        dtype: Dtype of the parameters.
        packed: Whether a sequence may hold several documents, which do not attend to each other.
            The first token of each document is then written as its complement, ~id.
        lora: Adapters of the blocks' linear maps, such as `ppctl.Lora(rank=16, alpha=32)`. Only the
            adapters are trained.
        sizes: Fields of `ppctl.config.Transformer` (num_layers, d_model, window, ...), with its
            defaults; `ppctl train --help model=transformer` lists them.

    Raises:
        ConfigError: A size is unknown or does not fit the others.
    """
    sizes |= {"vocab_size": vocab_size}
    model = _checked(settings.Transformer, sizes, drop=("name", "seq_len"))
    return _transformer(model.attention, model.architecture, lora, dtype=dtype, packed=packed)


def attention(
    kernel: str = "auto",
    *,
    device: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Kernel:
    """Return causal grouped-query attention for custom models, with the transformer's kernels.

    The result maps q [batch, tokens, heads, width] and k, v [batch, tokens, kv heads, width] to
    [batch, tokens, heads, width]; the kv heads divide the heads. An optional fourth argument, int
    [batch, tokens], numbers the documents of packed sequences, which do not attend to each other.
    The result runs with executor=spmd and mpmd, and compiles for hardware that is not attached.

    Args:
        kernel: auto | xla | chunked | cudnn | pallas, as `model.attention`.
        device: Target device, which decides the kernel of auto; None: the first attached device.
        scale: Factor of the scores; None: 1 / sqrt(width).
        softcap: Cap c of the scores: c * tanh(score / c); None: no cap.
        window: Number of most recent tokens that a token attends to, itself included; None: all.

    Raises:
        ConfigError: An argument is impossible. The result raises it when called, if device, dtype
            or shapes do not allow the kernel.
    """
    # check now: a wrong argument fails when the model is made, not when it is traced
    choice("kernel", kernel, ATTENTIONS)
    above_zero("scale", scale)
    above_zero("softcap", softcap)
    if window is not None:
        window = whole_number("window", window, 1)
    return attention_of(kernel, device, scoring=Scoring(scale, softcap, window))


def mlp(*, input_dim: int, target_dim: int, dtype: Any = jnp.float32, **sizes: Any) -> Stack:
    """Return a perceptron for regression as a `Stack`.

    Inputs are [batch, input_dim], targets [batch, target_dim].

    Args:
        input_dim: Features per example.
        target_dim: Targets per example.
        dtype: Dtype of the parameters.
        sizes: Fields of `ppctl.config.MLP` (num_layers, d_model, activation: relu | tanh | gelu),
            with its defaults.

    Raises:
        ConfigError: A size is unknown or impossible.
    """
    input_dim = whole_number("input_dim", input_dim, 1)
    target_dim = whole_number("target_dim", target_dim, 1)
    return _mlp(_checked(settings.MLP, sizes, drop=("name",)), input_dim, target_dim, dtype)


def _mlp(model: settings.MLP, input_dim: int, target_dim: int, dtype: Any) -> Stack:
    how: dict[str, Any] = {"input_dim": input_dim, "target_dim": target_dim, "dtype": dtype}
    how |= {"activation": model.activation, "dropout": model.dropout}
    return mlp_model.mlp(num_layers=model.num_layers, d_model=model.d_model, **how)


def _checked(schema: type, sizes: dict[str, Any], drop: tuple[str, ...]) -> Any:
    """Return settings of class `schema`; drop: fields that are not sizes. ConfigError if wrong."""
    names = [field.name for field in fields(schema) if field.name not in drop]
    unknown = [name for name in sizes if name not in names]
    if unknown:
        raise ConfigError(f"{unknown[0]} is not a size of this model. It has {', '.join(names)}.")
    model = settings_from(schema, sizes, "model")
    model.check()
    return model


@lru_cache(32)
def _transformer(
    kernel: str,
    sizes: Architecture,
    lora: Lora | None,
    *,
    dtype: Any,
    packed: bool,
    device: Any = None,
    imbalance: float | None = None,
) -> Stack:
    """Return a transformer as a stack: one for equal requests, so that JAX traces it once."""
    stack = transformer_model.transformer(
        sizes,
        mix=partial(attention_of, kernel, device),
        dtype=dtype,
        packed=packed,
        device=device,
        lora=lora,
        imbalance=imbalance,
    )
    same = partial(_transformer, kernel, sizes, lora, dtype=dtype, packed=packed)
    stack = stack.with_options(on_device=lambda device: same(device=device))
    if not any(sizes.has_experts):
        return stack
    return stack.with_options(counted=lambda load: same(device=device, imbalance=load))


def make_stack(
    model: AnyModel,
    data: DataSet,
    compute: jnp.dtype,
    device: Any,
    *,
    lora: Lora | None = None,
    cp: int = 1,
) -> Stack:
    """Return the model of these settings, with the input and output sizes of the data.

    compute: the compute dtype. device: a target device, attached or only described. cp: the number
    of devices that share a sequence.
    """
    dtype = jnp.promote_types(compute, jnp.float32)  # dtype of the parameters
    if isinstance(model, settings.Transformer):
        sizes = replace(model.architecture, vocab_size=_vocab_size(model, data))
        attention_kernels(model, cp, compute, device, data)  # raises for a kernel that cannot run
        expert_kernel(model, compute, device)
        made_for = partial(_transformer, dtype=dtype, packed=data.is_packed, device=device)
        return made_for(model.attention, sizes, lora)
    if isinstance(model, settings.CustomModel):
        how: dict[str, Any] = {"layers": model.layers, "mixes_examples": model.mixes_examples}
        how |= {"data": data, "dtype": dtype, "compute": compute, "device": device}
        return custom_stack(model.target, model.num_layers, model.options, **how)
    input_dim, target_dim = data.input_dim, data.target_dim
    if input_dim is None or target_dim is None:
        what = f"data={data.name} states no input_dim and no target_dim"
        raise ConfigError(f"model=mlp needs rows of numbers, but {what}.")
    return _mlp(model, input_dim, target_dim, dtype)


def _vocab_size(model: settings.Transformer, data: DataSet) -> int:
    """Return the transformer's vocabulary size. ConfigError if the data needs a larger one."""
    num_ids = data.vocab_size
    if num_ids is None:
        what = f"data={data.name} states no vocab_size"
        raise ConfigError(f"model=transformer needs token ids, but {what}.")
    vocab_size = model.vocab_size or num_ids
    if vocab_size < num_ids:
        what = f"model.vocab_size={vocab_size} is less than the {num_ids} token ids"
        use = f"Use model.vocab_size=null, which takes the data's, or {num_ids} or more."
        raise ConfigError(f"{what} of data={data.name}. {use}")
    return vocab_size


def lora_of(optim: settings.AnyOptim) -> Lora | None:
    """Return the LoRA adapters of a config, or None."""
    if optim.train != "lora":
        return None
    targets = None if optim.lora_targets is None else tuple(optim.lora_targets)
    return Lora(optim.lora_rank, optim.lora_alpha, targets, optim.lora_dropout)


def attention_kernels(
    model: settings.Transformer, cp: int, compute: jnp.dtype, device: Any, data: DataSet
) -> tuple[str, ...]:
    """Return the distinct attention kernels of a transformer on a device, in layer order.

    ConfigError if the device cannot run a kernel.
    """
    length = model.seq_len if cp == 1 else -(-model.seq_len // (2 * cp))
    scorings = [Scoring.of(model, window) for window in dict.fromkeys(model.windows)]
    of_model = model.attention, device, compute, max(model.attention_form.widths), length, cp
    return tuple(dict.fromkeys(choose(*of_model, each, packed=data.is_packed) for each in scorings))


def expert_kernel(model: settings.Transformer, compute: jnp.dtype, device: Any) -> str | None:
    """Return the kernel of experts; None without. ConfigError if the device cannot run it."""
    wanted = None if model.moe.num_experts is None else model.moe.kernel
    return None if wanted is None else grouped_products.choose(wanted, device, compute)
