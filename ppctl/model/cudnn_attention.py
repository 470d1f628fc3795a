"""cuDNN's flash attention by JAX's foreign function interface: forward, and backward.

XLA knows both calls. JAX's own function for them asks the GPU that is here while it traces, and refuses to be lowered
for devices that are described only. Calls made here lower without a GPU, and on an abstract mesh, as the programs of
executor=mpmd do. What a call says of itself is XLA's `CudnnfMHABackendConfig` (xla/service/gpu/backend_configs.proto).

Of packed sequences cuDNN takes the lengths of all documents, and where each begins in memory. It treats B sequences of
at most M documents as B*M sequences, and returns sums of the softmax for each of these. This has not run yet.

Shape suffixes: B batch, T tokens, S tokens attended to, N query heads, G kv heads, H width of a head, M documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.model.scoring import PLAIN, Scoring

CALLS = FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
ELEMENT_TYPES = {"bfloat16": "BF16", "float16": "F16"}
BTNH = (0, 2, 1, 3)  # axes of a [B, N, T, H] result from major to minor: in memory it is [B, T, N, H]


def forward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    causal: bool = True,
    scoring: Scoring = PLAIN,
    documents_BT: jax.Array | None = None,
    most_documents: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Return (attention [B, T, N, H], logarithms of the softmax's sums, float32 [B*M, N, T]).

    Of `scoring` only the scale is known here. documents_BT: the number of each token's document in its sequence, from 1
    on and of M = most_documents at most; None: a sequence is one.
    """
    B, T, N, H = q_BTNH.shape
    places = document_places(documents_BT, most_documents, N * H, k_BSGH.shape[2] * H)
    most = most_documents if places else 1
    results = _Shape((B, N, T, H), q_BTNH.dtype), _Shape((B * most, N, T), jnp.float32), _WORKSPACE
    products = {"bmm1": _product(3, 3, (0, 2)), "bmm2": _product(3, 1, (0, 1), (0, 2))}
    out_BNTH, log_sums, _ = _call(
        FORWARD, causal, scoring, most, results, [BTNH, None, None], products, q_BTNH, k_BSGH, v_BSGH, *places
    )
    return out_BNTH.transpose(0, 2, 1, 3), log_sums


