"""Lines that describe a run before it starts, and compare it with its prediction afterwards."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ppctl.config import Transformer
from ppctl.config.changed_settings import Change
from ppctl.executors.compiler_options import text_of
from ppctl.reports.terminal_output import bubble_text, seconds_text, size_text
from ppctl.schedule.placement_costs import peak_activations
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.built_in_models import attention_kernels
from ppctl.training.pipeline.job import TrainingJob, partition_text
from ppctl.training.pipeline.known_hardware import of_device

LOCKSTEP_NOTICE = 1.05  # ratio of lockstep to free-running makespan; above it, a note is printed


def describe(job: TrainingJob, start: int, changed: Sequence[Change] = ()) -> Iterator[str]:
    """Yield the lines that describe a run before it starts after `start` steps.

    changed: settings that differ from the checkpoint's.
    """
    config, pipe = job.config, job.pipe
    device, model = pipe.meshes.device, config.model
    # 1. the model, its data and devices
    attention = linear = ""
    if isinstance(model, Transformer):
        kernels = attention_kernels(model, config.mesh.cp, pipe.dtype, device, job.data)
        attention = "" if kernels == ("xla",) else f", attention by {' and '.join(kernels)}"
        linear = linear_text(model, device)
    trained = "" if pipe.num_trained == pipe.num_parameters else f" ({pipe.num_trained:,} trained)"
    size = f"{pipe.stack.num_layers} layers, {pipe.num_parameters:,} parameters{trained}"
    yield f"model     {model.name}, {size}, {pipe.dtype} compute{linear}{attention}"
    yield f"data      {job.data.source}"
    over = pipe.meshes.hosts_text
    hosts = "" if over is None else f", {over}"
    devices = f"{pipe.meshes.num_devices} x {device.device_kind}{hosts}"
    yield f"mesh      {config.mesh.axes_text} on {devices}"
    # 2. the schedule and its programs
    yield from _schedule_lines(job)
    if (ema := config.optim.ema) is not None:
        yield f"average   evaluations use the average of the parameters (optim.ema={ema:g})"
    # 3. the run directory
    where = f"resuming after step {start}" if start else "from the start"
    yield f"run       {config.run.dir}, {where}"
    yield from (f"changed   since step {start}: {each.arrow}" for each in changed)


def linear_text(model: Transformer, device: Any) -> str:
    """Return the line's part on products of linear maps in 8 bits; "" without them."""
    if model.linear_dtype is None:
        return ""
    hardware, kind = of_device(device.device_kind), device.device_kind
    lacks = device.platform == "cpu" or (hardware is not None and "fp8" not in hardware.peak_flops)
    emulated = f" (emulated: {kind} has no 8-bit products)" if lacks else ""
    return f", linear maps in {model.linear_dtype}{emulated}"


def _schedule_lines(job: TrainingJob) -> Iterator[str]:
    pipe, step = job.pipe, job.pipe.scheduled
    schedule, ticks, costs = step.schedule, step.ticks, step.costs
    # 1. the schedule
    if not pipe.execution.engine.is_pipelined:
        yield f"executor  reference (no pipeline), {schedule.num_microbatches} microbatches"
    else:
        chunks = f"{schedule.num_chunks} chunk{'s' if schedule.num_chunks > 1 else ''} a rank"
        file = getattr(job.config.schedule, "path", None)
        sizes = "" if file is None else f", ranks and microbatches of {file}"
        many_ticks = "" if ticks is None else f"{ticks.num_ticks} ticks, "
        yield (
            f"schedule  {schedule.name}, {schedule.num_microbatches} microbatches, {chunks}, "
            f"{many_ticks}at most {max(peak_activations(schedule)):g} live activations{sizes}"
        )
    if job.choice is not None:
        yield f"auto      {job.choice.summary}"
    # 2. the programs
    if pipe.execution.xla_flags:
        yield f"xla       {text_of(pipe.execution.xla_flags)}"
    if pipe.execution.engine.dispatches_tasks:
        barrier = ", no barrier before the optimizer" if pipe.execution.post_validation else ""
        programs = "a program for each stage and kind of task, dispatched by the host"
        yield f"executor  mpmd: {programs}{barrier}"
        if (fused := pipe.scheduled.num_fused) > 0:
            yield f"fuse      {fused} pairs of a forward and a backward run as one program"
    if ticks is not None:
        stretch = ticks.makespan_s(costs) / simulate(schedule, costs).makespan_s
        if stretch > LOCKSTEP_NOTICE:
            yield (
                f"note      {schedule.name} takes {stretch:.2f} times as long in the lockstep "
                "ticks of executor=spmd as on free-running ranks; schedule=eager_1f1b and "
                "interleaved take 1.00 times, with more activations"
            )
    # 3. the layers
    if (text := partition_text(job)) is not None:
        yield f"partition {text}"


@dataclass(frozen=True)
class StepPrediction:
    """Step time, memory and bubble of a run, predicted by the planner."""

    step_time_s: float | None  # seconds; None: unknown devices
    memory_bytes: int  # bytes of the fullest device: exact shapes and estimated temporaries
    source: str  # source of the predicted seconds
    ideal_bubble_fraction: float | None = None  # 0..1, with unit costs; None without a pipeline
    bubble_fraction: float | None = None  # 0..1, with the costs of the predicted step time

    def line(self) -> str:
        """Return the line to print before the run."""
        bubble = bubble_text(self.ideal_bubble_fraction, self.bubble_fraction)
        seconds = self.step_time_s
        step = "no step time" if seconds is None else f"{seconds_text(seconds, digits=3)} a step"
        memory = f"{size_text(self.memory_bytes)} a device predicted"
        parts = filter(None, (step, bubble and f"bubble {bubble}", memory))
        return f"plan      {', '.join(parts)} ({self.source})"

    def compared(self, step_times_s: Sequence[float], compiled_bytes: int) -> str:
        """Return the line to print after the run: predicted and measured values."""
        measured_s = statistics.median_low(step_times_s)  # two steps: the faster
        predicted, compiled = size_text(self.memory_bytes), size_text(compiled_bytes)
        memory = f"{predicted} a device predicted, {compiled} compiled"
        measured = seconds_text(measured_s, digits=3)
        if self.step_time_s is None:
            return f"plan      {memory}; {measured} a step measured, none predicted"
        ratio = self.step_time_s / measured_s
        predicted = seconds_text(self.step_time_s, digits=3)
        times = f"{predicted} a step predicted, {measured} measured"
        return f"plan      {times} ({ratio:.2f} times; {self.source}); {memory}"
