"""One run as a self-contained html page: status, curves, predictions, memory, warnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import TREND
from ppctl.reports.run_files import RUNNING, tracker_commands
from ppctl.reports.run_page.read_run import SLOW, RecordedRun
from ppctl.reports.run_page.run_figures import figures_of_run
from ppctl.reports.run_page.run_sections import (
    environment_html,
    memory_section,
    predictions_section,
    utc_text,
)
from ppctl.reports.run_page.step_gantt import picture
from ppctl.reports.run_status import FAILED, FINISHED

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
        kit.section("The step, rank by rank", picture(run.summary.path, run.pipeline).html),
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
