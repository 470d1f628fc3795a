"""One run as a self-contained html page: status, curves, predictions, memory, warnings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.reports import bubble_names as bubbles
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import TREND, memory_bars
from ppctl.reports.charts.palette import PARTS
from ppctl.reports.run_files import RUNNING, setting_changes, tracker_commands
from ppctl.reports.run_page.read_run import SLOW, RecordedRun, versions_of
from ppctl.reports.run_page.run_figures import figures_of_run
from ppctl.reports.run_page.step_gantt import step_html
from ppctl.reports.run_status import FAILED, FINISHED
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.mesh_axes import axes_text

MARK = '<main data-by="ppctl report">'  # tells a page of ours from other files
MOST_SLOW = 5  # steps that are named
IDEAL = "ideal_bubble_fraction"


def run_page(run: RecordedRun, file: Path) -> str:
    """Return the text of the page; `file`: its future place, for links to files of the run."""
    return kit.page(
        f"Run: {run.summary.name}",
        verdict_line(run),
        _headline(run),
        kit.section("To know", kit.bullets(warnings_of(run))),
        _figures(run),
        kit.section("The step, rank by rank", step_html(run.summary.path, run.pipeline)),
        predictions_section(run),
        memory_section(run),
        kit.section("The request", _request(run)),
        kit.section("Files", _files(run, file)),
        kit.section("Where it ran", environment_html(run)),
        main=MARK,
    )


def steps_text(run: RecordedRun) -> str:
    """Return steps as in `3 of 10`."""
    step, number = run.summary.step, run.summary.num_steps
    return f"{step:,} of {'?' if number is None else f'{number:,}'}"


def loss_text(run: RecordedRun) -> str:
    """Return the newest loss, exactly in a title."""
    loss = run.summary.loss
    if not run.summary.is_finite:
        return "not finite"
    return "none" if loss is None else kit.exact(loss, f"{loss:.4f}")


def verdict_line(run: RecordedRun) -> str:
    """Return the status of the run, a line with a mark and a colour."""
    summary = run.summary
    looks = {FINISHED: kit.YES, FAILED: kit.NO, RUNNING: kit.GOES_ON}
    look = looks.get(summary.status, kit.UNKNOWN)
    reason = f": {summary.reason}" if summary.reason else ""
    return kit.verdict(look, f"{summary.status} at step {steps_text(run)}{reason}")


def _headline(run: RecordedRun) -> str:
    """Return the cards of the most important numbers."""
    step = ("Step", steps_text(run), f"recorded {utc_text(run.summary.recorded_s)}")
    loss = ("Loss", loss_text(run), "of the newest step")
    return kit.cards([step, loss, *_speed_cards(run), *_device_cards(run)])


def _speed_cards(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the recorded evaluation, step time, speed and MFU."""
    if (loss := run.summary.eval_loss) is not None:
        yield "Eval loss", kit.number("eval_loss", loss), "the newest"
    if (step_s := run.median("step_time_s")) is not None:
        predicted_s = run.newest.get("predicted_step_time_s")
        note = "median" if predicted_s is None else f"median, predicted {predicted_s:.4g} s"
        yield "Step time", kit.exact(step_s, f"{step_s:.4g} s"), note
    if run.speed is not None and (value := run.median(run.speed)) is not None:
        yield "Speed", kit.exact(value, f"{value:,.0f} {kit.SPEEDS[run.speed]}"), "median"
    if (mfu := run.median("mfu_fraction")) is not None:
        yield "MFU", kit.number("mfu_fraction", mfu), "median, of the peak of all devices"


