"""One run as a self-contained html page: status, curves, step, predictions, memory, warnings."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.config.schedule_from_config import Planned
from ppctl.errors import PpctlError
from ppctl.reports import measured_timeline_file as timelines, page_kit as kit
from ppctl.reports.charts.draw_schedule import charts_html, too_many_tasks
from ppctl.reports.charts.page_figures import curves_svg, heat_svg, memory_bars
from ppctl.reports.charts.schedule_drawing import Drawing, number_text
from ppctl.reports.palette import PARTS
from ppctl.reports.recorded_settings import setting_text
from ppctl.reports.run_files import RUNNING, record_number, setting_changes, tracker_commands
from ppctl.reports.run_page.read_run import DROPPED, LOAD, RecordedRun, versions_of
from ppctl.reports.run_status import FAILED, FINISHED
from ppctl.reports.terminal_output import ABOUT_BUBBLES, bubble_text, iso_text, seconds_text

MARK = '<main data-by="ppctl report">'  # identifies a report among html files
MOST_BARS = 16  # ranks whose memory is drawn
LOOKS = {FINISHED: kit.YES, FAILED: kit.NO, RUNNING: kit.GOES_ON}
RAN_WITH = ("mesh", "hardware", "executor", "schedule")  # choices listed on the page
CURVES = "With many steps, a pale curve shows least and greatest values, a strong one medians."
HEAT = {  # title of each heat map, and the number drawn in the darkest colour
    LOAD: ("Load of experts: tokens of the most loaded expert over the mean", 1.0),
    DROPPED: ("Tokens dropped by model.moe.capacity", 0.0),
}
PREDICTIONS = f"Step time: the median. {ABOUT_BUBBLES} Memory: of the fullest device, as compiled."
FROM_ZERO = {"lr": "Learning rate", **{name: f"Speed, {unit}" for name, unit in kit.SPEEDS.items()}}
FIGURES = {"loss": "Loss", "eval_loss": "Eval loss", "grad_norm": "Gradient norm", **FROM_ZERO}
HOW = (
    "Not measured. With executor=mpmd, run.timeline=true times every task of one step; with "
    "executor=spmd, run.profile=N traces them."
)
UNITS = (
    "Ideal: equal stages. A microbatch through 1/p of the model takes {}. F, the forward, is the "
    "unit, called 1 s. I, the gradient of inputs, takes another 1 s if it reruns the forward. W, "
    "the gradient of weights, takes 1 s times the trained share of the layers' weights (below 1 "
    "with LoRA)."
)
MEANS = (
    "The simulation uses each stage's measured mean times, so the difference shows order, "
    "transfers and waits."
)
LOCKSTEP = "Simulated: ticks in lockstep, each as long as its slowest rank."


def run_page(run: RecordedRun, file: Path) -> str:
    """Return the text of the page. file: the page's path, for relative links to the run's files."""
    summary = run.summary
    reason = f": {summary.reason}" if summary.reason else ""
    status = f"{summary.status} at step {summary.steps_text}{reason}"
    drawn = kit.figures(figures_of([run], [summary.name]))
    return kit.page(
        f"Run: {summary.name}",
        kit.verdict(LOOKS.get(summary.status, kit.UNKNOWN), status),
        kit.cards(_cards(run)),
        kit.section("To know", kit.bullets(warnings_of(run))),
        kit.section("Over the steps", drawn, kit.soft(CURVES if drawn else "")),
        kit.section("Balance of experts", *_experts(run)),
        kit.section("The step, rank by rank", _step_html(summary.path, run.pipeline)),
        _predictions(run),
        _memory(run),
        kit.section("The request", _request(run)),
        kit.section("Files", _files(run, file)),
        kit.section("Where it ran", _environment(run)),
        main=MARK,
    )


def loss_text(run: RecordedRun) -> str:
    """Return the newest loss as html, with the exact number in a title."""
    missing = "none" if run.summary.is_finite else "not finite"
    return kit.number("loss", run.summary.loss, missing)


def _cards(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the most important recorded numbers."""
    newest, summary = run.newest.get, run.summary
    # 1. progress
    recorded = iso_text(summary.recorded_s) or "at an unknown time"
    yield "Step", summary.steps_text, f"recorded {recorded}"
    yield "Loss", loss_text(run), "of the newest step"
    if summary.eval_loss is not None:
        at = summary.eval_note or "of the newest step"
        yield "Eval loss", kit.number("eval_loss", summary.eval_loss), at
    # 2. numbers
    predicted_s, speed = newest("predicted_step_time_s"), run.speed or ""
    timed = "median" if predicted_s is None else f"median, predicted {seconds_text(predicted_s)}"
    shares = newest("ideal_bubble_fraction"), newest("predicted_bubble_fraction")
    shares = (*shares, run.measured_bubble)
    bubble = next((share for share in reversed(shares) if share is not None), None)
    for name, value, form, note in (
        ("Step time", run.median("step_time_s"), seconds_text, timed),
        ("Speed", run.median(speed), f"{{:,.0f}} {kit.SPEEDS.get(speed)}".format, "median"),
        ("MFU", run.median("mfu_fraction"), "{:.1%}".format, "median, of the peak of all devices"),
        ("Bubble", bubble, "{:.1%}".format, bubble_text(*shares)),
        ("Compiling", newest("compile_time_s"), "{:.1f} s".format, "of the newest start"),
    ):
        if value is not None:
            yield name, kit.exact(value, form(value)), note
    if (size := newest("memory_bytes")) is not None:
        yield "Memory", kit.number("memory_bytes", size), "of the fullest device, as compiled"


