"""The memory of a request: the bytes of a step on each rank, and the limit of a device.

Arrays are exact, from their shapes; temporaries are counted (`array_sizes`) for the request's
hardware. Sizes of compiled programs (plan.compile, training) are other numbers, and named so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ppctl.config import Config, Hardware
from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.plan_tasks import FORWARD, JOINS, TASKS
from ppctl.planner.cost.array_sizes import Microbatch, reference_bytes, task_bytes, workspace_bytes
from ppctl.planner.cost.counted_costs import adds_in_place
from ppctl.planner.cost.step_time import hardware_of, layout_of, param_bytes_of
from ppctl.planner.cost.task_flops import work_of
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.ir import PART_KINDS
from ppctl.training.pipeline.jax_start import (
    JAX_MEMORY_FRACTION,
    MOST_MEMORY_FRACTION,
    MemoryShare,
    is_gpu,
    memory_share,
)
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.known_hardware import described_only, of_topology, stated_bytes

GIB = 2**30


def predicted_memory(job: TrainingJob) -> tuple[Mapping[str, int], ...]:
    """Return each rank's bytes of one device by part, temporaries counted; compiles nothing."""
    # 1. sizes of a layer, and whether products add gradients to their sums
    pipe, hardware = job.pipe, hardware_of(job)
    work, params, layout = work_of(job.counted_model), param_bytes_of(pipe), layout_of(pipe)
    examples, remat = pipe.model.microbatch["inputs"].shape[0], pipe.execution.remat
    can_add = hardware is not None and hardware.adds_products
    layer_bytes = round(params.layer * params.compute_ratio)
    whole_before_tasks = pipe.model.layer_specs is None

    def in_place(num_layers: int) -> bool:
        return adds_in_place(num_layers, adds=can_add, unroll=pipe.execution.unroll)

    # 2. temporaries of one program of all tasks (None), or of one of executor=mpmd's
    def whole_step() -> int:
        microbatch = Microbatch(examples, pipe.schedule.num_microbatches, 0, remat)
        if not pipe.execution.is_pipelined:
            return reference_bytes(work, params, layout, microbatch)
        adds = in_place(layout.rank_layers)
        return workspace_bytes(work, params, layout, microbatch, adds=adds)

    def task(kind: str, role: Any) -> int:
        layers, with_head = (
            role.num_layers,
            ("B", "I") if remat.keeps_input_only else ("F", FORWARD),
        )
        how = {"head": role.is_last and kind in with_head, "adds": in_place(layers)}
        gathered = 0 if whole_before_tasks or kind == "W" else min(2, layers) * layer_bytes
        return gathered + task_bytes(work, params, kind, layers, examples, remat, **how)

    def of_program(program: ProgramId | None) -> int:
        if program is None:
            return whole_step()
        if program.kind in (*PART_KINDS, *JOINS):
            return round(max(0.0, work.head_bytes.of(examples))) if program.kind == "T" else 0
        if program.kind in TASKS:
            return task(program.kind, program.shape)
        if program.kind == "prepare" and layout.mesh.fsdp > 1 and whole_before_tasks:  # gathered
            return sum(role.num_layers for role in program.shape.stages) * layer_bytes
        if program.kind == "reduce":  # stacked, to be summed
            return program.shape.num_layers * params.trained_layer
        return 0

    return pipe.engine.memory(of_program)


class DeviceLimit(NamedTuple):
    """The bytes that programs can use of a device, and where the number comes from."""

    size_bytes: int
    source: str
    fraction: float | None = None  # share of a GPU's memory; None: all of it, or as requested

    @property
    def most_bytes(self) -> int | None:
        """The limit with MOST_MEMORY_FRACTION; None where this is no smaller."""
        if self.fraction is None or self.fraction >= MOST_MEMORY_FRACTION:
            return None
        return round(self.size_bytes / self.fraction * MOST_MEMORY_FRACTION)


def device_limit(config: Config, device: Any) -> DeviceLimit | None:
    """Return a device's memory: as requested, of the chosen hardware, or as stated; else None.

    Simulated devices share the machine's evenly.
    """
    # 1. as requested, or of described hardware
    if (gib := config.plan.memory_gib) is not None:
        return DeviceLimit(round(gib * GIB), f"plan.memory_gib={gib:g}")
    is_away = described_only(config.hardware, device.device_kind) is not None
    if isinstance(config.hardware, Hardware):
        described = _described(config.hardware, memory_share(config, here=not is_away))
        if described is not None:
            return described
    if config.plan.topology is not None:
        there = of_topology(config.hardware, config.plan.topology)
        if there is None or (there.cuda is None and config.plan.compiles):
            return None  # the compiler for TPUs says it itself
        return _described(there, memory_share(config, here=False))
    if is_away:
        return None

    # 2. of an attached device
    stated = stated_bytes(device)
    if stated is not None and device.platform == "cpu":
        number = config.mesh.num_devices
        shared = "" if number == 1 else f", shared by {number} simulated devices"
        return DeviceLimit(stated // number, f"this machine's memory{shared}")
    if stated is not None and is_gpu(device):
        return _of_gpu(stated, device.device_kind, memory_share(config, here=True))
    return None if stated is None else DeviceLimit(stated, f"stated by {device.device_kind}")


def _described(hardware: Hardware, share: MemoryShare) -> DeviceLimit | None:
    """Return the usable memory of described hardware: of a GPU, the share that JAX takes."""
    if hardware.memory_gib is None:
        return None
    name, gib = f"hardware={hardware.name}", hardware.memory_gib
    if hardware.cuda is None:
        return DeviceLimit(round(gib * GIB), name)
    return _of_gpu(round(gib * share.fraction / JAX_MEMORY_FRACTION * GIB), name, share)


def _of_gpu(size_bytes: int, name: str, share: MemoryShare) -> DeviceLimit:
    """Return a limit that says which share of a GPU's memory it is."""
    whole = size_text(round(size_bytes / share.fraction))
    source = f"{share.fraction * 100:g}% of the {whole} of {name}: {share.source}"
    return DeviceLimit(size_bytes, source, share.fraction)
