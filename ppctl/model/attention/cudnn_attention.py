"""cuDNN's flash attention, forward and backward, through JAX's foreign function interface.

JAX's function for the same two XLA calls queries the attached GPU while it traces. The calls of
this module lower without a GPU, and on an abstract mesh. XLA's `CudnnfMHABackendConfig` describes
each call (xla/service/gpu/backend_configs.proto).

Shape suffixes: B batch, T tokens, S tokens attended to, N query heads, G kv heads, H width of a
head.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.model.attention.attention_scores import PLAIN, Scoring

CALLS = FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
ELEMENT_TYPES = {"bfloat16": "BF16", "float16": "F16"}
BTNH = (0, 2, 1, 3)  # memory order of the axes of a result [B, N, T, H]: stored as [B, T, N, H]


def forward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    causal: bool = True,
    scoring: Scoring = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """Return (attention [B, T, N, H], log sums float32 [B, N, T]). Uses only scoring.scale."""
    sums, dtype = (q_BTNH.shape[0], *q_BTNH.shape[2:0:-1]), q_BTNH.dtype
    results = _Shape((*sums, v_BSGH.shape[-1]), dtype), _Shape(sums, jnp.float32), _WORKSPACE
    products = {"bmm1": _product(3, 3, (0, 2)), "bmm2": _product(3, 1, (0, 1), (0, 2))}
    arrays, layouts = (q_BTNH, k_BSGH, v_BSGH), [BTNH, None, None]
    out_BNTH, log_sums, _ = _call(FORWARD, causal, scoring, results, layouts, products, *arrays)
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v from g, the gradient of the output."""
    of = lambda a: _Shape((a.shape[0], a.shape[2], a.shape[1], a.shape[3]), a.dtype)  # noqa: E731
    products = {
        "bmm1_grad_gemm1": _product(2, 1, (0, 1), (0, 2)),
        "bmm1_grad_gemm2": _product(3, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm1": _product(2, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm2": _product(3, 3, (0, 2)),
    }
    results = of(q_BTNH), of(k_BSGH), of(v_BSGH), _WORKSPACE
    arrays = q_BTNH, k_BSGH, v_BSGH, log_sums, g_BTNH, out_BTNH
    layouts = [BTNH, BTNH, BTNH, None]
    *grads, _ = _call(BACKWARD, causal, scoring, results, layouts, products, *arrays)
    dq, dk, dv = (a.transpose(0, 2, 1, 3) for a in grads)
    return dq, dk, dv


def is_unmasked(params: Mapping[str, Any]) -> bool:
    """Return whether an equation's parameters are those of an unmasked call in CALLS."""
    config = str(params.get("legacy_backend_config"))
    return params.get("target_name") in CALLS and '"NO_MASK"' in config


def flops(call: str, shape: tuple[int, ...], num_keys: int) -> int:
    """Return the FLOPs of one of CALLS over all pairs of tokens; a backward counts twice a forward.

    shape: shape of q, [B, T, N, H]. num_keys: S.

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
    results: Sequence[_Shape],
    layouts: list,
    products: dict[str, Any],
    *arrays: jax.Array,
) -> Any:
    """Return the results of a call in CALLS. products: dimension numbers of each matrix product."""
    q_BTNH, k_BSGH = arrays[:2]
    (B, T, N, H), S = q_BTNH.shape, k_BSGH.shape[1]
    # 1. the scores, which stay on chip
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
    # 2. the call's description, a CudnnfMHABackendConfig
    config = {
        "algorithm": algorithm,
        "fmha_scale": scoring.scale_of(H),
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        "intermediate_tensor_shape": scores,
        **{f"{product}_dot_dimension_numbers": axes for product, axes in products.items()},
    }
    call = {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}
    return jax.ffi.ffi_call(
        name,
        results,
        output_layouts=layouts,
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(call),
    )(*arrays)


def _product(
    left: int, right: int, left_batch: Sequence[int], right_batch: Sequence[int] | None = None
) -> dict:
    """Return the dimension numbers of a matrix product: contracted axes and batch axes."""
    texts = lambda dims: [str(i) for i in dims]  # noqa: E731
    return {
        "lhs_contracting_dimensions": texts([left]),
        "rhs_contracting_dimensions": texts([right]),
        "lhs_batch_dimensions": texts(left_batch),
        "rhs_batch_dimensions": texts(left_batch if right_batch is None else right_batch),
    }
