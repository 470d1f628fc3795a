"""Seconds and bytes of a published step, by the planner's counts and costs."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from benchmarks.published.constants import Constants
from benchmarks.published.device_work import DeviceWork, work_of_request
from benchmarks.published.request import DTYPE, HOST_DEVICES, Request
from benchmarks.published.systems import System
from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.planned_step import Machine, Microbatch, PlannedLayout, Ring, Step
from ppctl.executors.work.roofline import Link, Op, PieceWork
from ppctl.planner.cost import step_time as timing
from ppctl.planner.cost.step_time import StepTime
from ppctl.planner.cost.target_devices import speed_of
from ppctl.planner.search.layout_candidate import along, shorter
from ppctl.schedule.costs import Costs, OpTimes, PieceTimes, costs_of_stages
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.schedule.ir import Schedule
from ppctl.schedule.mesh_axes import COPY_AXES, MeshSizes
from ppctl.schedule.placement_costs import peak_activations
from ppctl.schedule.remat import Remat

FLOAT32 = 4
# bytes of the optimizer, a parameter: gradient, weight, moments read, three written, a norm, a copy
UPDATE_BYTES = 36
UNFUSED_NORM = (
    15,
    25,
)  # passes over x, forward and backward, that a norm of several kernels takes more than one kernel
# cuDNN's attention on an H100, forward and backward, as shares of the peak by tokens, with all
# pairs counted and the backward as two forwards: FlashAttention-3 (Shah et al. 2024, arXiv
# 2407.08608), figures 5 and 6, causal, heads 128 wide. Its backward is timed of all pairs only; of
# half of them it is taken to lose as much speed as the forward does.
ATTENTION = {
    512: (0.64, 0.33),
    1024: (0.83, 0.47),
    2048: (0.98, 0.59),
    4096: (1.05, 0.69),
    8192: (1.07, 0.74),
    16384: (1.09, 0.76),
}
MEMORY_SHARE = (
    0.87  # share of a data sheet's bandwidth: measured on an H100 (conf/hardware/h100.yaml)
)
# share of NVLink's stated speed: rings of nccl-tests reach about 235 of 300 GB/s (A100), 360 of 450
# (H100)
LINK_SHARE = 0.8
TAKEN = (
    20 / 132
    # share of a device's cores for overlapped collectives: DeepSeek-V3 (2024, arXiv 2412.19437),
    # 3.2.2
)
CONTEXT_GIB = 2.0  # CUDA's and NCCL's own memory
GIB = 2**30


def machine_of(request: Request, constants: Constants) -> Machine:
    """Return the devices of a row: as conf/hardware has them, with the fitted constants."""
    hardware = request.hardware
    speed = speed_of(hardware, hardware.peak_flops[DTYPE])
    share = (
        constants.sustained_a100 if hardware.name.startswith("a100") else constants.sustained_h100
    )
    forward, backward = ATTENTION[
        min(ATTENTION, key=lambda length: abs(math.log(length / request.row.seq)))
    ]
    peak = hardware.peak_flops[DTYPE]
    speed = replace(
        speed,
        flops_per_s=speed.flops_per_s * share,
        fp8=speed.fp8 and speed.fp8 * share,
        bytes_per_s=hardware.memory_bytes_per_s * MEMORY_SHARE,
        attention_forward=speed.attention_forward and peak * share * forward,
        attention_backward=speed.attention_backward and peak * share * backward,
    )
    assert hardware.hosts is not None, "GPUs have hosts"
    is_infiniband = re.search(r"InfiniBand|[HEN]DR", request.row.network) is not None
    reached = constants.infiniband_share if is_infiniband else constants.other_share
    network = Link(hardware.hosts.latency_s, hardware.hosts.bytes_per_s * reached)
    link = Link(hardware.link_latency_s, hardware.link_bytes_per_s * LINK_SHARE)
    return Machine(speed, link, network, HOST_DEVICES, hardware.task_s, gathers_ahead=True)


def layout_of(request: Request) -> PlannedLayout:
    row = request.row
    sizes = request.rank_layers, max(request.sizes)
    mesh = MeshSizes(request.dp, row.pp, request.fsdp, ep=request.ep, tp=row.tp, cp=row.cp)
    return PlannedLayout(mesh, *sizes)


def op_times_of(request: Request, constants: Constants) -> OpTimes:
    """Return the op times of a row's trainer: the planner's, and what this trainer does besides or
    at the same time.
    """
    system, machine, layout = request.system, machine_of(request, constants), layout_of(request)
    found = _run_by(system, work_of_request(request), is_fp8=request.row.is_fp8)
    shown = 1 - system.hides_tp
    sends = replace(
        machine, link=Link(machine.link.latency_s * shown, machine.link.bytes_per_s / shown)
    )
    params = ParamBytes(found.layer_bytes, found.embed_head_bytes, 2.0, 0.5)
    examples = request.micro_batch
    microbatch = Microbatch(examples, ceil(request.num_microbatches), 0, Remat.NONE)
    step = Step(found.work, params, layout, microbatch, machine, adds=True)
    op_times = timing.op_times(replace(step, machine=sends))
    bytes_per_s = machine.speed.bytes_per_s

    layer, head = op_times.layer, op_times.head

    # norms of several kernels
    if request.row.kernel and "RMS" not in request.row.kernel:
        more = [passes * 2 * found.work.x_bytes * examples / bytes_per_s for passes in UNFUSED_NORM]
        layer = replace(
            layer, forward_s=layer.forward_s + more[0], input_grad_s=layer.input_grad_s + more[1]
        )

    # gradients that are added in separate passes
    each = system.gradient_bytes / FLOAT32 / bytes_per_s
    layer = replace(layer, weight_grad_s=layer.weight_grad_s + found.layer_bytes * each)
    head = replace(head, weight_grad_s=head.weight_grad_s + found.embed_head_bytes / 2 * each)

    # a loss of several kernels
    logits = examples * request.row.seq / layout.mesh.cp * request.model.vocab / layout.mesh.tp
    head = replace(head, input_grad_s=head.input_grad_s + logits * system.logit_bytes / bytes_per_s)

    # recomputed work
    again_s = request.redone * layer.forward_s
    layer = replace(layer, input_grad_s=layer.input_grad_s + again_s)

    # parameters that are gathered, and gradients that are scattered, layer by layer during the
    # layer before
    overhead_s, ring_of = 0.0, step.ring
    if request.fsdp > 1:
        gather_s = ring_of(["fsdp"]).link.gather_s(found.layer_bytes / 2, request.fsdp)
        scatter_s = ring_of(["fsdp"]).link.gather_s(
            found.layer_bytes * system.reduce_bytes / FLOAT32, request.fsdp
        )
        for size, _, ring in _parts(request, step, found.layer_bytes, found.expert_bytes):
            shard = size * system.reduce_bytes / FLOAT32 / request.fsdp
            scatter_s += ring.link.sum_s(shard, ring.size)
        beside = _beside_s if system.hides_replicas else operator.add
        forward_s = beside(layer.forward_s, gather_s)
        backward_s = beside(layer.input_grad_s + layer.weight_grad_s, gather_s + scatter_s)
        layer = PieceTimes(forward_s, backward_s - layer.weight_grad_s, layer.weight_grad_s)
        embed_head_s = 3 * ring_of(["fsdp"]).link.gather_s(found.embed_head_bytes / 2, request.fsdp)
        overhead_s = gather_s + scatter_s + embed_head_s
        hop_s = op_times.hop_s
    else:
        hop_s = op_times.hop_s
    if (
        not system.sequence_parallel and layout.mesh.tp > 1 and layout.mesh.pp > 1
    ):  # each sends a part, which the host gathers
        x_bytes = examples * found.work.x_bytes
        hop_s = ring_of(["pp"]).link.hop_s(x_bytes / layout.mesh.tp) + ring_of(
            ["tp"]
        ).link.gather_s(x_bytes, layout.mesh.tp)
    overhead_s += _overhead_s(request, found, step, layer)
    return replace(op_times, layer=layer, head=head, hop_s=hop_s, overhead_s=overhead_s)


def _beside_s(computing_s: float, sending_s: float) -> float:
    """Return the seconds of work during a collective, which takes some of its cores.

    >>> round(_beside_s(10.0, 1.0), 3), _beside_s(1.0, 10.0)
    (10.152, 10.0)
    """
    return max(computing_s + TAKEN * min(computing_s, sending_s), sending_s)


def _run_by(system: System, found: DeviceWork, *, is_fp8: bool) -> DeviceWork:
    """Return the work with the element-wise traffic of a trainer."""

    def run(op: Op) -> Op:
        if op.flops or op.axes:
            return op
        if is_fp8:  # Transformer Engine: weights in 8 bits are kept for all microbatches of a step,
            op = replace(op, fixed_bytes=0.0)  # and products add their results to sums
        return replace(
            op,
            bytes=op.bytes * system.element_wise,
            fixed_bytes=op.fixed_bytes * system.element_wise,
        )

    def piece(of: PieceWork) -> PieceWork:
        return PieceWork(
            *(tuple(map(run, ops)) for ops in (of.forward, of.input_grad, of.weight_grad))
        )

    work = found.work
    layer = piece(work.layer)
    if is_fp8:  # these trainers also compute the gradients of matrices in 8 bits
        weight_grad = (replace(op, kernel="fp8") if op.flops else op for op in layer.weight_grad)
        layer = replace(layer, weight_grad=tuple(weight_grad))
    return replace(found, work=replace(work, layer=layer, head=piece(work.head)))


def _embed_head_bytes(request: Request, found: DeviceWork) -> float:
    """Return the bytes of embedding and head on the device that has most of them."""
    has_half = request.row.has_pipeline and not request.model.tied
    return found.embed_head_bytes / 2 if has_half else found.embed_head_bytes


def _parts(
    request: Request, step: Step, whole: float, experts: float
) -> list[tuple[float, int, Ring]]:
    """Return (bytes, copies, their ring) of parameters that ep does not divide, and of experts."""
    axes = [axis for axis in COPY_AXES if axis != "ep"]
    parts = (whole - experts, request.replicas, step.ring(COPY_AXES))
    return [parts, (experts, request.expert_replicas, step.ring(axes))]


def _overhead_s(request: Request, found: DeviceWork, step: Step, layer: PieceTimes) -> float:
    """Return the seconds after, and before, all tasks: sums over replicas that nothing hides, and
    the optimizer.
    """
    system, replicas = request.system, request.replicas
    held = request.rank_layers * found.layer_bytes + _embed_head_bytes(request, found)
    updated, exposed_s = held / request.fsdp, 0.0
    if request.fsdp == 1 and replicas > 1:
        parts = _parts(request, step, held, request.rank_layers * found.expert_bytes)
        share = system.reduce_bytes / FLOAT32
        scatter_s = sum(ring.link.gather_s(size * share, ring.size) for size, _, ring in parts)
        gather_s = sum(ring.link.gather_s(size / 2, ring.size) for size, _, ring in parts)
        if system.shards == "nothing":
            gather_s = scatter_s
        else:
            updated = sum(size / copies for size, copies, _ in parts)
        if (
            system.hides_replicas
        ):  # but for one layer, during the last backward and the next forward
            share = 1 / request.rank_layers
            backward_s = (layer.input_grad_s + layer.weight_grad_s) * request.rank_layers
            forward_s = layer.forward_s * request.rank_layers
            exposed_s = max(share * scatter_s, scatter_s - backward_s) + max(
                share * gather_s, gather_s - forward_s
            )
            exposed_s += TAKEN * (min(scatter_s, backward_s) + min(gather_s, forward_s))
        else:
            exposed_s = scatter_s + gather_s
    return exposed_s + updated / FLOAT32 * UPDATE_BYTES / step.known_machine.speed.bytes_per_s


def costs_of(request: Request, op_times: OpTimes) -> Costs:
    """Return the costs of each stage's tasks; a vocabulary over all ranks adds its share to each
    rank's first stage.
    """
    if not request.divides_vocabulary:
        return costs_of_stages(op_times, request.sizes, keeps_input=False)
    free = PieceTimes(0.0, 0.0, 0.0)
    costs = costs_of_stages(
        replace(op_times, embed=free, head=free), request.sizes, keeps_input=False
    )
    pp = request.row.pp
    share_s = (op_times.embed.all_s + op_times.head.all_s) / pp
    add = lambda values, part: tuple(v + part * share_s * (s < pp) for s, v in enumerate(values))
    return replace(
        costs, forward_s=add(costs.forward_s, 1 / 3), input_grad_s=add(costs.input_grad_s, 2 / 3)
    )


@lru_cache(512)
def _built(family: str, pp: int, number: int, chunks: int) -> Schedule:
    """Return a schedule, not validated: the families are proved elsewhere."""
    return FAMILIES[family].generate(pp, number, **FAMILIES[family].knobs_for(chunks))


def step_time(request: Request, constants: Constants) -> StepTime:
    """Return the predicted time of a row's step."""
    op_times = op_times_of(request, constants)
    costs, layout = costs_of(request, op_times), layout_of(request)
    numbers = simulated_numbers(request)
    times = [
        vars(
            timing.step_time(
                op_times,
                _built(request.family, request.row.pp, n, request.num_chunks),
                None,
                costs,
                layout.rank_devices,
            )
        )
        for n in numbers
    ]
    return StepTime(**along(numbers, times, request.num_microbatches))


