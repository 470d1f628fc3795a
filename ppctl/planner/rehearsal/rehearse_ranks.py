"""A large run's ranks, rehearsed on one device, and the whole step simulated from their times.

Each distinct rank runs its tasks, or ticks, and its optimizer update. Transfers, collectives and
sends inside stages are not run; their time is predicted for the links of hardware=.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import mean

import jax

from ppctl.config import Config, Mpmd
from ppctl.config.schedule_from_config import label
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.executors.mpmd.plan_tasks import roles, task_entries
from ppctl.executors.mpmd.rank_programs import rank_entries, rank_roles
from ppctl.executors.work.planned_step import Step
from ppctl.executors.work.roofline import Speed
from ppctl.planner.cost.predict_step import (
    job_costs,
    peak_flops_of,
    step_of,
    target_of,
    time_of,
    timeline_of,
)
from ppctl.planner.cost.request_text import RequestText, out_of_memory
from ppctl.planner.cost.step_time import StepTime, exchange_s, op_times
from ppctl.planner.rehearsal.rank_on_device import (
    RankOnDevice,
    RankPart,
    RankTimes,
    Replicas,
    time_in_ticks,
    time_update,
)
from ppctl.planner.rehearsal.timed_runs import examples_of_device
from ppctl.schedule.costs import OF_PARTS, Costs, OpTimes, PieceTimes
from ppctl.schedule.ir import PART_KINDS, Kind
from ppctl.schedule.simulator import Timeline
from ppctl.training.pipeline.jax_start import simulate
from ppctl.training.pipeline.job import TrainingJob, assemble, unit_of_work
from ppctl.training.pipeline.mfu import mfu, model_flops

RUNS = 5  # timed steps of each rank after a warm-up step; the median is used


@dataclass(frozen=True)
class RehearsedRank:
    """A rank's part of a step as rehearsed: its seconds, and the memory of one of its devices."""

    rank: int
    ran_as: int  # rank that was timed for this one; of ranks with equal stages, only one is run
    tasks_s: float  # seconds of all its tasks in order
    update_s: float  # seconds of the gradient norm and the optimizer
    stages: tuple[int, ...]
    forward_s: tuple[float, ...]  # seconds of F in each stage, sends inside the stage included
    backward_s: tuple[float, ...]  # seconds of B, or of I and W
    memory_bytes: Mapping[str, int]  # bytes of one device, by part
    total_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """The predicted step of the whole mesh, as `ppctl rehearse --json` prints it."""

    request: RequestText
    schedule: str
    device: str  # kind of the device that ran the ranks
    hardware: str | None  # name of the description whose links are used
    step_time_s: float
    per_step_overhead_s: float  # part of the step: gathers, gradient sums, optimizer
    step_cpu_s: float | None  # CPU seconds of all devices; None for accelerators
    sent_s: float  # predicted seconds per step of sends inside stages, the largest of all ranks
    unit: str  # tokens_per_s | rows_per_s
    tokens_per_s: float  # tokens or examples a second, by `unit`
    mfu_fraction: float | None  # 0..1, share of the hardware's peak; None: unknown, as for CPUs
    mfu_causal_fraction: float | None  # MFU without the FLOPs of attention to later tokens
    bubble_fraction: float  # 0..1: idle share of the ranks in the simulated tasks of a step
    limit_bytes: int | None  # memory of a device
    ranks: tuple[RehearsedRank, ...]
    analytic_step_time_s: float  # seconds that `ppctl plan` predicts for the same request


