"""The prediction for a job before anything is compiled: `plan`, `train`, `tune` and `rehearse`.

The ideal bubble depends only on the schedule and its executor: stages are equal, tasks cost
`task_costs`, and nothing else takes time. The predicted bubble uses the seconds of layers,
embedding, head and transfers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppctl.config import AutoHardware, Hardware, Plan
from ppctl.config.field_checks import domains
from ppctl.errors import ConfigError, nearest, suggested
from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.fused_tasks import FusedTasks
from ppctl.executors.mpmd.plan_tasks import JOINS, TASKS
from ppctl.executors.work.planned_step import Step
from ppctl.executors.work.rank_bytes import reference_bytes, task_bytes, workspace_bytes
from ppctl.planner.cost.step_time import StepTime, op_times, step_time
from ppctl.planner.cost.target_devices import DeviceLimit, Target
from ppctl.schedule.costs import Costs, OpTimes, costs_of_stages
from ppctl.schedule.families.registry import BASELINE, build
from ppctl.schedule.ir import MOST_TASKS, PART_KINDS
from ppctl.schedule.partition.partition import stage_costs
from ppctl.schedule.simulator import Timeline
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.known_hardware import described_only, known
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.pipeline_step import layers_of, model_on, pipeline_step
from ppctl.training.run.run_lines import StepPrediction

Tree = Any


@dataclass(frozen=True)
class PipelinePlan:
    """The predicted step of a pipeline, before anything is compiled. Made by `ppctl.plan`."""

    hardware: str | None  # names of the hardware description, by rank if they differ; None: unknown
    dtype: str  # compute dtype
    memory: tuple[Mapping[str, int], ...]  # bytes of one device of each rank, by part
    limits: tuple[DeviceLimit | None, ...]  # memory of a device of each rank; None: unknown
    ideal_bubble: float | None  # 0..1: equal stages, no transfers; None: no pipeline
    unknown: str | None = None  # reason why the seconds and the next fields are unknown
    time: StepTime | None = None
    bubble: float | None = None  # 0..1: idle share of the ranks at the predicted seconds
    costs: Costs | None = field(default=None, repr=False)  # costs of the stages' tasks

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a train step; None: unknown."""
        return None if self.time is None else self.time.total_s

    @property
    def overhead_s(self) -> float | None:
        """Return the seconds of `step_s` for parameter gathers, gradient sums and the optimizer."""
        return None if self.time is None else self.time.overhead_s

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one device of each rank."""
        return tuple(sum(of_rank.values()) for of_rank in self.memory)

    @property
    def limit(self) -> DeviceLimit | None:
        """Return the memory of a device of the rank with the least room; None: unknown."""
        return tightest(self.total_bytes, self.limits)

    @property
    def limit_bytes(self) -> int | None:
        """Return the usable bytes of a device of the rank with the least room; None: unknown."""
        return None if self.limit is None else self.limit.size_bytes

    @property
    def fits(self) -> bool | None:
        """Return whether every rank's bytes fit a device; None: a device's memory is unknown."""
        return fit(self.total_bytes, self.limits)


def tightest(held: Sequence[int], limits: Sequence[DeviceLimit | None]) -> DeviceLimit | None:
    """Return the limit of the rank with the least room; None: one is unknown. held: bytes used."""
    pairs = [(limit.size_bytes - n, limit) for n, limit in zip(held, limits, strict=True) if limit]
    return min(pairs, key=lambda pair: pair[0])[1] if len(pairs) == len(limits) else None


def fit(held: Sequence[int], limits: Sequence[DeviceLimit | None]) -> bool | None:
    """Return whether the bytes of each rank fit its devices; None: a limit is unknown."""
    if None in limits:
        return None
    return all(limit and n <= limit.size_bytes for n, limit in zip(held, limits, strict=True))


def predict_job(job: TrainingJob) -> PipelinePlan:
    """Return the prediction for a job. ConfigError if the requested hardware lacks a speed."""
    return _predicted(job.pipe, steps_of(job), targets_of(job))


def predict_pipeline(pipe: Pipeline, counted: Model, target: Target) -> PipelinePlan:
    """Return the prediction for a pipeline of equal hardware.

    counted: the pipeline's model with target's kernels, on rank 0.
    """
    targets = (target,) * pipe.schedule.num_ranks

    def model_of(rank: int) -> Model:
        is_counted = pipe.meshes.group_of[rank] == 0
        return counted if is_counted else model_on(pipe, None, counted.stack, rank=rank)

    return _predicted(pipe, _steps(pipe, model_of, targets), targets)


def _predicted(pipe: Pipeline, steps: Sequence[Step], targets: Sequence[Target]) -> PipelinePlan:
    hardware = [target.known_hardware for target in targets]
    names = dict.fromkeys(each.name for each in hardware if each is not None)
    limits = tuple(target.limit for target in targets)
    name, memory = ", ".join(names) or None, memory_of(pipe, steps)
    known = name, targets[0].dtype, memory, limits, pipe.bubble()
    unknown = next((each.unknown for each in targets if each.unknown is not None), None)
    auto = pipe.groups[0].layout.of_rank.auto
    if unknown is None and auto:
        along = " and ".join(auto)
        unknown = f"XLA divides this model over {along}, and its sends cannot be predicted"
    if unknown is not None:
        return PipelinePlan(*known, unknown)
    times = [op_times(step) for step in steps]
    time, costs = time_of(pipe, times), job_costs(pipe, times)
    return PipelinePlan(*known, None, time, _bubble(pipe, times, time), costs)


def predict_step(job: TrainingJob) -> StepPrediction:
    """Return the prediction for a run, as `ppctl train` prints it."""
    found = predict_job(job)
    name = "unknown hardware" if found.hardware is None else f"hardware={found.hardware}"
    bubbles = found.ideal_bubble, found.bubble
    return StepPrediction(found.step_s, max(found.total_bytes), name, *bubbles)


def _bubble(pipe: Pipeline, times: Sequence[OpTimes], time: StepTime) -> float | None:
    """Return the idle share of the ranks in the timeline of the predicted step, 0..1.

    Devices that share cores, as simulated ones do, take longer for a task while others work. Their
    bubble needs the timeline itself. None: no pipeline, or a timeline above MOST_TASKS tasks.
    """
    if not pipe.execution.engine.is_pipelined:
        return None
    if time.width >= pipe.meshes.num_devices:
        return time.bubble_fraction
    if sum(map(len, pipe.schedule.ranks)) > MOST_TASKS:
        return None
    return timeline_of(pipe, times).bubble_fraction


def plan(
    pipe: Pipeline, *, hardware: str = "auto", memory_gib: float | None = None
) -> PipelinePlan:
    """Return the predicted seconds and bytes of a pipeline's step; compiles nothing.

    The numbers are those of `ppctl plan` for the same request: FLOPs and bytes of the traced
    layers, at the speeds of the hardware.

    Args:
        pipe: A result of `ppctl.pipeline`.
        hardware: A name of conf/hardware, such as h100 or v5e; the mesh may have other devices,
            such as simulated ones. "auto": the hardware of the mesh's devices.
        memory_gib: Memory of a device in GiB; None: the hardware's.

    Raises:
        ConfigError: The hardware is unknown, or states no speed for the compute dtype.
    """
    device = pipe.meshes.device
    request = hardware_named(hardware)
    how = device, pipe.meshes.num_devices, str(pipe.dtype)
    counted = model_on(pipe, described_only(request, device.device_kind))
    return predict_pipeline(pipe, counted, Target(request, *how, limits_of(memory_gib)))


def limits_of(memory_gib: float | None) -> Plan:
    """Return the settings of a plan for devices with this memory. ConfigError if impossible."""
    limits = Plan(memory_gib=memory_gib)
    domains("", limits)
    return limits


def hardware_named(name: str) -> Hardware | AutoHardware:
    """Return the hardware with this name, or AutoHardware for "auto". ConfigError if unknown."""
    if name == "auto":
        return AutoHardware()
    if name not in known():
        remedy = f" Use one of auto, {', '.join(known())}."
        remedy = suggested(nearest(name, known())[:1]) or remedy
        raise ConfigError(f"hardware={name} is not described.{remedy}")
    return known()[name]


# from a job to a step


def target_of(job: TrainingJob) -> Target:
    """Return the target devices of a job's plan, those of rank 0."""
    return targets_of(job)[0]


