"""Where a run ran: versions, mesh, hardware and each of its starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from math import nan
from typing import Any

from ppctl.config.mesh import axes_text
from ppctl.reports.charts.elements import printable, table
from ppctl.reports.run_files import setting_changes
from ppctl.reports.run_page.read import RecordedRun, versions_of

MOST_STARTS = 10  # that are listed
MOST_CHANGES = 30  # of settings


def environment_html(run: RecordedRun) -> str:
    """Return versions, settings and starts of the run."""
    rows = [[escape(name), escape(version)] for name, version in run.versions.items()]
    for part in ("mesh", "hardware", "executor"):
        values = run.config.get(part)
        if isinstance(values, dict):
            text = axes_text(values) if part == "mesh" else str(values.get("name", ""))
            rows.append([part, escape(printable(text))])
    if not rows and not run.starts:
        return "<p>Not recorded.</p>"
    listed = f'<div class="stages">{table("versions and settings", [], rows)}</div>' if rows else ""
    return listed + _starts(run)


def _starts(run: RecordedRun) -> str:
    """Return each start of the run: when, from which step, on what, and where its versions are others than before."""
    if not run.starts:
        return ""
    rows, before = [], {}
    for start in run.starts:
        versions = versions_of(start)
        changed = {name: version for name, version in versions.items() if before and before.get(name) != version}
        before = versions or before
        cells = (
            utc_text(start.get("at")),
            f"step {start.get('step', '?')}",
            str(start.get("host", "")),
            _devices(start),
            ", ".join(f"{name} {version}" for name, version in changed.items()),
        )
        rows.append([escape(printable(text)) for text in cells])
    shown = rows[-MOST_STARTS:]
    columns = ["started", "from", "host", "on", "versions that changed"]
    if not any(row[-1] for row in shown):
        columns, shown = columns[:-1], [row[:-1] for row in shown]
    earlier = (
        f"<p class='soft'>{len(rows) - len(shown)} earlier starts are left out.</p>" if len(rows) > len(shown) else ""
    )
    return f'<div class="starts">{table("starts of the run", columns, shown)}</div>{earlier}{_changes(run)}'


def _changes(run: RecordedRun) -> str:
    """Return the settings that starts have changed."""
    found = [f"<li>since step {step}: {escape(printable(text))}</li>" for step, text in setting_changes(run.starts)]
    earlier = f"<li>{len(found) - MOST_CHANGES} earlier ones are left out</li>" if len(found) > MOST_CHANGES else ""
    return f"<p>Settings that changed:</p><ul>{earlier}{''.join(found[-MOST_CHANGES:])}</ul>" if found else ""


def _devices(start: Mapping[str, Any]) -> str:
    """Return the devices of a start, as in `8 x cpu, 2 processes, Linux-6.8`."""
    kind, number, processes = start.get("device_kind"), start.get("num_devices"), start.get("num_processes")
    if kind is None or number is None:
        return ""
    name = kind if kind == start.get("platform") else f"{kind} ({start.get('platform')})"
    of_several = f", {processes} processes" if processes != 1 else ""
    system = f", {start['system']}" if "system" in start else ""
    return f"{number} x {name}{of_several}{system}"


def utc_text(seconds: object) -> str:
    """Return seconds since 1970 as a date and a time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds if isinstance(seconds, float) else nan))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
