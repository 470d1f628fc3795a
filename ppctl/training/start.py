"""JAX started as a run asks for it: platform, simulated devices, dtype, and the other processes of the run."""

from __future__ import annotations

import contextlib
import os
import socket

import jax
from jax.sharding import Mesh

from ppctl.config import Config
from ppctl.config import Mesh as MeshSettings
from ppctl.errors import ConfigError
from ppctl.executors.mesh import make_mesh
from ppctl.launch import distributed, xla_stderr
from ppctl.training.gpu_memory import set_memory_fraction

MOST_SIMULATED = 4096  # devices of one process: JAX starts them in seconds, 16,384 in minutes
CPU_FLAGS = (  # XLA aborts the process when one simulated device is 40 s late at a collective, as on a busy machine
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)


def mesh(*, dp: int = 1, pp: int = 1, fsdp: int = 1, tp: int = 1, cp: int = 1, order: str = "auto") -> Mesh:
    """Return a mesh of dp*pp*fsdp*tp*cp devices.

    They are copies of the pipeline (dp), its ranks (pp) and shards of parameters (fsdp); inside a stage shards of each
    layer's weights, which are computed with apart (tp), and parts of each sequence (cp).

    Where JAX has not started yet, a machine without accelerators simulates as many CPU devices.

    order: the axes from the slowest links to the fastest, as "pp-dp-fsdp", which is what "auto" takes where there are
    several hosts of GPUs, or slices of TPUs: the first goes over as many of them as its size allows, then the next.

    Raises:
        ConfigError: There are fewer devices, or no such axes.
    """
    settings = MeshSettings(dp, pp, fsdp, tp, cp, order)
    settings.check()
    simulate(settings.num_devices)
    return make_mesh(dp, pp, fsdp, tp, cp, order)


def start_jax(config: Config, dtype: str, num_devices: int | None = None) -> None:
    """Set what JAX reads when it first looks for devices, and join the other processes of the run, if any.

    num_devices: simulated CPU devices; None: those of the mesh.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in CPU_FLAGS if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    is_away = config.plan.topology is not None  # no device of this machine's is used then
    platform = config.run.platform or ("cpu" if is_away else None)
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    set_memory_fraction(config.run.memory_fraction)
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.run.distributed != "off":
        _join(config)
        return
    if is_away:
        return
    simulate(config.mesh.num_devices if num_devices is None else num_devices)


def simulate(num_devices: int) -> None:
    """Let JAX simulate so many CPU devices when it starts, unless it simulates more."""
    if num_devices > MOST_SIMULATED:
        raise ConfigError(
            f"{num_devices} devices are more than the {MOST_SIMULATED} that a machine can simulate. Use a smaller "
            "mesh, or plan.topology, which describes devices that are not here."
        )
    simulated: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if simulated < num_devices:
        # where JAX has started already, in a program of the user's, make_mesh counts what is there
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_devices)


def _join(config: Config) -> None:
    """Join the other processes, each with its share of simulated devices (at least one, to be heard)."""
    run = config.run
    if distributed.is_joined():
        return
    if run.platform in (None, "cpu"):
        count = distributed.known_count(run.num_processes, is_cpu=run.platform == "cpu")
        if count is not None:
            jax.config.update("jax_num_cpu_devices", max(1, config.mesh.num_devices // count))
    name = f"on {socket.gethostname()}" if run.process_id is None else run.process_id
    xla_stderr.divert(name)
    distributed.join(run.coordinator, run.num_processes, run.process_id, join_s=run.join_s, heartbeat_s=run.heartbeat_s)
