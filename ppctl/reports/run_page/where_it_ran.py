"""Where a run ran: versions, mesh, hardware and each of its starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ppctl.config.groups.mesh_settings import axes_text
from ppctl.reports import page_kit as kit
from ppctl.reports.run_files import setting_changes
from ppctl.reports.run_page.read_run import RecordedRun, versions_of

MOST_STARTS = 10  # that are listed
MOST_CHANGES = 30  # of settings


def environment_html(run: RecordedRun) -> str:
    """Return versions, settings and starts of the run."""
    rows = [[kit.text(name), kit.text(version)] for name, version in run.versions.items()]
    for part in ("mesh", "hardware", "executor"):
        values = run.config.get(part)
        if isinstance(values, dict):
            text = axes_text(values) if part == "mesh" else str(values.get("name", ""))
            rows.append([part, kit.text(text)])
    if not rows and not run.starts:
        return "<p>Not recorded.</p>"
    listed = kit.table("versions and settings", [], rows, "stages") if rows else ""
    return listed + _starts(run)


def _starts(run: RecordedRun) -> str:
    """Return each start of the run: time, step, devices and changed versions."""
    if not run.starts:
        return ""
    rows, before = [], {}
    for start in run.starts:
        versions = versions_of(start)
        changed = set(versions.items()) - set(before.items()) if before else ()
        texts = [" ".join(version) for version in versions.items() if version in changed]
        before = versions or before
        facts = utc_text(start.get("at")), f"step {start.get('step', '?')}", start.get("host", "")
        rows.append([kit.text(str(cell)) for cell in (*facts, _devices(start), ", ".join(texts))])
    shown = rows[-MOST_STARTS:]
    columns = ["started", "from", "host", "on", "versions that changed"]
    if not any(row[-1] for row in shown):
        columns, shown = columns[:-1], [row[:-1] for row in shown]
    few = f"{len(rows) - len(shown)} earlier starts are left out."
    earlier = kit.soft(few if len(rows) > len(shown) else "")
    return kit.table("starts of the run", columns, shown, "starts") + earlier + _changes(run)


def _changes(run: RecordedRun) -> str:
    """Return the settings that starts have changed."""
    changes = [f"since step {step}: {change}" for step, change in setting_changes(run.starts)]
    if not changes:
        return ""
    num_earlier = len(changes) - MOST_CHANGES
    earlier = [f"{num_earlier} earlier ones are left out"] if num_earlier > 0 else []
    listed = kit.bullets([*earlier, *changes[-MOST_CHANGES:]])
    return f"<p>Settings that changed:</p>{listed}"


def _devices(start: Mapping[str, Any]) -> str:
    """Return the devices of a start, as in `8 x cpu, 2 processes, Linux-6.8`."""
    kind, number, processes = map(start.get, ("device_kind", "num_devices", "num_processes"))
    if kind is None or number is None:
        return ""
    name = kind if kind == start.get("platform") else f"{kind} ({start.get('platform')})"
    of_several = f", {processes} processes" if processes != 1 else ""
    system = f", {start['system']}" if "system" in start else ""
    return f"{number} x {name}{of_several}{system}"


def utc_text(seconds: object) -> str:
    """Return seconds since 1970 as a date and a time."""
    with suppress(OverflowError, ValueError, OSError):
        if isinstance(seconds, float):
            return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    return "at an unknown time"
