"""One run as an html page that loads nothing: status, curves, predicted vs. measured, memory, what is odd."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from ppctl.reports.charts.elements import command_html, exact, link, printable, section, table
from ppctl.reports.charts.html import html_page
from ppctl.reports.run_files import RUNNING
from ppctl.reports.run_page.environment import environment_html, utc_text
from ppctl.reports.run_page.figures import SPEED_NAMES, figures_of_run
from ppctl.reports.run_page.gantt import picture
from ppctl.reports.run_page.predictions import memory_section, predictions_section
from ppctl.reports.run_page.read import SLOW, RecordedRun
from ppctl.reports.run_status import FAILED, FINISHED
from ppctl.reports.terminal import size_text
from ppctl.reports.tracker_commands import tracker_commands

MARK = '<main data-by="ppctl report">'  # tells a page of ours from other files
STYLES = ("plots.css", "plan.css", "sweep.css", "report.css")
MOST_SLOW = 5  # steps that are named
NUM_ROWS = 20  # of the table of numbers, about
NUMBERS = {"loss": ".4f", "grad_norm": ".4g", "lr": ".3e", "step_time_s": ".4g", "tokens_per_s": ",.0f"}
NUMBERS |= {"rows_per_s": ",.0f"}
COLUMN_NAMES = {"grad_norm": "gradient norm", "lr": "learning rate", "step_time_s": "s/step", **SPEED_NAMES}


def run_page(run: RecordedRun, file: Path) -> str:
    """Return the text of the page; `file`: where it will stand, for links to the other files of the run."""
    sections = [
        verdict_line(run),
        _headline(run),
        _warnings(run),
        _figures(run),
        section("The step, rank by rank", picture(run.summary.path, run.pipeline).html),
        predictions_section(run),
        memory_section(run),
        section("The request", _request(run)),
        section("Files", _files(run, file)),
        section("Where it ran", environment_html(run)),
    ]
    return html_page(f"Run: {printable(run.summary.name)}", f"{MARK}\n{''.join(sections)}</main>\n", *STYLES)


def steps_text(run: RecordedRun) -> str:
    """Return steps as in `3 of 10`."""
    return f"{run.summary.step:,} of {'?' if run.summary.num_steps is None else f'{run.summary.num_steps:,}'}"


def loss_text(run: RecordedRun) -> str:
    """Return the newest loss, exactly in a title."""
    loss = run.summary.loss
    if not run.summary.is_finite:
        return "not finite"
    return "none" if loss is None else exact(loss, f"{loss:.4f}")


def verdict_line(run: RecordedRun) -> str:
    """Return the status of the run, a line with a mark and a colour."""
    summary = run.summary
    colour, mark = {FINISHED: ("yes", "&#10003;"), FAILED: ("no", "&#10007;")}.get(summary.status, ("maybe", "?"))
    if summary.status == RUNNING:
        mark = "&#9654;"
    reason = f": {summary.reason}" if summary.reason else ""
    text = f"{summary.status} at step {steps_text(run)}{reason}"
    return f'<p class="fit {colour}"><b aria-hidden="true">{mark}</b> {escape(printable(text))}</p>'


def _headline(run: RecordedRun) -> str:
    """Return the numbers that people ask for first."""
    cards = [
        ("Step", steps_text(run), f"recorded {utc_text(run.summary.recorded_s)}"),
        ("Loss", loss_text(run), "of the newest step"),
        *_speed_cards(run),
        *_device_cards(run),
    ]
    divs = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in cards)
    return f'<dl class="numbers">{"".join(divs)}</dl>'


def _speed_cards(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of evaluation, step time, speed and MFU, where they are recorded."""
    eval_loss, step_s, mfu = run.summary.eval_loss, run.median("step_time_s"), run.median("mfu_fraction")
    if eval_loss is not None:
        yield "Eval loss", exact(eval_loss, f"{eval_loss:.4f}"), "the newest"
    if step_s is not None:
        predicted_s = run.newest.get("predicted_step_time_s")
        note = "median" if predicted_s is None else f"median, predicted {predicted_s:.4g} s"
        yield "Step time", exact(step_s, f"{step_s:.4g} s"), note
    if run.speed is not None and (value := run.median(run.speed)) is not None:
        yield "Speed", exact(value, f"{value:,.0f} {SPEED_NAMES[run.speed]}"), "median"
    if mfu is not None:
        yield "MFU", exact(mfu, f"{mfu:.1%}"), "median, of the peak of all devices"