def targets_of(job: TrainingJob) -> tuple[Target, ...]:
    """Return the target devices of each rank of a job's plan."""
    config, meshes = job.config, job.pipe.meshes
    how = config.plan, config.mesh.order, config.executor.xla_flags, config.run.memory_fraction
    devices = meshes.device, meshes.num_devices, str(job.pipe.dtype)
    ranks = range(job.pipe.schedule.num_ranks)
    return tuple(Target(job.hardware_of(r), *devices, *how) for r in ranks)


def peak_flops_of(job: TrainingJob) -> float | None:
    """Return the peak FLOP/s of all devices together, the denominator of MFU; None: unknown."""
    pairs = zip(targets_of(job), job.pipe.meshes.sizes_by_rank, strict=True)
    peaks = [(target.peak_flops, sizes.num_devices / target.number) for target, sizes in pairs]
    if any(peak is None for peak, _ in peaks):
        return None
    return sum(peak * share for peak, share in peaks if peak is not None)


def step_of(job: TrainingJob) -> Step:
    """Return the step of rank 0 of a job, on the target devices of its plan."""
    return steps_of(job)[0]


def steps_of(job: TrainingJob) -> tuple[Step, ...]:
    """Return the step of each rank of a job, on the target devices of its plan."""
    targets = targets_of(job)
    return _steps(job.pipe, job.counted_on, targets)