def _device_cards(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the recorded bubble, memory and compile time."""
    newest = run.newest.get
    kinds = {"predicted": newest("predicted_bubble_fraction"), "ideal": newest(IDEAL)}
    kinds["measured in one step"] = run.measured_bubble
    known = [(k, kit.exact(v, f"{v:.1%}")) for k, v in kinds.items() if v is not None]
    if known:
        (first, value), *others = known
        yield "Bubble", value, "; ".join([first, *(f"{kind}: {text}" for kind, text in others)])
    if (size := newest("memory_bytes")) is not None:
        yield "Memory", kit.number("memory_bytes", size), "of the fullest device, as compiled"
    if (seconds := newest("compile_time_s")) is not None:
        yield "Compiling", kit.exact(seconds, f"{seconds:.1f} s"), "of the newest start"


def warnings_of(run: RecordedRun) -> list[str]:
    """Return warnings: problems of the files, numbers that are not finite, slow steps."""
    warnings = list(run.problems)
    if not run.curves:
        warnings.append("no step is recorded")
    # 1. numbers that are not finite
    for name, of in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
        if lost := run.non_finite(name):
            many = f"{len(lost):,} steps, first at " if len(lost) > 1 else ""
            warnings.append(f"{of} is not finite at {many}step {lost[0]:,}")
    if lost := [step for step, loss in run.evaluations if loss is None]:
        steps = f"step{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:MOST_SLOW]))}"
        warnings.append(f"the eval loss is not finite after {steps}")
    # 2. slow steps
    if slow := run.slow_steps():
        named = ", ".join(f"step {step:,} {seconds:.3g} s" for step, seconds in slow[:MOST_SLOW])
        took = "steps took" if len(slow) > 1 else "step took"
        warnings.append(
            f"{len(slow):,} {took} more than {SLOW:g} times the median of "
            f"{run.median('step_time_s'):.3g} s; the slowest: {named}"
        )
    return warnings


def _figures(run: RecordedRun) -> str:
    drawn = figures_of_run(run)
    if not drawn:
        return ""
    num_steps = max(len(points) for points in run.curves.values())
    many = "Pale: the least and the greatest of the steps that share a pixel; strong: medians."
    about = kit.soft(many if num_steps > 4 * TREND else "")
    return kit.section("Over the steps", kit.figures(drawn), about)


def _request(run: RecordedRun) -> str:
    words = " ".join(f"<code>{kit.text(word)}</code>" for word in run.words)
    no_words = "the defaults" if run.config else "not known: its settings cannot be read"
    resume = f"<p>To resume it:</p>{kit.command(run.command)}" if run.command else ""
    return f'<p class="words">{words or no_words}</p>{resume}'


def _files(run: RecordedRun, file: Path) -> str:
    path, steps = run.summary.path, run.summary.checkpoints
    saved = f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}"
    rows = [["checkpoints", saved if steps else "none"]]
    rows += [[title, kit.command(words)] for title, words in tracker_commands(path)]
    for name, inside in (("profile", ""), ("timeline", "timeline.html")):
        place = path / name / inside
        if place.exists():
            rows.append([name, kit.link(place, file)])
    rows.append(["directory", kit.link(path, file)])
    return kit.table("files of the run", [], rows, "stages")


# --- predictions, memory and environment ---------------------------------------------------------

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
    """Return bars of the ranks by part; one bar if all are alike, else the fullest."""
    known = [(rank, sizes) for rank, sizes in enumerate(run.memory) if any(sizes.values())]
    if not known:
        return ""
    are_alike = len(known) > 1 and all(sizes == known[0][1] for _, sizes in known)
    known = known[:1] if are_alike else known
    present = dict.fromkeys(part for _, sizes in known for part, size in sizes.items() if size)
    parts = [*present][: len(PARTS)]
    fullest = sorted(known, key=lambda each: -sum(each[1].values()))[:MOST_BARS]
    shown = sorted(fullest, key=lambda each: each[0])
    named = [("every rank" if are_alike else f"rank {rank}", sizes) for rank, sizes in shown]
    few = f" The fullest {MOST_BARS} of {len(known)}." if len(known) > MOST_BARS else ""
    about = kit.soft(f"Of one device of each rank, as compiled at the newest start.{few}")
    return kit.section("Memory of each rank", memory_bars(named, parts), about)


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