def rehearse(config: Config) -> tuple[Rehearsal, Timeline]:
    """Run a request's ranks on the first device; return the simulated step and its timeline.

    ConfigError, ScheduleError or DataError for a bad request, or a rank too large for the device.
    """
    refused = None
    if not config.executor.ENGINE.is_pipelined:
        refused = "executor=reference has no ranks. Use executor=spmd or mpmd"
    elif isinstance(config.executor, Mpmd) and config.executor.fuse != "none":
        refused = "it times single tasks, but executor.fuse=fb runs two as one program. Use "
        refused += "executor.fuse=none"
    elif (how := config.run.distributed) != "off":
        refused = f"run.distributed={how} joins several processes. Leave it out"
    elif config.mesh.ranks or getattr(config.hardware, "ranks", ()):
        refused = "mesh.ranks or hardware.ranks gives ranks of other sizes or hardware. Use "
        refused += "`ppctl plan`"
    if refused is not None:
        raise ConfigError(f"`ppctl rehearse` runs each rank on one device: {refused}.")
    simulate(_replicas(config.mesh.num_devices))
    job = assemble(config, on_one_device=True, only_planned=True)
    if job.pipe.layout.of_rank.auto:
        raise ConfigError(
            f"`ppctl rehearse` runs one device's work, but mesh.tp={config.mesh.tp} has XLA "
            "divide whole programs (sharding of the model). Use mesh.tp=1, or "
            "`ppctl plan`."
        )
    # unknown hardware is refused before anything is compiled
    planned = replace(step_of(job), machine=target_of(job).machine)
    simulated = Simulated(job, planned, *_run_ranks(job))
    return simulated.found, simulated.timeline


def rank_parts(job: TrainingJob) -> list[RankPart]:
    """Return the role and the tasks of each rank."""
    pipe, model, has_own = job.pipe, job.pipe.model, job.pipe.model.own_embed_head is None
    stage_roles = roles(pipe.partition, are_alike=pipe.stack.are_alike, have_embed_head=has_own)
    kinds = rank_roles(model, pipe.layout.placement, stage_roles)
    order = pipe.scheduled.order
    entries = task_entries(pipe.schedule, order, stage_roles, keeps_input=model.stage.keeps_input)
    prepare, _ = rank_entries(pipe.schedule.rank_of, kinds, with_grads=True)
    tasks = ([e for e in entries if e.rank == r and e.program] for r in range(len(kinds)))
    return list(map(RankPart, kinds, prepare, tasks))


def _run_ranks(job: TrainingJob) -> tuple[dict[int, RankTimes], list[int]]:
    """Run each distinct rank. Return (times by rank that ran, for each rank the one that ran)."""
    parts, batch, ran = rank_parts(job), examples_of_device(job), dict[int, RankTimes]()
    kinds = [part.role for part in parts]
    ran_as = [kinds.index(kind) for kind in kinds]
    for r in sorted(set(ran_as)):
        try:
            ran[r] = _times(job, parts[r], batch)
        except jax.errors.JaxRuntimeError as error:
            if (reason := out_of_memory(error)) is None:
                raise
            raise ConfigError(
                f"Rank {r} does not fit this {target_of(job).kind}: {reason.rstrip('.')}. Use "
                "more ranks (mesh.pp), smaller microbatches (schedule.num_microbatches), or "
                "executor.remat=full."
            ) from error
    return ran, ran_as


def _times(job: TrainingJob, part: RankPart, batch: Mapping[str, jax.Array]) -> RankTimes:
    """Return the times of a rank's tasks and update.

    On CPU the rank is timed on one device, and on several devices at once, which share cores.
    """
    # 1. single tasks
    devices = all_devices()[: _replicas(job.pipe.meshes.num_devices) if _is_shared(job) else 1]
    sets = [Replicas(devices[:1]), *([Replicas(devices)] if len(devices) > 1 else [])]
    of_rank = job, part, batch
    one = RankOnDevice(*of_rank, sets[0])
    tasks, task_s = one.times(RUNS)
    # 2. all tasks, on one device and on all devices at the same time
    if job.pipe.ticks is not None:
        whole = [time_in_ticks(*of_rank, RUNS, on) for on in sets]
    else:
        whole = [tasks, *(RankOnDevice(*of_rank, on).times(RUNS)[0] for on in sets[1:])]
    alone, at_once = whole[0], whole[-1]
    update = time_update(job, part, RUNS, sets[-1])
    # 3. the seconds of single tasks, scaled so that they sum to `alone`
    task_s = {which: s * alone.wall_s / tasks.wall_s for which, s in task_s.items()}
    return RankTimes(alone, at_once, len(devices), update, task_s, one.temp_bytes)


