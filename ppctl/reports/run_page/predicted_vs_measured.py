"""Predicted vs. measured in the report of a run, and the memory of each rank by part."""

from __future__ import annotations

from typing import Any

from ppctl.reports import bubble_names as bubbles
from ppctl.reports import page_kit as kit
from ppctl.reports.bubble_names import shared_cores_text
from ppctl.reports.charts.memory_bars import memory_bars
from ppctl.reports.charts.palette import PARTS
from ppctl.reports.run_page.read_run import RecordedRun
from ppctl.reports.terminal_output import size_text

MOST_BARS = 16  # of ranks whose memory is drawn
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
    text = shared_cores_text(num_devices // num_processes, num_cores)
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
