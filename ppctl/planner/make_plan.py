"""The prediction for a request, as `ppctl plan` prints it: stages, bubble, step time, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Self

import jax

from ppctl.config import Transformer
from ppctl.config.groups.moe_settings import Experts
from ppctl.config.schedule_from_config import label
from ppctl.executors.device_mesh import device_numbers, hosts_text
from ppctl.model.experts.dispatch import Group, num_rows
from ppctl.model.experts.expert_layer import expert_group
from ppctl.planner.cost.planned_step import Machine
from ppctl.planner.cost.predict_step import PipelinePlan, predict_job, step_of, target_of
from ppctl.planner.cost.target_devices import Target
from ppctl.planner.rehearsal.timed_runs import out_of_memory
from ppctl.planner.search.token_budget import TokenBudget, check_tokens, token_budget
from ppctl.reports.bubble_names import shared_cores_text
from ppctl.schedule.costs import Costs
from ppctl.schedule.mesh_axes import STAGE_AXES
from ppctl.training.pipeline.built_in_models import attention_kernels, expert_kernel, expert_sizes
from ppctl.training.pipeline.job import TrainingJob, unit_of_work
from ppctl.training.pipeline.mfu import mfu, model_flops
from ppctl.training.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class RequestText:
    """The names of a request's parts, as lines of plans name them."""

    model: str
    num_layers: int
    mesh: str  # as typed after mesh=
    axes: str  # with their sizes
    stage_axes: tuple[str, ...]  # that divide stages
    num_microbatches: int
    executor: str
    dtype: str  # of compute
    batch_size: int  # examples of a step
    seq_len: int | None  # tokens of an example; None: the data are not text

    @property
    def title(self) -> str:
        return f"{self.model} of {self.num_layers} layers, mesh {self.mesh}"

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        model, mesh = job.config.model, job.config.mesh
        return cls(
            model.name,
            job.pipe.stack.num_layers,
            mesh.text,
            mesh.axes_text,
            tuple(mesh.sizes.shown(STAGE_AXES)),
            job.config.schedule.num_microbatches,
            job.config.executor.name,
            str(job.pipe.dtype),
            job.data.batch_size,
            None if job.data.vocab_size is None else job.pipe.batch_shapes["inputs"].shape[1],
        )

    @property
    def sizes(self) -> str:
        """The dtype of compute, the batch and its sequences, in words."""
        return sizes_text(self.dtype, self.batch_size, self.seq_len)


def sizes_text(dtype: str, batch_size: int, seq_len: int | None) -> str:
    """Return the dtype of compute, the batch and the length of its sequences in words.

    >>> sizes_text("bfloat16", 128, 2048)
    'bfloat16 compute, batch of 128 sequences of 2,048 tokens'
    """
    of_what = "rows" if seq_len is None else f"sequences of {seq_len:,} tokens"
    return f"{dtype} compute, batch of {batch_size:,} {of_what}"


@dataclass(frozen=True)
class StagePart:
    """A stage: its layers, its devices, and the seconds of a microbatch there."""

    first_layer: int
    num_layers: int
    rank: int
    devices: tuple[int, ...]  # of its rank, by number; () of a topology only predicted
    forward_s: float | None  # None: unknown; 0 of a last stage: in its backward (remat=full)
    backward_s: float | None  # the sum of the next two
    input_grad_s: float | None
    weight_grad_s: float | None


@dataclass(frozen=True)
class LayerPart:
    """The contents of a network's layer, embedding or head."""

    name: str  # "embedding", "0", "1", ..., "head"
    stage: int
    cost: float  # FLOPs of matrix products, forward and backward, over the mean layer's
    params: Mapping[str, tuple[int, ...]]  # shapes by the author's names
    operations: Mapping[str, int]  # number of each


@dataclass(frozen=True)
class ExpertsPart:
    """The experts of a layer on a device, with a microbatch forward and back."""

    num_experts: int
    top_k: int  # experts of a token
    num_rows: int  # tokens, once for each of their experts, that the device is expected to compute
    most_rows: int  # for which its arrays have room
    compute_s: float | None  # of their products; None: unknown
    sent_s: float | None  # of tokens and results between the devices that divide the experts
    remedy: str | None  # where sends take longer


