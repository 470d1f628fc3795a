"""A sweep as one self-contained html page: the best jobs, speed and bubble, all numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import mean
from typing import Any

from ppctl.config import Config
from ppctl.config.groups.sweep_settings import Search
from ppctl.config.schedule_from_config import trained_share
from ppctl.errors import ScheduleError
from ppctl.launch.sweep.best_job import DONE, Recorded, best_of, decimals, finished, loss_of
from ppctl.launch.sweep.live_table import equal_errors, state_counts
from ppctl.launch.sweep.sweep_jobs import Job, Outcome, Sweep, side_by_side_note
from ppctl.reports import bubble_names as bubbles
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.svg_plots import MOST_LINES, Curve, Line, curves_svg, lines_svg
from ppctl.reports.run_page.write_report import FILE as REPORT
from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.search.extrapolated_cost import MOST_TASKS
from ppctl.schedule.simulator import simulate

MICROBATCHES = "schedule.num_microbatches"
RATE, SEED = "optim.lr", "run.seed"
REPEATS = (SEED, "run.num_steps", "optim.")  # begin settings without effect on speed
SHOWN = (  # columns of the table, from a record
    *("steps", "final_loss", "eval_loss", "step_time_s", "predicted_step_time_s", *kit.SPEEDS),
    *("ideal_bubble_fraction", "predicted_bubble_fraction", "measured_bubble_fraction"),
    *("memory_bytes", "seconds"),
)
LOSSES, BUBBLES = ("final_loss", "eval_loss"), ("ideal", "measured")
ABOUT = (
    "Seconds of a step and tok/s are medians over all steps of a run; predicted: seconds of a "
    f"step by the planner. {bubbles.ABOUT} Memory: of the fullest device, as compiled. Seconds "
    "in all are of this sweep, start and compiling included."
)
Records = Sequence[Mapping[str, Any]]
Points = Iterable[tuple[float, float | None]]  # x, value; None: unknown


def sweep_page(
    sweep: Sweep, outcomes: Sequence[Outcome], records: Records, num_earlier: int = 0
) -> str:
    """Return the page; `num_earlier`: jobs of earlier sweeps in this directory's other files."""
    states = {outcome.status for outcome in outcomes}
    look = kit.NO if "failed" in states else kit.YES if states <= {*DONE} else kit.UNKNOWN
    note = side_by_side_note(sweep)
    counts = f"{state_counts(outcomes)}."
    return kit.page(
        f"Sweep: {sweep.directory}",
        kit.verdict(look, f"{counts} {note}." if note else counts),
        _best(sweep, records),
        _learning_rates(sweep, records),
        _figures(sweep, records) if sweep.study is None else _history(sweep.study.search, records),
        kit.section("Jobs", _jobs(sweep, outcomes, records), _earlier(num_earlier)),
        _failures(sweep, outcomes),
    )


def _best(sweep: Sweep, records: Records) -> str:
    parts = []
    for best in best_of(sweep, records):
        parts.append(f"<p>{kit.text(best.text)}. It is in</p>{kit.command(str(best.place))}")
        parts.append(f"<p>To train it anew:</p>{kit.command(best.command)}")
    return kit.section("The best", *parts)


