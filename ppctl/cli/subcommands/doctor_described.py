"""`ppctl doctor hardware=h100` on a machine without one: the findings that need no devices."""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.cli.subcommands.doctor_findings import Finding, of_versions, report
from ppctl.config import AutoHardware, Config, Hardware
from ppctl.errors import PpctlError
from ppctl.executors.device_mesh import all_devices
from ppctl.planner.make_plan import predicted
from ppctl.planner.show.plan_terminal import fit_text, time_text
from ppctl.reports.terminal_output import size_text
from ppctl.training.pipeline.job import assemble, state_bytes
from ppctl.training.pipeline.job_checks import check_evaluations, check_examples
from ppctl.training.pipeline.known_hardware import described_only

UNKNOWN = "processes, links, run.dir, memory of the devices: `ppctl doctor` finds them there"


def described(hardware: Hardware | AutoHardware) -> Hardware | None:
    """Return the hardware of a request if the local devices are others, else None."""
    is_named = not isinstance(hardware, AutoHardware)
    return described_only(hardware, all_devices()[0].device_kind) if is_named else None


def doctor_described(config: Config, hardware: Hardware, *, as_json: bool) -> int:
    """Print the predicted findings of a request for remote devices; return 0 where all are ok."""
    more = {"described": hardware.name, "unknown": UNKNOWN}
    more |= {"links": [], "all_reduces": [], "costs": None}
    lines = [f"--  {'unknown':10}{UNKNOWN}"]
    on = f"on hardware={hardware.name}, as far as this machine can tell"
    return report([of_versions(), *_request(config)], more, as_json=as_json, on=on, lines=lines)


def _request(config: Config) -> Iterator[Finding]:
    """Yield the findings of a request that need no devices."""
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
    request = f"mesh={config.mesh.text}, {found.schedule}"
    yield Finding("request", True, f"{request}: a state takes {size_text(state_bytes(job))}{tried}")
    yield Finding("step", True, time_text(found))
