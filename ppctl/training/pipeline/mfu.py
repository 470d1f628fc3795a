"""Model FLOPs utilization (MFU): the model's FLOPs over the devices' peak FLOPs."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax

from ppctl.config import AutoHardware, Hardware, Transformer
from ppctl.executors.reference import reference
from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.model.attention.attention_scores import Scoring
from ppctl.model.stack import Stack
from ppctl.model.trainable_parameters import trained_flags
from ppctl.training.pipeline.built_in_models import lora_of, make_stack
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.known_hardware import NOMINAL, known, of_device


def mfu_peak_flops(request: Hardware | AutoHardware, device_kind: str, dtype: str) -> float | None:
    """Return a device's peak FLOP/s for MFU; None for unknown devices and nominal peaks (CPUs).

    >>> mfu_peak_flops(AutoHardware(), "TPU v4", "float32")
    275000000000000.0
    >>> mfu_peak_flops(AutoHardware(), "cpu", "float32")
    """
    hardware = request if isinstance(request, Hardware) else of_device(device_kind)
    if hardware is None:
        return None
    peak = hardware.peak_flops.get(dtype)
    is_nominal = hardware.name == NOMINAL and peak == known()[NOMINAL].peak_flops.get(dtype)
    return None if is_nominal else peak


def mfu(step_flops: float, step_s: float | None, peak_flops_per_s: float | None) -> float | None:
    """Return the MFU of a step, 0..1: step_flops / (step_s * peak); None if one is unknown.

    >>> mfu(3e12, 2.0, 4e12)
    0.375
    """
    if step_s is None or peak_flops_per_s is None:
        return None
    return step_flops / (step_s * peak_flops_per_s)


@dataclass(frozen=True)
class ModelFlops:
    """Matmul FLOPs of the model in one step: forward and backward, without recomputation."""

    full: int  # FLOPs with attention to the whole sequence, as most publications count
    causal: int  # FLOPs with attention only to earlier tokens in the window


def model_flops(job: TrainingJob) -> ModelFlops:
    """Return the FLOPs of a step, counted with the plain kernels of attention and experts."""
    pipe, model = job.pipe, job.config.model
    stack, masked = pipe.stack, 0
    if isinstance(model, Transformer):
        plain = replace(model, attention="xla", moe=replace(model.moe, kernel="ragged_dot"))
        if plain != model:
            stack = make_stack(plain, job.data, pipe.dtype, None, lora=lora_of(job.config.optim))
        num_examples, num_tokens = pipe.batch_shapes["inputs"].shape
        causal = (Scoring(window=window).num_pairs(num_tokens) for window in model.windows)
        pairs = sum(num_tokens**2 - num_pairs for num_pairs in causal)
        # the backward of a pair has twice the FLOPs of its forward
        masked = 3 * num_examples * model.attention_form.pair_flops * pairs
    shapes, treedef = jax.tree.flatten(pipe.batch_shapes)
    trained = trained_flags(stack.param_shapes, stack.options.trainable)
    full = _step_flops(stack, trained, tuple(shapes), treedef, pipe.dtype)
    return ModelFlops(full, full - masked)


@lru_cache(64)
def _step_flops(stack: Stack, _trained: tuple, shapes: tuple, treedef: Any, dtype: Any) -> int:
    """Return the matmul FLOPs of a step. Stacks compare without the flags of trained parameters."""
    loss_and_grads = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=dtype)
    return matmul_flops(loss_and_grads, stack.param_shapes, jax.tree.unflatten(treedef, shapes))