def _steps(
    pipe: Pipeline, model_of: Callable[[int], Model], targets: Sequence[Target]
) -> tuple[Step, ...]:
    """Return the step of each rank; model_of: rank -> model with the kernels to count.

    Equal ranks of equal hardware have one step, that of the largest rank.
    """
    kinds = [
        (group, target.request.name)
        for group, target in zip(pipe.meshes.group_of, targets, strict=True)
    ]
    is_equal, found = len({*kinds}) == 1, dict[Any, Step]()
    for rank, (kind, target) in enumerate(zip(kinds, targets, strict=True)):
        if kind not in found:
            machine = target.machine if target.unknown is None else None
            adds, which = target.adds_products, None if is_equal else rank
            found[kind] = pipeline_step(pipe, model_of(rank), machine, adds=adds, rank=which)
    if is_equal:
        return (found[kinds[0]],) * len(targets)
    return tuple(found[kind].with_layers(*layers_of(pipe, r)) for r, kind in enumerate(kinds))


# the bytes and the seconds of a job


def memory_of(pipe: Pipeline, steps: Sequence[Step]) -> tuple[Mapping[str, int], ...]:
    """Return the bytes of one device of each rank, by part, with predicted temporaries."""
    of_groups = [steps[group.ranks[0]] for group in pipe.groups]

    def of_program(program: ProgramId | None) -> int:
        """Return the temporary bytes of a program of executor=mpmd; None: those of a whole step."""
        step = of_groups[0 if program is None else program.group]
        params, has_whole_layers = step.params, not step.gathers_by_layer
        if program is None:
            is_pipelined = pipe.execution.engine.is_pipelined
            return workspace_bytes(step) if is_pipelined else reference_bytes(step)
        if isinstance(program.shape, FusedTasks):
            return sum(map(of_program, program.shape.programs))
        if program.kind in (*PART_KINDS, *JOINS):
            return round(step.head_bytes) if program.kind == "T" else 0
        if program.kind in TASKS:
            stage = program.shape
            return task_bytes(step, program.kind, stage.num_layers, has_head=stage.is_last)
        # all layers of the rank, gathered
        if program.kind == "prepare" and step.layout.mesh.fsdp > 1 and has_whole_layers:
            num_layers = sum(role.num_layers for role in program.shape.stages)
            return num_layers * round(params.layer * params.compute_ratio)
        if program.kind == "reduce":  # stacked gradients, before their sum
            return program.shape.num_layers * params.trained_layer
        return 0

    return pipe.engine.memory(of_program)


def time_of(pipe: Pipeline, times: Sequence[OpTimes], costs: Costs | None = None) -> StepTime:
    """Return the seconds of a train step. times: of each rank.

    The overhead is the slowest rank's. costs: costs of the stages' tasks; None: `job_costs`.
    """
    slowest = max(times, key=lambda each: each.overhead_s)
    if not pipe.execution.engine.is_pipelined:
        alone = build(BASELINE, 1, pipe.schedule.num_microbatches)
        whole = costs_of_stages(slowest, [pipe.stack.num_layers], keeps_input=False)
        return step_time(slowest, alone, None, whole, 1)
    counted = None if pipe.ticks is None else pipe.ticks.counted
    costs = costs or job_costs(pipe, times)
    return step_time(slowest, pipe.schedule, counted, costs, pipe.meshes.rank_devices)


def timeline_of(pipe: Pipeline, times: Sequence[OpTimes], costs: Costs | None = None) -> Timeline:
    """Return the timeline of a step's tasks, without per-step overhead. Arguments: `time_of`."""
    costs = costs or job_costs(pipe, times)
    return pipe.scheduled.timeline(costs, times[0].capacity / pipe.meshes.rank_devices)


def job_costs(pipe: Pipeline, times: Sequence[OpTimes]) -> Costs:
    """Return the costs of the stages' tasks. times: of each rank."""
    layers = None if pipe.stack.are_alike else pipe.relative_costs.layers
    keeps_input, split = pipe.execution.remat.keeps_input_only, pipe.schedule.is_split
    sizes = stage_costs(pipe.partition, embed=0.0, head=0.0, layers=layers)
    by_stage = [times[rank] for rank in pipe.schedule.rank_of]
    return costs_of_stages(by_stage, sizes, keeps_input=keeps_input, split=split)
