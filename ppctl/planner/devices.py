"""The devices that a prediction is for, in words."""

from __future__ import annotations

from ppctl.executors.hosts import over_hosts
from ppctl.executors.mesh import hosts_text
from ppctl.planner.step_time import device_kind, hardware_of
from ppctl.training.job import TrainingJob
from ppctl.training.known_hardware import described_only, host_devices


def devices_text(job: TrainingJob) -> str:
    """Return the number and kind of the devices, and which axes of the mesh go over hosts, if any.

    Devices that hardware= or plan.topology describes, and for which nothing is compiled, are named as these name them:
    "64 x h100 (described), 8 hosts: pp over 8".
    """
    config, pipe = job.config, job.pipe
    number, kind, plan = pipe.mesh.size, device_kind(pipe), config.plan
    is_there = plan.topology is not None and not plan.only_predicts_topology
    if is_there or (plan.topology is None and described_only(config.hardware, kind) is None):
        return ", ".join(filter(None, (f"{number} x {kind}", hosts_text(pipe.mesh))))
    hardware = hardware_of(job)
    if hardware is None:
        assert plan.topology is not None, "hardware= that is described is known"
        return f"{number} x {plan.topology.partition(':')[0]}"
    text, of_host = f"{number} x {hardware.name} (described)", host_devices(hardware, plan.topology)
    if of_host is None or number <= of_host or number % of_host:
        return text
    hosts = number // of_host
    over = over_hosts(dict(pipe.mesh.shape), config.mesh.order, hosts)
    axes = ", ".join(f"{axis} over {n}" for axis, n in over.items() if n > 1)
    return f"{text}, {hosts} hosts: {axes}"
