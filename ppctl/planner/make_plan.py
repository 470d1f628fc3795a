"""The prediction for a request, as `ppctl plan` prints it: stages, bubble, step time, memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax

from ppctl.config import Transformer
from ppctl.config.groups.moe_settings import Experts
from ppctl.config.schedule_from_config import label
from ppctl.executors.work.planned_step import Machine
from ppctl.model.experts.dispatch import Group, num_rows
from ppctl.model.experts.expert_layer import expert_group
from ppctl.planner.cost.predict_step import (
    PipelinePlan,
    fit,
    peak_flops_of,
    predict_job,
    step_of,
    target_of,
    targets_of,
    tightest,
)
from ppctl.planner.cost.request_text import RequestText, out_of_memory
from ppctl.planner.cost.target_devices import Target
from ppctl.planner.cost.token_budget import TokenBudget, check_tokens, token_budget
from ppctl.reports.terminal_output import shared_cores_text
from ppctl.schedule.costs import Costs
from ppctl.schedule.mesh_axes import RANK_AXES
from ppctl.training.pipeline.built_in_models import attention_kernels, expert_kernel
from ppctl.training.pipeline.job import TrainingJob, unit_of_work
from ppctl.training.pipeline.mfu import mfu, model_flops
from ppctl.training.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class StagePart:
    """A stage: its layers, its devices, and a microbatch's seconds in it."""

    first_layer: int
    num_layers: int
    rank: int
    devices: tuple[int, ...]  # device numbers of its rank; (): a topology that is only predicted
    place: str  # devices, axes and hardware of its rank; "": ranks are equal
    # seconds; None: unknown. With remat=full, forward_s of the last stage is 0: its backward runs
    # the forward
    forward_s: float | None
    backward_s: float | None  # input_grad_s + weight_grad_s
    input_grad_s: float | None
    weight_grad_s: float | None


@dataclass(frozen=True)
class LayerPart:
    """A layer, the embedding or the head of a user's network: parameters, operations, cost."""

    name: str  # "embedding", "0", "1", ..., "head"
    stage: int
    cost: float  # FLOPs of matrix products, forward and backward, relative to the mean layer
    params: Mapping[str, tuple[int, ...]]  # parameter shapes, by the network's names
    operations: Mapping[str, int]  # number of each operation


@dataclass(frozen=True)
class ExpertsPart:
    """The experts of a layer on one device, for a microbatch's forward and backward."""

    num_experts: int
    top_k: int  # experts a token
    num_rows: int  # expected rows on the fullest device; one for each token and expert
    most_rows: int  # maximum rows (token-expert pairs) in the device's arrays
    compute_s: float | None  # seconds of the experts' products; None: unknown
    sent_s: float | None  # seconds of sends of tokens and results along ep; None: unknown
    remedy: str | None  # remedy if sends take longer than products


@dataclass(frozen=True)
class Prediction:
    """The prediction for a request."""

    request: RequestText
    schedule: str
    auto: str | None  # line about the choice of schedule=auto
    partition: tuple[int, ...]  # layers of each stage
    rank_of: tuple[int, ...]  # rank of each stage
    vocab_parts: int  # parts of embedding and head, one a rank; 0: on the first and last stage
    stages: tuple[StagePart, ...]  # () without a pipeline
    layers: tuple[LayerPart, ...]  # contents of a network's layers; () for other models
    experts: ExpertsPart | None  # None: a model without experts
    ideal_bubble_fraction: float | None  # 0..1: equal stages, no transfers; None: no pipeline
    predicted_bubble_fraction: float | None  # 0..1: at the predicted seconds; None: unknown
    num_parameters: int
    step_flops: int  # FLOPs of the model; recomputation not counted
    devices: str
    hardware: str | None  # name of the description used
    step_time_s: float | None
    transfer_s: float | None  # seconds until the next rank can read a value; None: no pipeline
    per_step_overhead_s: float | None  # part of the step: gathers, gradient sums, optimizer
    unknown: str | None  # reason why the step time is unknown
    unit: str  # tokens_per_s | rows_per_s
    tokens_per_s: float | None  # tokens or examples a second, by `unit`
    token_budget: TokenBudget | None  # cost of plan.tokens; None: unset, or unknown step time
    mfu_fraction: float | None  # 0..1, share of the hardware's peak; None: unknown, as for CPUs
    mfu_causal_fraction: float | None  # MFU without the FLOPs of attention to later tokens
    memory_bytes: tuple[Mapping[str, int], ...]  # bytes of one device of each rank, by part
    total_bytes: tuple[int, ...]  # bytes of one device of each rank, summed over the parts
    fullest_rank: int  # the rank with the least room
    is_compiled: bool  # whether memory is the compiled program's (plan.compile), not predicted
    predicted_bytes: tuple[int, ...]  # predicted bytes by rank, as in `ppctl tune` and `train`
    limit_bytes: int | None  # memory of a device
    limit_source: str | None
    limit_fraction: float | None  # share of a GPU's memory: run.memory_fraction or JAX's default
    fits: bool | None  # None: the memory of a device is unknown
    compile_s: float | None
    refusal: str | None  # message of the compiler, if the program does not fit
    assumes: tuple[str, ...]  # assumptions of the prediction, one line each