@dataclass(frozen=True)
class Prediction:
    """The prediction for a request."""

    request: RequestText
    schedule: str
    auto: str | None  # the choice of schedule=auto, in a line
    partition: tuple[int, ...]  # layers of each stage
    rank_of: tuple[int, ...]  # the rank of each stage
    vocab_parts: int  # of embedding and head, one a rank; 0: on the first and the last stage
    stages: tuple[StagePart, ...]  # () without a pipeline
    layers: tuple[LayerPart, ...]  # of a network, which was cut into layers; () of other models
    experts: ExpertsPart | None  # None: the model has no expert
    ideal_bubble_fraction: float | None  # 0..1: equal stages, no transfers; None: no pipeline
    predicted_bubble_fraction: float | None  # 0..1: by the step time's seconds; None: unknown
    num_parameters: int
    step_flops: int  # of the model; recomputing is not counted
    devices: str
    hardware: str | None  # name of the description used
    step_time_s: float | None
    transfer_s: float | None  # from a task's end to its value on the next rank; None: no pipeline
    per_step_overhead_s: float | None  # a part: parameters gathered, gradients summed, optimizer
    unknown: str | None  # why the step time is unknown
    unit: str  # tokens_per_s | rows_per_s
    tokens_per_s: float | None  # or examples, by `unit`
    token_budget: TokenBudget | None  # of plan.tokens; None: not set, or the step time is unknown
    mfu_fraction: float | None  # 0..1: of the hardware's peak; None: unknown, as of CPUs
    mfu_causal_fraction: float | None  # the same, attention to later tokens not counted
    memory_bytes: tuple[Mapping[str, int], ...]  # for each rank, of one device, by part
    total_bytes: tuple[int, ...]  # for each rank
    is_compiled: bool  # memory is that of the compiled program (plan.compile), not predicted
    predicted_bytes: tuple[int, ...]  # for each rank, as in `ppctl tune` and `ppctl train`
    limit_bytes: int | None  # memory of a device
    limit_source: str | None
    limit_fraction: float | None  # share of a GPU's memory: run.memory_fraction or JAX's default
    fits: bool | None  # None: the memory of a device is unknown
    compile_s: float | None
    refusal: str | None  # the compiler's, if the program does not fit
    assumes: tuple[str, ...]  # a line each


def predicted(job: TrainingJob) -> Prediction:
    """Return the prediction for a job."""
    # 1. its numbers
    config, plan, pipe = job.config, job.config.plan, job.pipe
    unit, count = unit_of_work(job)
    step_tokens = count if unit == "tokens_per_s" else None
    check_tokens("plan.tokens", plan.tokens, step_tokens)
    found, target, flops = predict_job(job), target_of(job), model_flops(job)
    peak, step_s = target.peak_flops, found.step_s
    of_tokens = plan.tokens, step_tokens, step_s, pipe.mesh.size, target.known_hardware
    # 2. the record
    return Prediction(
        request=RequestText.of(job),
        schedule=label(config.schedule),
        auto=None if job.choice is None else job.choice.summary,
        partition=tuple(map(len, pipe.partition)),
        rank_of=tuple(pipe.schedule.rank_of),
        vocab_parts=pipe.schedule.vocab_parts,
        layers=_network_layers(pipe),
        experts=experts_part(job),
        ideal_bubble_fraction=found.ideal_bubble,
        predicted_bubble_fraction=found.bubble,
        num_parameters=pipe.num_parameters,
        step_flops=flops.full,
        devices=_devices_text(job, target),
        hardware=found.hardware,
        step_time_s=step_s,
        per_step_overhead_s=found.overhead_s,
        unknown=found.unknown,
        unit=unit,
        tokens_per_s=None if step_s is None else count / step_s,
        token_budget=token_budget(*of_tokens),
        mfu_fraction=mfu(flops.full, step_s, peak),
        mfu_causal_fraction=mfu(flops.causal, step_s, peak),
        predicted_bytes=found.total_bytes,
        assumes=assumptions(job, is_timed=found.time is not None),
        **_stages(job, found.costs),
        **_memory(job, target, found),
    )


def _network_layers(pipe: Pipeline) -> tuple[LayerPart, ...]:
    """Return the contents of a network's embedding, layers and head; () of other models."""
    network, costs, last = pipe.stack.options.network, pipe.relative_costs, len(pipe.partition) - 1
    if network is None:
        return ()
    stages = [0, *(stage for stage, layers in enumerate(pipe.partition) for _ in layers), last]
    of_all = [costs.embed, *costs.layers, costs.head]
    return tuple(
        LayerPart(held.name, stage, cost, held.params, held.operations)
        for held, stage, cost in zip(network.contents, stages, of_all, strict=True)
    )


