"""A sweep as one html page that loads nothing: the best jobs, speed and bubble over microbatches, all numbers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import quote

from ppctl.config.sweep import Search
from ppctl.launch.sweep.best import DONE, best_of, decimals
from ppctl.launch.sweep.jobs import SHARED, Job, Outcome, Sweep, ran_side_by_side
from ppctl.launch.sweep.live_table import equal_errors, state_counts
from ppctl.launch.sweep.theory import bubble_curve
from ppctl.reports import bubbles
from ppctl.reports.charts.elements import exact, section, table
from ppctl.reports.charts.html import html_page
from ppctl.reports.charts.palette import line_sample
from ppctl.reports.charts.plots import MOST_LINES, Curve, Line, curves_svg, lines_svg
from ppctl.reports.run_page.write_report import FILE as REPORT
from ppctl.reports.terminal import size_text

MICROBATCHES = "schedule.num_microbatches"
RATE, SEED = "optim.lr", "run.seed"
REPEATS = (SEED, "run.num_steps")  # and those of the optimizer: jobs that differ in these alone are as fast
SPEEDS = {"tokens_per_s": "tokens/s", "rows_per_s": "rows/s"}
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {  # of a record: column, how it is written
    "steps": ("steps", "{:,}".format),
    "final_loss": ("loss", "{:.4f}".format),
    "eval_loss": ("eval loss", "{:.4f}".format),
    "step_time_s": ("s/step", "{:.4g}".format),
    "predicted_step_time_s": ("s/step, predicted", "{:.4g}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "rows_per_s": ("rows/s", "{:,.0f}".format),
    "ideal_bubble_fraction": ("bubble, ideal", "{:.1%}".format),
    "predicted_bubble_fraction": ("bubble, predicted", "{:.1%}".format),
    "measured_bubble_fraction": ("bubble, measured", "{:.1%}".format),
    "memory_bytes": ("memory", size_text),
    "seconds": ("s in all", "{:,.1f}".format),
}
ABOUT = (
    "Seconds of a step and tokens/s are medians over all steps of a run; predicted: seconds of a step by the planner. "
    f"{bubbles.ABOUT} Memory: of the fullest device, as compiled. Seconds in all are of this sweep, start and "
    "compiling included."
)
Records = Sequence[Mapping[str, Any]]


def sweep_page(sweep: Sweep, outcomes: Sequence[Outcome], records: Records, num_earlier: int = 0) -> str:
    """Return the page; `num_earlier`: jobs of earlier sweeps in this directory, which the other files keep."""
    found = {outcome.status for outcome in outcomes}
    colour, mark = (
        ("no", "&#10007;") if "failed" in found else ("yes", "&#10003;") if found <= {*DONE} else ("maybe", "?")
    )
    shared = f" {SHARED}." if ran_side_by_side(sweep) else ""
    sections = [
        f'<p class="fit {colour}"><b aria-hidden="true">{mark}</b> {escape(state_counts(outcomes))}.{shared}</p>',
        _best(sweep, records),
        _learning_rates(sweep, records),
        _figures(sweep, records) if sweep.study is None else _history(sweep.study.search, records),
        section("Jobs", _jobs(sweep, outcomes, records) + _earlier(num_earlier)),
        _failures(sweep, outcomes),
    ]
    content = f"<main>\n{''.join(sections)}</main>\n"
    return html_page(f"Sweep: {sweep.directory}", content, "plots.css", "plan.css", "sweep.css")


def _best(sweep: Sweep, records: Records) -> str:
    lines = [
        f"<p>{escape(best.text)}. It is in</p><code>{escape(str(best.place))}</code>"
        f"<p>To train it anew:</p><code>{escape(best.command)}</code>"
        for best in best_of(sweep, records)
    ]
    return section("The best", f'<div class="best">{"".join(lines)}</div>') if lines else ""


def _figures(sweep: Sweep, records: Records) -> str:
    """Return the figures of speed and bubble over microbatches, where the sweep has several numbers of these.

    A line for each combination of the other settings that a step takes longer or shorter for.
    """
    by_line: dict[str, list[tuple[Job, Mapping[str, Any]]]] = defaultdict(list)
    for job, record in zip(sweep.jobs, records, strict=True):
        if record["status"] in DONE and job.config is not None and job.config.executor.IS_PIPELINED:
            by_line[_line_name(job)].append((job, record))
    if len({_size(job) for jobs in by_line.values() for job, _ in jobs}) < 2:
        return ""
    drawn = dict(list(by_line.items())[:MOST_LINES])
    names = "".join(f"<li>{line_sample(number)}{escape(name)}</li>" for number, name in enumerate(drawn))
    figures, sizes = [], [(name, _size(job)) for name, jobs in by_line.items() for job, _ in jobs]
    means = ["marks: means of jobs that differ in seed or optimizer alone"] * (len({*sizes}) < len(sizes))
    for speed, unit in SPEEDS.items():
        lines = [_line(name, jobs, speed, _predicted_speed(jobs, speed)) for name, jobs in drawn.items()]
        if any(line.points for line in lines):
            about = ["dashed: as predicted before the run"] * any(line.predicted for line in lines)
            figures.append(_figure(lines, unit, about + means, "{:,.0f}".format))
    lines = [
        _line(name, jobs, "ideal_bubble_fraction", _theory(jobs), "measured_bubble_fraction")
        for name, jobs in drawn.items()
    ]
    if any(line.points for line in lines):
        about = ["dashed: the theory, on ranks that run freely"] * any(line.predicted for line in lines)
        about += ["marks: the executor's own order"]
        about += ["hollow: measured"] * any(line.measured for line in lines)
        figures.append(_figure(lines, "bubble", about + means, "{:.0%}".format))
    left_out = len(by_line) - len(drawn)
    few = f"<p class='soft'>The first {MOST_LINES} lines; {left_out} more are in the table.</p>" if left_out else ""
    body = f'<ul class="keys">{names}</ul>{few}<div class="figures">{"".join(figures)}</div>'
    return section("Over the number of microbatches", body) if figures else ""


def _learning_rates(sweep: Sweep, records: Records) -> str:
    """Return the figure of the loss over the learning rate, where the sweep tried several.

    A line for each combination of the other settings; over seeds, which only repeat a job, it is the mean.
    """
    done = [(job, record) for job, record in zip(sweep.jobs, records, strict=True) if record["status"] in DONE]
    by = "eval_loss" if done and all(record["eval_loss"] is not None for _, record in done) else "final_loss"
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for job, record in done:
        rate = job.values.get(RATE)
        if isinstance(rate, int | float) and rate > 0 and record[by] is not None:
            others = [f"{name}={value}" for name, value in job.values.items() if name not in (RATE, SEED)]
            found[" ".join(others) or "all jobs"][float(rate)].append(record[by])
    if len({rate for line in found.values() for rate in line}) < 2:
        return ""
    drawn = dict(list(found.items())[:MOST_LINES])
    lines = [Line(name, [(x, mean(values)) for x, values in sorted(line.items())]) for name, line in drawn.items()]
    names = [f"<li>{line_sample(number)}{escape(name)}</li>" for number, name in enumerate(drawn)] * (len(drawn) > 1)
    keys = f'<ul class="keys">{"".join(names)}</ul>' if names else ""
    few = len(found) - len(drawn)
    about = [f"{few} more lines are in the table."] * bool(few)
    if any(len(values) > 1 for line in found.values() for values in line.values()):
        about.append("Marks are means over the seeds.")
    title = SHOWN[by][0]
    svg = lines_svg(lines, title=title, x_name=RATE, y_text="{:.4g}".format, from_zero=False, is_log=True)
    figure = f"<figure><figcaption>{title}</figcaption>{svg}<p class='soft'>{' '.join(about)}</p></figure>"
    return section("Over the learning rate", f'{keys}<div class="figures">{figure}</div>')


def _history(search: Search, records: Records) -> str:
    """Return the figure of what a search looks for, over its jobs, and the best so far."""
    name, better = search.metric, min if search.is_minimized else max
    points = [(float(record["job"]), record[name]) for record in records if record[name] is not None]
    if len(points) < 2:
        return ""
    so_far = accumulate((value for _, value in points), better)
    best = [(job, value) for (job, _), value in zip(points, so_far, strict=True)]
    curves = [Curve("best so far", best), Curve("each job", points, is_marked=True)]
    drawn = curves_svg(curves, title=name, x_name="job")
    return section("The search", f'<div class="figures"><figure><figcaption>{name}</figcaption>{drawn}</figure></div>')


def _line_name(job: Job) -> str:
    """Return the name of a line: the settings that the sweep varies, those aside that only repeat a job."""
    assert job.config is not None
    is_repeat = lambda name: name in (MICROBATCHES, *REPEATS) or name.startswith("optim.")  # noqa: E731
    others = {name: value for name, value in job.values.items() if not is_repeat(name)}
    parts = [str(value) if name == "schedule" else f"{name}={value}" for name, value in others.items()]
    return " ".join(parts) or job.config.schedule.name


def _size(job: Job) -> int:
    assert job.config is not None
    return job.config.schedule.num_microbatches


def _line(
    name: str,
    jobs: Sequence[tuple[Job, Mapping[str, Any]]],
    number: str,
    expected: Sequence[tuple[float, float]],
    other: str | None = None,
) -> Line:
    def points(of: str) -> list[tuple[float, float]]:
        return _means((float(_size(job)), record[of]) for job, record in jobs if record[of] is not None)

    return Line(name, points(number), expected, points(other) if other else ())


def _predicted_speed(jobs: Sequence[tuple[Job, Mapping[str, Any]]], speed: str) -> list[tuple[float, float]]:
    """Return (microbatches, speed at the predicted seconds of a step) of each job that has both."""
    found = []
    for job, record in jobs:
        predicted_s = record["predicted_step_time_s"]
        if predicted_s and record[speed] is not None and record["step_time_s"]:
            found.append((float(_size(job)), record[speed] * record["step_time_s"] / predicted_s))
    return _means(found)


def _means(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean of the values at each place, ascending."""
    found: dict[float, list[float]] = defaultdict(list)
    for x, value in points:
        found[x].append(value)
    return [(x, mean(values)) for x, values in sorted(found.items())]