def _figures(sweep: Sweep, records: Records) -> str:
    """Return the figures of speed and bubble over microbatches, "" for a single number of these.

    A line for each combination of the other settings that affect the time of a step.
    """
    # 1. the jobs of each line
    by_line: dict[str, list[Recorded]] = defaultdict(list)
    for job, record in finished(sweep, records):
        if job.config is not None and job.config.executor.IS_PIPELINED:
            by_line[_line_name(job)].append((job, record))
    sizes = [(name, _size(job)) for name, jobs in by_line.items() for job, _ in jobs]
    if len({size for _, size in sizes}) < 2:
        return ""
    drawn = dict(list(by_line.items())[:MOST_LINES])
    # 2. speed, measured and predicted
    figures: list[str] = []
    means = "marks: means of jobs that differ only in seed or optimizer"
    repeats = [means] * (len({*sizes}) < len(sizes))
    for speed, unit in kit.SPEEDS.items():
        lines = [Line(n, _points(j, speed), _predicted_speed(j, speed)) for n, j in drawn.items()]
        about = ["dashed: as predicted before the run"] * any(line.predicted for line in lines)
        figures += _figure(lines, unit, about + repeats, "{:,.0f}".format)
    # 3. bubble, in theory, simulated and measured
    lines = []
    for name, jobs in drawn.items():
        ideal, measured = (_points(jobs, f"{kind}_bubble_fraction") for kind in BUBBLES)
        lines.append(Line(name, ideal, _theory(jobs), measured))
    about = ["dashed: the theory, on ranks that run freely"] * any(line.predicted for line in lines)
    about += ["marks: the executor's own order"]
    about += ["hollow: measured"] * any(line.measured for line in lines)
    figures += _figure(lines, "bubble", about + repeats, "{:.0%}".format)
    if not figures:
        return ""
    left_out = len(by_line) - len(drawn)
    few = f"The first {MOST_LINES} lines; {left_out} more are in the table." if left_out else ""
    keys = kit.line_legend(drawn)
    return kit.section("Over the number of microbatches", keys, kit.soft(few), kit.figures(figures))


def _learning_rates(sweep: Sweep, records: Records) -> str:
    """Return the figure of the loss over the learning rate, where the sweep tried several.

    A line for each combination of the other settings, the mean over seeds.
    """
    # 1. the losses of each line
    done = finished(sweep, records)
    by = loss_of(done)
    by_line: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for job, record in done:
        rate = job.values.get(RATE)
        if isinstance(rate, int | float) and rate > 0 and record[by] is not None:
            others = {name: value for name, value in job.values.items() if name not in (RATE, SEED)}
            name = " ".join(f"{name}={value}" for name, value in others.items()) or "all jobs"
            by_line[name].append((float(rate), record[by]))
    if len({rate for points in by_line.values() for rate, _ in points}) < 2:
        return ""
    # 2. the figure
    drawn = dict(list(by_line.items())[:MOST_LINES])
    lines = [Line(name, _means(points)) for name, points in drawn.items()]
    few = len(by_line) - len(drawn)
    about = [f"{few} more lines are in the table."] * bool(few)
    if any(len(points) > len({rate for rate, _ in points}) for points in by_line.values()):
        about.append("Marks are means over the seeds.")
    title = kit.NUMBERS[by][0]
    how = {"y_text": "{:.4g}".format, "from_zero": False, "is_log": True}
    figure = kit.figure(title, lines_svg(lines, title=title, x_name=RATE, **how), " ".join(about))
    keys = kit.line_legend(drawn) if len(drawn) > 1 else ""
    return kit.section("Over the learning rate", keys, kit.figures([figure]))


def _history(search: Search, records: Records) -> str:
    """Return the figure of the searched number over the jobs, and the best so far."""
    name, better = search.metric, min if search.is_minimized else max
    points = [(float(each["job"]), each[name]) for each in records if each[name] is not None]
    if len(points) < 2:
        return ""
    so_far = accumulate((value for _, value in points), better)
    best = [(job, value) for (job, _), value in zip(points, so_far, strict=True)]
    curves = [Curve("best so far", best), Curve("each job", points, is_marked=True)]
    drawn = curves_svg(curves, title=name, x_name="job")
    return kit.section("The search", kit.figures([kit.figure(name, drawn)]))


def _line_name(job: Job) -> str:
    """Return the name of a line: the varied settings, except those that only repeat a job."""
    assert job.config is not None
    varied = {k: v for k, v in job.values.items() if not k.startswith((MICROBATCHES, *REPEATS))}
    parts = [str(v) if k == "schedule" else f"{k}={v}" for k, v in varied.items()]
    return " ".join(parts) or job.config.schedule.name


def _size(job: Job) -> int:
    assert job.config is not None
    return job.config.schedule.num_microbatches


def _points(jobs: Sequence[Recorded], name: str) -> list[tuple[float, float]]:
    return _means((float(_size(job)), record[name]) for job, record in jobs)