def experts_part(job: TrainingJob) -> ExpertsPart | None:
    """Return the experts of a job's layers that have them; None without any."""
    # 1. rows
    model, axes = job.config.model, job.pipe.execution.axes
    if not isinstance(model, Transformer) or (sizes := expert_sizes(model)) is None:
        return None
    group, num_tokens = expert_group(sizes, axes), prod(job.pipe.model.x.shape[:2])
    most = num_rows(num_tokens, sizes.top_k, group, sizes.capacity)
    even = ceil(job.config.costs.expert_imbalance * num_tokens * sizes.top_k)
    counts = sizes.num_experts, sizes.top_k, min(most, even), most
    # 2. seconds; operations are those of the mean layer
    step = step_of(job)
    if step.machine is None:
        return ExpertsPart(*counts, None, None, None)
    work, share = step.work.layer, len(sizes.has_experts) / sum(sizes.has_experts)
    ops = (*work.once, *(work.redo or ())) if step.microbatch.remat.recomputes else work.once
    products = [op for op in ops if op.kernel == "experts"]
    compute_s = share * step.machine.speed.seconds(products, step.microbatch.examples)
    sent_s = share * sum(step.sent_s(op) for op in ops if "ep" in op.axes)
    remedy = None
    if sent_s > compute_s:
        num_hosts = step.machine.over(job.pipe.mesh.shape)["ep"]
        remedy = _dispatch_remedy(model.moe, job.config.mesh.ep, num_hosts, group)
    return ExpertsPart(*counts, compute_s, sent_s, remedy)


def _dispatch_remedy(moe: Experts, ep: int, num_hosts: int, group: Group) -> str:
    """Return the remedy for sends that take longer than the experts' products."""
    if moe.dispatch == "alltoall" and moe.capacity is None:
        return "use model.moe.capacity=1.25, which sends less and may drop tokens"
    if num_hosts > 1:
        return f"use mesh.ep={ep // num_hosts}, which stays inside a host"
    if moe.dispatch == "gather" and group.size > moe.top_k:
        return "use model.moe.dispatch=alltoall with model.moe.capacity=1.25, which sends less"
    return "use a smaller mesh.ep, and more of mesh.fsdp or mesh.pp"


def _stages(job: TrainingJob, costs: Costs | None) -> dict[str, Any]:
    pipe = job.pipe
    if not pipe.execution.engine.is_pipelined:
        return {"stages": (), "transfer_s": None}
    stages, is_described = list[StagePart](), job.config.plan.only_predicts_topology
    numbers = device_numbers(pipe.mesh)
    for s, (layers, rank) in enumerate(zip(pipe.partition, pipe.layout.rank_of, strict=True)):
        devices = () if is_described else tuple(numbers[:, rank, :].ravel().tolist())
        seconds = (None if costs is None else costs.seconds(kind, s, 1) for kind in "FBIW")
        stages.append(StagePart(layers.start, len(layers), rank, devices, *seconds))
    return {"stages": tuple(stages), "transfer_s": None if costs is None else costs.transfer_s}


def _memory(job: TrainingJob, target: Target, found: PipelinePlan) -> dict[str, Any]:
    # 1. the memory of each rank
    memory, needed, compile_s, refusal = found.memory, found.total_bytes, None, None
    is_compiled = False
    if job.config.plan.compiles:
        total, compile_s, refusal = _compile(job.pipe)
        if total is not None:
            memory, needed, is_compiled = job.pipe.memory(), total, True

    # 2. whether it fits: the compiler for a topology has accepted it
    limit, fits = target.limit, None
    if refusal is not None:
        fits = False
    elif limit is not None:
        fits = max(needed) <= limit.size_bytes
    elif is_compiled and target.plan.topology is not None:
        fits = True
    size_bytes, source, fraction = (None, None, None) if limit is None else limit
    return {
        "memory_bytes": memory,
        "total_bytes": needed,
        "is_compiled": is_compiled,
        "limit_bytes": size_bytes,
        "limit_source": source,
        "limit_fraction": fraction,
        "fits": fits,
        "compile_s": compile_s,
        "refusal": refusal,
    }


def _compile(pipe: Pipeline) -> tuple[tuple[int, ...] | None, float, str | None]:
    """Return (bytes of one device by rank, seconds, None), or (None, seconds, refusal)."""
    began = time.perf_counter()
    try:
        total = pipe.engine.compile(evaluate=False).total_bytes
    except jax.errors.JaxRuntimeError as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        return None, time.perf_counter() - began, reason
    return total, time.perf_counter() - began, None


