"""The findings of `ppctl doctor`: their report, and the finding of the installed packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from ppctl.launch import join_processes as distributed
from ppctl.reports.terminal_output import OutputConsole, show_json, show_table


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
