"""Several processes of one run, with JAX's multi-controller runtime: join, exchange text, leave.

Every process runs the same program; a global array has a part on each. Process 0 leads: it hosts
the service that connects the others.
"""

import os
import socket
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ppctl.errors import ConfigError, one_line
from ppctl.launch.cluster_variables import cluster_fault, proxy_fault

# seconds that a process waits for the others to join: nodes of a cluster may boot containers
JOIN_S = 300
LEAVE_S = 30  # seconds that a finished process waits for the others
COUNTED_BY = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")  # read by JAX's cluster detection, too
EXTRA = 2  # simulated devices of a process outside the mesh
# bytes of a row: the length of a text, and its start
LENGTH_BYTES, SHORT_BYTES = 4, 1020
_extra_on: set[str] = set()  # the platform with EXTRA devices in each process, if any


def join(
    coordinator: str | None, num_processes: int | None, process_id: int | None, *, heartbeat_s: int
) -> None:
    """Join all processes, before JAX looks for devices. ConfigError if some do not join.

    coordinator: host:port where process 0 listens. JAX detects values of None from the cluster's
    variables. heartbeat_s: seconds of silence after which a process is lost. CPU collectives
    between processes use Gloo.
    """
    # 1. join in a thread: JAX's time-out, which is longer, would end the process silently
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    is_explicit = None not in (coordinator, num_processes, process_id)
    listens = process_id == 0
    bind = None if coordinator is None else _checked(coordinator, listens=listens)
    failure: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                cluster_detection_method="deactivate" if is_explicit else None,
                initialization_timeout=JOIN_S + LEAVE_S,
                heartbeat_timeout_seconds=heartbeat_s,
                shutdown_timeout_seconds=LEAVE_S,
                coordinator_bind_address=bind,
            )
        except (ValueError, RuntimeError, OSError) as error:
            failure.append(error)

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(JOIN_S)
    # 2. explain a failure
    who = "the processes" if process_id is None else f"process {process_id}"
    where = "the cluster's variables" if coordinator is None else f"run.coordinator={coordinator}"
    if failure:
        reason = cluster_fault(os.environ) or one_line(failure[0]).rstrip(".")
        raise ConfigError(
            f"run.distributed: {who} cannot join with {where}: {reason}. Use run.distributed="
            "explicit with run.coordinator=HOST:PORT, run.num_processes=N and run.process_id=I."
        )
    if thread.is_alive():
        count = "all" if num_processes is None else f"all {num_processes}"
        proxy = proxy_fault(coordinator, os.environ)
        raise ConfigError(
            f"run.distributed: {who} waited {JOIN_S} s with {where}, and not {count} processes "
            f"joined{'' if proxy is None else f' ({proxy})'}. Start every process, with the same "
            "address, which all of them can reach."
        )


def _checked(coordinator: str, *, listens: bool) -> str | None:
    """Return the address to listen at: a loopback address, or None for all interfaces.

    ConfigError if the host is unknown or, for the process that listens, the port is taken.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"run.coordinator={coordinator}: the host is unknown ({error.strerror}). "
            "Use the address of process 0."
        ) from error
    family, _, _, _, address = infos[0]
    is_loopback = str(address[0]) in ("::1", "127.0.0.1")
    if listens:
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address if is_loopback else ("", int(port)))
        except OSError as error:
            raise ConfigError(
                f"run.coordinator={coordinator}: process 0 cannot listen at port {port} "
                f"({error.strerror}). Use another port."
            ) from error
    return coordinator if is_loopback else None


def known_count(num_processes: int | None, *, is_cpu: bool) -> int | None:
    """Return the number of processes from the setting, else from the cluster; None if unknown.

    On CPU, ConfigError if unknown: the simulated devices are divided by this number.
    """
    if num_processes is not None:
        return num_processes
    for name in COUNTED_BY:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if not is_cpu:
        return None
    lacks = f"neither {' nor '.join(COUNTED_BY)} gives the number of processes"
    raise ConfigError(
        f"run.distributed=auto: {cluster_fault(os.environ) or lacks}. Simulated CPU "
        "devices are divided by the number of processes. Use run.num_processes=N, or "
        "run.platform=cuda or tpu."
    )


def simulate(num_devices: int) -> None:
    """Let JAX simulate this process's CPU devices of the mesh, and two more for exchanges.

    Exchanges run at any time beside other programs. But collectives of the same devices at the
    same time take each other's messages, because Gloo has no tags, and the process aborts. XLA for
    CPUs does not order programs of one and of several local devices. So exchanges have devices
    that no mesh uses, at another place in process 0: groups of other programs (of JAX and Orbax)
    have the same place in all processes. XLA has a thread for each device.
    """
    jax.config.update("jax_num_cpu_devices", num_devices + EXTRA)
    _extra_on.add("cpu")


def exchange_devices() -> list[Any]:
    """Return the device of each process, by its number, that exchanges texts and flags."""
    _, *others = groups = _by_process(jax.devices())
    place = -EXTRA if groups[0][0].platform in _extra_on else -1
    return [groups[0][-1], *(group[place] for group in others)]


def of_mesh(devices: list[Any]) -> list[Any]:
    """Return the devices without those that `simulate` added for exchanges."""
    if devices[0].platform not in _extra_on:
        return devices
    return [device for group in _by_process(devices) for device in group[:-EXTRA]]


def _by_process(devices: list[Any]) -> list[list[Any]]:
    """Return the devices of each process."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(device.process_index, []).append(device)
    return [groups[process] for process in sorted(groups)]


