"""Predicted vs. measured in the report of a run, and the memory of each rank by part."""

from __future__ import annotations

from html import escape

from ppctl.reports import bubbles
from ppctl.reports.bubbles import shared_cores_text
from ppctl.reports.charts.elements import exact, printable, section, table
from ppctl.reports.charts.palette import PARTS, part_sample
from ppctl.reports.charts.plots import stacked_bars
from ppctl.reports.run_page.read import RecordedRun
from ppctl.reports.terminal import size_text

MOST_BARS = 16  # of ranks whose memory is drawn
ABOUT = f"Step time: of the median step. {bubbles.ABOUT} Memory: of the fullest device, as compiled."


def predictions_section(run: RecordedRun) -> str:
    """Return the planner's predictions compared with measurements, nothing where there are neither."""
    newest, rows = run.newest, []
    memory_bytes = newest.get("predicted_memory_bytes"), newest.get("memory_bytes")
    for name, predicted, measured, text in (
        ("step time", newest.get("predicted_step_time_s"), run.median("step_time_s"), "{:.4g} s".format),
        ("bubble", newest.get("predicted_bubble_fraction"), run.measured_bubble, "{:.1%}".format),
        ("ideal bubble", newest.get("ideal_bubble_fraction"), None, "{:.1%}".format),
        ("memory of a device", *memory_bytes, lambda size: size_text(int(size))),
    ):
        if predicted is None and measured is None:
            continue
        ratio = f"{measured / predicted:.3g}" if predicted and measured is not None else ""
        cells = ("" if value is None else exact(value, text(value)) for value in (predicted, measured))
        rows.append([name, *cells, ratio])
    if not rows:
        return ""
    listed = table("predicted and measured", ["", "predicted", "measured", "measured / predicted"], rows)
    named = zip(("predicted", "compiled"), memory_bytes, strict=True)
    sizes = [(label, {"memory": int(size)}) for label, size in named if size is not None and size >= 0]
    bars = stacked_bars(sizes, ("memory",), None, size_text) if len(sizes) == 2 else ""
    return section("Predicted and measured", f"{listed}{bars}<p class='soft'>{ABOUT}{_shared_text(run)}</p>")


def _shared_text(run: RecordedRun) -> str:
    """Return a sentence where the newest start ran on simulated devices that share few cores, else nothing."""
    start = run.starts[-1] if run.starts else {}
    found = (start.get(name) for name in ("num_devices", "num_processes", "num_cores"))
    numbers = [number for number in found if isinstance(number, int) and number > 0]
    if run.measured_bubble is None or len(numbers) < 3:
        return ""
    num_devices, num_processes, num_cores = numbers
    text = shared_cores_text(num_devices // num_processes, num_cores)
    return "" if text is None else f" {text}."


def memory_section(run: RecordedRun) -> str:
    """Return bars of the ranks by part, and the numbers; one bar where all are alike, of many the fullest."""
    known = [(rank, sizes) for rank, sizes in enumerate(run.memory) if any(sizes.values())]
    if not known:
        return ""
    are_alike = len(known) > 1 and all(sizes == known[0][1] for _, sizes in known)
    known = known[:1] if are_alike else known
    parts = list(dict.fromkeys(part for _, sizes in known for part, size in sizes.items() if size))[: len(PARTS)]
    fullest = sorted(known, key=lambda each: -sum(each[1].values()))[:MOST_BARS]
    named = [
        ("every rank" if are_alike else f"rank {rank}", sizes)
        for rank, sizes in sorted(fullest, key=lambda each: each[0])
    ]
    rows = []
    for name, sizes in named:
        numbers = (*(sizes.get(part, 0) for part in parts), sum(sizes.values()))
        rows.append([name, *(exact(size, size_text(size)) for size in numbers)])
    few = f" The fullest {MOST_BARS} of {len(known)}." if len(known) > MOST_BARS else ""
    legend = "".join(f"<li>{part_sample(number)}{escape(printable(part))}</li>" for number, part in enumerate(parts))
    listed = table("memory of each rank by part", ["", *map(escape, map(printable, parts)), "total"], rows)
    about = f"<p class='soft'>Of one device of each rank, as compiled at the newest start.{few}</p>"
    return section(
        "Memory of each rank",
        f'{stacked_bars(named, parts, None, size_text)}<ul class="parts">{legend}</ul>{about}'
        f"<details><summary>Numbers</summary>{listed}</details>",
    )
