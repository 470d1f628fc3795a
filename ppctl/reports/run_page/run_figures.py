"""The figures of a report: curves over steps, of one run or several, and step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ppctl.reports.charts.svg_plots import Curve, curves_svg, histogram_svg, is_far
from ppctl.reports.charts.thinning import Points
from ppctl.reports.page_kit import SPEEDS, figure
from ppctl.reports.run_page.read_run import RecordedRun

SPEED_STEPS = 5  # over which speed is drawn
FEW_EVALUATIONS = 40  # that carry a mark each
_SPEED = f"Speed, {{}}, over {SPEED_STEPS} steps"


def figures_of_run(run: RecordedRun) -> list[str]:
    """Return the figures of one run, those it has records for."""
    drawn = [_loss(run)]
    for name, title in (("grad_norm", "Gradient norm"), ("lr", "Learning rate")):
        drawn.append(_figure(title, [_curve(run, name, title)], from_zero=name == "lr"))
    if run.speed is not None:
        unit = SPEEDS[run.speed]
        drawn.append(_figure(_SPEED.format(unit), [_speed(run, run.speed, unit)], from_zero=True))
    drawn.append(_step_times(run))
    return [each for each in drawn if each]


def figures_of_runs(
    runs: Sequence[RecordedRun], labels: Sequence[str], num_together: int
) -> list[list[str]]:
    """Return the figures of losses and speeds, for each num_together runs, on the same axes."""
    named = list(zip(runs, labels, strict=True))
    losses = [_curve(run, "loss", label) for run, label in named]
    evals = [Curve(label, run.evaluations, _lost(run.evaluations)) for run, label in named]
    kinds = [("Loss", losses, False), ("Eval loss", evals, False)]
    for speed, unit in SPEEDS.items():
        kinds.append((_SPEED.format(unit), [_speed(run, speed, name) for run, name in named], True))
    pages = []
    for first in range(0, len(named), num_together):
        drawn = (
            _figure(title, curves[first : first + num_together], from_zero=from_zero, others=curves)
            for title, curves, from_zero in kinds
        )
        pages.append([each for each in drawn if each])
    return pages


def _loss(run: RecordedRun) -> str:
    curves = [_curve(run, "loss", "train")]
    if run.evaluations:
        is_marked = len(run.evaluations) <= FEW_EVALUATIONS
        curves.append(Curve("eval", run.evaluations, _lost(run.evaluations), is_marked))
    return _figure("Loss", curves)


def _step_times(run: RecordedRun) -> str:
    values = [value for value in run.values("step_time_s") if value > 0]
    median, predicted = run.median("step_time_s"), run.newest.get("predicted_step_time_s")
    if not values or not median or median < 0:
        return ""
    named = [("median", median)]
    note = "solid: the median"
    if predicted is not None and predicted > 0:
        named.append(("predicted", predicted))
        far = f"; predicted: {predicted:.4g} s, too far to be drawn"
        note += far if is_far(median, predicted) else "; dashed: as predicted"
    drawn = histogram_svg(values, named, title="Step times", x_name="seconds of a step")
    return figure("Step times, number of steps", drawn, note)


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


def _speed(run: RecordedRun, name: str, label: str) -> Curve:
    points = over_steps(run.curves.get(name, ()), run.curves.get("step_time_s", ()), SPEED_STEPS)
    return Curve(label, points, _lost(points))


def _curve(run: RecordedRun, name: str, label: str) -> Curve:
    points = run.curves.get(name, ())
    return Curve(label, points, _lost(points))


def _lost(points: Points) -> list[float]:
    return [x for x, y in points if y is None]


def _figure(
    title: str, curves: Sequence[Curve], *, from_zero: bool = False, others: Sequence[Curve] = ()
) -> str:
    """Return a figure with its caption, on axes for `others` too; "" without a finite value."""
    if not any(y is not None for curve in curves for _, y in curve.points):
        return ""
    note = "crosses: not finite" if any(curve.lost for curve in curves) else ""
    drawn = curves_svg(curves, title=title, x_name="step", from_zero=from_zero, others=others)
    return figure(title, drawn, note)
