"""Causal grouped-query attention by several kernels, which give the same numbers.

kernel  | what it is                                           | where
xla     | all scores of a sequence in memory                   | any backend, short sequences
chunked | a softmax over blocks of keys, one after the other:  | any backend, long sequences
        | memory grows with the tokens, not with their square  |
cudnn   | cuDNN's flash attention; of packed sequences by name | NVIDIA GPUs of capability 8.0, in 16 bits
pallas  | JAX's splash attention                               | TPUs

Shape suffixes: B batch, T tokens, S tokens attended to, N query heads, G kv heads, H width of a head. What a backward
reads of a kernel's forward (its output, and the logarithms of the sums of the softmax) is named "saved", so that
remat=none keeps it and no kernel runs twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ppctl.errors import ConfigError
from ppctl.model import chunked_attention, cudnn_attention, plain_attention
from ppctl.model.context_attention import PairKernel, context_functions
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.scoring import PLAIN, Scoring

# tokens from which auto takes `chunked` where the device has no kernel: it takes 0.57 of the CPU seconds of `xla` there
LONG = 1024
LANES = 128  # of a TPU
PALLAS_BLOCKS = (512, 384, 256, LANES)  # tokens of a block on TPUs: the first that divides a sequence, as MaxText's 512

# q [B, T, N, H], k and v [B, S, G, H], and of packed sequences the document of each token [B, T] -> [B, T, N, H]
Kernel = Callable[..., jax.Array]


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
    most_documents: int | None = None,
) -> str:
    """Return the kernel that `wanted` (auto, or a kernel) means on a device, which need not be here.

    device: has platform, and on GPUs compute_capability, as jax.Device; dtype: of compute; num_tokens: of a sequence,
    or where devices along cp divide it, of a piece; packed: a sequence has several documents, of which most_documents
    says how many at most (None: not known). ConfigError where the device, the dtype or the sizes do not allow a kernel
    that was asked for by name.
    """
    if wanted != "auto":
        reason = _refusal(wanted, device, dtype, head_dim, num_tokens, scoring)
        if wanted == "cudnn" and packed and reason is None:
            reason = _refusal_of_documents(device, most_documents)
        if wanted not in PAIR_KERNELS and cp > 1:
            reason = f"mesh.cp={cp} merges parts of a softmax, which {wanted} does not give"
        if reason is not None:
            raise ConfigError(f"model.attention={wanted}: {reason}. Use model.attention=auto, which chooses one.")
        return wanted
    for kernel in ("cudnn", "pallas") if cp == 1 else ("cudnn",):
        if packed and kernel == "cudnn":
            continue  # it has not run on a GPU yet
        if _refusal(kernel, device, dtype, head_dim, num_tokens, scoring) is None:
            return kernel
    return "chunked" if num_tokens >= LONG else "xla"


def _refusal(
    kernel: str, device: Any, dtype: jnp.dtype, head_dim: int, num_tokens: int, scoring: Scoring
) -> str | None:
    """Return why a kernel cannot run, or None."""
    if kernel == "cudnn":
        capability = _capability(device)
        if capability is None:
            return f"cuDNN runs on NVIDIA GPUs, and the platform is {device.platform}"
        widest = 256 if capability >= (9, 0) else 128
        if capability < (8, 0):
            return (
                f"cuDNN's flash attention needs compute capability 8.0, and {device.device_kind} has "
                f"{device.compute_capability}"
            )
        if jnp.dtype(dtype).name not in cudnn_attention.ELEMENT_TYPES:
            return f"cuDNN's flash attention computes in bfloat16 or float16, and run.dtype={dtype}"
        if head_dim % 8 or head_dim > widest:
            return f"cuDNN needs heads of a multiple of 8 and at most {widest} wide, and they are {head_dim} wide"
        if scoring.softcap is not None or scoring.window is not None:
            return f"ppctl's call of cuDNN has no windows and no caps of scores, and the model has {_extras(scoring)}"
    if kernel == "pallas":
        if device.platform != "tpu":
            return f"the Pallas kernel is for TPUs, and the platform is {device.platform}"
        if jnp.dtype(dtype).itemsize > 4:
            return f"the Pallas kernel computes in at most 32 bits, and run.dtype={dtype}"
        if head_dim % LANES or num_tokens % LANES:
            return (
                f"the Pallas kernel needs heads and sequences of multiples of {LANES}, and they are {head_dim} wide "
                f"and {num_tokens} tokens long"
            )
    return None


def _refusal_of_documents(device: Any, most_documents: int | None) -> str | None:
    """Return why cuDNN's attention, which runs on the device, cannot run of packed sequences, or None."""
    if (_capability(device) or (0, 0)) < (9, 0):
        return (
            f"cuDNN's flash attention of packed documents needs compute capability 9.0, and {device.device_kind} has "
            f"{device.compute_capability}"
        )
    if most_documents is None:
        return "cuDNN must know how many documents a sequence has at most, and of this data that is not known"
    return None