def simulated_numbers(request: Request) -> list[int]:
    """Return the numbers of microbatches to simulate: the row's, or two that determine it.

    Batches that the source rounds, and interleaving of whole groups of ranks, need other numbers.
    """
    pp, number = request.row.pp, request.num_microbatches
    group = pp if request.family != BASELINE else 1
    if number == int(number) and number % group == 0:
        return shorter(pp, int(number), request.num_chunks)
    least = max(group, int(number) // group * group)
    return [least, least + group]


def chosen(requests: Sequence[Request], constants: Constants) -> tuple[Request, StepTime]:
    """Return the fastest of a row's requests that fits, with its time; where none fits, the fastest
    of all.
    """
    if len(requests) == 1:
        return requests[0], step_time(requests[0], constants)
    sizes = [memory_gib(request) for request in requests]
    limit = requests[0].device_gib
    fitting = [request for request, size in zip(requests, sizes, strict=True) if size <= limit]
    timed = [(request, step_time(request, constants)) for request in fitting or requests]
    return min(timed, key=lambda each: each[1].total_s)


def memory_gib(request: Request) -> float:
    """Return the GiB that a device of the fullest rank needs: state, activations, temporaries."""
    system, found, row = request.system, work_of_request(request), request.row
    held = (request.rank_layers * found.layer_bytes + _embed_head_bytes(request, found)) / FLOAT32
    experts = request.rank_layers * found.expert_bytes / FLOAT32
    state, of_experts = 12.0, 12.0
    if system.shards == "optimizer":
        state, of_experts = 12 / request.replicas, 12 / request.expert_replicas
    bytes_of_state = held * (2 + system.stored_gradient_bytes + state)
    bytes_of_state += experts * (of_experts - state)
    if request.fsdp > 1:
        bytes_of_state = (
            held * (2 + system.stored_gradient_bytes + 12) / request.fsdp + 2 * found.layer_bytes
        )
    layer_kept = _kept_bytes(request, found)
    x_bytes = found.work.x_bytes
    kept = layer_kept * (1 - request.redone) + x_bytes * request.redone
    number = ceil(request.num_microbatches)
    group = row.pp if request.family != BASELINE else 1
    few = min(-(-number // group) * group, 3 * row.pp)
    few = max(group, few // group * group)
    live = peak_activations(_built(request.family, row.pp, few, request.num_chunks))[0]
    activations = request.micro_batch * kept * live * request.rank_layers
    working = request.micro_batch * layer_kept * (request.redone > 0)
    logits = 0.0
    if not row.has_pipeline:
        rows = request.micro_batch * row.seq / row.cp
        logits = (
            rows * request.model.vocab / row.tp * (2 + 4 + 4)
        )  # in bfloat16, float32, and their gradient
    return (bytes_of_state + activations + max(working, logits)) / GIB + CONTEXT_GIB


def _kept_bytes(request: Request, found: DeviceWork) -> float:
    """Return the bytes that a trainer's forward keeps of a layer, an example."""
    work = found.work
    if request.system.element_wise == 1:
        return work.stash_bytes[Remat.NONE]
    unfused = (
        8 * work.x_bytes if request.row.kernel and "RMS" not in request.row.kernel else 0
    )  # two norms in float32
    return max(work.residual_bytes, work.stash_bytes[Remat.NONE]) + unfused
