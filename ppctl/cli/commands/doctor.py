"""`ppctl doctor`: check that a request would train here, and measure the links between devices.

Does all that `ppctl train` does before it compiles the step: joins the processes, makes the mesh,
opens the data, builds the model, writes to run.dir. Then it measures the links between devices,
which the planner needs, and compares the received numbers with the sent ones.
"""

import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from ppctl.config import Config, Run
from ppctl.errors import ConfigError, PpctlError
from ppctl.executors.device_mesh import all_devices
from ppctl.launch import join_processes as distributed
from ppctl.reports.terminal_output import OutputConsole, show_json, show_lines, size_text
from ppctl.training.pipeline.jax_start import start_jax
from ppctl.training.pipeline.job import DEFAULT_DTYPE, assemble, state_bytes
from ppctl.training.pipeline.job_checks import check_job
from ppctl.training.pipeline.known_hardware import described_only, stated_bytes
from ppctl.training.run.process_group import process_group
from ppctl.training.run.run_environment import check_disk

T = TypeVar("T")
# (float32 numbers per message, exchanges per run). The number of exchanges must be odd: the check
# expects that the two devices end with each other's numbers.
SMALL, LARGE = (1, 65), (1 << 20, 9)
RUNS = 5  # timed runs after a warm-up; the median counts
ANSWER_WITHIN_S = 60.0  # seconds of a few exchanges, after which a device counts as hanging


def doctor(config: Config, *, as_json: bool) -> int:
    """Print the findings; return 0 if the request would train here, else 1."""
    directory = Path(config.run.dir).absolute()
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    start_jax(config.run, config.run.dtype or DEFAULT_DTYPE, config.mesh.num_devices)
    # raises if settings or run.dir differ between processes
    with process_group(config.run, config.mesh, asdict(config)):
        away = described_only(config.hardware, all_devices()[0].device_kind)
        if away is not None:
            raise ConfigError(
                f"hardware={away.name} describes devices that are not attached, but `ppctl doctor` "
                "checks attached devices. Use `ppctl plan`, or leave hardware out."
            )
        # 1. the findings of all processes, and the links
        request, mesh, needed = _request(config)
        local = [*request, _directory(config.run, needed)]
        links = list[MeasuredLink]()
        findings = [*_merged(_gathered(Finding, local))]
        if mesh is not None:
            links = _measured(mesh)
            findings += _of_links(links)
    if not distributed.is_lead():
        return int(not all(each.is_ok for each in findings))
    with suppress(OSError):  # directory not empty
        for path in made:
            path.rmdir()
    # 2. the output
    bad = [finding for finding in findings if not finding.is_ok]
    if as_json:
        found = {"ok": not bad, "findings": list(map(asdict, findings))}
        show_json({**found, "links": list(map(asdict, links))})
        return int(bool(bad))
    lines = [f"{'ok' if each.is_ok else 'NO'}  {each.what:10}{each.text}" for each in findings]
    fault = f"this request would not train here: {bad[0].text}" if bad else ""
    show_lines(OutputConsole(), *lines, fault or "this request would train here")
    return int(bool(bad))


# --- findings of each process


@dataclass(frozen=True)
class Finding:
    """The result of a check. Training would fail if it is not ok."""

    what: str
    is_ok: bool
    text: str


def _request(config: Config) -> tuple[list[Finding], Mesh | None, int | None]:
    """Build all that training builds before it compiles; return (findings, mesh, state bytes).

    state bytes: size of a checkpoint. If the request is faulty, it and the mesh are None.
    """
    try:
        job = assemble(config)
        notes = check_job(job)
    except PpctlError as error:
        return [Finding("request", False, str(error))], None, None
    meshes, needed = job.pipe.meshes, state_bytes(job)
    device = meshes.device
    devices = f"{meshes.num_devices} x {device.device_kind} ({device.platform})"
    if device.platform != "cpu" and (stated := stated_bytes(jax.local_devices()[0])) is not None:
        devices += f", {size_text(stated)} of each available to programs"
    request = f"mesh={config.mesh.text}, {job.pipe.schedule.name}"
    tried = "".join(f". {note}" for note in notes)
    findings = [
        Finding("devices", True, devices),
        Finding("data", True, job.data.source),
        Finding("request", True, f"{request}: a state takes {size_text(needed)}{tried}"),
    ]
    return findings, meshes.storage, needed


def _directory(run: Run, needed: int | None) -> Finding:
    """Return whether run.dir is writable, with room for checkpoints of `needed` bytes if known."""
    directory = Path(run.dir).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-"):
            pass
        free = shutil.disk_usage(directory).free
        check_disk(run, needed or 0)
    except OSError as error:
        why = f"cannot be written: {error.strerror}. Use another run.dir, or make it writable."
        return Finding("run.dir", False, f"run.dir={run.dir} {why}")
    except ConfigError as error:
        return Finding("run.dir", False, str(error))
    return Finding("run.dir", True, f"{directory} is writable, {size_text(free)} free")


# --- findings of all processes together