def _devices_text(job: TrainingJob, target: Target) -> str:
    """Return the number and kind of the devices ("64 x h100 (described)"), and axes over hosts."""
    topology, hardware = target.plan.topology, target.known_hardware
    if target.plan.compiles if topology is not None else not target.is_away:
        hosts = hosts_text(job.pipe.mesh)
        return ", ".join(filter(None, (f"{target.number} x {target.kind}", hosts)))
    if hardware is None:
        return f"{target.number} x {str(topology).partition(':')[0]}"
    return f"{target.number} x {hardware.name} (described)"


# assumptions in words; change them along with how something is counted


def assumptions(job: TrainingJob, *, is_timed: bool) -> tuple[str, ...]:
    """Return the assumptions of a job's prediction. is_timed: its step time is known."""
    # 1. of the layout
    pipe, model, kernels = job.pipe, job.config.model, ()
    examples = pipe.model.microbatch["inputs"].shape[0]
    over = ", ".join(f"{name}={size}" for name, size in pipe.execution.axes.divided.items())
    lines = [
        f"stages divided over {over}" if over else "stages whole on each device",
        f"equal microbatches ({examples} examples a device)",
        "equal layers and devices"
        if pipe.stack.are_alike
        else "layers by their FLOPs, equal devices",
    ]
    if isinstance(model, Transformer):
        cp, device = job.config.mesh.cp, job.counted_device
        kernels = attention_kernels(model, cp, pipe.dtype, device, job.data)
        lines.append(" and ".join(f"attention={kernel}" for kernel in kernels))
        if (kernel := expert_kernel(model, pipe.dtype, device)) is not None:
            lines.append(f"products of experts={kernel}, on the expected rows")

    # 2. of seconds and bytes
    if is_timed:
        machine = target_of(job).machine
        lines += [*_speeds(job, machine, kernels), *_overlap(job, machine)]
        lines.append("no time for reading data, evaluations and checkpoints")
    if not job.config.plan.compiles:
        lines.append("no fragmented memory, no buffers of collectives")
    return tuple(lines)


def _speeds(job: TrainingJob, machine: Machine, kernels: Sequence[str]) -> Iterator[str]:
    speed, shape = machine.speed, job.pipe.mesh.shape
    large = "matrix products" if speed.cores is None else "large matrix products"
    yield f"{speed.flops_per_s / 1e12:.4g} TFLOP/s in {large}"
    if {"cudnn", "pallas"} & {*kernels} and speed.attention_forward is not None:
        forward, backward = speed.attention_forward, speed.attention_backward or speed.flops_per_s
        yield f"{forward / 1e12:.4g} in attention forward, {backward / 1e12:.4g} backward"
    yield f"{speed.bytes_per_s / 1e9:.4g} GB/s of memory"
    yield "one operation of a device at a time"
    if (shared := shared_cores_text(job.pipe.mesh.size, machine.cores)) is not None:
        yield shared
    links, over = machine.links(shape), machine.over(shape)
    for axis in (axis for axis, size in shape.items() if size > 1):
        where = "between hosts" if over[axis] > 1 else "within a host"
        gbs, latency_us = links[axis].bytes_per_s / 1e9, links[axis].latency_s * 1e6
        yield f"{axis} {where} at {gbs:.4g} GB/s each way and {latency_us:.3g} us a message"
    yield "links without contention, rings for collectives"
    if job.pipe.stack.takes_key:
        yield "random numbers of layers not counted"
    task = "tick" if job.pipe.execution.engine.in_ticks else "task"
    yield f"{machine.task_s * 1e6:.3g} us to start a {task}"


def _overlap(job: TrainingJob, machine: Machine) -> Iterator[str]:
    pipe, mesh, axes = job.pipe, job.config.mesh, job.pipe.execution.axes
    if mesh.pp > 1:
        in_ticks = pipe.execution.engine.in_ticks
        ticks = "ticks as long as the slowest rank's and a transfer"
        yield ticks if in_ticks else "ranks that compute while values travel"
    if pipe.execution.gather == "layer" and mesh.fsdp > 1:
        ahead, alone = "while the layer before is computed", "with nothing computed meanwhile"
        when = ahead if machine.gathers_ahead else alone
        yield f"each layer gathered in each task that reads it, {when}"
    elif mesh.num_devices > 1:
        yield "gathers of parameters before all tasks"
    if axes.num_devices > 1:
        but = ", but for weight gradients" if machine.gathers_ahead else ""
        yield f"nothing computed while devices along {' or '.join(axes.divided)} send{but}"
    yield "sums of gradients and the optimizer after all tasks, no overlap"