def predicted(job: TrainingJob) -> Prediction:
    """Return the prediction for a job."""
    # 1. predict the step
    config, plan, pipe = job.config, job.config.plan, job.pipe
    unit, count = unit_of_work(job)
    step_tokens = count if unit == "tokens_per_s" else None
    check_tokens("plan.tokens", plan.tokens, step_tokens)
    found, target, flops = predict_job(job), target_of(job), model_flops(job)
    peak, step_s = peak_flops_of(job), found.step_s
    of_tokens = plan.tokens, step_tokens, step_s, pipe.meshes.num_devices, target.known_hardware
    # 2. make the record
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
        **_memory(job, found),
    )


def _network_layers(pipe: Pipeline) -> tuple[LayerPart, ...]:
    """Return the embedding, layers and head of a user's network; () for other models."""
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
    """Return the experts of a layer of a job's model; None for a model without experts."""
    # 1. rows of a device
    model, axes = job.config.model, job.pipe.execution.axes
    if not isinstance(model, Transformer) or model.moe.num_experts is None:
        return None
    sizes = model.moe
    group, num_tokens = expert_group(sizes, axes), prod(job.pipe.model.x.shape[:2])
    most = num_rows(num_tokens, sizes.top_k, group, sizes.capacity)
    even = ceil(job.config.costs.expert_imbalance * num_tokens * sizes.top_k)
    counts = sizes.number, sizes.top_k, min(most, even), most
    # 2. seconds: step.work.layer is the mean layer; `share` scales it to a layer with experts
    step = step_of(job)
    if step.machine is None:
        return ExpertsPart(*counts, None, None, None)
    work, share = step.work.layer, model.num_layers / sum(model.has_experts)
    ops = (*work.once, *(work.redo or ())) if step.microbatch.remat.recomputes else work.once
    products = [op for op in ops if op.kernel == "experts"]
    compute_s = share * step.machine.speed.seconds(products, step.microbatch.examples)
    sent_s = share * sum(step.sent_s(op) for op in ops if "ep" in op.axes)
    remedy = None
    if sent_s > compute_s:
        num_hosts = step.machine.over(job.pipe.meshes.sizes.by_axis)["ep"]
        remedy = _dispatch_remedy(sizes, job.config.mesh.ep, num_hosts, group)
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
    numbers, places = pipe.meshes.device_numbers, _places(job)
    for s, (layers, rank) in enumerate(pipe.layout.placement.stages):
        devices = () if is_described else numbers[rank]
        seconds = (None if costs is None else costs.seconds(kind, s, 1) for kind in "FBIW")
        stages.append(StagePart(layers.start, len(layers), rank, devices, places[rank], *seconds))
    return {"stages": tuple(stages), "transfer_s": None if costs is None else costs.transfer_s}


def _places(job: TrainingJob) -> list[str]:
    """Return the devices, axes and hardware of each rank; "" if ranks are equal."""
    names, sizes = [each.request.name for each in targets_of(job)], job.pipe.meshes.sizes_by_rank
    if len({*zip(names, sizes, strict=True)}) == 1:
        return [""] * len(names)
    shown = (of.shown(RANK_AXES) for of in sizes)
    axes = [" ".join(f"{axis}={n}" for axis, n in of.items() if n > 1) for of in shown]
    hardware = [f" x {name}" * (name != "auto") for name in names]
    parts = zip(sizes, hardware, axes, strict=True)
    return [f"{of.num_devices}{name}" + f", {text}" * bool(text) for of, name, text in parts]


