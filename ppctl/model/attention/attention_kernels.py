"""Causal grouped-query attention by several kernels with equal results.

kernel  | method                                               | where
xla     | all scores of a sequence in memory                   | any backend, short sequences
chunked | a softmax over blocks of keys, one after the other:  | any backend, long sequences, and
        | memory grows with the tokens, not with their square  | those divided over cp
cudnn   | cuDNN's flash attention; no packed sequences         | NVIDIA GPUs, compute capability 8.0
        |                                                      | or above, 16-bit dtypes
pallas  | JAX's splash attention                               | TPUs

Shape suffixes: B batch, T tokens, S tokens attended to, N query heads, G kv heads, H width of a
head. A kernel's output and the logarithms of its softmax sums are checkpointed under the name
"saved": remat=none keeps them for the backward, so that no kernel runs twice.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ppctl.errors import ConfigError, setting
from ppctl.model.attention import chunked_attention, context_attention, cudnn_attention
from ppctl.model.attention.attention_scores import PLAIN, Scoring, plain
from ppctl.model.attention.context_attention import PairKernel
from ppctl.model.parallel import WHOLE, StageAxes

# minimum tokens for auto to select `chunked`, which then takes 0.57 of the CPU seconds of `xla`
LONG = 1024
LANES = 128  # lanes of a TPU
PALLAS_BLOCKS = (512, 384, 256, LANES)  # tokens a block; the first that divides T (MaxText: 512)

# (q [B, T, N, H], k and v [B, S, G, H], document of each token [B, T] or None) -> [B, T, N, H]
Kernel = Callable[..., jax.Array]
Mix = Callable[[StageAxes, Scoring], Kernel]  # (axes of a stage, scoring) -> attention


def choose(
    wanted: str,
    device: Any,
    dtype: jnp.dtype,
    head_dim: int,
    num_tokens: int,
    cp: int = 1,
    scoring: Scoring = PLAIN,
    *,
    packed: bool = False,
) -> str:
    """Return the name of a supported kernel: `wanted`, or the preferred one for wanted="auto".

    Args:
        device: An attached or described device: `platform`, and on GPUs `compute_capability`.
        dtype: The dtype of compute.
        head_dim: Width of a head: the larger one of its queries and keys, and its values.
        num_tokens: Tokens of a sequence; with cp > 1, tokens of one of a device's two pieces.
        packed: Whether sequences hold several documents.

    Raises:
        ConfigError: The device, dtype, sizes or packing rule out the requested kernel.
    """
    limits = partial(_limits, device, dtype, head_dim, num_tokens, cp, scoring, packed)
    fault = lambda kernel: next((text for is_over, text in limits(kernel) if is_over), None)  # noqa: E731
    if wanted == "auto":
        by_length = "chunked" if num_tokens >= LONG or cp > 1 else "xla"
        return next((kernel for kernel in ("cudnn", "pallas") if fault(kernel) is None), by_length)
    if (reason := fault(wanted)) is not None:
        raise ConfigError(
            f"{setting('model.attention', wanted)}: {reason}. Use "
            f"{setting('model.attention', 'auto')}, which chooses a supported kernel."
        )
    return wanted


def _limits(
    device: Any,
    dtype: jnp.dtype,
    head_dim: int,
    num_tokens: int,
    cp: int,
    scoring: Scoring,
    packed: bool,
    kernel: str,
) -> list[tuple[bool, str]]:
    """Return the limits of a kernel as pairs (whether it is exceeded, reason)."""
    # 1. the limit of all kernels
    merges = (
        f"{setting('mesh.cp', cp)} merges parts of a softmax by their sums, which {kernel} does "
        "not return"
    )
    limits = [(cp > 1 and kernel not in PAIR_KERNELS, merges)]
    if kernel not in ("pallas", "cudnn"):
        return limits
    # 2. the limits of a kernel for TPUs or NVIDIA GPUs
    by_dtype, kind, platform = setting("run.dtype", dtype), jnp.dtype(dtype), device.platform
    if kernel == "pallas":
        shape = f"heads {head_dim} wide and {num_tokens} tokens"
        sizes = f"a head width and a number of tokens divisible by {LANES}, not {shape}"
        limits += [
            (platform != "tpu", f"the Pallas kernel is for TPUs, and the platform is {platform}"),
            (kind.itemsize > 4, f"the Pallas kernel computes in at most 32 bits, and {by_dtype}"),
            (head_dim % LANES + num_tokens % LANES > 0, f"the Pallas kernel needs {sizes}"),
        ]
    else:
        flash, capability = "cuDNN's flash attention", compute_capability(device)
        most = 256 if capability >= (9, 0) else 128
        version = f"{getattr(device, 'device_kind', platform)} has {'.'.join(map(str, capability))}"
        widths = f"a head width of at most {most} that is divisible by 8, not {head_dim}"
        named = {"model.window": scoring.window, "model.attention_softcap": scoring.softcap}
        extras = [setting(name, f"{n:g}") for name, n in named.items() if n is not None]
        has = f"neither windows nor caps of scores, and the model has {' '.join(extras)}"
        limits += [
            (not any(capability), f"cuDNN runs on NVIDIA GPUs, and the platform is {platform}"),
            (capability < (8, 0), f"{flash} needs compute capability 8.0, and {version}"),
            (
                kind.name not in cudnn_attention.ELEMENT_TYPES,
                f"{flash} computes in bfloat16, and {by_dtype}",
            ),
            (head_dim % 8 > 0 or head_dim > most, f"cuDNN needs {widths}"),
            (bool(extras), f"ppctl's call of cuDNN supports {has}"),
            (packed, "cuDNN's attention does not keep packed documents apart"),
        ]
    return limits


def compute_capability(device: Any) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, (0, 0) for other devices."""
    text = str(getattr(device, "compute_capability", ""))
    version = re.fullmatch(r"(\d+)\.(\d+)", text)  # no match for AMD's, which has letters
    if device.platform not in ("gpu", "cuda") or version is None:
        return 0, 0
    return int(version[1]), int(version[2])


