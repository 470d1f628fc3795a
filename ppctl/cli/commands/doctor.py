"""`ppctl doctor`: check that a request would train here, and measure the links between devices.

Takes the request of `ppctl train` and does all of it short of compiling the step: joins the processes, makes the mesh,
opens the data, builds the model, writes where the run would write. Then it measures the links between devices, which a
planner needs, and checks what arrives over them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ppctl.cli.commands.doctor_described import described, doctor_described
from ppctl.cli.commands.findings import Finding, of_versions, show_findings
from ppctl.config import Config
from ppctl.errors import PpctlError
from ppctl.executors.links import AllReduce, MeasuredLink, device_pairs, measure_all_reduce, measure_link, probe_devices
from ppctl.launch import distributed
from ppctl.reports.terminal import OutputConsole, show_json, show_table
from ppctl.training.checks import check_job
from ppctl.training.gpu_memory import is_gpu, memory_share
from ppctl.training.job import DEFAULT_DTYPE, assemble, state_bytes
from ppctl.training.known_hardware import of_device, stated_bytes
from ppctl.training.process_group import process_group
from ppctl.training.start import start_jax

PROBE_BYTES = 16 << 20  # written to measure the speed of run.dir
ANSWER_WITHIN_S = 60.0  # a device that takes longer to exchange a few messages does not answer
SHARE_TOLERANCE = 0.02  # of a GPU's memory: how far the share that programs get may be from the requested one
CLOCK_WARNING_S = 1.0  # clocks that differ by more put the records of a run out of order


def doctor(config: Config, *, as_json: bool) -> int:
    """Print the findings; return 0 when the request would train here, else 1."""
    directory = Path(config.run.dir).absolute()
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    start_jax(config, config.run.dtype or DEFAULT_DTYPE)
    with process_group(config):  # which refuses settings that differ, and a run.dir that is not the same for all
        away = described(config.hardware)
        code = _doctor(config, as_json=as_json) if away is None else doctor_described(config, away, as_json=as_json)
    if distributed.is_lead():
        with suppress(OSError):  # not empty: it is of use to others
            for path in made:
                path.rmdir()
    return code


def _doctor(config: Config, *, as_json: bool) -> int:
    request, mesh, needed = _request(config)
    local = [of_versions(), *request, *_directories(config, needed)]
    by_process = [[Finding(**each) for each in json.loads(text)] for text in distributed.gather(_json(local))]
    findings = list(_merged(by_process))
    findings += _together()
    links, sums = ([], []) if mesh is None else _measured(mesh)
    findings += _of_links(links, sums)
    bad = [finding for finding in findings if not finding.is_ok]
    if distributed.is_lead():
        if as_json:
            document = {
                "ok": not bad,
                "findings": [asdict(finding) for finding in findings],
                "links": [asdict(link) for link in links],
                "all_reduces": [asdict(each) for each in sums],
                "costs": None if mesh is None else hop_costs(links, mesh),
            }
            show_json(document)
        else:
            _show(findings, links, mesh)
    return 1 if bad else 0


# what each process finds by itself


def _request(config: Config) -> tuple[list[Finding], Mesh | None, int | None]:
    """Return (findings, mesh, bytes of a state), of everything that training builds before it compiles."""
    try:
        job = assemble(config)
        notes = check_job(job)
    except PpctlError as error:
        return [Finding("request", False, str(error))], None, None
    device = job.pipe.mesh.devices.flat[0]
    schedule, tried = job.pipe.schedule, "".join(f". {note}" for note in notes)
    needed = state_bytes(job)
    findings = [
        Finding("devices", True, f"{job.pipe.mesh.size} x {device.device_kind} ({device.platform})"),
        *_memory(config, jax.local_devices()[0]),
        Finding("data", True, job.data.source),
        Finding("request", True, f"mesh={config.mesh.text}, {schedule.name}: a state takes {_size(needed)}{tried}"),
    ]
    return findings, job.pipe.mesh, needed


def _memory(config: Config, device: Any) -> Iterator[Finding]:
    """Yield a finding of an accelerator: the memory that programs get, of a GPU the share that was requested."""
    stated = None if device.platform == "cpu" else stated_bytes(device)
    if stated is None:
        return
    text, known = f"{_size(stated)} of each device are for programs", of_device(device.device_kind)
    if not is_gpu(device):
        yield Finding("memory", True, text)
        return
    asked = memory_share(config, here=True)
    if known is None or known.cuda is None:
        yield Finding("memory", True, f"{text} ({asked.source})")
        return
    share = stated / known.cuda.memory_bytes
    text += f", {share:.0%} of its {_size(known.cuda.memory_bytes)}"
    if abs(share - asked.fraction) <= SHARE_TOLERANCE:
        yield Finding("memory", True, f"{text} ({asked.source})")
        return
    reason = f"{text}, but {asked.source} is {asked.fraction:.0%}: JAX had started before, or the GPU is divided."
    yield Finding("memory", False, f"{reason} Free the GPU, or use run.memory_fraction={share:.2f}.")


def _directories(config: Config, needed: int | None) -> Iterator[Finding]:
    """Yield a finding: whether run.dir can be written, has room for the checkpoints, and how fast it takes them."""
    directory = Path(config.run.dir).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor-") as file:
            began = time.perf_counter()
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = PROBE_BYTES / (time.perf_counter() - began)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        reason = (
            f"run.dir={config.run.dir} cannot be written: {error.strerror}. Use another run.dir, or make it writable."
        )
        yield Finding("run.dir", False, reason)
        return
    text = f"{directory} is writable at {_size(speed)}/s, {_size(free)} free"
    keep = config.run.checkpoint.keep
    need = 0 if needed is None else (keep + 1) * needed
    if free < need:
        yield Finding(
            "run.dir",
            False,
            f"run.dir={config.run.dir} has {_size(free)} free, but run.checkpoint.keep+1 = {keep}+1 checkpoints of "
            f"{_size(needed or 0)} take {_size(need)}. Free the disk, use another run.dir, or keep fewer.",
        )
        return
    yield Finding("run.dir", True, text)


# what they find together


def _merged(by_process: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """Yield the findings of all processes: one where they agree (numbers aside), else one for each process."""
    for same in zip(*by_process, strict=False):
        if len({finding.text for finding in same}) == 1 or all(f.is_ok and f.what == "run.dir" for f in same):
            yield same[0]
            continue
        for process, finding in enumerate(same):
            yield Finding(finding.what, finding.is_ok, f"process {process}: {finding.text}")


def _together() -> list[Finding]:
    """Return findings: where the processes run, and how far their clocks are apart."""
    hosts = distributed.gather(socket.gethostname())
    number = len(hosts)
    if number == 1:
        return [Finding("processes", True, f"1, on {hosts[0]}")]
    counts = {host: hosts.count(host) for host in hosts}
    where = ", ".join(f"{count} on {host}" for host, count in counts.items())
    # the gather before this one let all go on at the same time, give or take a message
    times = [float(text) for text in distributed.gather(repr(time.time()))]
    apart = max(times) - min(times)
    late = f"{apart:.3f} s apart" + (": set them by NTP, records are out of order" if apart > CLOCK_WARNING_S else "")
    return [Finding("processes", True, f"{number}: {where}"), Finding("clocks", True, late)]


# links


def _measured(mesh: Mesh) -> tuple[list[MeasuredLink], list[AllReduce]]:
    """Measure the links between the devices of a mesh, and a sum over each of its axes; the same on every process."""
    own = jax.process_index()
    links = []
    for a, b in device_pairs(probe_devices(list(mesh.devices.flat))):
        if own in (a.process_index, b.process_index):
            with _answering(f"exchange of device {a.id} (process {a.process_index}) and {b.id} ({b.process_index})"):
                links.append(measure_link(a, b))
    gathered = [MeasuredLink(**each) for text in distributed.gather(_json(links)) for each in json.loads(text)]
    worst: dict[tuple[int, int], MeasuredLink] = {}
    for link in gathered:  # both ends of a link between processes measured it
        known = worst.get((link.first, link.second), link)
        worst[link.first, link.second] = MeasuredLink(
            link.first,
            link.second,
            max(link.latency_s, known.latency_s),
            min(link.bytes_per_s, known.bytes_per_s),
            link.is_right and known.is_right,
        )
    sums = []
    for axis, size in mesh.shape.items():
        if size > 1:
            with _answering(f"sum over {axis}"):
                sums.append(measure_all_reduce(mesh, str(axis)))
    return [worst[key] for key in sorted(worst)], sums


def _of_links(links: Sequence[MeasuredLink], sums: Sequence[AllReduce]) -> list[Finding]:
    wrong = [f"devices {link.first} and {link.second}" for link in links if not link.is_right]
    wrong += [f"a sum over {each.axis}" for each in sums if not each.is_right]
    if wrong:
        return [Finding("links", False, f"{', '.join(wrong)}: other numbers arrived than were sent.")]
    findings = []
    if links:
        slowest = min(links, key=lambda link: link.bytes_per_s)
        farthest = max(links, key=lambda link: link.latency_s)
        text = (
            f"{len(links)} pairs; slowest {_size(slowest.bytes_per_s)}/s (devices {slowest.first} and "
            f"{slowest.second}), farthest {farthest.latency_s * 1e6:.0f} us (devices {farthest.first} and "
            f"{farthest.second})"
        )
        findings.append(Finding("links", True, text))
    for each in sums:
        text = f"sum over {each.axis} ({each.size} devices) of {_size(each.num_bytes)}: {each.seconds * 1e3:.2f} ms"
        findings.append(Finding("sums", True, text))
    return findings


def hop_costs(links: Sequence[MeasuredLink], mesh: Mesh) -> dict[str, float] | None:
    """Return `transfer_s` and `transfer_bytes_per_s` of `schedule.costs.Costs`.

    They are of the worst measured link between neighbours along pp; None where none was measured.
    """
    by_pair = {frozenset((link.first, link.second)): link for link in links}
    rows = mesh.devices.swapaxes(0, 1)  # [pp, dp, fsdp]
    near = [
        by_pair[key]
        for here, there in itertools.pairwise(rows)
        for a, b in zip(here.flat, there.flat, strict=True)
        if (key := frozenset((a.id, b.id))) in by_pair
    ]
    if not near:
        return None
    return {
        "transfer_s": max(link.latency_s for link in near),
        "transfer_bytes_per_s": min(link.bytes_per_s for link in near),
    }


@contextmanager
def _answering(what: str) -> Iterator[None]:
    """End the process with a line when the body waits for ever: a collective cannot be cancelled."""

    def give_up() -> None:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        would = "Training would hang there."
        if load > 2 * cores:
            would = (
                f"Training would hang there, or this machine is too busy (load {load:.0f} on {cores} cores): try again."
            )
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


# what is shown


def _show(findings: Sequence[Finding], links: Sequence[MeasuredLink], mesh: Mesh | None) -> None:
    console = OutputConsole()
    say: Callable[[str], None] = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    show_findings(console, findings)
    if len(links) > 1:
        ids = sorted({link.first for link in links} | {link.second for link in links})
        by_pair = {(link.first, link.second): link for link in links}

        def cell(row: int, column: int) -> str:
            if row == column:
                return "-"
            link = by_pair[min(row, column), max(row, column)]
            return f"{link.bytes_per_s / 2**30:.2f}" if row < column else f"{link.latency_s * 1e6:.0f}"

        rows = [(str(row), *(cell(row, column) for column in ids)) for row in ids]
        show_table(console, "above the diagonal GiB/s, below it microseconds", ("device", *map(str, ids)), rows)
    costs = None if mesh is None else hop_costs(links, mesh)
    if costs is not None:
        say(f"costs     transfer_s={costs['transfer_s']:.3g} transfer_bytes_per_s={costs['transfer_bytes_per_s']:.4g}")
    bad = [finding for finding in findings if not finding.is_ok]
    say("this request would train here" if not bad else f"this request would not train here: {bad[0].text}")


def _json(items: Sequence[Any]) -> str:
    return json.dumps([asdict(item) for item in items])


def _size(num_bytes: float) -> str:
    """Return bytes as people read them.

    >>> _size(3 << 20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
