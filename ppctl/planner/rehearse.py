"""A large run's ranks, rehearsed on one device: what a step of the whole mesh takes.

Each rank that differs from those before it runs its own tasks, or ticks, and its optimizer's update here. The whole
pipeline is then simulated from these times, with transfers and collectives as `planner.analytic` counts them for the
links of hardware=. Of a rank whose devices divide its stages over tp and cp one device runs; what the others send to it
stands in (`planner.stand_ins`), and its seconds are counted, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import mean

import jax

from ppctl.config import Analytic, Config, Measure
from ppctl.config.schedule_from_config import label
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.plan import PlanEntry
from ppctl.executors.mpmd.rank import RankRole, rank_entries, rank_roles
from ppctl.executors.mpmd.task_plan import roles, task_entries
from ppctl.planner.analytic import Machine, exchange_s
from ppctl.planner.memory import device_limit
from ppctl.planner.op_times import OpTimes, PieceTimes, StepTime
from ppctl.planner.rank_in_ticks import in_ticks, time_in_ticks
from ppctl.planner.rank_on_device import RankOnDevice, RankTimes
from ppctl.planner.roofline import Speed
from ppctl.planner.step_runs import as_run, examples_of_device, out_of_memory, time_of, timeline_of
from ppctl.planner.step_time import (
    counted_op_times,
    device_kind,
    hardware_of,
    layout_of,
    machine_of,
    mfu_of,
    param_bytes_of,
    predicted_time,
)
from ppctl.schedule.costs import OF_PARTS, Costs
from ppctl.schedule.ir import PART_KINDS, Kind
from ppctl.schedule.simulate import Timeline
from ppctl.training.engines.make import dispatch_order
from ppctl.training.job import TrainingJob, assemble, model_flops, unit_of_work


@dataclass(frozen=True)
class RehearsedRank:
    """A rank's part of a step as it ran here: its seconds, and the memory of one of its devices."""

    rank: int
    ran_as: int  # the rank whose run this is: ranks with equal stages run once
    tasks_s: float  # all its tasks, one after the other, as they ran here
    update_s: float  # the norm of its gradients, the optimizer
    cpu_s: float | None  # CPU seconds of both; None for accelerators
    stages: tuple[int, ...]
    forward_s: tuple[float, ...]  # of a microbatch through each stage, with what its devices send each other
    backward_s: tuple[float, ...]  # B, or I and W
    part_s: float | None  # of a microbatch through its part of the vocabulary, E, S, T and G; None where it has none
    memory_bytes: Mapping[str, int]  # of one device, by part
    total_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """The predicted step of the whole mesh, as `ppctl rehearse --json` prints it."""

    schedule: str
    device: str  # that the ranks ran on
    hardware: str | None  # whose links are counted
    step_time_s: float
    per_step_overhead_s: float  # of it: gathering parameters, reducing gradients, the optimizer
    step_cpu_s: float | None  # CPU seconds of all devices; None for accelerators
    sent_s: float  # counted, not run: what devices along tp and cp send in a step, on the rank that sends longest
    unit: str  # tokens_per_s | rows_per_s
    tokens_per_s: float  # or examples, as `unit` says
    mfu_fraction: float | None  # 0..1: of the hardware's peak; None where that is not known, as of CPUs
    mfu_causal_fraction: float | None  # the same, attention to later tokens not counted
    bubble_fraction: float  # 0..1: idle share of the ranks in the simulated step, per-step overhead apart
    limit_bytes: int | None  # memory of a device
    ranks: tuple[RehearsedRank, ...]
    analytic_step_time_s: float | None  # of costs=analytic for the same request
    analytic_per_step_overhead_s: float | None
    analytic_unknown: str | None  # why these are not known


def rehearse(config: Config) -> tuple[Rehearsal, Timeline]:
    """Run the ranks of a request on the first device here; return what a step takes, and its timeline.

    ConfigError, ScheduleError or DataError for what cannot be, and where this device has not the memory for a rank.
    """
    _check(config)
    job = assemble(config, on_one_device=True, only_planned=True)
    if job.pipe.layout.auto:
        raise ConfigError(
            f"`ppctl rehearse` runs one device's work, but mesh.tp={config.mesh.tp} is divided by XLA (sharding of the "
            "model), which divides whole programs. Use mesh.tp=1, or `ppctl plan`."
        )
    machine = machine_of(config, device_kind(job.pipe), str(job.pipe.dtype))  # refused before anything is compiled
    simulated = Simulated(job, machine, *_run_ranks(job))
    return simulated.found, simulated.timeline


def _check(config: Config) -> None:
    refused = None
    if not config.executor.IS_PIPELINED:
        refused = "executor=reference has no ranks. Use executor=spmd or mpmd"
    elif config.run.distributed != "off":
        refused = f"run.distributed={config.run.distributed} joins processes, but one device runs. Leave it out"
    elif isinstance(config.costs, Measure):
        refused = "costs=measure times pieces of a model, a rehearsal whole ranks. Leave it out"
    if refused is not None:
        raise ConfigError(f"`ppctl rehearse` runs each rank on one device: {refused}.")