def _memory(job: TrainingJob, found: PipelinePlan) -> dict[str, Any]:
    # 1. the memory of each rank
    memory, needed, compile_s, refusal = found.memory, found.total_bytes, None, None
    is_compiled = False
    if job.config.plan.compiles:
        began = time.perf_counter()
        try:
            needed = job.pipe.engine.compile(evaluate=False).total_bytes
            memory, is_compiled = job.pipe.memory(), True
        except jax.errors.JaxRuntimeError as error:
            refusal = out_of_memory(error)
            if refusal is None:
                raise
        compile_s = time.perf_counter() - began

    # 2. whether it fits; the compiler for a topology knows the limit, and refuses larger programs
    limit, fits = tightest(needed, found.limits), fit(needed, found.limits)
    if refusal is not None:
        fits = False
    elif limit is None and is_compiled and job.config.plan.topology is not None:
        fits = True
    size_bytes, source, fraction = (None, None, None) if limit is None else limit
    room = [
        size if at is None else size - at.size_bytes
        for size, at in zip(needed, found.limits, strict=True)
    ]
    return {
        "fullest_rank": max(range(len(room)), key=room.__getitem__),
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


def _devices_text(job: TrainingJob, target: Target) -> str:
    """Return the devices, such as "64 x h100 (described)", and the axes over hosts, as text."""
    topology, hardware = target.plan.topology, target.known_hardware
    if target.plan.compiles if topology is not None else not target.is_away:
        hosts = job.pipe.meshes.hosts_text
        return ", ".join(filter(None, (f"{target.number} x {target.kind}", hosts)))
    targets = targets_of(job)
    if len({each.request.name for each in targets}) > 1:
        numbers = Counter[str]()
        for each, mesh in zip(targets, job.pipe.meshes.by_rank, strict=True):
            numbers[each.hardware.name] += mesh.size
        return " and ".join(f"{n} x {name}" for name, n in numbers.items()) + " (described)"
    if hardware is None:
        return f"{target.number} x {str(topology).partition(':')[0]}"
    return f"{target.number} x {hardware.name} (described)"


# assumptions in words: change them together with the predictions


def assumptions(job: TrainingJob, *, is_timed: bool) -> tuple[str, ...]:
    """Return the assumptions of a job's prediction. is_timed: whether its step time is known."""
    # 1. the layout
    pipe, model, kernels = job.pipe, job.config.model, ()
    examples = pipe.model.microbatch["inputs"].shape[0]
    over = ", ".join(f"{name}={size}" for name, size in pipe.execution.axes.divided.items())
    unequal = ["ranks of unequal sizes, hops as slow as the slowest"] * bool(job.config.mesh.ranks)
    unequal += ["hardware by rank"] * bool(getattr(job.config.hardware, "ranks", ()))
    devices = ", ".join(unequal) or "equal devices"
    layers = "equal layers" if pipe.stack.are_alike else "layers by their FLOPs"
    alike = pipe.stack.are_alike and not unequal
    lines = ["equal layers and devices" if alike else f"{layers}, {devices}"]
    if not job.config.mesh.ranks:
        lines[:0] = [
            f"stages divided over {over}" if over else "stages whole on each device",
            f"equal microbatches ({examples} examples a device)",
        ]
    if isinstance(model, Transformer):
        cp, device = job.config.mesh.cp, job.counted_device
        kernels = attention_kernels(model, cp, pipe.dtype, device, job.data)
        lines.append(" and ".join(f"attention={kernel}" for kernel in kernels))
        if (kernel := expert_kernel(model, pipe.dtype, device)) is not None:
            lines.append(f"products of experts={kernel}, on the expected rows")

    # 2. seconds and bytes
    if is_timed:
        machine = target_of(job).machine
        lines += [*_speeds(job, machine, kernels), *_overlap(job, machine)]
        lines.append("no time for reading data, evaluations and checkpoints")
    if not job.config.plan.compiles:
        lines.append("no fragmented memory, no buffers of collectives")
    return tuple(lines)


def _speeds(job: TrainingJob, machine: Machine, kernels: Sequence[str]) -> Iterator[str]:
    speed, meshes = machine.speed, job.pipe.meshes
    shape = {**meshes.sizes_by_rank[0].by_axis, "pp": meshes.num_ranks}
    large = "matrix products" if speed.cores is None else "large matrix products"
    yield f"{speed.flops_per_s / 1e12:.4g} TFLOP/s in {large}"
    if getattr(job.config.model, "linear_dtype", None) is not None:
        fast = None if speed.fp8 is None else f"{speed.fp8 / 1e12:.4g} TFLOP/s in 8-bit products"
        yield fast or f"8-bit products as fast as those of {job.pipe.dtype}"
    if {"cudnn", "pallas"} & {*kernels} and speed.attention_forward is not None:
        forward, backward = speed.attention_forward, speed.attention_backward or speed.flops_per_s
        yield f"{forward / 1e12:.4g} in attention forward, {backward / 1e12:.4g} backward"
    yield f"{speed.bytes_per_s / 1e9:.4g} GB/s of memory"
    yield "one operation of a device at a time"
    if (shared := shared_cores_text(job.pipe.meshes.num_devices, machine.cores)) is not None:
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
        ticks = "ticks as long as the slowest rank's tasks and a transfer"
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
