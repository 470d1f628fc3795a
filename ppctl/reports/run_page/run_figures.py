"""The figures of a report: curves over steps, of one run or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppctl.reports.charts.page_figures import Points, curves_svg
from ppctl.reports.page_kit import SPEEDS, figure, line_legend
from ppctl.reports.run_page.read_run import RecordedRun

SPEED_STEPS = 5  # over which speed is drawn
SPEED = f"Speed, {{}}, over {SPEED_STEPS} steps"


def figures_of_run(run: RecordedRun) -> list[str]:
    """Return the figures of one run, those it has records for."""
    losses = {"train": run.curves.get("loss", ())}
    if "eval_loss" in run.curves:
        losses["eval"] = run.curves["eval_loss"]
    drawn = [_figure("Loss", losses)]
    for name, title in (("grad_norm", "Gradient norm"), ("lr", "Learning rate")):
        drawn.append(_figure(title, {title: run.curves.get(name, ())}, from_zero=name == "lr"))
    if run.speed is not None:
        unit = SPEEDS[run.speed]
        drawn.append(_figure(SPEED.format(unit), {unit: speeds_of(run, run.speed)}, from_zero=True))
    return [each for each in drawn if each]


def figures_of_runs(runs: Sequence[RecordedRun], labels: Sequence[str]) -> list[str]:
    """Return the figures of losses and speeds of at most MOST_LINES runs."""
    kinds = [("Loss", [run.curves.get("loss", ()) for run in runs], False)]
    kinds.append(("Eval loss", [run.curves.get("eval_loss", ()) for run in runs], False))
    for speed, unit in SPEEDS.items():
        kinds.append((SPEED.format(unit), [speeds_of(run, speed) for run in runs], True))
    drawn = (
        _figure(title, dict(zip(labels, curves, strict=True)), from_zero=from_zero)
        for title, curves, from_zero in kinds
    )
    return [each for each in drawn if each]


def speeds_of(run: RecordedRun, name: str) -> Points:
    """Return at each step the speed over the newest SPEED_STEPS ones: their work by their time.

    A host that is late makes one step too short and the next one too long, which evens out.
    """
    seconds = dict(run.curves.get("step_time_s", ()))
    known = []  # step, work, seconds
    for step, speed in run.curves.get(name, ()):
        if speed is not None and (step_s := seconds.get(step)):
            known.append((step, speed * step_s, step_s))
    windows = [known[max(0, i - SPEED_STEPS) : i] for i in range(1, len(known) + 1)]
    return [(w[-1][0], sum(work for _, work, _ in w) / sum(s for *_, s in w)) for w in windows]


def _figure(title: str, curves: Mapping[str, Points], *, from_zero: bool = False) -> str:
    """Return a figure with its caption; "" without a finite value."""
    values = [y for points in curves.values() for _, y in points]
    if all(y is None for y in values):
        return ""
    note = "crosses: not finite" if None in values else ""
    drawn = curves_svg(curves, title=title, x_name="step", from_zero=from_zero)
    return figure(title, drawn + (line_legend(curves) if len(curves) > 1 else ""), note)
