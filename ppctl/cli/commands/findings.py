"""What `ppctl doctor` finds: the results of its checks, and that of the installed packages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from rich.console import Console


@dataclass(frozen=True)
class Finding:
    """The result of a check. Training fails where one is not ok."""

    what: str
    is_ok: bool
    text: str


def of_versions() -> Finding:
    """Return the finding of the packages that ppctl needs: which are here, and whether they will do."""
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
    remedy = f"{'; '.join(wrong)}. Install ppctl again: pip install ppctl."
    return Finding("versions", not wrong, remedy if wrong else ", ".join([f"Python {python}", *found]))


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print findings, a line each."""
    for finding in findings:
        mark = "ok" if finding.is_ok else "NO"
        console.print(f"{mark}  {finding.what:10}{finding.text}", markup=False, highlight=False, soft_wrap=True)
