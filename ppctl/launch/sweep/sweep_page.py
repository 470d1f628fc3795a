"""A sweep as a self-contained html page: best jobs, figures over settings, all numbers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ppctl.launch.sweep.sweep_jobs import Job, side_by_side_note
from ppctl.launch.sweep.sweep_records import (
    DONE,
    Best,
    Result,
    decimals,
    equal_errors,
    loss_of,
    state_counts,
)
from ppctl.reports import bubble_names as bubbles
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import MOST_LINES, curves_svg
from ppctl.reports.run_page.write_report import FILE as REPORT

MICROBATCHES, RATE, SEED = "schedule.num_microbatches", "optim.lr", "run.seed"
REPEATS = (SEED, "run.num_steps", "optim.")  # begin settings without effect on speed
SHOWN = (  # columns of the table, from a record
    *("steps", "final_loss", "eval_loss", "step_time_s", "predicted_step_time_s", *kit.SPEEDS),
    *("ideal_bubble_fraction", "predicted_bubble_fraction", "measured_bubble_fraction"),
    *("memory_bytes", "seconds"),
)
LOSSES = ("final_loss", "eval_loss")
ABOUT = (
    "Seconds of a step and tok/s are medians over all steps of a run; predicted: seconds of a "
    f"step by the planner. {bubbles.ABOUT} Memory: of the fullest device, as compiled. Seconds "
    "in all are of this sweep, start and compiling included."
)
Points = list[tuple[float, float]]  # x, y; ascending


class Number(NamedTuple):
    """A number of records that a figure shows over a setting."""

    name: str
    title: str
    form: str  # of the values on the axis, as in {x:.0%}
    predicted: str | None = None  # dashed


def sweep_page(directory: Path, results: Sequence[Result], best: Sequence[Best]) -> str:
    """Return the text of the page."""
    # 1. how it ended
    states = {result.outcome.status for result in results}
    look = kit.NO if "failed" in states else kit.YES if states <= {*DONE} else kit.UNKNOWN
    note = side_by_side_note([result.job for result in results])
    counts = f"{state_counts(results)}."
    # 2. figures of loss, speed and bubble
    done = [result for result in results if result.is_done]
    loss = loss_of(done)
    losses = [Number(loss, kit.NUMBERS[loss][0], "{x:.4g}")]
    bubble = "ideal_bubble_fraction", "bubble", "{x:.0%}", "predicted_bubble_fraction"
    speeds = [
        Number(name, unit, "{x:,.0f}", f"predicted_{name}") for name, unit in kit.SPEEDS.items()
    ]
    speeds.append(Number(*bubble))
    timed = [replace(result, numbers=_with_predicted_speeds(result.numbers)) for result in done]
    return kit.page(
        f"Sweep: {directory}",
        kit.verdict(look, f"{counts} {note}." if note else counts),
        kit.section("The best", *(part for each in best for part in _best(each))),
        _figures_over("Over the learning rate", RATE, (SEED,), done, losses),
        _figures_over("Over the number of microbatches", MICROBATCHES, REPEATS, timed, speeds),
        kit.section("Jobs", _jobs(directory, results)),
        _failures(results),
    )


def _best(best: Best) -> tuple[str, ...]:
    where = f"<p>{kit.text(best.text)}. It is in</p>{kit.command(str(best.place))}"
    return where, f"<p>To train it anew:</p>{kit.command(best.command)}"


def _with_predicted_speeds(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return numbers with the speeds at the predicted seconds of a step, where both are known."""
    predicted_s, step_time_s = numbers["predicted_step_time_s"], numbers["step_time_s"]
    if not predicted_s or not step_time_s:
        return numbers
    known = {name: numbers[name] for name in kit.SPEEDS if numbers[name] is not None}
    speeds = {f"predicted_{name}": v * step_time_s / predicted_s for name, v in known.items()}
    return {**numbers, **speeds}


