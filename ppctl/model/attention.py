"""Causal grouped-query attention by several kernels, which give the same numbers.

kernel  | what it is                                           | where
xla     | all scores of a sequence in memory                   | any backend, short sequences
chunked | a softmax over blocks of keys, one after the other:  | any backend, long sequences
        | memory grows with the tokens, not with their square  |
cudnn   | cuDNN's flash attention                              | NVIDIA GPUs of capability 8.0, in 16 bits
pallas  | JAX's splash attention                               | TPUs

Source of `chunked`: Milakov and Gimelshein 2018; its backward: Dao et al. 2022. Shape suffixes: B batch, T tokens, S
tokens attended to, N query heads, G kv heads, R = N/G queries of a kv head, M = R*T, H width of a head; K number of
blocks, C tokens of a block. What a backward reads of a kernel's forward (its output, and the logarithms of the sums of
the softmax) is named "saved", so that remat=none keeps it and no kernel runs twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ppctl.errors import ConfigError
from ppctl.model import cudnn_attention
from ppctl.model.context_attention import PairKernel, context_functions
from ppctl.model.parallel import WHOLE, StageAxes

BLOCK = 256  # tokens of a block of `chunked`
# tokens from which auto takes `chunked` where the device has no kernel: it takes 0.57 of the CPU seconds of `xla` there
LONG = 1024
LANES = 128  # of a TPU
PALLAS_BLOCKS = (512, 384, 256, LANES)  # tokens of a block on TPUs: the first that divides a sequence, as MaxText's 512
NEVER = -1e30  # score of a token that comes later

# q [B, T, N, H], k and v [B, S, G, H], and of packed sequences the document of each token [B, T] -> [B, T, N, H]
Kernel = Callable[..., jax.Array]


def choose(
    wanted: str, device: Any, dtype: jnp.dtype, head_dim: int, num_tokens: int, cp: int = 1, *, packed: bool = False
) -> str:
    """Return the kernel that `wanted` (auto, or a kernel) means on a device, which need not be here.

    device: has platform, and on GPUs compute_capability, as jax.Device; dtype: of compute; num_tokens: of a sequence,
    or where devices along cp divide it, of a piece; packed: a sequence has several documents. ConfigError where the
    device, the dtype or the sizes do not allow a kernel that was asked for by name.
    """
    if wanted != "auto":
        reason = _refusal(wanted, device, dtype, head_dim, num_tokens, packed)
        if wanted not in PAIR_KERNELS and cp > 1:
            reason = f"mesh.cp={cp} merges parts of a softmax, which {wanted} does not give"
        if reason is not None:
            raise ConfigError(f"model.attention={wanted}: {reason}. Use model.attention=auto, which chooses one.")
        return wanted
    for kernel in ("cudnn", "pallas") if cp == 1 else ("cudnn",):
        if _refusal(kernel, device, dtype, head_dim, num_tokens, packed) is None:
            return kernel
    return "chunked" if num_tokens >= LONG else "xla"


def _refusal(kernel: str, device: Any, dtype: jnp.dtype, head_dim: int, num_tokens: int, packed: bool) -> str | None:
    """Return why a kernel cannot run, or None."""
    if kernel == "cudnn":
        if packed:
            return "the call of cuDNN has no mask of documents, and data.packing=true needs one"
        version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # AMD's has letters
        if device.platform not in ("gpu", "cuda") or version is None:
            return f"cuDNN runs on NVIDIA GPUs, and the platform is {device.platform}"
        capability = int(version[1]), int(version[2])
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


def attention(wanted: str, device: Any = None, axes: StageAxes = WHOLE) -> Kernel:
    """Return causal softmax attention, scaled by 1/sqrt(H), softmax in at least float32, by what `choose` chooses.

    device: where it is to run; None: on the first that is here. axes: with cp, T are the tokens of one device.
    """

    def mix(q_BTNH: jax.Array, k_BSGH: jax.Array, v_BSGH: jax.Array, *documents_BT: jax.Array) -> jax.Array:
        place = jax.devices()[0] if device is None else device
        sizes = q_BTNH.dtype, q_BTNH.shape[3]
        if axes.cp == 1:
            kernel = choose(wanted, place, *sizes, q_BTNH.shape[1], packed=bool(documents_BT))
            return KERNELS[kernel](q_BTNH, k_BSGH, v_BSGH, *documents_BT)
        pair = PAIR_KERNELS[choose(wanted, place, *sizes, q_BTNH.shape[1] // 2, axes.cp)]
        return kernel_of(*context_functions(pair, axes))(q_BTNH, k_BSGH, v_BSGH)

    return mix


# --- xla -------------------------------------------------------------------------------------------------------------


def plain(q_BTNH: jax.Array, k_BSGH: jax.Array, v_BSGH: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
    """Attention as matrix products and a softmax."""
    B, T, N, H = q_BTNH.shape
    G = k_BSGH.shape[2]
    q_BTGRH = q_BTNH.reshape(B, T, G, N // G, H) * H**-0.5
    q_BGMH = q_BTGRH.transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    scores_BGMS = jnp.einsum("BGMH,BSGH->BGMS", q_BGMH, k_BSGH)
    scores_BGMS = scores_BGMS.astype(jnp.promote_types(scores_BGMS.dtype, jnp.float32))
    sees_TS = jnp.tril(jnp.ones((T, T), bool))
    if documents_BT is not None:
        sees_TS = (sees_TS & (documents_BT[:, :, None] == documents_BT[:, None]))[:, None]  # [B, 1, T, S]
    sees_MS = jnp.tile(sees_TS, (N // G, 1))
    weights_BGMS = softmax(jnp.where(sees_MS, scores_BGMS, NEVER), v_BSGH.dtype)
    mix_BGMH = jnp.einsum("BGMS,BSGH->BGMH", weights_BGMS, v_BSGH)
    mix_BTNH = mix_BGMH.reshape(B, G, N // G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return checkpoint_name(mix_BTNH, "saved")


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the softmax over the last axis, in `dtype`. Its derivative reads the result alone: scores are not kept."""
    return jax.nn.softmax(scores).astype(dtype)


