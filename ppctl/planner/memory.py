"""The memory of a request: what a step takes on each rank, and what a device has. The one home of both.

Arrays are exact, from their shapes; temporaries are counted (`planner.sizes`), as for the hardware of the request. What
`plan.compile` compiles, and what a run compiles, is another number, and named so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ppctl.config import AutoHardware, Config, Hardware
from ppctl.executors.mpmd.plan import TASKS, ProgramId
from ppctl.planner.analytic import adds_in_place
from ppctl.planner.count import work_of
from ppctl.planner.sizes import Microbatch, reference_bytes, task_bytes, workspace_bytes
from ppctl.planner.step_time import hardware_of, layout_of, param_bytes
from ppctl.training.job import TrainingJob
from ppctl.training.known_hardware import of_topology, stated_bytes

GIB = 2**30
JAX_MEMORY_FRACTION = 0.75  # of a GPU's memory: what JAX takes by default, and conf/hardware states


def predicted_memory(job: TrainingJob) -> tuple[Mapping[str, int], ...]:
    """Return for each rank the bytes of one device by part, temporaries as counted; nothing is compiled."""
    pipe, hardware = job.pipe, hardware_of(job)
    work, params, layout = work_of(job.counted_model), param_bytes(pipe.states.natural, pipe.dtype), layout_of(pipe)
    examples, remat = pipe.model.microbatch["inputs"].shape[0], pipe.execution.remat
    unroll, keeps_input = pipe.execution.unroll, remat.keeps_input_only
    can_add = hardware is not None and hardware.adds_products

    def of_program(program: ProgramId | None) -> int:
        if program is None:
            microbatch = Microbatch(examples, pipe.schedule.num_microbatches, 0, remat)
            if not pipe.execution.is_pipelined:
                return reference_bytes(work, params, layout, microbatch)
            in_place = adds_in_place(layout, adds=can_add, unroll=unroll)
            return workspace_bytes(work, params, layout, microbatch, adds=in_place)
        if program.kind in TASKS:
            role = program.shape
            in_place = adds_in_place(replace(layout, rank_layers=role.num_layers), adds=can_add, unroll=unroll)
            head = role.is_last and program.kind in ("BI" if keeps_input else "FE")
            sizes = role.num_layers, examples, remat
            return task_bytes(work, params, program.kind, *sizes, head=head, adds=in_place)
        if program.kind == "prepare":
            return 0 if layout.fsdp == 1 else _layers_of(program) * params.layer  # gathered, before they are cast
        return _layers_of(program) * params.layer if program.kind == "finish" else 0  # stacked, to be summed

    return pipe.engine.memory(of_program)


def _layers_of(program: ProgramId) -> int:
    """Return the layers of the rank that runs a program of whole ranks."""
    return sum(role.num_layers for role in program.shape.stages)


class DeviceLimit(NamedTuple):
    """The bytes that programs can use of a device, and where the number comes from."""

    size_bytes: int
    source: str


def device_limit(config: Config, device: Any) -> DeviceLimit | None:
    """Return the memory of a device: as requested, of the chosen hardware, or as the device states; None if not known.

    Simulated devices share the machine's evenly.
    """
    if config.plan.memory_gib is not None:
        return DeviceLimit(round(config.plan.memory_gib * GIB), f"plan.memory_gib={config.plan.memory_gib:g}")
    if isinstance(config.hardware, Hardware) and not isinstance(config.hardware, AutoHardware):
        described = _described(config.hardware, config.run.memory_fraction)
        if described is not None:
            return described
    if config.plan.topology is not None:
        there = of_topology(config.hardware, config.plan.topology)
        if there is None or there.cuda is None:
            return None  # the compiler for TPUs says it itself
        return _described(there, config.run.memory_fraction)
    stated = stated_bytes(device)
    if stated is not None and device.platform == "cpu":
        number = config.mesh.num_devices
        shared = "" if number == 1 else f", shared by {number} simulated devices"
        return DeviceLimit(stated // number, f"this machine's memory{shared}")
    return None if stated is None else DeviceLimit(stated, f"stated by {device.device_kind}")


def _described(hardware: Hardware, memory_fraction: float | None) -> DeviceLimit | None:
    """Return the memory that programs can use of described hardware: of a GPU, the share that JAX takes."""
    if hardware.memory_gib is None:
        return None
    share, source = 1.0, f"hardware={hardware.name}"
    if memory_fraction is not None and hardware.cuda is not None:
        share, source = memory_fraction / JAX_MEMORY_FRACTION, f"{source} run.memory_fraction={memory_fraction:g}"
    return DeviceLimit(round(hardware.memory_gib * share * GIB), source)