def rank_parts(job: TrainingJob) -> list[tuple[RankRole, PlanEntry, list[PlanEntry]]]:
    """Return for each rank its role, the entry that makes it ready, and its tasks in the order of a step."""
    pipe, model = job.pipe, job.pipe.model
    stage_roles = roles(pipe.partition, are_alike=pipe.stack.are_alike, have_ends=model.own_ends is None)
    kinds = rank_roles(model, pipe.layout, stage_roles)
    order = dispatch_order(pipe.schedule, pipe.task_costs)
    entries = task_entries(pipe.schedule, order, stage_roles, keeps_input=model.stage.keeps_input)
    prepare, _ = rank_entries(pipe.layout, kinds, with_grads=True)
    tasks = ([entry for entry in entries if entry.rank == r and entry.program] for r in range(len(kinds)))
    return list(zip(kinds, prepare, tasks, strict=True))


def _run_ranks(job: TrainingJob) -> tuple[dict[int, RankTimes], list[int]]:
    """Return the times of the ranks that were run, and for each rank the one that ran for it."""
    parts, batch, ran = rank_parts(job), examples_of_device(job), dict[int, RankTimes]()
    kinds = [kind for kind, _, _ in parts]
    ran_as = [kinds.index(kind) for kind in kinds]
    pipe, runs, copies = job.pipe, job.config.rehearse.runs, _at_once(job)
    for r in sorted(set(ran_as)):
        try:
            ran[r] = RankOnDevice(job, *parts[r], batch, copies).times(runs)
            if pipe.ticks is not None:
                whole = time_in_ticks(job, r, kinds[r], batch, runs, copies)
                ran[r] = in_ticks(ran[r], whole, pipe.ticks, is_masked=pipe.execution.idle == "compute")
        except jax.errors.JaxRuntimeError as error:
            reason = out_of_memory(error)
            if reason is None:
                raise
            raise ConfigError(
                f"Rank {r} does not fit this {device_kind(job.pipe)}: {reason.rstrip('.')}. Use more ranks (mesh.pp), "
                "more and smaller microbatches (schedule.num_microbatches), or executor.remat=full."
            ) from error
    return ran, ran_as


def _at_once(job: TrainingJob) -> int:
    """Return how many ranks run at the same time: as many as share this machine's cores, and have one each."""
    return min(os.cpu_count() or 1, job.pipe.mesh.size) if _is_shared(job) else 1


def _is_shared(job: TrainingJob) -> bool:
    """Return whether the devices of the mesh share this machine's cores, as simulated ones do."""
    return job.pipe.mesh.devices.flat[0].platform == "cpu"