def _replicas(num_devices: int) -> int:
    """Return the number of simulated devices that run a rank at once: enough to load all cores."""
    return min(num_devices, 2 * (os.cpu_count() or 1))


def _is_shared(job: TrainingJob) -> bool:
    """Return whether the devices of the mesh are simulated, and so share this machine's cores."""
    return job.pipe.meshes.device.platform == "cpu"


@dataclass(frozen=True)
class Simulated:
    """The whole pipeline, simulated from the ranks that ran.

    ran: times of the distinct ranks. ran_as: for each rank, its key in `ran`.
    """

    job: TrainingJob
    planned: Step  # step as `ppctl plan` predicts it, for links and the analytic step time
    ran: Mapping[int, RankTimes]
    ran_as: Sequence[int]

    @cached_property
    def costs(self) -> Costs:
        """Return the costs of each stage's tasks; equal ranks have the same costs."""
        kinds = zip(*map(self._of_stage, range(self.job.pipe.schedule.num_stages)), strict=True)
        parts = {OF_PARTS[kind]: self._of_parts(kind) for kind in PART_KINDS}
        return Costs(*kinds, transfer_s=self._counted.hop_s, **parts)

    def _of_stage(self, s: int) -> tuple[float, float, float]:
        """Return the seconds of a stage's F, I and W, gathers and sends included."""
        schedule, sent = self.job.pipe.schedule, self._sent
        like = self.ran_as[schedule.rank_of[s]]
        times, stage = self.ran[like].task_s, schedule.stages_of[like][schedule.chunk_of[s]]
        half = times.get((stage, "B"), 0.0) / 2
        usual = {"F": 0.0, "I": half, "W": half}
        ran = [times.get((stage, kind), usual_s) for kind, usual_s in usual.items()]
        f, i = self._with_gathers(len(self.job.pipe.partition[stage]), *ran)
        of_w = ran[2], sent.seconds("W", s, 1)
        w = max(of_w) if self.planned.known_machine.gathers_ahead else sum(of_w)
        return f + sent.seconds("F", s, 1), i + sent.seconds("I", s, 1), w

    def _of_parts(self, kind: Kind) -> tuple[float, ...]:
        """Return each vocabulary part's seconds of a kind, sends included; () without parts."""

        def seconds(part: int) -> float:
            like = self.ran_as[part]
            return self.ran[like].task_s.get((like, kind), 0.0) + self._sent.seconds(kind, part, 1)

        return tuple(map(seconds, range(len(self.job.pipe.schedule.ranks_of(kind)))))

    def _with_gathers(self, layers: int, f: float, i: float, w: float) -> tuple[float, float]:
        """Return the seconds of F and I with gathers; f, i, w: without, for `layers` layers."""
        if self._counted.gathers is None or not layers:
            return f, i
        is_split, remat = self.job.pipe.schedule.is_split, self.job.pipe.execution.remat
        one = replace(self._counted, layer=PieceTimes(f / layers, i / layers, w / layers))
        i = one.input_grad_s(layers, keeps_input=remat.keeps_input_only, split=is_split)
        return one.forward_s(layers), i

    def _of_ranks(self, times: OpTimes) -> tuple[OpTimes, ...]:
        return (times,) * self.job.pipe.schedule.num_ranks

    @cached_property
    def step(self) -> StepTime:
        return time_of(self.job.pipe, self._of_ranks(self._op_times), self.costs)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline_of(self.job.pipe, self._of_ranks(self._op_times), self.costs)

    @property
    def found(self) -> Rehearsal:
        """Return the record of the rehearsal, which `ppctl rehearse` prints."""
        # 1. the request and its prediction
        job, pipe, step, target = self.job, self.job.pipe, self.step, target_of(self.job)
        unit, count = unit_of_work(job)
        flops, peak = model_flops(job), peak_flops_of(job)

        # 2. the ranks
        ran = [self.ran[r] for r in self.ran_as]
        # mean number of devices that would run tasks at once without shared cores
        times = self._of_ranks(replace(self._op_times, capacity=inf))
        free = timeline_of(pipe, times, self.costs)
        at_once = pipe.meshes.num_devices * (1 - free.bubble_fraction)
        cpu_s = sum(each.cpu_s(at_once) + each.update.cpu_s for each in ran)
        copies = self.planned.layout.rank_devices
        return Rehearsal(
            request=RequestText.of(job),
            schedule=label(job.config.schedule),
            device=target.kind,
            hardware=target.hardware.name,
            step_time_s=step.total_s,
            per_step_overhead_s=step.overhead_s,
            step_cpu_s=cpu_s * copies if _is_shared(self.job) else None,
            sent_s=self._sent_s,
            unit=unit,
            tokens_per_s=count / step.total_s,
            mfu_fraction=mfu(flops.full, step.total_s, peak),
            mfu_causal_fraction=mfu(flops.causal, step.total_s, peak),
            bubble_fraction=self.timeline.bubble_fraction,
            limit_bytes=None if target.limit is None else target.limit.size_bytes,
            ranks=tuple(map(self._rank, range(len(ran)))),
            analytic_step_time_s=time_of(pipe, self._of_ranks(self._counted)).total_s,
        )

    def _rank(self, rank: int) -> RehearsedRank:
        schedule, times = self.job.pipe.schedule, self.ran[self.ran_as[rank]]
        stages = schedule.stages_of[rank]
        memory = {**self.job.pipe.memory()[rank], "temporaries": times.temp_bytes}
        forward_s, backward_s = (
            tuple(self.costs.seconds(kind, s, 1) for s in stages) for kind in "FB"
        )
        return RehearsedRank(
            rank=rank,
            ran_as=self.ran_as[rank],
            tasks_s=times.alone.wall_s,
            update_s=times.update.wall_s,
            stages=stages,
            forward_s=forward_s,
            backward_s=backward_s,
            memory_bytes=memory,
            total_bytes=sum(memory.values()),
        )

    @cached_property
    def _counted(self) -> OpTimes:
        """Return the op times that `ppctl plan` predicts."""
        return op_times(self.planned)

    @cached_property
    def _sent(self) -> Costs:
        """Return the seconds of each task's sends: its predicted cost if computing took no time."""
        free = Speed(1e60, 1e60)  # not infinite: `Costs` of no work at all are refused
        machine = replace(self.planned.known_machine, speed=free, task_s=0.0)
        sent = op_times(replace(self.planned, machine=machine))
        return job_costs(self.job.pipe, self._of_ranks(replace(sent, gathers=None)))

    @property
    def _sent_s(self) -> float:
        """Return the seconds per step of sends inside stages, the largest of all ranks."""
        schedule, of_rank = self.job.pipe.schedule, [0.0] * self.job.pipe.schedule.num_ranks
        for kind in (*"FIW", *PART_KINDS):
            for place, rank in enumerate(schedule.ranks_of(kind)):
                of_rank[rank] += self._sent.seconds(kind, place, 1)
        return schedule.num_microbatches * max(of_rank)

    @cached_property
    def _op_times(self) -> OpTimes:
        """Return the predicted op times with the measured overhead and capacity of a step."""
        times = self.ran.values()
        exchanged_s = exchange_s(self.planned)
        return replace(
            self._counted,
            overhead_s=max(each.update.wall_s for each in times) + exchanged_s,
            capacity=mean(each.capacity for each in times) if _is_shared(self.job) else inf,
        )