def backward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    out_BTNH: jax.Array,
    log_sums: jax.Array,
    g_BTNH: jax.Array,
    causal: bool = True,
    scoring: Scoring = PLAIN,
    documents_BT: jax.Array | None = None,
    most_documents: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v from those of the output; documents as of `forward`."""
    places = document_places(documents_BT, most_documents, prod(q_BTNH.shape[2:]), prod(k_BSGH.shape[2:]))
    most = most_documents if places else 1
    of = lambda a: _Shape((a.shape[0], a.shape[2], a.shape[1], a.shape[3]), a.dtype)  # noqa: E731
    products = {
        "bmm1_grad_gemm1": _product(2, 1, (0, 1), (0, 2)),
        "bmm1_grad_gemm2": _product(3, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm1": _product(2, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm2": _product(3, 3, (0, 2)),
    }
    results = of(q_BTNH), of(k_BSGH), of(v_BSGH), _WORKSPACE
    arrays = q_BTNH, k_BSGH, v_BSGH, log_sums, g_BTNH, out_BTNH, *places
    dq, dk, dv, _ = _call(BACKWARD, causal, scoring, most, results, [BTNH, BTNH, BTNH, None], products, *arrays)
    return dq.transpose(0, 2, 1, 3), dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def document_places(
    documents_BT: jax.Array | None, most: int, q_stride: int, kv_stride: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array] | tuple[()]:
    """Return what cuDNN is told of documents: lengths for queries and for keys, and starts likewise; () of one each.

    Lengths are int32 [B, M], all documents of all sequences in order, and then zeros. Starts are int32 [B, M + 1],
    counted in numbers of the array of queries, or keys: a token has q_stride of these, or kv_stride; behind them stands
    the end of the array. most: M. ConfigError where starts do not fit into 32 bits.

    >>> lengths, _, starts, _ = document_places(jnp.array([[1, 1, 2], [1, 2, 2]]), 3, 10, 10)
    >>> lengths.tolist(), starts.tolist()
    ([[2, 1, 1], [2, 0, 0]], [[0, 20, 30, 40], [60, 60, 60, 60]])
    """
    if documents_BT is None or most == 1:
        return ()
    B, T = documents_BT.shape
    if B * T * max(q_stride, kv_stride) >= 2**31:
        raise ConfigError(
            f"model.attention=cudnn: {B} sequences of {T} tokens and {max(q_stride, kv_stride)} numbers each are more "
            "than the 2^31 in which cuDNN counts where packed documents start. Use smaller microbatches."
        )
    documents_BT = documents_BT.clip(1, most)  # so that no token is left out, whose output nobody would write
    lengths_BM = (documents_BT[:, :, None] == jnp.arange(1, most + 1)).sum(1, dtype=jnp.int32)
    starts_BM = lengths_BM.cumsum(1) - lengths_BM + T * jnp.arange(B, dtype=jnp.int32)[:, None]
    in_order = jnp.argsort(lengths_BM.reshape(-1) == 0, stable=True)  # documents that there are come first
    lengths = lengths_BM.reshape(-1)[in_order]
    starts = jnp.where(lengths > 0, starts_BM.reshape(-1)[in_order], B * T)
    starts = jnp.concatenate([starts, jnp.full(B, B * T, jnp.int32)]).reshape(B, most + 1)
    lengths = lengths.reshape(B, most)
    return lengths, lengths, starts * q_stride, starts * kv_stride


def is_unmasked(params: Mapping[str, Any]) -> bool:
    """Return whether an equation with these parameters is one of CALLS in which all queries attend to all keys."""
    return params.get("target_name") in CALLS and '"NO_MASK"' in str(params.get("legacy_backend_config"))


def flops(call: str, shape: tuple[int, ...], num_keys: int) -> int:
    """Return the FLOPs of one of CALLS as the plain form has them: of all pairs of tokens, a backward twice a forward.

    shape: of q, [B, T, N, H].

    >>> flops(FORWARD, (1, 8, 2, 4), 8)
    2048
    """
    return (4 if call == FORWARD else 8) * prod(shape) * num_keys


_Shape = jax.ShapeDtypeStruct
_WORKSPACE = _Shape((0,), jnp.uint8)


def _call(
    name: str,
    causal: bool,
    scoring: Scoring,
    most_documents: int,
    results: Sequence[_Shape],
    layouts: list,
    products: dict[str, Any],
    *arrays: jax.Array,
) -> Any:
    q_BTNH, k_BSGH = arrays[:2]
    (B, T, N, H), S = q_BTNH.shape, k_BSGH.shape[1]
    scores = {
        "element_type": ELEMENT_TYPES[jnp.dtype(q_BTNH.dtype).name],
        "dimensions": [str(n) for n in (B, N, T, S)],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    config = {
        "algorithm": algorithm,
        "fmha_scale": scoring.scale_of(H),
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": most_documents,
        "is_paged_attention": False,
        "intermediate_tensor_shape": scores,
        **{f"{product}_dot_dimension_numbers": axes for product, axes in products.items()},
    }
    return jax.ffi.ffi_call(
        name,
        results,
        output_layouts=layouts,
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config}),
    )(*arrays)


def _product(left: int, right: int, left_batch: Sequence[int], right_batch: Sequence[int] | None = None) -> dict:
    """Return the axes of a matrix product: contracted, and shared."""
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": [str(i) for i in left_batch],
        "rhs_batch_dimensions": [str(i) for i in (left_batch if right_batch is None else right_batch)],
    }