def _merged(by_process: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """Yield the findings of all processes, then a finding that counts processes on each host.

    A finding is yielded once if its text is the same on all processes, else once per process.
    """
    for same in zip(*by_process, strict=False):
        if len({each.text for each in same}) == 1:
            yield same[0]
            continue
        for process, finding in enumerate(same):
            yield Finding(finding.what, finding.is_ok, f"process {process}: {finding.text}")
    hosts = distributed.gather(socket.gethostname())
    where = ", ".join(f"{number} on {host}" for host, number in Counter(hosts).items())
    yield Finding("processes", True, f"{len(hosts)}: {where}")


# --- links


@dataclass(frozen=True)
class MeasuredLink:
    """Measurements of the link between two devices; `first` and `second` are their JAX ids."""

    first: int
    second: int
    latency_s: float  # seconds of a 4-byte message, one way
    bytes_per_s: float  # bytes per second each way, of 4 MiB messages sent both ways at once
    is_right: bool  # whether the received numbers equal the sent ones


def _measured(mesh: Mesh) -> list[MeasuredLink]:
    """Measure the links between devices; return the same list on every process."""
    own = jax.process_index()
    links = []
    for a, b in combinations(probe_devices(list(mesh.devices.flat)), 2):
        if own in (a.process_index, b.process_index):
            ends = f"device {a.id} (process {a.process_index}) and {b.id} ({b.process_index})"
            with _answering(f"exchange of {ends}"):
                links.append(measure_link(a, b))
    # two processes may have measured a link: keep the wrong result, if any
    found = sorted(chain(*_gathered(MeasuredLink, links)), key=lambda link: link.is_right)
    by_ends = {(link.first, link.second): link for link in reversed(found)}
    return [by_ends[ends] for ends in sorted(by_ends)]


def _of_links(links: Sequence[MeasuredLink]) -> list[Finding]:
    wrong = [f"devices {link.first} and {link.second}" for link in links if not link.is_right]
    if wrong:
        text = f"{', '.join(wrong)}: the received numbers differ from the sent ones."
        return [Finding("links", False, text)]
    if not links:
        return []
    slowest = min(links, key=lambda link: link.bytes_per_s)
    farthest = max(links, key=lambda link: link.latency_s)
    text = (
        f"{len(links)} pairs; slowest {size_text(int(slowest.bytes_per_s))}/s (devices "
        f"{slowest.first} and {slowest.second}), farthest {farthest.latency_s * 1e6:.0f} us "
        f"(devices {farthest.first} and {farthest.second})"
    )
    return [Finding("links", True, text)]


def probe_devices(devices: Sequence[Any], most: int = 16) -> list[Any]:
    """Return the devices to measure: all, if they are at most `most`.

    If there are more: the first device of each process, or the first `most` devices if a single
    process has them all.
    """
    if len(devices) <= most:
        return list(devices)
    firsts = {device.process_index: device for device in reversed(devices)}
    return [firsts[i] for i in sorted(firsts)] if len(firsts) > 1 else list(devices[:most])


def measure_link(a: Any, b: Any) -> MeasuredLink:
    """Measure the link between two devices.

    Every process with one of the devices must call this; all must measure links in the same order.
    """
    mesh = Mesh(np.array([a, b]), ("pair",), axis_types=(AxisType.Auto,))
    latency_s, right = _exchanges(mesh, *SMALL)
    large_s, large_right = _exchanges(mesh, *LARGE)
    moving_s = max(large_s - latency_s, 1e-9)
    return MeasuredLink(a.id, b.id, latency_s, LARGE[0] * 4 / moving_s, right and large_right)


def _exchanges(mesh: Mesh, length: int, number: int) -> tuple[float, bool]:
    """Return (seconds of one exchange of float32 [length], whether the contents were swapped).

    Both devices send `number` times inside one program, as pipeline ranks do, so that times exclude
    the host and the start of a program.
    """

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(
            0, number, lambda _, x: jax.lax.ppermute(x, "pair", [(0, 1), (1, 0)]), x
        )

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("pair"), out_specs=P("pair")))
    numbers = np.repeat(np.arange(2, dtype=np.float32), length)
    placed = NamedSharding(mesh, P("pair"))
    sent = jax.make_array_from_callback(numbers.shape, placed, numbers.__getitem__)
    received, seconds = jax.block_until_ready(run(sent)), []
    for _ in range(RUNS):
        began = time.perf_counter()
        received = jax.block_until_ready(run(sent))
        seconds.append(time.perf_counter() - began)
    wanted, shards = numbers[::-1], received.addressable_shards
    right = all(np.array_equal(shard.data, wanted[shard.index]) for shard in shards)
    return statistics.median(seconds) / number, right


@contextmanager
def _answering(what: str) -> Iterator[None]:
    """Exit with a message that names `what` if the body hangs: a collective cannot be cancelled."""

    def give_up() -> None:
        would = "Training would hang too, or this machine is too busy: try again."
        print(f"ppctl: {what}: no answer within {ANSWER_WITHIN_S:.0f} s. {would}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(ANSWER_WITHIN_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _gathered(kind: type[T], items: Sequence[Any]) -> list[list[T]]:
    """Return the items of each process, as dataclasses of type `kind`."""
    texts = distributed.gather(json.dumps([asdict(item) for item in items]))
    return [[kind(**each) for each in json.loads(text)] for text in texts]
