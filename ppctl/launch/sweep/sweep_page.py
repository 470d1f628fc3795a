"""A sweep as a self-contained html page: best jobs, figures over settings, all numbers."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from ppctl.launch.sweep import sweep_records as records
from ppctl.launch.sweep.sweep_jobs import DONE, FILES, NUMBERS, Result
from ppctl.launch.sweep.sweep_records import LOSSES
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import MOST_LINES, curves_svg
from ppctl.reports.run_page.one_run_page import MARK
from ppctl.reports.terminal_output import ABOUT_BUBBLES
from ppctl.reports.write_report import FILE as REPORT

SEED = "run.seed"  # jobs that differ only in the seed are repeats
DRAWN = (*LOSSES, *kit.SPEEDS)
# columns of the table, from a record
SHOWN = (*(name for name in NUMBERS if name != "predicted_memory_bytes"), "seconds")
ABOUT = (
    "Step time and tok/s are medians over all steps of a run; the predicted step time is the "
    f"planner's. {ABOUT_BUBBLES} Memory: that of the fullest device, as compiled. Seconds in all "
    "cover this sweep, with start and compilation."
)


def sweep_page(directory: Path, results: Sequence[Result], file: Path | None = None) -> str:
    """Return the page's HTML. file: the path of the page; None: in the sweep's directory."""
    file = file or directory / FILES[1]
    states = {result.status for result in results}
    look = kit.NO if "failed" in states else kit.YES if states <= {*DONE} else kit.UNKNOWN
    note = records.side_by_side_note(results)
    counts = f"{records.state_counts(results)}."
    best = (
        f"<p>{kit.text(each.text)}. It is in</p>{kit.command(each.place)}"
        for each in records.best_of(results)
    )
    done = [result for result in results if result.is_done]
    keys = dict.fromkeys(key for result in done for key in result.job.values if key != SEED)
    return kit.page(
        f"Sweep: {directory}",
        kit.verdict(look, f"{counts} {note}." if note else counts),
        kit.section("The best", *best),
        *(_figures_over(key, done) for key in keys),
        kit.section("Jobs", _jobs(file, results)),
        _failures(results),
        main=MARK,
    )


def _figures_over(key: str, done: Sequence[Result]) -> str:
    """Return a section that plots the runs' numbers against a swept setting, a figure for each.

    key: the setting. Jobs with a value that is not a positive number are omitted; with fewer than
    two different values the result is empty. A line has the means over repeats for one combination
    of the other settings.
    """
    # 1. group the jobs by line
    by_line: dict[str, list[tuple[float, Result]]] = defaultdict(list)
    for result in done:
        x, values = result.job.values.get(key), result.job.values
        if isinstance(x, int | float) and not isinstance(x, bool) and x > 0:
            line = " ".join(f"{k}={v}" for k, v in values.items() if k not in (key, SEED))
            by_line[line or "jobs"].append((float(x), result))
    if len({x for places in by_line.values() for x, _ in places}) < 2:
        return ""
    drawn = dict(list(by_line.items())[:MOST_LINES])
    # 2. draw the figures
    figures = []
    for name in DRAWN:
        curves = {line: _means(places, name) for line, places in drawn.items()}
        if any(curves.values()):
            title = kit.NUMBERS[name][0]
            svg = curves_svg(curves, title=title, x_name=key, over_sizes=True)
            figures.append(kit.figure(title, svg))
    # 3. make the section
    left_out = len(by_line) - len(drawn)
    few = f"The first {MOST_LINES} lines; {left_out} more are in the table." if left_out else ""
    return kit.section(f"Over {key}", kit.line_legend(drawn), kit.soft(few), kit.figures(figures))


def _means(places: Sequence[tuple[float, Result]], name: str) -> list[tuple[float, float]]:
    """Return (x, mean of number `name`) for each x in `places`, ascending."""
    values: dict[float, list[float]] = defaultdict(list)
    for x, result in places:
        if (value := result.numbers[name]) is not None:
            values[x].append(value)
    return [(x, mean(at_x)) for x, at_x in sorted(values.items())]


def _jobs(file: Path, results: Sequence[Result]) -> str:
    numbers = [{**each.numbers, "seconds": each.seconds} for each in results]
    present = [name for name in SHOWN if any(each[name] is not None for each in numbers)]
    keys = list(dict.fromkeys(name for result in results for name in result.job.values))
    cells = [kit.column(name, [each[name] for each in numbers]) for name in present]
    rows = []
    for result, *known in zip(results, *cells, strict=True):
        job, state = result.job, result.status
        values = [kit.text(str(job.values.get(name, ""))) for name in keys]
        index, report = str(job.index), job.run_dir / REPORT
        if report.is_file():
            index = kit.link(report, file, index)
        status = f'<span class="{state}">{state}</span>'
        rows.append([index, *values, status, *known])
    head = ["job", *map(kit.breakable, keys), "status", *(kit.NUMBERS[name][0] for name in present)]
    return kit.table("all jobs", head, rows, "jobs") + kit.soft(ABOUT)


def _failures(results: Sequence[Result]) -> str:
    parts = []
    for error, jobs in records.equal_errors(results).items():
        parts += [f"<dt>{job.index}: {kit.text(job.name)}</dt>" for job in jobs]
        parts.append(f"<dd>{kit.text(error)}</dd>")
    return kit.section("What failed", f'<dl class="errors">{"".join(parts)}</dl>') if parts else ""
