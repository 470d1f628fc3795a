"""One run as an html page that loads nothing: how it stands, its curves, predicted beside taken, what is odd."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from html import escape
from math import nan
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ppctl.reports.charts.bars import stacked, swatch
from ppctl.reports.charts.elements import exact, section, table
from ppctl.reports.charts.html import whole
from ppctl.reports.charts.palette import PARTS
from ppctl.reports.run_files import RUNNING
from ppctl.reports.run_page.figures import SPEED_NAMES, of_run
from ppctl.reports.run_page.gantt import picture
from ppctl.reports.run_page.read import SLOW, Run, versions_of
from ppctl.reports.run_status import FAILED, FINISHED
from ppctl.reports.terminal import size_text

MARK = '<main data-by="ppctl report">'  # what tells a page of ours from other files
STYLES = ("plan.css", "sweep.css", "report.css")
MOST_SLOW = 5  # steps that are named
MOST_STARTS = 10  # that are listed
MOST_BARS = 16  # of ranks whose memory is drawn
NUM_ROWS = 20  # of the table of numbers, about
NUMBERS = {"loss": ".4f", "grad_norm": ".4g", "lr": ".3e", "step_time_s": ".4g", "tokens_per_s": ",.0f"}
NUMBERS |= {"rows_per_s": ",.0f"}
COLUMN_NAMES = {"grad_norm": "gradient norm", "lr": "learning rate", "step_time_s": "s/step", **SPEED_NAMES}


def page(run: Run, file: Path) -> str:
    """The text of the page; `file`: where it will stand, for links to what the run left beside it."""
    sections = [
        verdict(run),
        _numbers(run),
        _warnings(run),
        _figures(run),
        section("The step, rank by rank", picture(run.standing.path, run.pipeline).html),
        _predicted(run),
        _memory(run),
        section("Asked for", _asked(run)),
        section("What it left", _left(run, file)),
        section("Where it ran", _environment(run)),
    ]
    return whole(f"Run: {printable(run.standing.name)}", f"{MARK}\n{''.join(sections)}</main>\n", *STYLES)


def printable(text: str) -> str:
    """A text without what no page can hold: file names may have any bytes."""
    return text.encode(errors="replace").decode()


def steps_text(run: Run) -> str:
    """`3 of 10`."""
    return f"{run.standing.step:,} of {'?' if run.standing.num_steps is None else f'{run.standing.num_steps:,}'}"


def loss_text(run: Run) -> str:
    """The newest loss, exactly in a title."""
    loss = run.standing.loss
    if not run.standing.is_finite:
        return "not finite"
    return "none" if loss is None else exact(loss, f"{loss:.4f}")


def verdict(run: Run) -> str:
    """How the run stands, as a line with a mark and a colour."""
    said = run.standing
    colour, mark = {FINISHED: ("yes", "&#10003;"), FAILED: ("no", "&#10007;")}.get(said.status, ("maybe", "?"))
    if said.status == RUNNING:
        mark = "&#9654;"
    reason = f": {said.reason}" if said.reason else ""
    text = f"{said.status} at step {steps_text(run)}{reason}"
    return f'<p class="fit {colour}"><b aria-hidden="true">{mark}</b> {escape(printable(text))}</p>'


def _numbers(run: Run) -> str:
    """The numbers that people ask for first."""
    median, speed, mfu = run.median("step_time_s"), run.speed, run.median("mfu_fraction")
    cards = [
        ("Step", steps_text(run), f"recorded {_utc(run.standing.recorded_s)}"),
        ("Loss", loss_text(run), "of the newest step"),
    ]
    if run.standing.eval_loss is not None:
        cards.append(("Eval loss", exact(run.standing.eval_loss, f"{run.standing.eval_loss:.4f}"), "the newest"))
    if median is not None:
        predicted = run.newest.get("predicted_step_time_s")
        said = "" if predicted is None else f", predicted {predicted:.4g} s"
        cards.append(("Step time", exact(median, f"{median:.4g} s"), f"median{said}"))
    if speed is not None and (value := run.median(speed)) is not None:
        cards.append(("Speed", exact(value, f"{value:,.0f} {SPEED_NAMES[speed]}"), "median"))
    if mfu is not None:
        cards.append(("MFU", exact(mfu, f"{mfu:.1%}"), "median, of the peak of all devices"))
    bubble, measured = run.newest.get("predicted_bubble_fraction"), run.measured_bubble
    if bubble is not None or measured is not None:
        shown = "not known" if bubble is None else exact(bubble, f"{bubble:.1%}")
        note = (
            "predicted"
            if measured is None
            else f"predicted; measured in one step: {exact(measured, f'{measured:.1%}')}"
        )
        cards.append(("Bubble", shown, note))
    if "memory_bytes" in run.newest:
        size = run.newest["memory_bytes"]
        cards.append(("Memory", exact(size, size_text(int(size))), "of the fullest device, as compiled"))
    if "compile_time_s" in run.newest:
        seconds = run.newest["compile_time_s"]
        cards.append(("Compiling", exact(seconds, f"{seconds:.1f} s"), "of the newest start"))
    told = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in cards)
    return f'<dl class="numbers">{"".join(told)}</dl>'


def warnings(run: Run) -> list[str]:
    """What is odd about a run: its files, numbers that are not finite, steps that took long."""
    told = list(run.problems)
    if not run.curves:
        told.append("no step is recorded")
    for name, of in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
        if lost := run.non_finite(name):
            many = f"{len(lost):,} steps, first at step {lost[0]:,}" if len(lost) > 1 else f"step {lost[0]:,}"
            told.append(f"{of} is not finite at {many}")
    if lost := [step for step, loss in run.evaluations if loss is None]:
        told.append(
            f"the eval loss is not finite after step{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:MOST_SLOW]))}"
        )
    if slow := run.slow_steps():
        named = ", ".join(f"step {step:,} {seconds:.3g} s" for step, seconds in slow[:MOST_SLOW])
        took = "steps took" if len(slow) > 1 else "step took"
        told.append(
            f"{len(slow):,} {took} more than {SLOW:g} times the median of {run.median('step_time_s'):.3g} s; "
            f"the slowest: {named}"
        )
    return told


def _warnings(run: Run) -> str:
    items = "".join(f"<li>{escape(printable(each))}</li>" for each in warnings(run))
    return section("To know", f'<ul class="warnings">{items}</ul>') if items else ""


def _figures(run: Run) -> str:
    drawn = of_run(run)
    if not drawn:
        return ""
    num_steps = max(len(points) for points in run.curves.values())
    many = (
        "<p class='soft'>Pale: the least and the greatest of the steps that share a pixel; strong: medians.</p>"
        if num_steps > 4 * 80
        else ""
    )
    return section("Over the steps", f'<div class="figures">{"".join(drawn)}</div>{many}{_table(run)}')


def _table(run: Run) -> str:
    """Numbers of some steps, the first and the last among them, for who cannot see the figures."""
    present = [name for name in NUMBERS if run.values(name)]
    by_step = {name: dict(run.curves[name]) for name in present} | {"eval loss": dict(run.evaluations)}
    steps = sorted({step for name in present for step in by_step[name]})
    if not steps:
        return ""
    every = max(1, len(steps) // NUM_ROWS)
    shown = list(dict.fromkeys([*steps[::every], steps[-1]]))
    names = [*present, *(["eval loss"] if any(step in by_step["eval loss"] for step in shown) else [])]

    def cell(name: str, step: float) -> str:
        if step not in by_step[name]:
            return ""
        value = by_step[name][step]
        return "not finite" if value is None else exact(value, format(value, NUMBERS.get(name, ".4f")))

    rows = [[f"{step:,}", *(cell(name, step) for name in names)] for step in shown]
    listed = table("numbers of some steps", ["step", *(COLUMN_NAMES.get(name, name) for name in names)], rows)
    return f"<details><summary>Numbers of {len(shown)} of {len(steps):,} steps</summary>{listed}</details>"


def _predicted(run: Run) -> str:
    """What the planner foresaw beside what was taken."""
    newest, rows = run.newest, []
    for name, foreseen, taken, text in (
        ("step time", newest.get("predicted_step_time_s"), run.median("step_time_s"), "{:.4g} s".format),
        ("bubble", newest.get("predicted_bubble_fraction"), run.measured_bubble, "{:.1%}".format),
        ("memory of a device", newest.get("predicted_memory_bytes"), newest.get("memory_bytes"), _size),
    ):
        if foreseen is None and taken is None:
            continue
        ratio = f"{taken / foreseen:.3g}" if foreseen and taken is not None else ""
        rows.append([name, *("" if each is None else exact(each, text(each)) for each in (foreseen, taken)), ratio])
    if not rows:
        return ""
    said = table("predicted and taken", ["", "predicted", "taken", "taken / predicted"], rows)
    sizes = [
        (label, newest.get(key))
        for label, key in (("predicted", "predicted_memory_bytes"), ("compiled", "memory_bytes"))
    ]
    known = [(label, {"memory": int(size)}) for label, size in sizes if size is not None and size >= 0]
    bars = stacked(known, ("memory",), None, size_text) if len(known) == 2 else ""
    about = (
        "Timing: the median step; the bubble of a measured timeline (run.timeline=true); memory of the fullest device, "
        "as compiled."
    )
    return section("Predicted and taken", f"{said}{bars}<p class='soft'>{about}</p>")


def _memory(run: Run) -> str:
    """Bars of the ranks by part, and the numbers; one where all are alike, of many the fullest."""
    known = [(rank, sizes) for rank, sizes in enumerate(run.memory) if any(sizes.values())]
    if not known:
        return ""
    if are_alike := len(known) > 1 and all(sizes == known[0][1] for _, sizes in known):
        known = known[:1]
    fullest = sorted(known, key=lambda each: -sum(each[1].values()))[:MOST_BARS]
    parts = list(dict.fromkeys(part for _, sizes in known for part, size in sizes.items() if size))[: len(PARTS)]
    name = lambda rank: "every rank" if are_alike else f"rank {rank}"  # noqa: E731
    drawn = sorted(fullest, key=lambda each: each[0])
    bars = stacked([(name(rank), sizes) for rank, sizes in drawn], parts, None, size_text)
    rows = [
        [
            name(rank),
            *(exact(size, size_text(size)) for size in (*(sizes.get(part, 0) for part in parts), sum(sizes.values()))),
        ]
        for rank, sizes in drawn
    ]
    few = f" The fullest {MOST_BARS} of {len(known)}." if len(known) > MOST_BARS else ""
    legend = "".join(f"<li>{swatch(number)}{escape(printable(part))}</li>" for number, part in enumerate(parts))
    listed = table("memory of each rank by part", ["", *map(escape, map(printable, parts)), "total"], rows)
    about = f"<p class='soft'>Of one device of each rank, as compiled at the newest start.{few}</p>"
    return section(
        "Memory of each rank",
        f'{bars}<ul class="parts">{legend}</ul>{about}<details><summary>Numbers</summary>{listed}</details>',
    )


def _size(value: float) -> str:
    return size_text(int(value))


def _asked(run: Run) -> str:
    words = " ".join(f"<code>{escape(printable(word))}</code>" for word in run.words)
    nothing = "nothing beside the defaults" if run.config else "not known: its settings cannot be read"
    resume = f"<p>To go on with it:</p>{code(run.command)}" if run.command else ""
    return f'<p class="words">{words or nothing}</p>{resume}'


def code(text: str) -> str:
    """A command to copy."""
    return f'<code class="command">{escape(printable(text))}</code>'


def _left(run: Run, file: Path) -> str:
    path, steps = run.standing.path, run.standing.checkpoints
    saved = f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}" if steps else "none"
    rows = [["checkpoints", saved]]
    board = path / "tensorboard"
    if board.is_dir():
        rows.append(["TensorBoard", code(shlex.join(["tensorboard", "--logdir", str(board)]))])
    for name, inside in (("profile", ""), ("timeline", "timeline.html")):
        place = path / name / inside
        if place.exists():
            rows.append([name, link(place, file)])
    rows.append(["directory", link(path, file)])
    return f'<div class="stages">{table("what it left", [], rows)}</div>'


def link(place: Path, file: Path) -> str:
    """A link from a page to a file or directory, which holds as long as both move together."""
    target = os.path.relpath(os.path.abspath(place), os.path.dirname(os.path.abspath(file)))
    return f'<a href="{escape(quote(os.fsencode(target)))}">{escape(printable(str(place)))}</a>'


def _environment(run: Run) -> str:
    rows = [[escape(name), escape(version)] for name, version in run.versions.items()]
    for part, keys in (("mesh", ("dp", "pp", "fsdp")), ("hardware", ("name",)), ("executor", ("name",))):
        values = run.config.get(part)
        if isinstance(values, dict):
            told = " ".join(f"{key}={values[key]}" for key in keys if key in values)
            rows.append([part, escape(printable(told.removeprefix("name=")))])
    if not rows and not run.starts:
        return "<p>Not recorded.</p>"
    settings = f'<div class="stages">{table("versions and settings", [], rows)}</div>' if rows else ""
    return settings + _starts(run)


def _starts(run: Run) -> str:
    """Each start of the run: when, from which step, on what, and where its versions are others than before."""
    if not run.starts:
        return ""
    rows, before = [], {}
    for start in run.starts:
        versions = versions_of(start)
        changed = {name: version for name, version in versions.items() if before and before.get(name) != version}
        before = versions or before
        told = (
            _utc(start.get("at")),
            f"step {start.get('step', '?')}",
            str(start.get("host", "")),
            _devices(start),
            ", ".join(f"{name} {version}" for name, version in changed.items()),
        )
        rows.append([escape(printable(text)) for text in told])
    shown = rows[-MOST_STARTS:]
    columns = ["started", "from", "host", "on", "versions that changed"]
    if not any(row[-1] for row in shown):
        columns, shown = columns[:-1], [row[:-1] for row in shown]
    earlier = (
        f"<p class='soft'>{len(rows) - len(shown)} earlier starts are left out.</p>" if len(rows) > len(shown) else ""
    )
    return f'<div class="starts">{table("starts of the run", columns, shown)}</div>{earlier}'


def _devices(start: Mapping[str, Any]) -> str:
    """`8 x cpu, 2 processes, Linux-6.8`."""
    kind, number, processes = start.get("device_kind"), start.get("num_devices"), start.get("num_processes")
    if kind is None or number is None:
        return ""
    name = kind if kind == start.get("platform") else f"{kind} ({start.get('platform')})"
    of_several = f", {processes} processes" if processes != 1 else ""
    system = f", {start['system']}" if "system" in start else ""
    return f"{number} x {name}{of_several}{system}"


def _utc(seconds: object) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds if isinstance(seconds, float) else nan))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
