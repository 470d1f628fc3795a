"""The findings of `ppctl doctor`: their report, of packages, and of devices that are elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from ppctl.config import AutoHardware, Config, Hardware
from ppctl.errors import PpctlError
from ppctl.executors.device_mesh import all_devices
from ppctl.launch import join_processes as distributed
from ppctl.planner.make_plan import predicted
from ppctl.planner.show.plan_terminal import fit_text, time_text
from ppctl.reports.terminal_output import OutputConsole, show_json, show_table, size_text
from ppctl.training.pipeline.job import assemble, state_bytes
from ppctl.training.pipeline.job_checks import check_evaluations, check_examples
from ppctl.training.pipeline.known_hardware import described_only

UNKNOWN = "processes, links, run.dir, memory of the devices: `ppctl doctor` finds them there"


@dataclass(frozen=True)
class Finding:
    """The result of a check. Training fails where one is not ok."""

    what: str
    is_ok: bool
    text: str


def of_versions() -> Finding:
    """Return the finding of the installed versions of required packages."""
    found, wrong = [], []
    for text in requires("ppctl") or ():
        requirement = Requirement(text)
        if requirement.marker is not None:  # of an extra
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed (needs {requirement.specifier})")
            continue
        found.append(f"{requirement.name} {here}")
        if not requirement.specifier.contains(here, prereleases=True):
            wrong.append(f"{requirement.name} {here} is not {requirement.specifier}")
    python = ".".join(map(str, sys.version_info[:3]))
    if wrong:
        remedy = "Install ppctl again: pip install ppctl."
        return Finding("versions", False, f"{'; '.join(wrong)}. {remedy}")
    return Finding("versions", True, ", ".join([f"Python {python}", *found]))


def report(
    findings: Sequence[Finding],
    more: Mapping[str, Any],
    *,
    as_json: bool,
    on: str,
    table: Sequence[Any] | None = None,
    lines: Sequence[str] = (),
) -> int:
    """Print findings and the verdict `on` a machine, on process 0; return 0 if all are ok, else 1.

    more: other entries of the JSON; table (arguments of `show_table`) and lines: printed before the
    verdict.
    """
    # 1. no output, or JSON
    bad = [finding for finding in findings if not finding.is_ok]
    if as_json and distributed.is_lead():
        show_json({"ok": not bad, "findings": [asdict(finding) for finding in findings], **more})
    if as_json or not distributed.is_lead():
        return int(bool(bad))
    # 2. text
    console = OutputConsole()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for finding in findings:
        say(f"{'ok' if finding.is_ok else 'NO'}  {finding.what:10}{finding.text}")
    if table is not None:
        show_table(console, *table)
    for line in lines:
        say(line)
    fault = f"this request would not train {on}: {bad[0].text}" if bad else ""
    say(fault or f"this request would train {on}")
    return int(bool(bad))


# --- of remote devices, described by hardware= ---


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
