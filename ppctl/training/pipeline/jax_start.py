"""Start JAX with a run's settings: platform, devices, GPU memory, dtype and processes."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ppctl.config import Hardware, Mesh as MeshSettings, Run
from ppctl.config.config_dirs import user_cache_dir
from ppctl.config.field_checks import domains, settings_from
from ppctl.errors import ConfigError, setting
from ppctl.executors.compiler_options import add_to_xla_flags
from ppctl.executors.device_mesh import all_devices, make_mesh, taken
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.launch import join_processes as distributed, xla_stderr
from ppctl.schedule.mesh_axes import AXES

JAX_MEMORY_FRACTION = 0.75  # JAX's default; memory_gib of GPUs in conf/hardware assumes it
VARIABLE = "XLA_CLIENT_MEM_FRACTION"
OLDER_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # older name; jaxlib fails if both are set
MOST_SIMULATED = 4096  # devices of a process: JAX starts 4,096 in seconds, 16,384 in minutes
# JAX settings that change a run's numerics; JAX reads them from the environment by default
DEFAULTS = {
    "jax_default_matmul_precision": None,
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
}
CPU_FLAGS = (  # XLA's default aborts when a simulated device is 40 s late at a collective
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)
# parameters of mallopt (glibc's malloc.h), each with its value
MALLOC_SETTINGS = {
    -8: 1,  # M_ARENA_MAX: one heap for all threads; those of other threads end at 64 MB
    -3: 2**30,  # M_MMAP_THRESHOLD: bytes; each larger block is mapped by itself
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: free bytes at the heap's end that are not returned
}


def mesh(
    *, order: str = "auto", ranks: Sequence[Mapping[str, Any]] = (), **sizes: int
) -> Mesh | RankMeshes:
    """Return a mesh of devices with these sizes along the axes dp, pp, fsdp, ep, tp and cp.

    If JAX has not started yet, a machine without accelerators simulates enough CPU devices.

    Args:
        order: The axes from the slowest links to the fastest, such as "pp-dp-fsdp". The first axis
            spans as many hosts as its size allows, then the next. "auto" uses "pp-dp-fsdp" on
            several hosts of GPUs or slices of TPUs.
        ranks: The sizes of each pipeline rank, in place of `sizes`, such as [{"fsdp": 4, "tp": 2},
            {"ranks": "1-2", "dp": 2}]. Ranks take the devices in order. Needs executor=mpmd.
        sizes: Devices along each axis, 1 by default: replicas of the pipeline (dp), its ranks (pp),
            shards of parameters (fsdp), shards of experts (ep), shards of each layer's computation
            (tp), and parts of each sequence (cp).

    Raises:
        ConfigError: There are fewer devices, or an axis is unknown.
    """
    for name in sizes:
        if name not in AXES:
            raise ConfigError(f"{name}={sizes[name]} is not a mesh axis. Use {', '.join(AXES)}.")
    given = {**sizes, "order": order, "ranks": [*ranks]}
    settings = settings_from(MeshSettings, given, "mesh")
    domains("", settings)
    if ranks:
        settings.check()
    simulate(settings.num_devices)
    return mesh_of_settings(settings)


def mesh_of_settings(settings: MeshSettings) -> Mesh | RankMeshes:
    """Return the mesh of attached devices. ConfigError as `make_mesh`."""
    if not settings.ranks:
        return make_mesh(settings.sizes, settings.order)
    devices = taken(settings.num_devices, f"mesh.ranks={settings.text}")
    return RankMeshes.of_sizes(devices, settings.by_rank)


def start_jax(run: Run, dtype: str, num_devices: int, *, is_away: bool = False) -> None:
    """Configure JAX, join the run's other processes, if any, and start JAX.

    num_devices: devices of the mesh, in all processes; without accelerators they are simulated.
    is_away: the run uses no attached device, as with plan.topology. ConfigError if JAX cannot
    start.
    """
    add_to_xla_flags(*CPU_FLAGS)
    platform = run.platform or ("cpu" if is_away else None)
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        keep_freed_memory()
    set_memory_fraction(run.memory_fraction)
    set_arithmetic(dtype)
    if run.distributed != "off":
        _join(run, num_devices)
    elif not is_away:
        simulate(num_devices)
    all_devices()


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for later steps; return whether it does.

    By default large blocks are returned to the system. Then each step faults on every page of its
    temporaries, which takes 3 to 8 % of its CPU seconds (docs/benchmarks.md). This must come before
    JAX's threads. Environment variables of malloc take precedence.
    """
    of_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if of_user or sys.platform != "linux":
        return False
    set_one = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_one is not None and all(set_one(*each) for each in MALLOC_SETTINGS.items())