def warnings_of(run: RecordedRun) -> list[str]:
    """Return warnings on problems of the files and on numbers that are not finite."""
    warnings = [*run.problems, *([] if run.curves else ["no step is recorded"])]
    for name, of in (("loss", "loss"), ("grad_norm", "gradient norm"), ("eval_loss", "eval loss")):
        if name in run.curves and (number := run.curves[name].num_lost):
            many = f"{number:,} steps, first at " if number > 1 else ""
            first = run.curves[name].first_lost
            warnings.append(f"the {of} is not finite at {many}step {first:,}")
    return warnings


def _request(run: RecordedRun) -> str:
    words = " ".join(f"<code>{kit.text(word)}</code>" for word in run.words)
    no_words = "the defaults" if run.summary.config else "not known: its settings cannot be read"
    note = f" ({run.summary.resume_note})" if run.summary.resume_note else ""
    resume = f"<p>To resume it{note}:</p>{kit.command(run.command)}" if run.command else ""
    return f'<p class="words">{words or no_words}</p>{resume}'


def _files(run: RecordedRun, file: Path) -> str:
    path, steps = run.summary.path, run.summary.checkpoints
    saved = f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}"
    rows = [["checkpoints", saved if steps else "none"]]
    rows += [[title, kit.command(words)] for title, words in tracker_commands(path)]
    places = {"profile": path / "profile", "timeline": path / "timeline" / "timeline.html"}
    rows += [[name, kit.link(at, file)] for name, at in places.items() if os.path.exists(at)]
    rows.append(["directory", kit.link(path, file)])
    return kit.table("files of the run", [], rows, "stages")


def _predictions(run: RecordedRun) -> str:
    """Return a table of predictions and measurements; "" if none is recorded."""
    newest, rows = run.newest.get, []
    for name, key, measured in (
        ("step time", "predicted_step_time_s", run.median("step_time_s")),
        ("bubble", "predicted_bubble_fraction", run.measured_bubble),
        ("ideal bubble", "ideal_bubble_fraction", None),
        ("memory of a device", "predicted_memory_bytes", newest("memory_bytes")),
    ):
        predicted = newest(key)
        if predicted is not None or measured is not None:
            ratio = f"{measured / predicted:.3g}" if predicted and measured is not None else ""
            rows.append([name, kit.number(key, predicted), kit.number(key, measured), ratio])
    if not rows:
        return ""
    columns = ["", "predicted", "measured", "measured / predicted"]
    listed = kit.table("predicted and measured", columns, rows)
    return kit.section("Predicted and measured", listed, kit.soft(PREDICTIONS))


def _memory(run: RecordedRun) -> str:
    """Return memory bars of the fullest ranks, or one bar if all ranks are equal."""
    known = {f"rank {rank}": sizes for rank, sizes in enumerate(run.memory) if any(sizes.values())}
    if not known:
        return ""
    first, *others = known.values()
    if others and all(sizes == first for sizes in others):
        known = {"every rank": first}
    parts = dict.fromkeys(part for each in known.values() for part, size in each.items() if size)
    fullest = sorted(known, key=lambda name: -sum(known[name].values()))[:MOST_BARS]
    named = [(name, sizes) for name, sizes in known.items() if name in fullest]
    few = f" The fullest {MOST_BARS} of {len(known)}." if len(known) > MOST_BARS else ""
    about = kit.soft(f"Of one device of each rank, as compiled at the newest start.{few}")
    bars = memory_bars(named, [*parts][: len(PARTS)])
    return kit.section("Memory of each rank", bars, about)


def _experts(run: RecordedRun) -> Iterator[str]:
    """Yield heat maps of experts and a note on the most loaded layer; nothing without experts."""
    drawn = []
    for name, blocks in run.layers.items():
        title, least = HEAT[name]
        if name == LOAD or any(value > 0 for row in blocks.values for value in row):
            drawn.append(kit.figure(title, heat_svg(*blocks, title=title, least=least)))
    yield kit.figures(drawn)
    if LOAD in run.layers:
        blocks = run.layers[LOAD]
        loads = [(value, l) for l, value in enumerate(blocks.values[-1]) if value == value]
        load, l = max(loads, default=(1.0, 0))
        yield kit.soft(
            f"1 is an even load. In the last column the most loaded expert has {load:.3g} times "
            f"the mean, in layer {l}. With many steps, a column shows its greatest values."
        )