def _theory(jobs: Sequence[tuple[Job, Mapping[str, Any]]]) -> list[tuple[float, float]]:
    config = jobs[0][0].config
    assert config is not None
    return bubble_curve(config, [_size(job) for job, _ in jobs])


def _figure(lines: Sequence[Line], name: str, about: Sequence[str], y_text: Callable[[float], str]) -> str:
    drawn = lines_svg(lines, title=name, x_name="microbatches", y_text=y_text)
    return f"<figure><figcaption>{name}</figcaption>{drawn}<p class='soft'>{'; '.join(about)}</p></figure>"


def _jobs(sweep: Sweep, outcomes: Sequence[Outcome], records: Records) -> str:
    present = [name for name in SHOWN if any(record[name] is not None for record in records)]
    keys = list(dict.fromkeys(name for job in sweep.jobs for name in job.values))
    texts = {name: SHOWN[name][1] for name in present}
    for name in {"final_loss", "eval_loss"} & texts.keys():
        texts[name] = f"{{:.{decimals(record[name] for record in records)}f}}".format
    rows = []
    for job, outcome, record in zip(sweep.jobs, outcomes, records, strict=True):
        values = [escape(str(job.values.get(name, ""))) for name in keys]
        numbers = ["" if record[name] is None else exact(record[name], texts[name](record[name])) for name in present]
        status = f'<span class="{outcome.status}">{outcome.status}</span>'
        rows.append([_number(job, sweep.directory), *values, status, *numbers])
    head = ["job", *map(_breakable, keys), "status", *(SHOWN[name][0] for name in present)]
    return f'<div class="jobs">{table("all jobs", head, rows)}</div><p class="soft">{ABOUT}</p>'


def _number(job: Job, directory: Path) -> str:
    """Return the number of a job, as a link to its report if there is one."""
    report = job.run_dir / REPORT
    if not report.is_file():
        return str(job.index)
    target = quote(os.fsencode(os.path.relpath(report.absolute(), directory.absolute())))
    return f'<a href="{escape(target)}" title="{escape(f"report of job {job.index}")}">{job.index}</a>'


def _earlier(number: int) -> str:
    if not number:
        return ""
    jobs = "One job" if number == 1 else f"{number} jobs"
    return f"<p class='soft'>{jobs} of earlier sweeps in this directory: see sweep.csv and sweep.json.</p>"


def _failures(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    errors = [
        "".join(f"<dt>{job.index}: {escape(job.name)}</dt>" for job in jobs) + f"<dd>{escape(error)}</dd>"
        for error, jobs in equal_errors(sweep, outcomes).items()
    ]
    return section("What failed", f'<dl class="errors">{"".join(errors)}</dl>') if errors else ""


def _breakable(name: str) -> str:
    """Return the name of a setting, which may go on in the next line after a dot or an underscore."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")
