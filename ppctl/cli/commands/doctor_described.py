"""`ppctl doctor hardware=h100` where no H100 is: what can be told from here of a request for devices that are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec

from ppctl.cli.commands.findings import Finding, of_versions, show_findings
from ppctl.config import AutoHardware, Config, Hardware
from ppctl.errors import PpctlError
from ppctl.executors.mesh import all_devices
from ppctl.executors.topology import has_plugin
from ppctl.launch import distributed
from ppctl.planner.plan import predicted
from ppctl.planner.plan_terminal import fit_text, time_text
from ppctl.reports.terminal import OutputConsole, show_json, size_text
from ppctl.training.checks import check_evaluations, check_examples
from ppctl.training.job import assemble, state_bytes
from ppctl.training.known_hardware import described_device, described_only

UNKNOWN_HERE = "processes, links, run.dir, the devices' own memory: `ppctl doctor` with the same request says it there"


def described(hardware: Hardware | AutoHardware) -> Hardware | None:
    """Return the hardware of a request where the devices here are others; None where they are what it names."""
    is_named = not isinstance(hardware, AutoHardware)
    return described_only(hardware, all_devices()[0].device_kind) if is_named else None


def doctor_described(config: Config, hardware: Hardware, *, as_json: bool) -> int:
    """Print what can be told of a request for devices that are not here; return 0 where nothing speaks against it."""
    findings = [of_versions(), *_request(config, hardware)]
    bad = [finding for finding in findings if not finding.is_ok]
    if not distributed.is_lead():
        return int(bool(bad))
    if as_json:
        show_json(
            {
                "ok": not bad,
                "described": hardware.name,
                "findings": [asdict(finding) for finding in findings],
                "unknown": UNKNOWN_HERE,
                "links": [],
                "all_reduces": [],
                "costs": None,
            }
        )
        return int(bool(bad))
    console = OutputConsole()
    show_findings(console, findings)
    console.print(f"--  {'unknown':10}{UNKNOWN_HERE}", markup=False, highlight=False, soft_wrap=True)
    name = f"hardware={hardware.name}, which is not here"
    text = f"from here, nothing speaks against this request on {name}"
    if bad:
        text = f"this request would not train on {name}: {bad[0].text}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(bool(bad))


def _request(config: Config, hardware: Hardware) -> Iterator[Finding]:
    """Yield the findings of a request, as far as nothing of it need be on the devices."""
    try:
        job = assemble(config, only_planned=True)
        notes = [check_evaluations(config.run, job.data), check_examples(job)]
        found = predicted(job)
    except PpctlError as error:
        yield Finding("request", False, str(error))
        return
    yield Finding("devices", True, found.devices)
    yield Finding("memory", found.fits is not False, fit_text(found))
    yield Finding("data", True, job.data.source)
    tried = "".join(f". {note}" for note in notes if note is not None)
    state = size_text(state_bytes(job))
    yield Finding("request", True, f"mesh={config.mesh.text}, {found.schedule}: a state takes {state}{tried}")
    yield Finding("step", True, time_text(found))
    yield Finding("compiler", True, compiler_text(config, hardware))


def compiler_text(config: Config, hardware: Hardware) -> str:
    """Return whether the compiler for the devices is here, which needs none of them, and how it is asked."""
    device = described_device(hardware)
    if device is None:
        return "none that is asked without the devices"
    is_gpu = device.platform == "gpu"
    if not (has_plugin() if is_gpu else find_spec("libtpu") is not None):
        extra = "XLA's plugin for CUDA (ppctl[cuda12] or ppctl[cuda13])" if is_gpu else "libtpu (ppctl[tpu])"
        return f"not here: all of it is predicted. With {extra} `ppctl plan` compiles for plan.topology"
    number, of_host = config.mesh.num_devices, hardware.host_devices or config.mesh.num_devices
    shape = "HOSTSxGPUS" if number % min(number, of_host) else f"{-(-number // of_host)}x{min(number, of_host)}"
    topology = f"plan.topology={hardware.name}:{shape if is_gpu else 'CHIPS'}"
    return f"here: `ppctl plan` with {topology} compiles the step, and says the memory that it takes"