def attention(
    wanted: str, device: Any = None, axes: StageAxes = WHOLE, scoring: Scoring = PLAIN
) -> Kernel:
    """Return causal softmax attention; in each call, `choose` selects the kernel by the shapes.

    device: the target device; None: the first attached one. axes: mesh axes that divide a
    stage.
    """

    def mix(
        q_BTNH: jax.Array,
        k_BSGH: jax.Array,
        v_BSGH: jax.Array,
        documents_BT: jax.Array | None = None,
    ) -> jax.Array:
        place = jax.devices()[0] if device is None else device
        T, width = q_BTNH.shape[1], max(q_BTNH.shape[-1], v_BSGH.shape[-1])
        select = partial(choose, wanted, place, q_BTNH.dtype, width)
        if axes.cp == 1:
            chosen = select(T, 1, scoring, packed=documents_BT is not None)
            return kernel_named(chosen, scoring)(q_BTNH, k_BSGH, v_BSGH, documents_BT)
        pair = pair_kernel(select(T // 2, axes.cp, scoring), scoring)
        forward, backward = context_attention.forward, context_attention.backward
        kernel = kernel_of(partial(forward, pair, axes), partial(backward, pair, axes))
        return kernel(q_BTNH, k_BSGH, v_BSGH)

    return mix


def pallas(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    scoring: Scoring = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """Return attention by JAX's splash kernels for TPUs; interpret=True runs on any device."""
    # imported in the function, because importing Pallas takes 0.3 s
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    # 1. the mask of a head, and the tokens of a block
    T, N, H = q_BTNH.shape[1:]
    of_head = masks.CausalMask((T, T))
    if scoring.window is not None:
        of_head = masks.LocalMask((T, T), (scoring.window - 1, 0), 0)
    block = next(size for size in PALLAS_BLOCKS if T % size == 0)
    names = (field.name for field in fields(splash.BlockSizes))
    sizes: dict[str, Any] = {name: block for name in names if name.startswith("block")}
    # 2. the kernel
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([of_head] * N),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**sizes),
        residual_checkpoint_name="saved",
        attn_logits_soft_cap=scoring.softcap,
        interpret=interpret,
    )
    # 3. the call, one sequence at a time
    q_BNTH, k_BGSH, v_BGSH = (a.transpose(0, 2, 1, 3) for a in (q_BTNH, k_BSGH, v_BSGH))
    both = None if documents_BT is None else splash.SegmentIds(documents_BT, documents_BT)
    out_BNTH: Any = jax.vmap(kernel)(q_BNTH * scoring.scale_of(H), k_BGSH, v_BGSH, both)
    return out_BNTH.transpose(0, 2, 1, 3)


def kernel_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Return attention whose gradients are computed by `backward`.

    forward(q, k, v) -> (output, log_sums): log_sums are the logarithms of the softmax's sums.
    backward(q, k, v, output, log_sums, g) -> gradients of q, k and v. With packed sequences both
    also take documents_BT.
    """

    def of(documents: jax.Array | None) -> dict[str, jax.Array]:
        return {} if documents is None else {"documents_BT": documents}

    @jax.custom_vjp
    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None) -> jax.Array:
        return forward(q, k, v, **of(documents))[0]

    def save(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        out, log_sums = (checkpoint_name(a, "saved") for a in forward(q, k, v, **of(documents)))
        return out, (q, k, v, out, log_sums, documents)

    def pull(saved: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
        *arrays, documents = saved
        return (*backward(*arrays, g, **of(documents)), None)

    kernel.defvjp(save, pull)
    return lambda q, k, v, documents=None: kernel(q, k, v, documents)


# kernels that return the softmax's sums, so that results over parts of the keys can be merged
PAIR_KERNELS = {"chunked": chunked_attention, "cudnn": cudnn_attention}


def pair_kernel(name: str, scoring: Scoring = PLAIN) -> PairKernel:
    """Return one of PAIR_KERNELS with this scoring."""
    module = PAIR_KERNELS[name]
    return PairKernel(*(partial(f, scoring=scoring) for f in (module.forward, module.backward)))


@cache
def kernel_named(name: str, scoring: Scoring = PLAIN) -> Kernel:
    """Return attention by the kernel of this name."""
    if name in ("xla", "pallas"):
        return partial(plain if name == "xla" else pallas, scoring=scoring)
    return kernel_of(*pair_kernel(name, scoring))