def _device_cards(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of bubble, memory and compile time, where they are recorded."""
    ideal, bubble = run.newest.get("ideal_bubble_fraction"), run.newest.get("predicted_bubble_fraction")
    kinds = (("predicted", bubble), ("ideal", ideal), ("measured in one step", run.measured_bubble))
    known = [(kind, exact(value, f"{value:.1%}")) for kind, value in kinds if value is not None]
    if known:
        (first, value), *others = known
        yield "Bubble", value, "; ".join([first, *(f"{kind}: {text}" for kind, text in others)])
    if (size := run.newest.get("memory_bytes")) is not None:
        yield "Memory", exact(size, size_text(int(size))), "of the fullest device, as compiled"
    if (seconds := run.newest.get("compile_time_s")) is not None:
        yield "Compiling", exact(seconds, f"{seconds:.1f} s"), "of the newest start"


def warnings_of(run: RecordedRun) -> list[str]:
    """Return what is odd about a run: its files, numbers that are not finite, steps that took long."""
    found = list(run.problems)
    if not run.curves:
        found.append("no step is recorded")
    for name, of in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
        if lost := run.non_finite(name):
            many = f"{len(lost):,} steps, first at step {lost[0]:,}" if len(lost) > 1 else f"step {lost[0]:,}"
            found.append(f"{of} is not finite at {many}")
    if lost := [step for step, loss in run.evaluations if loss is None]:
        found.append(
            f"the eval loss is not finite after step{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:MOST_SLOW]))}"
        )
    if slow := run.slow_steps():
        named = ", ".join(f"step {step:,} {seconds:.3g} s" for step, seconds in slow[:MOST_SLOW])
        took = "steps took" if len(slow) > 1 else "step took"
        found.append(
            f"{len(slow):,} {took} more than {SLOW:g} times the median of {run.median('step_time_s'):.3g} s; "
            f"the slowest: {named}"
        )
    return found


def _warnings(run: RecordedRun) -> str:
    items = "".join(f"<li>{escape(printable(each))}</li>" for each in warnings_of(run))
    return section("To know", f'<ul class="warnings">{items}</ul>') if items else ""


def _figures(run: RecordedRun) -> str:
    drawn = figures_of_run(run)
    if not drawn:
        return ""
    num_steps = max(len(points) for points in run.curves.values())
    many = (
        "<p class='soft'>Pale: the least and the greatest of the steps that share a pixel; strong: medians.</p>"
        if num_steps > 4 * 80
        else ""
    )
    return section("Over the steps", f'<div class="figures">{"".join(drawn)}</div>{many}{_table(run)}')


def _table(run: RecordedRun) -> str:
    """Return numbers of some steps, the first and the last among them, for who cannot see the figures."""
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


def _request(run: RecordedRun) -> str:
    words = " ".join(f"<code>{escape(printable(word))}</code>" for word in run.words)
    no_words = "the defaults" if run.config else "not known: its settings cannot be read"
    resume = f"<p>To resume it:</p>{command_html(run.command)}" if run.command else ""
    return f'<p class="words">{words or no_words}</p>{resume}'


def _files(run: RecordedRun, file: Path) -> str:
    path, steps = run.summary.path, run.summary.checkpoints
    saved = f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}" if steps else "none"
    rows = [["checkpoints", saved]]
    rows += [[title, command_html(command)] for title, command in tracker_commands(path)]
    for name, inside in (("profile", ""), ("timeline", "timeline.html")):
        place = path / name / inside
        if place.exists():
            rows.append([name, link(place, file)])
    rows.append(["directory", link(path, file)])
    return f'<div class="stages">{table("files of the run", [], rows)}</div>'
