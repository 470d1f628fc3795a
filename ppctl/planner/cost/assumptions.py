"""The assumptions of a prediction in words. Change them along with how something is counted."""

from collections.abc import Iterator

from ppctl.config import Transformer
from ppctl.planner.cost.planned_step import Machine
from ppctl.planner.cost.predict_step import target_of
from ppctl.reports.bubble_names import shared_cores_text
from ppctl.schedule.axis_table import MESH_AXES, Divided
from ppctl.training.pipeline.built_in_models import attention_kernels
from ppctl.training.pipeline.job import TrainingJob

KERNELS = {
    "xla": "all scores of a sequence in memory",
    "chunked": "a softmax over blocks of keys",
    "cudnn": "cuDNN's flash attention",
    "pallas": "the Pallas kernel for TPUs",
}


DIVIDED: dict[Divided, str] = {  # the parts of a stage that an axis divides
    "batch": "microbatches divided over {over}",
    "weights": "layers divided over {over}, {rows} sequence parallelism",
    "tokens": "sequences divided over {over}, keys and values {keys}",
    "experts": "experts divided over {over}",
}


def assumptions(job: TrainingJob, *, is_timed: bool) -> tuple[str, ...]:
    """Return the assumptions of a job's prediction in words. is_timed: its step time is known."""
    lines = [*_of_the_layout(job)]
    if is_timed:
        machine = target_of(job).machine
        lines += [*_counted(job, machine), *_overlap(job, machine)]
        lines.append("no time for reading data, evaluations and checkpoints")
    if not job.config.plan.compiles:
        lines.append("no fragmented memory, no buffers of collectives")
    return tuple(lines)


def _of_the_layout(job: TrainingJob) -> Iterator[str]:
    axes, auto = job.pipe.execution.axes, job.pipe.layout.auto
    if axes.num_devices == 1:
        yield "whole layers on each device (no tensor or sequence parallelism)"
    rows = "with" if axes.sequence_parallel else "without"
    keys = "gathered" if axes.context == "gather" else "round a ring"
    for name, size in axes.divided.items():
        if name in auto:
            how = f"by XLA, whose collectives along {name} are not counted"
            yield f"all work divided evenly over {name}={size} {how}"
            continue
        for part in next(axis.divides for axis in MESH_AXES if axis.name == name):
            yield DIVIDED[part].format(over=f"{name}={size}", rows=rows, keys=keys)
    yield f"equal microbatches ({job.pipe.model.microbatch['inputs'].shape[0]} examples a device)"
    are_alike = job.pipe.stack.are_alike
    yield "equal layers and devices" if are_alike else "layers by their FLOPs, equal devices"
    if kernels := _kernels(job):
        yield " and ".join(f"attention={kernel} ({KERNELS[kernel]})" for kernel in kernels)


def _kernels(job: TrainingJob) -> tuple[str, ...]:
    """Return the kernels of the built-in attention, () of other models."""
    model, cp = job.config.model, job.config.mesh.cp
    if not isinstance(model, Transformer):
        return ()
    return attention_kernels(model, cp, job.pipe.dtype, job.counted_device, job.data)


def _counted(job: TrainingJob, machine: Machine) -> Iterator[str]:
    speed, kernels = machine.speed, ""
    if {"cudnn", "pallas"} & {*_kernels(job)} and speed.attention_forward is not None:
        forward, backward = speed.attention_forward, speed.attention_backward or speed.flops_per_s
        kernels = f", {forward / 1e12:.4g} in attention forward, {backward / 1e12:.4g} backward"
    large = "matrix products" if speed.cores is None else "large matrix products"
    yield f"{speed.flops_per_s / 1e12:.4g} TFLOP/s in {large}{kernels}"
    yield f"{speed.bytes_per_s / 1e9:.4g} GB/s of memory"
    yield "one operation of a device at a time"
    if (shared := shared_cores_text(job.pipe.mesh.size, machine.cores)) is not None:
        yield shared
    yield from _links(job, machine)
    if job.pipe.stack.takes_key:
        yield "random numbers of layers not counted"
    task = "tick" if job.pipe.execution.engine.in_ticks else "task"
    yield f"{_microseconds(machine.task_s)} to start a {task}"


def _links(job: TrainingJob, machine: Machine) -> Iterator[str]:
    """Yield the speed of the links of each axis of the mesh."""
    shape = job.pipe.mesh.shape
    links, over = machine.links(shape), machine.over(shape)
    axes = [axis for axis, size in shape.items() if size > 1]
    for axis in axes:
        where, speed = "", f"{links[axis].bytes_per_s / 1e9:.4g} GB/s each way"
        if machine.network is not None:
            where = " between hosts" if over[axis] > 1 else " within a host"
        yield f"{axis}{where} at {speed} and {_microseconds(links[axis].latency_s)} a message"
    if axes:
        yield "links without contention, rings for collectives"


def _overlap(job: TrainingJob, machine: Machine) -> Iterator[str]:
    # 1. tasks and transfers between ranks
    pipe, mesh = job.pipe, job.config.mesh
    if mesh.pp > 1 and pipe.execution.engine.in_ticks:
        yield "ticks as long as the slowest rank's and a transfer"
    elif mesh.pp > 1:
        yield "ranks that compute while values travel"

    # 2. parameters and gradients
    sums = "sums of gradients and the optimizer after"
    if pipe.execution.gather == "layer" and mesh.fsdp > 1:
        ahead, alone = "while the layer before is computed", "with nothing computed meanwhile"
        when = ahead if machine.gathers_ahead else alone
        yield f"each layer gathered in each task that reads it, {when}"
        yield f"{sums} all tasks, no overlap"
    elif mesh.num_devices > 1:
        axes = pipe.execution.axes
        if axes.num_devices > 1 and not pipe.layout.auto:
            but = ", but for weight gradients" if machine.gathers_ahead else ""
            yield f"nothing computed while devices along {' or '.join(axes.divided)} send{but}"
        yield f"gathers of parameters before all tasks, {sums}, no overlap"
    else:
        yield "the optimizer after all tasks"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