def _capability(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, None of another device."""
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # AMD's has letters
    return None if device.platform not in ("gpu", "cuda") or version is None else (int(version[1]), int(version[2]))


def _extras(scoring: Scoring) -> str:
    """Return the settings that only some kernels have."""
    named = {"model.window": scoring.window, "model.attention_softcap": scoring.softcap}
    return " ".join(f"{name}={value:g}" for name, value in named.items() if value is not None)


def attention(
    wanted: str,
    device: Any = None,
    axes: StageAxes = WHOLE,
    scoring: Scoring = PLAIN,
    most_documents: int | None = None,
) -> Kernel:
    """Return causal softmax attention, softmax in at least float32, by what `choose` chooses.

    device: where it is to run; None: on the first that is here. axes: with cp, T are the tokens of one device.
    most_documents: as of `choose`.
    """

    def mix(q_BTNH: jax.Array, k_BSGH: jax.Array, v_BSGH: jax.Array, *documents_BT: jax.Array) -> jax.Array:
        place = jax.devices()[0] if device is None else device
        sizes = q_BTNH.dtype, q_BTNH.shape[3]
        if axes.cp == 1:
            documents = {"packed": bool(documents_BT), "most_documents": most_documents}
            chosen = choose(wanted, place, *sizes, q_BTNH.shape[1], 1, scoring, **documents)
            return kernel_named(chosen, scoring, most_documents)(q_BTNH, k_BSGH, v_BSGH, *documents_BT)
        pair = pair_kernel(choose(wanted, place, *sizes, q_BTNH.shape[1] // 2, axes.cp, scoring), scoring)
        return kernel_of(*context_functions(pair, axes))(q_BTNH, k_BSGH, v_BSGH)

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
    """Attention by JAX's splash kernels for TPUs; T and H are as `choose` demands. interpret: on any device."""
    # imported here: Pallas takes 0.3 s
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    T, N, H = q_BTNH.shape[1:]
    of_head = splash_attention_mask.CausalMask((T, T))
    if scoring.window is not None:
        of_head = splash_attention_mask.LocalMask((T, T), (scoring.window - 1, 0), 0)
    mask = splash_attention_mask.MultiHeadMask([of_head] * N)
    block = next(size for size in PALLAS_BLOCKS if T % size == 0)
    names = (field.name for field in fields(splash_attention_kernel.BlockSizes) if field.name.startswith("block"))
    sizes: dict[str, Any] = dict.fromkeys(names, block)
    kernel = splash_attention_kernel.make_splash_mha(
        mask,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        residual_checkpoint_name="saved",
        attn_logits_soft_cap=scoring.softcap,
        interpret=interpret,
    )
    q_BNTH, k_BGSH, v_BGSH = (a.transpose(0, 2, 1, 3) for a in (q_BTNH, k_BSGH, v_BSGH))
    both = None if documents_BT is None else splash_attention_kernel.SegmentIds(documents_BT, documents_BT)
    out_BNTH: Any = jax.vmap(kernel)(q_BNTH * scoring.scale_of(H), k_BGSH, v_BGSH, both)
    return out_BNTH.transpose(0, 2, 1, 3)


def kernel_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Return attention by two functions: q, k, v -> output, log_sums; and all of these, g -> gradients of q, k, v.

    log_sums: logarithms of the sums of the softmax. Of packed sequences both are given documents_BT too.
    """

    @jax.custom_vjp
    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, documents: tuple[jax.Array, ...]) -> jax.Array:
        return forward(q, k, v, **_named(documents))[0]

    def save(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        out, log_sums = (checkpoint_name(a, "saved") for a in forward(q, k, v, **_named(documents)))
        return out, (q, k, v, out, log_sums, documents)

    def pull(saved: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
        *arrays, documents = saved
        return (*backward(*arrays, g, **_named(documents)), None)

    kernel.defvjp(save, pull)
    return lambda q, k, v, *documents: kernel(q, k, v, documents)


def _named(documents: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    return dict(zip(("documents_BT",), documents, strict=False))


PAIR_KERNELS = ("xla", "chunked", "cudnn")  # those that merge parts of a softmax


def pair_kernel(name: str, scoring: Scoring = PLAIN) -> PairKernel:
    """Return one of PAIR_KERNELS."""
    module = {"xla": plain_attention, "chunked": chunked_attention, "cudnn": cudnn_attention}[name]
    return PairKernel(partial(module.forward, scoring=scoring), partial(module.backward, scoring=scoring))


@cache
def kernel_named(name: str, scoring: Scoring = PLAIN, most_documents: int | None = None) -> Kernel:
    """Return attention by the kernel of this name; most_documents: of packed sequences, which cudnn needs."""
    if name in ("xla", "pallas"):
        return partial(plain_attention.plain if name == "xla" else pallas, scoring=scoring)
    forward, backward = pair_kernel(name, scoring)
    if name == "cudnn" and most_documents is not None:
        forward, backward = (partial(function, most_documents=most_documents) for function in (forward, backward))
    return kernel_of(forward, backward)


KERNELS: dict[str, Kernel] = {name: kernel_named(name) for name in ("xla", "chunked", "cudnn", "pallas")}
