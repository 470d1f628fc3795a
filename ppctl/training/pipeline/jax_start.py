"""JAX started by a run's settings: platform, devices, GPU memory, dtype and other processes."""

import contextlib
import os
import socket
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ppctl.config import Hardware, Run
from ppctl.config import Mesh as MeshSettings
from ppctl.config.field_checks import domains
from ppctl.errors import ConfigError, setting
from ppctl.executors.device_mesh import all_devices, make_mesh
from ppctl.launch import join_processes as distributed
from ppctl.launch import xla_stderr
from ppctl.schedule.mesh_axes import AXES

JAX_MEMORY_FRACTION = 0.75  # JAX's default, and that of memory_gib of GPUs in conf/hardware
VARIABLE = "XLA_CLIENT_MEM_FRACTION"
OLDER_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jaxlib refuses both
MOST_SIMULATED = 4096  # devices of one process: JAX starts them in seconds, 16,384 in minutes
DEFAULTS = {  # of JAX, which change a run's digits, by default read from the environment
    "jax_default_matmul_precision": None,
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
}
CPU_FLAGS = (  # by default XLA aborts when a simulated device is 40 s late at a collective
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)


def mesh(*, order: str = "auto", **sizes: int) -> Mesh:
    """Return a mesh of so many devices along each axis: dp=, pp=, fsdp=, tp=, cp=, 1 by default.

    The axes are copies of the pipeline (dp), its ranks (pp), shards of parameters (fsdp), shards of
    each layer's computation (tp) and parts of each sequence (cp). If JAX has not started yet, a
    machine without accelerators simulates as many CPU devices.

    order: the axes from the slowest links to the fastest, as "pp-dp-fsdp", which "auto" takes on
    several hosts of GPUs or slices of TPUs: the first goes over as many hosts as its size allows,
    then the next.

    ConfigError: there are fewer devices, or no such axes.
    """
    for name in sizes:
        if name not in AXES:
            raise ConfigError(f"{name}={sizes[name]}: the axes of a mesh are {', '.join(AXES)}.")
    settings = MeshSettings(**sizes, order=order)
    domains("", settings)
    simulate(settings.num_devices)
    return make_mesh(settings.sizes, order)


def start_jax(run: Run, dtype: str, num_devices: int, *, is_away: bool = False) -> None:
    """Make the settings that JAX reads, join the run's other processes, if any, and start JAX.

    num_devices: of the mesh, of all processes; as many are simulated without accelerators. is_away:
    no attached device is used, as with plan.topology. ConfigError where JAX cannot start.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in CPU_FLAGS if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    platform = run.platform or ("cpu" if is_away else None)
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    set_memory_fraction(run.memory_fraction)
    set_arithmetic(dtype)
    if run.distributed != "off":
        _join(run, num_devices)
    elif not is_away:
        simulate(num_devices)
    all_devices()


def set_arithmetic(dtype: str) -> None:
    """Let JAX compute in 64 bits for float64 only, and as it does by default: not as variables such
    as JAX_ENABLE_X64 or JAX_DEFAULT_MATMUL_PRECISION state, with which a run has other digits.
    """
    jax.config.update("jax_enable_x64", dtype == "float64")
    for name, value in DEFAULTS.items():
        jax.config.update(name, value)


def simulate(num_devices: int) -> None:
    """Let JAX simulate num_devices CPU devices when it starts, unless it simulates more."""
    if num_devices > MOST_SIMULATED:
        absent = setting("plan.topology", argument="attached devices")
        raise ConfigError(
            f"{num_devices} devices are more than the {MOST_SIMULATED} that a machine can "
            f"simulate. Use a smaller mesh, or {absent}."
        )
    simulated: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if simulated < num_devices:
        with contextlib.suppress(RuntimeError):  # JAX has started: make_mesh counts its devices
            jax.config.update("jax_num_cpu_devices", num_devices)


def _join(run: Run, num_devices: int) -> None:
    """Join the other processes, each with its share of simulated devices, at least one."""
    if distributed.is_joined():
        return
    if run.platform in (None, "cpu"):
        count = distributed.known_count(run.num_processes, is_cpu=run.platform == "cpu")
        if count is not None:
            jax.config.update("jax_num_cpu_devices", max(1, num_devices // count))
    xla_stderr.divert(f"on {socket.gethostname()}" if run.process_id is None else run.process_id)
    place = run.coordinator, run.num_processes, run.process_id
    distributed.join(*place, heartbeat_s=run.heartbeat_s)


class MemoryShare(NamedTuple):
    """The share that programs get, and what states it."""

    fraction: float
    source: str


def memory_share(asked: float | None, *, here: bool) -> MemoryShare:
    """Return the share of a GPU's memory for programs; here: the environment may state it.

    asked: run.memory_fraction.

    >>> memory_share(None, here=False)
    MemoryShare(fraction=0.75, source="run.memory_fraction=null, JAX's default")
    """
    if asked is not None:
        return MemoryShare(asked, f"run.memory_fraction={asked:g}")
    for name in (VARIABLE, OLDER_VARIABLE) if here else ():
        if text := os.environ.get(name):
            return MemoryShare(float(text), f"{name}={text}")
    return MemoryShare(JAX_MEMORY_FRACTION, "run.memory_fraction=null, JAX's default")


def set_memory_fraction(fraction: float | None) -> None:
    """Let JAX take this share when it starts; None: that of the environment, or its default."""
    if fraction is not None:
        os.environ.pop(OLDER_VARIABLE, None)
        os.environ[VARIABLE] = str(fraction)


def check_memory_fraction(asked: float | None, device: Any, planned: Hardware | None) -> None:
    """Raise ConfigError for run.memory_fraction where the devices are no GPUs.

    device: an attached one. planned: the hardware of a plan's devices, if they are others.
    """
    if asked is None:
        return
    if is_gpu(device) if planned is None else planned.cuda is not None:
        return
    devices = device.device_kind if planned is None else f"hardware={planned.name}"
    raise ConfigError(
        f"run.memory_fraction={asked} is of GPUs, but the devices are {devices}. Leave it out."
    )


def is_gpu(device: Any) -> bool:
    return device.platform in ("gpu", "cuda")
