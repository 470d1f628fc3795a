"""The memory of a request: what a step takes on each rank, and what a device has. The one home of both.

Arrays are exact, from their shapes; temporaries are counted (`planner.sizes`), as for the hardware of the request. What
`plan.compile` compiles, and what a run compiles, is another number, and named so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ppctl.config import Config, Hardware
from ppctl.executors.mpmd.plan import ProgramId
from ppctl.executors.mpmd.task_plan import FORWARD, JOINS, TASKS
from ppctl.planner.analytic import adds_in_place
from ppctl.planner.count import work_of
from ppctl.planner.sizes import Microbatch, reference_bytes, task_bytes, workspace_bytes
from ppctl.planner.step_time import hardware_of, layout_of, param_bytes_of
from ppctl.reports.terminal import size_text
from ppctl.schedule.ir import PART_KINDS
from ppctl.training.gpu_memory import JAX_MEMORY_FRACTION, MOST_MEMORY_FRACTION, MemoryShare, is_gpu, memory_share
from ppctl.training.job import TrainingJob
from ppctl.training.known_hardware import described_only, of_topology, stated_bytes

GIB = 2**30


def predicted_memory(job: TrainingJob) -> tuple[Mapping[str, int], ...]:
    """Return for each rank the bytes of one device by part, temporaries as counted; nothing is compiled."""
    pipe, hardware = job.pipe, hardware_of(job)
    work, params, layout = work_of(job.counted_model), param_bytes_of(pipe), layout_of(pipe)
    examples, remat = pipe.model.microbatch["inputs"].shape[0], pipe.execution.remat
    unroll, keeps_input = pipe.execution.unroll, remat.keeps_input_only
    can_add = hardware is not None and hardware.adds_products
    layer_bytes = round(params.layer * params.compute_ratio)
    whole_before_tasks = pipe.model.layer_specs is None

    def of_program(program: ProgramId | None) -> int:
        if program is None:
            microbatch = Microbatch(examples, pipe.schedule.num_microbatches, 0, remat)
            if not pipe.execution.is_pipelined:
                return reference_bytes(work, params, layout, microbatch)
            in_place = adds_in_place(layout, adds=can_add, unroll=unroll)
            return workspace_bytes(work, params, layout, microbatch, adds=in_place)
        if program.kind in (*PART_KINDS, *JOINS):
            return round(max(0.0, work.head_bytes.of(examples))) if program.kind == "T" else 0
        if program.kind in TASKS:
            role = program.shape
            in_place = adds_in_place(replace(layout, rank_layers=role.num_layers), adds=can_add, unroll=unroll)
            head = role.is_last and program.kind in (("B", "I") if keeps_input else ("F", FORWARD))
            sizes = role.num_layers, examples, remat
            gathered = 0 if whole_before_tasks or program.kind == "W" else min(2, role.num_layers) * layer_bytes
            return gathered + task_bytes(work, params, program.kind, *sizes, head=head, adds=in_place)
        if program.kind == "prepare":  # gathered, before they are taken apart
            layers = sum(role.num_layers for role in program.shape.stages)
            return layers * layer_bytes if layout.fsdp > 1 and whole_before_tasks else 0
        return (
            program.shape.num_layers * params.trained_layer if program.kind == "reduce" else 0
        )  # stacked, to be summed

    return pipe.engine.memory(of_program)


class DeviceLimit(NamedTuple):
    """The bytes that programs can use of a device, and where the number comes from."""

    size_bytes: int
    source: str
    fraction: float | None = None  # of a GPU's memory that they are; None: all of it, or as requested

    @property
    def most(self) -> DeviceLimit | None:
        """The largest limit that run.memory_fraction should set; None where this is no smaller."""
        if self.fraction is None or self.fraction >= MOST_MEMORY_FRACTION:
            return None
        size_bytes = round(self.size_bytes / self.fraction * MOST_MEMORY_FRACTION)
        return DeviceLimit(size_bytes, f"run.memory_fraction={MOST_MEMORY_FRACTION:g}", MOST_MEMORY_FRACTION)


def device_limit(config: Config, device: Any) -> DeviceLimit | None:
    """Return the memory of a device: as requested, of the chosen hardware, or as the device states; None if not known.

    Simulated devices share the machine's evenly.
    """
    if config.plan.memory_gib is not None:
        return DeviceLimit(round(config.plan.memory_gib * GIB), f"plan.memory_gib={config.plan.memory_gib:g}")
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
    stated = stated_bytes(device)
    if stated is not None and device.platform == "cpu":
        number = config.mesh.num_devices
        shared = "" if number == 1 else f", shared by {number} simulated devices"
        return DeviceLimit(stated // number, f"this machine's memory{shared}")
    if stated is not None and is_gpu(device):
        return _of_gpu(stated, device.device_kind, memory_share(config, here=True))
    return None if stated is None else DeviceLimit(stated, f"stated by {device.device_kind}")


def _described(hardware: Hardware, share: MemoryShare) -> DeviceLimit | None:
    """Return the memory that programs can use of described hardware: of a GPU, the share that JAX takes."""
    if hardware.memory_gib is None:
        return None
    name = f"hardware={hardware.name}"
    if hardware.cuda is None:
        return DeviceLimit(round(hardware.memory_gib * GIB), name)
    return _of_gpu(round(hardware.memory_gib * share.fraction / JAX_MEMORY_FRACTION * GIB), name, share)


def _of_gpu(size_bytes: int, name: str, share: MemoryShare) -> DeviceLimit:
    """Return a limit that says which share of a GPU's memory it is."""
    whole = size_text(round(size_bytes / share.fraction))
    source = f"{share.fraction * 100:g}% of the {whole} of {name}: {share.source}"
    return DeviceLimit(size_bytes, source, share.fraction)