def _environment(run: RecordedRun) -> str:
    """Return the layout, the starts with devices and changed versions, and changed settings."""
    # 1. the layout
    texts = [(name, setting_text(run.summary.config, name)) for name in RAN_WITH]
    rows = [[name, kit.text(text)] for name, text in texts if text is not None]
    content = kit.table("choices", [], rows, "stages") if rows else ""
    # 2. the starts
    rows, before = [], {}
    for start in run.starts:
        versions = versions_of(start)
        changed = [f"{name} {v}" for name, v in versions.items() if before.get(name) != v]
        before = versions or before
        at, step = iso_text(record_number(start, "at")) or "?", f"step {start.get('step', '?')}"
        facts = at, step, start.get("host", ""), _devices(start), ", ".join(changed)
        rows.append([kit.text(str(fact)) for fact in facts])
    columns = ["started", "from", "host", "on", "versions, and which changed"]
    content += kit.table("starts of the run", columns, rows, "starts") if rows else ""
    # 3. settings
    changes = [f"since step {step}: {change}" for step, change in setting_changes(run.starts)]
    content += f"<p>Settings that changed:</p>{kit.bullets(changes)}" if changes else ""
    return content or "<p>Not recorded.</p>"


def _devices(start: Mapping[str, Any]) -> str:
    """Return the devices of a recorded start, as in `8 x cpu, 2 processes, Linux-6.8`."""
    kind, number, processes = map(start.get, ("device_kind", "num_devices", "num_processes"))
    if kind is None or number is None:
        return ""
    name = kind if kind == start.get("platform") else f"{kind} ({start.get('platform')})"
    of_several = f", {processes} processes" if processes != 1 else ""
    system = f", {start['system']}" if "system" in start else ""
    return f"{number} x {name}{of_several}{system}"


def figures_of(runs: Sequence[RecordedRun], labels: Sequence[str]) -> list[str]:
    """Return a figure of each number that runs have recorded; one run's losses share a figure."""
    drawn = []
    for name, title in FIGURES.items():
        # 1. the curves
        curves = {label: run.points(name) for label, run in zip(labels, runs, strict=True)}
        if len(runs) == 1 and "eval_loss" in runs[0].curves:
            if name == "loss":
                curves = {"train": curves[labels[0]], "eval": runs[0].points("eval_loss")}
            elif name == "eval_loss":
                continue
        # 2. the figure
        values = [y for points in curves.values() for _, y in points]
        if any(y is not None for y in values):
            note = "crosses: not finite" if None in values else ""
            svg = curves_svg(curves, title=title, x_name="step", from_zero=name in FROM_ZERO)
            legend = kit.line_legend(curves) if len(curves) > 1 else ""
            drawn.append(kit.figure(title, svg + legend, note))
    return drawn


def _step_html(run_dir: Path, pipeline: Planned | str) -> str:
    """Return notes, then charts of a measured step and its simulation, else of a simulated step."""
    notes: list[str] = []
    measured = _measured(run_dir, pipeline, notes)
    if measured:
        return charts_html(measured, notes)
    if isinstance(pipeline, str):
        return charts_html((), [*notes, pipeline])
    if reason := too_many_tasks(sum(map(len, pipeline.step.schedule.ranks))):
        return charts_html((), [*notes, reason])
    timeline = pipeline.step.timeline(pipeline.step.costs)
    drawing = Drawing(f"{pipeline.label}, ideal", timeline)
    kinds = dict.fromkeys("".join(kind.replace("B", "IW") for kind in drawing.kinds))
    seconds = {kind: timeline.costs.seconds(kind, 0, 1) for kind in kinds}
    units = UNITS.format(", ".join(f"{k} {number_text(s)} s" for k, s in seconds.items()))
    notes += [HOW, units] if pipeline.step.ticks is None else [HOW, units, LOCKSTEP]
    return charts_html([drawing], notes)


def _measured(run_dir: Path, pipeline: Planned | str, notes: list[str]) -> Sequence[Drawing]:
    """Return the measured step and its simulation, or (); add lines on both to `notes`."""
    timed = run_dir / "timeline" / timelines.FILES[0]
    traced = run_dir / "profile" / timelines.TASKS_FILE
    label = "the schedule" if isinstance(pipeline, str) else pipeline.label
    for file in (timed, traced):
        ticks, explained = None, [MEANS]
        try:
            if file == timed:
                timeline, which = timelines.read_timeline(file, label), "one step"
                how = "run.timeline=true"
            elif isinstance(pipeline, str) or pipeline.step.ticks is None:
                continue
            else:
                timeline, num_steps = timelines.read_profile(file, pipeline.step.schedule)
                which = f"the median one of {num_steps} traced steps, first device of each rank"
                how, ticks, explained = "run.profile=N", pipeline.step.ticks, [LOCKSTEP, MEANS]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, PpctlError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            line = str(reason).partition("\n")[0].rstrip(".")
            notes.append(f"{file} cannot be drawn: {line}.")
            continue
        if reason := too_many_tasks(len(timeline.start_s)):
            notes.append(f"{reason} It is in {file.parent}.")
            continue
        notes += [f"Measured: {which} ({how}).", *explained]
        return timelines.measured_and_simulated(timeline, ticks, label)
    return ()
