"""What the prediction for a job assumes, in words: all of it follows from the request and from how seconds are counted.

Who changes how something is counted changes its words here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config import Measure, Transformer
from ppctl.planner.analytic import Machine
from ppctl.planner.roofline import Link
from ppctl.planner.step_time import device_kind, layout_of, machine_of
from ppctl.reports.bubbles import shared_cores_text
from ppctl.training.job import TrainingJob
from ppctl.training.models import attention_kernels

KERNELS = {
    "xla": "all scores of a sequence in memory",
    "chunked": "a softmax over blocks of keys",
    "cudnn": "cuDNN's flash attention",
    "pallas": "the Pallas kernel for TPUs",
}


def assumptions(job: TrainingJob, *, is_timed: bool) -> tuple[str, ...]:
    """Return what the prediction for a job assumes, a few words each. is_timed: whether the time of a step is known."""
    lines = [*_of_the_layout(job)]
    if is_timed:
        lines += [*(_measured if isinstance(job.config.costs, Measure) else _counted)(job), *_overlap(job)]
        lines.append("no time for reading data, evaluations and checkpoints")
    if not job.config.plan.compiles:
        lines.append("no fragmented memory, no buffers of collectives")
    return tuple(lines)


def _of_the_layout(job: TrainingJob) -> Iterator[str]:
    axes, mesh = job.pipe.execution.axes, job.config.mesh
    if axes.num_devices == 1:
        yield "whole layers on each device (no tensor or sequence parallelism)"
    if job.pipe.layout.auto:
        yield f"all work divided evenly over tp={mesh.tp} by XLA, whose collectives along tp are not counted"
    elif mesh.tp > 1:
        rows = "with" if axes.sequence_parallel else "without"
        yield f"layers divided over tp={mesh.tp}, {rows} sequence parallelism"
    if mesh.cp > 1:
        yield f"sequences divided over cp={mesh.cp}, keys and values by executor.context={axes.context}"
    yield f"equal microbatches ({job.pipe.model.microbatch['inputs'].shape[0]} examples a device)"
    yield "equal layers and devices" if job.pipe.stack.are_alike else "layers by their FLOPs, equal devices"
    if isinstance(job.config.model, Transformer):
        yield " and ".join(f"attention={kernel} ({KERNELS[kernel]})" for kernel in _kernels(job))


def _kernels(job: TrainingJob) -> tuple[str, ...]:
    """Return the kernels of attention that are counted, or that are timed here."""
    is_here = isinstance(job.config.costs, Measure)
    device = job.pipe.mesh.devices.flat[0] if is_here else job.counted_device
    return attention_kernels(job.config, job.pipe.dtype, device, job.data)


def _measured(job: TrainingJob) -> Iterator[str]:
    yield "a layer, the embedding and the head as they were timed here, each apart"
    if job.pipe.execution.axes.num_devices > 1:
        yield "what devices along tp or cp send is in these times, as they sent it here"
    if job.pipe.execution.dispatches_tasks and job.config.mesh.pp > 1:
        yield "values on the next rank at once"


def _counted(job: TrainingJob) -> Iterator[str]:
    pipe = job.pipe
    machine = machine_of(job.config, device_kind(pipe), str(pipe.dtype))
    speed = machine.speed
    kernels = ""
    has_kernel = isinstance(job.config.model, Transformer) and not {"cudnn", "pallas"}.isdisjoint(_kernels(job))
    if has_kernel and speed.attention_forward is not None:
        backward = speed.attention_backward or speed.flops_per_s
        kernels = f", {speed.attention_forward / 1e12:.4g} in attention forward, {backward / 1e12:.4g} backward"
    large = "matrix products" if speed.cores is None else "large matrix products"
    yield f"{speed.flops_per_s / 1e12:.4g} TFLOP/s in {large}{kernels}"
    yield f"{speed.bytes_per_s / 1e9:.4g} GB/s of memory"
    yield "one operation of a device at a time"
    shared = shared_cores_text(job.pipe.mesh.size, machine.cores)
    if shared is not None:
        yield shared
    yield from _links(job, machine)
    yield f"{_microseconds(machine.task_s)} to start a {'tick' if pipe.execution.in_ticks else 'task'}"


def _links(job: TrainingJob, machine: Machine) -> Iterator[str]:
    """Yield the speed of each kind of link that axes of the mesh use."""
    links, axes_of = layout_of(job.pipe).links(machine), dict[Link, list[str]]()
    over = machine.over(job.pipe.mesh.shape)
    for axis, size in job.pipe.mesh.shape.items():
        if size > 1:
            axes_of.setdefault(links[axis], []).append(axis)
    for link, axes in axes_of.items():
        where = " between hosts" if over[axes[0]] > 1 and machine.network is not None else ""
        if link == machine.link and machine.network is not None and machine.host_devices is not None:
            where = f" within hosts of {machine.host_devices}"
        doctor = job.config.costs.doctor
        source = f" (costs.doctor={doctor})" if doctor is not None and link == machine.link else ""
        speed = f"{link.bytes_per_s / 1e9:.4g} GB/s each way and {_microseconds(link.latency_s)} a message"
        yield f"{' and '.join(axes)}{where} at {speed}{source}"
    if axes_of:
        yield "links without contention, rings for collectives"


def _overlap(job: TrainingJob) -> Iterator[str]:
    """Yield what runs at the same time as what."""
    pipe, mesh = job.pipe, job.config.mesh
    if mesh.pp > 1 and pipe.execution.in_ticks:
        yield "ticks as long as the slowest rank's and a transfer"
    elif mesh.pp > 1:
        yield "ranks that compute while values travel"
    if pipe.execution.gather == "tick" and mesh.fsdp > 1:
        yield "gathers of layers before each task, sums of gradients and the optimizer after all, no overlap"
    elif pipe.execution.gather == "layer" and mesh.fsdp > 1:
        machine = machine_of(job.config, device_kind(pipe), str(pipe.dtype))
        how = "while the layer before is computed" if machine.gathers_ahead else "with nothing computed meanwhile"
        yield f"each layer gathered in each task that reads it, {how}"
        yield "sums of gradients and the optimizer after all tasks, no overlap"
    elif mesh.num_devices > 1:
        if mesh.tp * mesh.cp > 1 and not pipe.layout.auto and not isinstance(job.config.costs, Measure):
            machine = machine_of(job.config, device_kind(pipe), str(pipe.dtype))
            beside = ", but for weight gradients" if machine.gathers_ahead else ""
            yield f"nothing computed while devices along tp or cp send{beside}"
        yield "gathers of parameters before all tasks, sums of gradients and the optimizer after, no overlap"
    else:
        yield "the optimizer after all tasks"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
