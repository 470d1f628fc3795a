"""The figures of a report: curves over steps, of one run or several, and step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ppctl.reports.charts.page_figures import FAR_BIN, Points, curves_svg, histogram_svg, is_far
from ppctl.reports.page_kit import SPEEDS, figure, line_legend
from ppctl.reports.run_page.read_run import RecordedRun

SPEED_STEPS = 5  # over which speed is drawn
_SPEED = f"Speed, {{}}, over {SPEED_STEPS} steps"


def figures_of_run(run: RecordedRun) -> list[str]:
    """Return the figures of one run, those it has records for."""
    losses = {"train": run.curves.get("loss", ())}
    if run.evaluations:
        losses["eval"] = run.evaluations
    drawn = [_figure("Loss", losses)]
    for name, title in (("grad_norm", "Gradient norm"), ("lr", "Learning rate")):
        drawn.append(_figure(title, {title: run.curves.get(name, ())}, from_zero=name == "lr"))
    if run.speed is not None:
        unit = SPEEDS[run.speed]
        drawn.append(_figure(_SPEED.format(unit), {unit: _speed(run, run.speed)}, from_zero=True))
    drawn.append(_step_times(run))
    return [each for each in drawn if each]


def figures_of_runs(
    runs: Sequence[RecordedRun], labels: Sequence[str], num_together: int
) -> list[list[str]]:
    """Return the figures of losses and speeds, for each num_together runs, on the same axes."""
    kinds = [("Loss", [run.curves.get("loss", ()) for run in runs], False)]
    kinds.append(("Eval loss", [run.evaluations for run in runs], False))
    for speed, unit in SPEEDS.items():
        kinds.append((_SPEED.format(unit), [_speed(run, speed) for run in runs], True))
    pages = []
    for first in range(0, len(runs), num_together):
        some = slice(first, first + num_together)
        drawn = (
            _figure(
                title,
                dict(zip(labels[some], curves[some], strict=True)),
                from_zero=from_zero,
                others=curves,
            )
            for title, curves, from_zero in kinds
        )
        pages.append([each for each in drawn if each])
    return pages


def _step_times(run: RecordedRun) -> str:
    values = [value for value in run.values("step_time_s") if value > 0]
    median, predicted = run.median("step_time_s"), run.newest.get("predicted_step_time_s")
    if not values or not median or median < 0:
        return ""
    named = {"median": median}
    notes = [f"solid: the median, {median:.4g} s"]
    if predicted is not None and predicted > 0:
        named["predicted"] = predicted
        far = is_far(median, predicted)
        notes.append(f"{'not drawn' if far else 'dashed'}: as predicted, {predicted:.4g} s")
    if beyond := sum(value > FAR_BIN * median for value in values):
        notes.append(f"last bar: {beyond:,} of more than {FAR_BIN * median:.4g} s")
    drawn = histogram_svg(values, named, title="Step times", x_name="seconds of a step")
    return figure("Step times, number of steps", drawn, "; ".join(notes))


def over_steps(speeds: Points, step_times_s: Points, num_steps: int) -> Points:
    """Return at each step the speed over the newest `num_steps` ones: their work by their time.

    A host that is late makes one step too short and the next one too long, which evens out. At a
    step without speed or time it begins anew.

    >>> over_steps([(1, 4.0), (2, 8.0), (3, 3.0)], [(1, 1.5), (2, 0.5), (3, 1.5)], 2)
    [(1, 4.0), (2, 5.0), (3, 4.25)]
    """
    seconds = dict(step_times_s)
    window: deque[tuple[float, float]] = deque(maxlen=num_steps)  # (work, seconds)
    points: list[tuple[float, float | None]] = []
    for step, speed in speeds:
        measured_s = seconds.get(step)
        if speed is None or measured_s is None or measured_s <= 0:
            window.clear()
        else:
            window.append((speed * measured_s, measured_s))
            speed = sum(work for work, _ in window) / sum(time_s for _, time_s in window)
        points.append((step, speed))
    return points


def _speed(run: RecordedRun, name: str) -> Points:
    return over_steps(run.curves.get(name, ()), run.curves.get("step_time_s", ()), SPEED_STEPS)


def _figure(
    title: str,
    curves: Mapping[str, Points],
    *,
    from_zero: bool = False,
    others: Sequence[Points] = (),
) -> str:
    """Return a figure with its caption, on axes for `others` too; "" without a finite value."""
    values = [y for points in curves.values() for _, y in points]
    if all(y is None for y in values):
        return ""
    note = "crosses: not finite" if None in values else ""
    drawn = curves_svg(curves, title=title, x_name="step", from_zero=from_zero, others=others)
    return figure(title, drawn + (line_legend(curves) if len(curves) > 1 else ""), note)