def set_arithmetic(dtype: str) -> None:
    """Enable 64 bits for float64 only, and reset the other numerics settings to JAX's defaults.

    Otherwise environment variables such as JAX_ENABLE_X64 or JAX_DEFAULT_MATMUL_PRECISION would
    change the numbers of a run.
    """
    jax.config.update("jax_enable_x64", dtype == "float64")
    for name, value in DEFAULTS.items():
        jax.config.update(name, value)


def simulate(num_devices: int) -> None:
    """Let JAX simulate at least num_devices CPU devices when it starts."""
    if num_devices > MOST_SIMULATED:
        absent = setting("plan.topology", argument="attached devices")
        what = f"{num_devices} devices are more than the {MOST_SIMULATED} that a machine"
        raise ConfigError(f"{what} can simulate. Use a smaller mesh, or {absent}.")
    simulated: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if simulated < num_devices:
        with contextlib.suppress(RuntimeError):  # if JAX has started; make_mesh then counts devices
            jax.config.update("jax_num_cpu_devices", num_devices)


def _join(run: Run, num_devices: int) -> None:
    """Join the other processes, each with its share of simulated devices, at least one."""
    if distributed.is_joined():
        return
    if run.platform in (None, "cpu"):
        count = distributed.known_count(run.num_processes, is_cpu=run.platform == "cpu")
        if count is not None:
            distributed.simulate(max(1, num_devices // count))
    xla_stderr.divert(f"on {socket.gethostname()}" if run.process_id is None else run.process_id)
    place = run.coordinator, run.num_processes, run.process_id
    distributed.join(*place, heartbeat_s=run.heartbeat_s)


class MemoryShare(NamedTuple):
    """The share of a GPU's memory for programs, and the setting that states it."""

    fraction: float
    source: str


def memory_share(asked: float | None, *, here: bool) -> MemoryShare:
    """Return the share of a GPU's memory for programs.

    asked: run.memory_fraction. here: the GPU is attached, so environment variables apply.

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
    """Set the share of GPU memory that JAX takes when it starts; None: leave it unchanged."""
    if fraction is not None:
        os.environ.pop(OLDER_VARIABLE, None)
        os.environ[VARIABLE] = str(fraction)


def check_memory_fraction(asked: float | None, device: Any, planned: Hardware | None) -> None:
    """Raise ConfigError if run.memory_fraction is set but the devices are not GPUs.

    device: an attached device. planned: the hardware of a plan, if its devices are not attached.
    """
    is_for_gpus = is_gpu(device) if planned is None else planned.cuda is not None
    if asked is None or is_for_gpus:
        return
    devices = device.device_kind if planned is None else f"hardware={planned.name}"
    what = f"run.memory_fraction={asked} is for GPUs, but the devices are {devices}"
    raise ConfigError(f"{what}. Leave it out.")


def is_gpu(device: Any) -> bool:
    return device.platform in ("gpu", "cuda")


MOST_BYTES = 2**31  # bytes of one machine's programs; the oldest are removed first
WORTH_S = 0.05  # seconds; programs that compile faster are not kept


def keep_compiled(place: str | None) -> str | None:
    """Set JAX's cache of compiled programs; return a note if its directory cannot be written.

    Programs are machine code, so each kind of machine has a separate directory.

    place: run.compilation_cache: a directory, auto (JAX_COMPILATION_CACHE_DIR if set, else the
    user's cache directory), or None for no cache. ConfigError if a requested directory cannot be
    written.
    """
    jax.config.update("jax_enable_compilation_cache", place is not None)
    if place is None or (place == "auto" and "JAX_COMPILATION_CACHE_DIR" in os.environ):
        return None
    top = user_cache_dir() / "compiled" if place == "auto" else Path(place).expanduser()
    directory = machine_directory(top)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        drop_oldest(directory)
    except OSError as error:
        problem = f"compiled programs cannot be kept in {directory}: {error.strerror}. "
        if place != "auto":
            remedy = "Use run.compilation_cache=null, or another directory."
            raise ConfigError(f"run.compilation_cache={place}: {problem}{remedy}") from error
        return f"{problem}Use run.compilation_cache=DIR, or null"
    # no warning: an entry that another process is still writing cannot be read, so JAX compiles
    torn = "Error reading persistent compilation cache entry"
    warnings.filterwarnings("ignore", torn, UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_S)
    return None


def machine_directory(top: Path) -> Path:
    """Return the directory in `top` for processor and compiler; equal machines share programs."""
    text = f"{platform.system()} {platform.machine()} {platform.processor()} {version('jaxlib')}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if re.match(r"(flags|Features)\s*:", line)), "")
    return top / f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def drop_oldest(directory: Path) -> None:
    """Remove the oldest entries, so that at most MOST_BYTES remain."""
    left, entries = MOST_BYTES, list[tuple[float, int, Path]]()
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # another process removes entries, too
            info = path.stat()
            entries.append((info.st_mtime, info.st_size, path))
    for _, size, path in sorted(entries, reverse=True):
        left -= size
        if left < 0:
            path.unlink(missing_ok=True)