def _figures_over(
    title: str,
    key: str,
    repeats: tuple[str, ...],
    done: Sequence[Result],
    numbers: Sequence[Number],
) -> str:
    """Return a section with a figure of each number over a swept setting, "" for one value of it.

    A line for each combination of the other settings, except those that begin with `repeats`.
    """
    # 1. the records of each line
    by_line: dict[str, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
    for result in done:
        x = result.job.values.get(key)
        if isinstance(x, int | float) and x > 0:
            line = _line_name(result.job, (key, *repeats))
            by_line[line].append((float(x), result.numbers))
    places = [(name, x) for name, each in by_line.items() for x, _ in each]
    if len({x for _, x in places}) < 2:
        return ""
    drawn = dict(list(by_line.items())[:MOST_LINES])
    # 2. the figures
    means = ["marks: means of jobs that differ only in seed or optimizer"]
    figures = []
    for number in numbers:
        curves, predicted = (
            {line: _means(each, name) for line, each in drawn.items()}
            for name in (number.name, number.predicted)
        )
        if not any(curves.values()):
            continue
        about = ["dashed: as predicted before the run"] * any(predicted.values())
        about += means * (len({*places}) < len(places))
        svg = curves_svg(
            curves,
            title=number.title,
            x_name=key.removeprefix("schedule.num_"),
            y_form=number.form,
            from_zero=key != RATE,
            over_sizes=True,
            predicted=predicted,
        )
        figures.append(kit.figure(number.title, svg, "; ".join(about)))
    # 3. the section
    left_out = len(by_line) - len(drawn)
    few = f"The first {MOST_LINES} lines; {left_out} more are in the table." if left_out else ""
    keys = kit.line_legend(drawn)
    return kit.section(title, keys, kit.soft(few), kit.figures(figures)) if figures else ""


def _line_name(job: Job, without: tuple[str, ...]) -> str:
    """Return the varied settings of a job, except those whose names begin so."""
    varied = {k: v for k, v in job.values.items() if not k.startswith(without)}
    return " ".join(str(v) if k == "schedule" else f"{k}={v}" for k, v in varied.items()) or "jobs"


def _means(records: Sequence[tuple[float, Mapping[str, Any]]], name: str | None) -> Points:
    """Return the mean of a number's known values at each place, [] for no number."""
    values: dict[float, list[float]] = defaultdict(list)
    for x, record in records:
        if name is not None and (value := record.get(name)) is not None:
            values[x].append(value)
    return [(x, mean(at_x)) for x, at_x in sorted(values.items())]


def _jobs(directory: Path, results: Sequence[Result]) -> str:
    numbers = [{**each.numbers, "seconds": each.outcome.seconds} for each in results]
    present = [name for name in SHOWN if any(each[name] is not None for each in numbers)]
    keys = list(dict.fromkeys(name for result in results for name in result.job.values))
    digits = {name: decimals(each[name] for each in numbers) for name in LOSSES if name in present}

    def cell(name: str, value: Any) -> str:
        if name in digits and value is not None:
            return kit.exact(value, f"{value:.{digits[name]}f}")
        return kit.number(name, value)

    rows = []
    for result, known in zip(results, numbers, strict=True):
        job, state = result.job, result.outcome.status
        values = [kit.text(str(job.values.get(name, ""))) for name in keys]
        index, report = str(job.index), job.run_dir / REPORT
        if report.is_file():
            index = kit.link(report, directory / "sweep.html", index)
        status = f'<span class="{state}">{state}</span>'
        rows.append([index, *values, status, *(cell(name, known[name]) for name in present)])
    head = ["job", *map(kit.breakable, keys), "status", *(kit.NUMBERS[name][0] for name in present)]
    return kit.table("all jobs", head, rows, "jobs") + kit.soft(ABOUT)


def _failures(results: Sequence[Result]) -> str:
    parts = []
    for error, jobs in equal_errors(results).items():
        parts += [f"<dt>{job.index}: {kit.text(job.name)}</dt>" for job in jobs]
        parts.append(f"<dd>{kit.text(error)}</dd>")
    return kit.section("What failed", f'<dl class="errors">{"".join(parts)}</dl>') if parts else ""