@softmax.defjvp
def _softmax_jvp(dtype: jnp.dtype, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (scores,), (change,) = primals, tangents
    weights = checkpoint_name(softmax(scores, dtype), "saved")
    wide = weights.astype(scores.dtype)
    return weights, (wide * (change - jnp.sum(wide * change, -1, keepdims=True))).astype(dtype)


def _plain_forward(
    q_BTNH: jax.Array, k_BSGH: jax.Array, v_BSGH: jax.Array, causal: bool
) -> tuple[jax.Array, jax.Array]:
    scores_BGMS = _plain_scores(q_BTNH, k_BSGH, causal)
    log_sums_BGM = jax.nn.logsumexp(scores_BGMS, axis=-1)
    weights_BGMS = jnp.exp(scores_BGMS - log_sums_BGM[..., None]).astype(v_BSGH.dtype)
    mix_BGMH = jnp.einsum("BGMS,BSGH->BGMH", weights_BGMS, v_BSGH)
    B, T, N, _ = q_BTNH.shape
    return _from_groups(mix_BGMH, q_BTNH.shape), log_sums_BGM.reshape(B, N, T)


def _plain_backward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    out_BTNH: jax.Array,
    log_sums_BNT: jax.Array,
    g_BTNH: jax.Array,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores_BGMS = _plain_scores(q_BTNH, k_BSGH, causal)
    wide, scale, G = scores_BGMS.dtype, q_BTNH.shape[3] ** -0.5, k_BSGH.shape[2]
    weights_BGMS = jnp.exp(scores_BGMS - log_sums_BNT.reshape(*scores_BGMS.shape[:3], 1))
    q_BGMH, g_BGMH, out_BGMH = (_to_groups(a, G) for a in (q_BTNH, g_BTNH, out_BTNH))
    drift_BGM = jnp.sum(g_BGMH.astype(wide) * out_BGMH.astype(wide), -1)  # of each query: its gradient times its output
    product = partial(jnp.einsum, preferred_element_type=wide)
    change = weights_BGMS * (product("BGMH,BSGH->BGMS", g_BGMH, v_BSGH) - drift_BGM[..., None]) * scale
    change = change.astype(q_BTNH.dtype)
    dq = _from_groups(product("BGMS,BSGH->BGMH", change, k_BSGH), q_BTNH.shape)
    dk = product("BGMS,BGMH->BSGH", change, q_BGMH)
    return dq, dk, product("BGMS,BGMH->BSGH", weights_BGMS.astype(g_BTNH.dtype), g_BGMH)


def _plain_scores(q_BTNH: jax.Array, k_BSGH: jax.Array, causal: bool) -> jax.Array:
    """Return [B, G, M, S] in at least float32."""
    _, T, N, H = q_BTNH.shape
    S, G = k_BSGH.shape[1:3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BGMH = _to_groups(q_BTNH, G)
    scores_BGMS = jnp.einsum("BGMH,BSGH->BGMS", q_BGMH, k_BSGH, preferred_element_type=wide) * H**-0.5
    if not causal:
        return scores_BGMS
    causal_MS = jnp.tile(jnp.tril(jnp.ones((T, S), bool)), (N // G, 1))
    return jnp.where(causal_MS, scores_BGMS, NEVER)


def _to_groups(a_BTNH: jax.Array, G: int) -> jax.Array:
    """Return [B, G, M, H]."""
    B, T, N, H = a_BTNH.shape
    return a_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)


def _from_groups(a_BGMH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    B, T, N, H = shape
    return a_BGMH.reshape(B, N, T, H).transpose(0, 2, 1, 3)


# --- chunked ---------------------------------------------------------------------------------------------------------


def _chunked_forward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    causal: bool = True,
    documents_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (output, logarithms of the sums of exponentials [B, N, T])."""
    num_keys = k_BSGH.shape[1]
    documents = _document_blocks(documents_BT)
    q, k, v = _query_blocks(q_BTNH, k_BSGH), _key_blocks(k_BSGH), _key_blocks(v_BSGH)
    scale, wide = q.shape[-1] ** -0.5, jnp.promote_types(q.dtype, jnp.float32)

    def one_pair(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        mix, total, largest = carry
        i, j = pair
        scores = _scores(q, k, i, j, scale, wide, causal, num_keys, documents)
        before, own = largest[i], scores.max(-1)
        now = jnp.maximum(before, own)
        weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(before - now)
        added = jnp.einsum("BGRCS,BSGH->BGRCH", weights.astype(v.dtype), v[j], preferred_element_type=wide)
        mix = mix.at[i].set(mix[i] * shrink[..., None] + added)
        return (mix, total.at[i].set(total[i] * shrink + weights.sum(-1)), largest.at[i].set(now)), None

    start = jnp.zeros(q.shape, wide), jnp.zeros(q.shape[:-1], wide), jnp.full(q.shape[:-1], NEVER, wide)
    (mix, total, largest), _ = jax.lax.scan(one_pair, start, _pairs(len(q), len(k), causal))
    log_sums_BTN1 = _from_query_blocks((largest + jnp.log(total))[..., None], (*q_BTNH.shape[:3], 1))
    return _from_query_blocks((mix / total[..., None]).astype(q.dtype), q_BTNH.shape), log_sums_BTN1[..., 0].swapaxes(
        1, 2
    )


def _chunked_backward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    out_BTNH: jax.Array,
    log_sums_BNT: jax.Array,
    g_BTNH: jax.Array,
    causal: bool = True,
    documents_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_keys = k_BSGH.shape[1]
    documents = _document_blocks(documents_BT)
    log_sums = _query_blocks(log_sums_BNT.swapaxes(1, 2)[..., None], k_BSGH)[..., 0]
    q, k, v = _query_blocks(q_BTNH, k_BSGH), _key_blocks(k_BSGH), _key_blocks(v_BSGH)
    g, out = _query_blocks(g_BTNH, k_BSGH), _query_blocks(out_BTNH, k_BSGH)
    scale, wide = q.shape[-1] ** -0.5, log_sums.dtype
    drift = jnp.sum(g.astype(wide) * out.astype(wide), -1)  # of each query: its gradient times its output
    product = partial(jnp.einsum, preferred_element_type=wide)

    def one_pair(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        dq, dk, dv = carry
        i, j = pair
        scores = _scores(q, k, i, j, scale, wide, causal, num_keys, documents)
        weights = jnp.exp(scores - log_sums[i][..., None])
        dv = dv.at[j].add(product("BGRCS,BGRCH->BSGH", weights.astype(g.dtype), g[i]))
        change = weights * (product("BGRCH,BSGH->BGRCS", g[i], v[j]) - drift[i][..., None]) * scale
        change = change.astype(q.dtype)
        dk = dk.at[j].add(product("BGRCS,BGRCH->BSGH", change, q[i]))
        return (dq.at[i].add(product("BGRCS,BSGH->BGRCH", change, k[j])), dk, dv), None

    start = tuple(jnp.zeros(a.shape, wide) for a in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(one_pair, start, _pairs(len(q), len(k), causal))
    of_keys = lambda a: _from_key_blocks(a.astype(k.dtype), k_BSGH.shape)  # noqa: E731
    return _from_query_blocks(dq.astype(q.dtype), q_BTNH.shape), of_keys(dk), of_keys(dv)


def _scores(
    q: jax.Array,
    k: jax.Array,
    i: jax.Array,
    j: jax.Array,
    scale: float,
    dtype: jnp.dtype,
    causal: bool,
    num_keys: int,
    documents: jax.Array | None,
) -> jax.Array:
    """Return the scores [B, G, R, C, C] of the queries of block i and the keys of block j."""
    scores = jnp.einsum("BGRCH,BSGH->BGRCS", q[i], k[j], preferred_element_type=dtype) * scale
    if documents is not None:
        is_same_BCS = documents[i][:, :, None] == documents[j][:, None]
        scores = jnp.where(is_same_BCS[:, None, None], scores, NEVER)
    if not causal:
        block = k.shape[2]
        is_padding = j * block + jnp.arange(block) >= num_keys  # causal queries come before it
        return jnp.where(is_padding, NEVER, scores) if num_keys % block else scores
    here = np.arange(q.shape[-2])
    comes_later = here[:, None] < here  # of the tokens of one block
    return jnp.where((i == j) & comes_later, NEVER, scores)


def _pairs(num_queries: int, num_keys: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (i, j) of blocks of queries and of keys, causal: j <= i; those of a block i are neighbours."""
    i, j = np.tril_indices(num_queries) if causal else np.indices((num_queries, num_keys)).reshape(2, -1)
    return i.astype(np.int32), j.astype(np.int32)


def _padded(a: jax.Array) -> jax.Array:
    """Return [B, K, C, ...] of [B, T, ...]; later tokens are zeros, which no token before them attends to."""
    B, T = a.shape[:2]
    block = min(BLOCK, T)
    number = -(-T // block)
    a = jnp.pad(a, [(0, 0), (0, number * block - T), *[(0, 0)] * (a.ndim - 2)])
    return a.reshape(B, number, block, *a.shape[2:])


def _document_blocks(documents_BT: jax.Array | None) -> jax.Array | None:
    """Return [K, B, C]."""
    return None if documents_BT is None else _padded(documents_BT).swapaxes(0, 1)


def _query_blocks(q_BTNH: jax.Array, k_BSGH: jax.Array) -> jax.Array:
    """Return [K, B, G, R, C, H]."""
    q_BKCNH, G = _padded(q_BTNH), k_BSGH.shape[2]
    B, K, C, N, H = q_BKCNH.shape
    return q_BKCNH.reshape(B, K, C, G, N // G, H).transpose(1, 0, 3, 4, 2, 5)


def _from_query_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    B, T, N, H = shape
    return blocks.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, H)[:, :T]


def _key_blocks(k_BSGH: jax.Array) -> jax.Array:
    """Return [K, B, C, G, H]."""
    return _padded(k_BSGH).swapaxes(0, 1)


def _from_key_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.swapaxes(0, 1).reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


# --- kernels of others -----------------------------------------------------------------------------------------------


def pallas(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention by JAX's splash kernels for TPUs; T and H are as `choose` demands. interpret: on any device."""
    # imported here: Pallas takes 0.3 s
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    T, N, H = q_BTNH.shape[1:]
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * N)
    block = next(size for size in PALLAS_BLOCKS if T % size == 0)
    names = (field.name for field in fields(splash_attention_kernel.BlockSizes) if field.name.startswith("block"))
    sizes: dict[str, Any] = dict.fromkeys(names, block)
    kernel = splash_attention_kernel.make_splash_mha(
        mask,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        residual_checkpoint_name="saved",
        interpret=interpret,
    )
    q_BNTH, k_BGSH, v_BGSH = (a.transpose(0, 2, 1, 3) for a in (q_BTNH, k_BSGH, v_BSGH))
    both = None if documents_BT is None else splash_attention_kernel.SegmentIds(documents_BT, documents_BT)
    out_BNTH: Any = jax.vmap(kernel)(q_BNTH * H**-0.5, k_BGSH, v_BGSH, both)
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


PAIR_KERNELS = {
    "xla": PairKernel(_plain_forward, _plain_backward),
    "chunked": PairKernel(_chunked_forward, _chunked_backward),
    "cudnn": PairKernel(cudnn_attention.forward, cudnn_attention.backward),
}
KERNELS: dict[str, Kernel] = {
    "xla": plain,
    "chunked": kernel_of(_chunked_forward, _chunked_backward),
    "cudnn": kernel_of(cudnn_attention.forward, cudnn_attention.backward),
    "pallas": pallas,
}
