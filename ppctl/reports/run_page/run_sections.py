"""Parts of a run's page: predicted vs. measured, the memory of each rank, where it ran."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ppctl.reports import bubble_names as bubbles
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import memory_bars
from ppctl.reports.charts.palette import PARTS
from ppctl.reports.run_files import setting_changes
from ppctl.reports.run_page.read_run import RecordedRun, versions_of
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.mesh_axes import axes_text

MOST_BARS = 16  # of ranks whose memory is drawn
MOST_STARTS = 10  # that are listed
MOST_CHANGES = 30  # of settings
ABOUT = (
    f"Step time: of the median step. {bubbles.ABOUT} Memory: of the fullest device, as compiled."
)


def predictions_section(run: RecordedRun) -> str:
    """Return the planner's predictions compared with measurements, "" without either."""
    newest, seconds, share = run.newest.get, "{:.4g} s".format, "{:.1%}".format
    sizes = newest("predicted_memory_bytes"), newest("memory_bytes")
    step_s = newest("predicted_step_time_s"), run.median("step_time_s")
    rows = []
    for name, predicted, measured, form in (
        ("step time", *step_s, seconds),
        ("bubble", newest("predicted_bubble_fraction"), run.measured_bubble, share),
        ("ideal bubble", newest("ideal_bubble_fraction"), None, share),
        ("memory of a device", *sizes, lambda size: size_text(int(size))),
    ):
        values = predicted, measured
        if values == (None, None):
            continue
        ratio = f"{measured / predicted:.3g}" if predicted and measured is not None else ""
        cells = ["" if value is None else kit.exact(value, form(value)) for value in values]
        rows.append([name, *cells, ratio])
    if not rows:
        return ""
    columns = ["", "predicted", "measured", "measured / predicted"]
    listed = kit.table("predicted and measured", columns, rows)
    return kit.section("Predicted and measured", listed, kit.soft(ABOUT + _shared_text(run)))


def _shared_text(run: RecordedRun) -> str:
    """Return a sentence if the newest start's simulated devices share few cores, else ""."""
    start = run.starts[-1] if run.starts else {}
    counts: list[Any] = [start.get(n) for n in ("num_devices", "num_processes", "num_cores")]
    if run.measured_bubble is None or not all(isinstance(n, int) and n > 0 for n in counts):
        return ""
    num_devices, num_processes, num_cores = counts
    text = bubbles.shared_cores_text(num_devices // num_processes, num_cores)
    return "" if text is None else f" {text}."


def memory_section(run: RecordedRun) -> str:
    """Return bars of the ranks by part, and numbers; one bar if all are alike, else the fullest."""
    known = [(rank, sizes) for rank, sizes in enumerate(run.memory) if any(sizes.values())]
    if not known:
        return ""
    are_alike = len(known) > 1 and all(sizes == known[0][1] for _, sizes in known)
    known = known[:1] if are_alike else known
    present = dict.fromkeys(part for _, sizes in known for part, size in sizes.items() if size)
    parts = [*present][: len(PARTS)]
    fullest = sorted(known, key=lambda each: -sum(each[1].values()))[:MOST_BARS]
    named, rows = [], []
    for rank, sizes in sorted(fullest, key=lambda each: each[0]):
        name = "every rank" if are_alike else f"rank {rank}"
        numbers = (*(sizes.get(part, 0) for part in parts), sum(sizes.values()))
        named.append((name, sizes))
        rows.append([name, *(kit.exact(size, size_text(size)) for size in numbers)])
    few = f" The fullest {MOST_BARS} of {len(known)}." if len(known) > MOST_BARS else ""
    listed = kit.table("memory of each rank by part", ["", *map(kit.text, parts), "total"], rows)
    about = kit.soft(f"Of one device of each rank, as compiled at the newest start.{few}")
    bars = memory_bars(named, parts)
    return kit.section("Memory of each rank", bars, about, kit.folded("Numbers", listed))


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
