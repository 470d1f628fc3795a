"""The work of a published model on one device of a stage, as the planner counts it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp

from benchmarks.published.request import DTYPE, Request
from benchmarks.published.rows import Model
from ppctl import config as settings
from ppctl.config.groups.moe_settings import Experts
from ppctl.executors.model_shapes import Model as CountedModel, tree_bytes
from ppctl.executors.parameter_layout import shapes_on_device
from ppctl.executors.work.roofline import ModelWork
from ppctl.executors.work.task_flops import work_of
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import init
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.job import open_data, stack_for
from ppctl.training.pipeline.known_hardware import described_device, known
from ppctl.training.pipeline.pipeline_request import divided_stack, shards_in_stages


@dataclass(frozen=True)
class DeviceWork:
    """A model as one device of a stage computes it."""

    work: ModelWork
    layer_bytes: int  # parameters in float32
    embed_head_bytes: int  # embedding and head
    expert_bytes: int = 0  # experts of a layer


@lru_cache(256)
def device_work(
    model: Model,
    seq: int,
    ep: int,
    tp: int,
    cp: int,
    rows: bool,
    flash: bool,
    gpu: str,
    is_fp8: bool,
) -> DeviceWork:
    """Return what one device of a stage computes for an example: traced, nothing runs. ConfigError
    where it cannot.
    """
    transformer = settings.Transformer(
        num_layers=1,
        d_model=model.hidden,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        mlp_width=model.ffn,
        activation="swiglu" if model.gated else "gelu",
        vocab_size=model.vocab,
        seq_len=seq,
        tied=model.tied,
        attention="cudnn" if flash else "xla",
        head_dim=model.head_dim,
        linear_dtype="fp8" if is_fp8 else None,
        moe=_experts(model),
    )
    transformer.check()
    hardware, dtype = known()[gpu], jnp.dtype(DTYPE)
    data = settings.Synthetic(batch_size=1, vocab_size=model.vocab)
    config = settings.Config(model=transformer, data=data, hardware=hardware)
    stack = stack_for(config, open_data(config, sizes_only=True), dtype, described_device(hardware))
    stack = stack.counted()
    params = jax.eval_shape(lambda: init(stack, 0))
    batch = {name: jax.ShapeDtypeStruct((1, seq), jnp.int32) for name in ("inputs", "targets")}
    axes = StageAxes(ep=ep, tp=tp, cp=cp, sequence_parallel=rows)
    divided = divided_stack(stack, axes, batch)
    held = shapes_on_device(params, shards_in_stages(stack, divided, axes)[0])
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])
    shapes, how = (held["embed_head"], layer, batch), (1, Remat.NONE, 0, dtype, axes)
    counted = CountedModel(stack.in_shards(divided), *shapes, *how, parts=divided.parts)
    sizes = tree_bytes(layer), tree_bytes(held["embed_head"]), tree_bytes(layer.get("experts", ()))
    return DeviceWork(work_of(counted), *sizes)


def _experts(model: Model) -> Experts:
    """Return a model's experts. Each computes only its tokens, sent by all-to-all."""
    if model.experts is None:
        return Experts()
    return Experts(
        model.experts,
        model.top_k,
        model.expert_ffn,
        shared_width=model.shared_ffn or None,
        dispatch="alltoall",
        capacity=1.0,
    )


def work_of_request(request: Request) -> DeviceWork:
    row, system = request.row, request.system
    alone = replace(request.model, layers=1)  # whatever their number
    if system.flash:
        alone = _with_heads_of_cudnn(alone, row.tp)
    return device_work(
        alone,
        row.seq,
        request.ep,
        row.tp,
        row.cp,
        system.sequence_parallel,
        system.flash,
        request.hardware.name,
        row.is_fp8,
    )


def _with_heads_of_cudnn(model: Model, tp: int) -> Model:
    """Return the model with heads of 128 or 64 numbers, and as many in all, where the counted
    kernel has no others.

    FlashAttention-2 has heads of up to 256; counts differ only by the statistics of each row.
    """
    width = model.head_width
    if width <= 128 and width % 8 == 0:
        return model
    for wide in (128, 64):
        if all(heads * width % (wide * tp) == 0 for heads in (model.heads, model.kv_heads)):
            return replace(
                model, heads=model.heads * width // wide, kv_heads=model.kv_heads * width // wide
            )
    return model