def is_joined() -> bool:
    """Return whether this process called `join`, even if it is the only one."""
    return jax.distributed.is_initialized()


def is_lead() -> bool:
    """Return whether this process prints and records: process 0, or the only one."""
    return jax.process_index() == 0


def stop_requested(finished: int) -> bool:
    """Return whether to stop: a process got SIGTERM, and all have finished the same steps.

    Every process must call it at each step. finished: number of finished steps.
    """
    return multihost_utils.reached_preemption_sync_point(finished)


def gather(text: str) -> list[str]:
    """Return the texts of all processes, by process number. A barrier: all must call it."""
    if not is_joined():
        return [text]
    # file names that are not UTF-8 must not stop one process while the others wait
    encoded = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    # 1. rows of one size, so that one program exchanges all: the length, and the start of the text
    row = np.zeros(LENGTH_BYTES + SHORT_BYTES, np.uint8)
    row[:LENGTH_BYTES] = np.array([len(encoded)], "<u4").view(np.uint8)
    row[LENGTH_BYTES:][: len(encoded)] = encoded[:SHORT_BYTES]
    rows = np.asarray(_all_rows(row))
    lengths = rows[:, :LENGTH_BYTES].copy().view("<u4")[:, 0]
    rows = rows[:, LENGTH_BYTES:]
    # 2. whole texts, if one is longer
    if lengths.max() > SHORT_BYTES:
        padded = np.zeros(1 << int(lengths.max()).bit_length(), np.uint8)
        padded[: len(encoded)] = encoded
        rows = np.asarray(_all_rows(padded))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def gather_later(flag: bool) -> Callable[[], list[bool]]:
    """Return a function that returns the flags of all processes. All must call both.

    Devices exchange the flags after work dispatched earlier; processes wait only in the returned
    function.
    """
    if not is_joined():
        return lambda: [flag]
    rows = _all_rows(np.array([flag], np.int32))
    return lambda: [bool(each) for each in np.asarray(rows)[:, 0]]


def _all_rows(row: np.ndarray) -> jax.Array:
    """Return the rows of all processes, exchanged by one device of each: counts may differ."""
    devices = exchange_devices()
    divided, copied = _exchange(tuple(devices))
    placed = jax.device_put(row[None], devices[jax.process_index()])
    shape = (len(devices), len(row))
    rows = jax.make_array_from_single_device_arrays(shape, divided, [placed])
    return copied(rows).addressable_data(0)


@cache  # the same function each time, so that rows of equal sizes share a compiled program
def _exchange(devices: tuple[Any, ...]) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Return the sharding of rows by device, and the function that copies all to each device."""
    mesh = Mesh(np.array(devices), ("process",))
    whole = NamedSharding(mesh, P())
    return NamedSharding(mesh, P("process")), jax.jit(lambda a: a, out_shardings=whole)


def leave() -> None:
    """Leave when every process has called this, or after LEAVE_S."""
    jax.distributed.shutdown()