@dataclass(frozen=True)
class Simulated:
    """The whole pipeline, simulated from the times of ranks that were run; ran_as: for each rank which one."""

    job: TrainingJob
    machine: Machine  # of which links count
    ran: Mapping[int, RankTimes]
    ran_as: Sequence[int]

    @cached_property
    def costs(self) -> Costs:
        """The costs of each stage's tasks. A stage of a rank that did not run is its like on the rank that did."""
        schedule = self.job.pipe.schedule
        forward, input_grad, weight_grad = list[float](), list[float](), list[float]()
        gather_s = self._counted.task_s - self.machine.task_s  # executor.gather=tick: of a chunk's parameters
        sent = self._sent
        for s, rank in enumerate(schedule.rank_of):
            like = self.ran_as[rank]
            times, stage = self.ran[like].task_s, schedule.stages_of[like][schedule.chunk_of[s]]
            whole = times.get((stage, "B"), 0.0) / 2
            ran = times.get((stage, "F"), 0.0), times.get((stage, "I"), whole), times.get((stage, "W"), whole)
            f, i = self._with_gathers(len(self.job.pipe.partition[stage]), *ran)
            forward.append(f + gather_s + sent.seconds("F", s, 1))
            input_grad.append(i + gather_s + sent.seconds("I", s, 1))
            of_w = ran[2], sent.seconds("W", s, 1)
            weight_grad.append(max(of_w) if self.machine.gathers_ahead else sum(of_w))
        costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=self._counted.hop_s)
        return replace(costs, **{name: self._of_parts(kind) for kind, name in OF_PARTS.items()})

    def _of_parts(self, kind: Kind) -> tuple[float, ...]:
        """Return the seconds of each part's tasks of a kind, with what ranks send for them; of no parts ()."""
        parts = self.job.pipe.schedule.places(kind)
        ran = (self.ran[like].task_s.get((like, kind), 0.0) for like in (self.ran_as[part] for part in parts))
        return tuple(s + self._sent.seconds(kind, part, 1) for part, s in zip(parts, ran, strict=True))

    def _with_gathers(self, layers: int, f: float, i: float, w: float) -> tuple[float, float]:
        """Return the seconds of F and of B without W, or of I, where they gather layers (executor.gather=layer)."""
        if self._counted.gathers is None or not layers:
            return f, i
        execution, is_split = self.job.pipe.execution, self.job.pipe.schedule.is_split
        one = replace(self._counted, layer=PieceTimes(f / layers, i / layers, w / layers))
        keeps_input = execution.remat.keeps_input_only
        return one.forward_s(layers), one.input_grad_s(layers, keeps_input=keeps_input, split=is_split)

    @cached_property
    def step(self) -> StepTime:
        return time_of(self.job.pipe, self._op_times, self.costs)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline_of(self.job.pipe, self._op_times, self.costs)

    @cached_property
    def found(self) -> Rehearsal:
        """The rehearsal, as it is printed."""
        job, config, pipe, step = self.job, self.job.config, self.job.pipe, self.step
        hardware = hardware_of(job)
        analytic, unknown = predicted_time(job, Analytic(doctor=config.costs.doctor))
        unit, count = unit_of_work(job)
        mfu = mfu_of(job, step.total_s, model_flops(job))
        ranks = tuple(self._rank(r) for r in range(pipe.schedule.num_ranks))
        copies = pipe.mesh.size // pipe.mesh.shape["pp"]
        limit = device_limit(config, pipe.mesh.devices.flat[0])
        return Rehearsal(
            schedule=label(config.schedule),
            device=device_kind(pipe),
            hardware=None if hardware is None else hardware.name,
            step_time_s=step.total_s,
            per_step_overhead_s=step.overhead_s,
            step_cpu_s=sum(each.cpu_s or 0.0 for each in ranks) * copies if _is_shared(self.job) else None,
            sent_s=self._sent_s,
            unit=unit,
            tokens_per_s=count / step.total_s,
            mfu_fraction=mfu.full,
            mfu_causal_fraction=mfu.causal,
            bubble_fraction=self.timeline.bubble_fraction,
            limit_bytes=None if limit is None else limit.size_bytes,
            ranks=ranks,
            analytic_step_time_s=None if analytic is None else analytic.total_s,
            analytic_per_step_overhead_s=None if analytic is None else analytic.overhead_s,
            analytic_unknown=unknown,
        )

    def _rank(self, rank: int) -> RehearsedRank:
        schedule, times = self.job.pipe.schedule, self.ran[self.ran_as[rank]]
        stages = schedule.stages_of[rank]
        memory = {**self.job.pipe.memory()[rank], "temporaries": times.temp_bytes}
        seconds = lambda kind: tuple(self.costs.seconds(kind, s, 1) for s in stages)  # noqa: E731
        return RehearsedRank(
            rank=rank,
            ran_as=self.ran_as[rank],
            tasks_s=times.tasks.wall_s,
            update_s=times.update.wall_s,
            cpu_s=times.tasks.cpu_s + times.update.cpu_s if _is_shared(self.job) else None,
            stages=stages,
            forward_s=seconds("F"),
            backward_s=seconds("B"),
            part_s=sum(self.costs.seconds(kind, rank, 1) for kind in PART_KINDS) if schedule.num_parts else None,
            memory_bytes=memory,
            total_bytes=sum(memory.values()),
        )

    @cached_property
    def _counted(self) -> OpTimes:
        """The op times of costs=analytic, for what ranks exchange."""
        return counted_op_times(self.job, self.machine)

    @cached_property
    def _sent(self) -> Costs:
        """What devices along tp and cp send in each stage's tasks: the counted costs where computing takes no time."""
        counted = counted_op_times(self.job, replace(self.machine, speed=Speed(inf, inf)))
        costs, _ = as_run(self.job.pipe, replace(counted, task_s=0.0, gathers=None))
        return costs

    @property
    def _sent_s(self) -> float:
        schedule, sent = self.job.pipe.schedule, self._sent
        of_stage = [sum(sent.seconds(kind, s, 1) for kind in "FIW") for s in range(schedule.num_stages)]
        return schedule.num_microbatches * max(sum(of_stage[s] for s in stages) for stages in schedule.stages_of)

    @cached_property
    def _op_times(self) -> OpTimes:
        pipe, times = self.job.pipe, self.ran.values()
        exchanged_s = exchange_s(param_bytes_of(pipe), self.machine, layout_of(pipe), gather=pipe.execution.gather)
        alone = mean(each.tasks.cpu_s / each.tasks.wall_s for each in times)  # cores that a rank keeps busy
        return OpTimes(
            embed=self._counted.embed,
            layer=self._layer,
            head=self._counted.head,
            task_s=0.0,
            hop_s=self._counted.hop_s,
            overhead_s=max(each.update.wall_s for each in times) + exchanged_s,
            capacity=max(1.0, (os.cpu_count() or 1) / alone) if _is_shared(self.job) else inf,
        )

    @property
    def _layer(self) -> PieceTimes:
        """A layer of the largest stage."""
        sizes = [len(layers) for layers in self.job.pipe.partition]
        s = max(range(len(sizes)), key=sizes.__getitem__)
        return PieceTimes(*(self.costs.seconds(kind, s, 1) / max(1, sizes[s]) for kind in "FIW"))