def _predicted_speed(jobs: Sequence[Recorded], speed: str) -> list[tuple[float, float]]:
    """Return (microbatches, speed at the predicted seconds of a step) of each job that has both."""
    points = []
    for job, record in jobs:
        predicted_s = record["predicted_step_time_s"]
        if predicted_s and record[speed] is not None and record["step_time_s"]:
            points.append((float(_size(job)), record[speed] * record["step_time_s"] / predicted_s))
    return _means(points)


def _means(points: Points) -> list[tuple[float, float]]:
    """Return the mean of the known values at each place, ascending."""
    values: dict[float, list[float]] = defaultdict(list)
    for x, value in points:
        if value is not None:
            values[x].append(value)
    return [(x, mean(at_x)) for x, at_x in sorted(values.items())]


def _theory(jobs: Sequence[Recorded]) -> list[tuple[float, float]]:
    config = jobs[0][0].config
    assert config is not None
    return bubble_curve(config, [_size(job) for job, _ in jobs])


def bubble_curve(config: Config, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return (microbatches, idle share 0..1) of the schedule, simulated on ranks that run freely.

    Empty without a pipeline, and for a schedule that is no family.
    """
    schedule = config.schedule
    if schedule.name not in FAMILIES or not config.executor.IS_PIPELINED:
        return []
    costs = task_costs(config.executor.remat, trained_share(config.model, config.optim))
    curve = []
    for num in sorted(set(sizes)):
        try:
            built = build(schedule.name, config.mesh.pp, num, **schedule.knobs())
        except ScheduleError:
            continue  # a size that the family cannot serve: that job has failed
        if sum(map(len, built.ranks)) <= MOST_TASKS:
            curve.append((float(num), simulate(built, costs).bubble_fraction))
    return curve


def _figure(
    lines: Sequence[Line], name: str, about: Sequence[str], y_text: Callable[[float], str]
) -> list[str]:
    """Return a figure; none without points."""
    if not any(line.points for line in lines):
        return []
    drawn = lines_svg(lines, title=name, x_name="microbatches", y_text=y_text)
    return [kit.figure(name, drawn, "; ".join(about))]


def _jobs(sweep: Sweep, outcomes: Sequence[Outcome], records: Records) -> str:
    present = [name for name in SHOWN if any(record[name] is not None for record in records)]
    keys = list(dict.fromkeys(name for job in sweep.jobs for name in job.values))
    digits = {name: decimals(each[name] for each in records) for name in LOSSES if name in present}

    def cell(name: str, value: Any) -> str:
        if name in digits and value is not None:
            return kit.exact(value, f"{value:.{digits[name]}f}")
        return kit.number(name, value)

    rows = []
    for job, outcome, record in zip(sweep.jobs, outcomes, records, strict=True):
        values = [kit.text(str(job.values.get(name, ""))) for name in keys]
        status = f'<span class="{outcome.status}">{outcome.status}</span>'
        index, report = str(job.index), job.run_dir / REPORT
        if report.is_file():
            index = kit.link(report, sweep.directory / "sweep.html", index)
        rows.append([index, *values, status, *(cell(name, record[name]) for name in present)])
    head = ["job", *map(kit.breakable, keys), "status", *(kit.NUMBERS[name][0] for name in present)]
    return kit.table("all jobs", head, rows, "jobs") + kit.soft(ABOUT)


def _earlier(number: int) -> str:
    if not number:
        return ""
    jobs = "One job" if number == 1 else f"{number} jobs"
    return kit.soft(f"{jobs} of earlier sweeps in this directory: see sweep.csv and sweep.json.")


def _failures(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    parts = []
    for error, jobs in equal_errors(sweep, outcomes).items():
        parts += [f"<dt>{job.index}: {kit.text(job.name)}</dt>" for job in jobs]
        parts.append(f"<dd>{kit.text(error)}</dd>")
    return kit.section("What failed", f'<dl class="errors">{"".join(parts)}</dl>') if parts else ""
