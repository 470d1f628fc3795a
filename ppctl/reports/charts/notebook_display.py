"""Schedules and pipelines as html for notebooks: a picture and plain tables, without a style sheet.

Pictures are data of <img>, so that their ids and fonts do not meet those of other cells.
"""

import base64
from collections.abc import Mapping, Sequence

from ppctl.reports.charts.image_charts import MAX_RANKS, MAX_VECTORS, image
from ppctl.reports.charts.schedule_drawing import Drawing, title_of
from ppctl.reports.page_kit import table, text
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulator import simulate

LOOK = "max-width:100%;background:white"


def schedule_html(schedule: Schedule) -> str:
    """Return the chart of a schedule on free-running ranks, F = I = W = 1 s; large ones in words.

    >>> from ppctl.schedule.families.registry import build
    >>> schedule_html(build("gpipe", 1024, 1))
    '<p>gpipe: 1024 ranks, 1 microbatch. Too large for a picture here: ppctl.draw makes a page.</p>'
    """
    if schedule.num_ranks > MAX_RANKS or sum(map(len, schedule.ranks)) > MAX_VECTORS:
        words = f"{title_of(schedule.name, schedule)}. Too large for a picture here"
        return f"<p>{text(words)}: ppctl.draw makes a page.</p>"
    drawing = Drawing(schedule.name, simulate(schedule, Costs()))
    data = base64.b64encode(image([drawing], "svg")).decode()
    words = text(f"{drawing.title}; {drawing.verdict}")
    return f'<img alt="{words}" style="{LOOK}" src="data:image/svg+xml;base64,{data}">'


def pipeline_html(
    facts: Mapping[str, str],
    layers: Sequence[str],
    memory: Sequence[Mapping[str, int]],
    schedule: Schedule | None,
) -> str:
    """Return facts, a table of each rank's layers and bytes, and the schedule's chart."""
    lines = "".join(f"<b>{text(name)}</b> {text(words)}<br>" for name, words in facts.items())
    parts = [part for part in memory[0] if any(held.get(part) for held in memory)]
    rows = [
        [str(r), text(held), size_text(sum(sizes.values()))]
        + [size_text(sizes.get(part, 0)) for part in parts]
        for r, (held, sizes) in enumerate(zip(layers, memory, strict=True))
    ]
    listed = table("ranks", ["rank", "layers", "memory", *map(text, parts)], rows)
    return f"<p>{lines}</p>{listed}" + ("" if schedule is None else schedule_html(schedule))
