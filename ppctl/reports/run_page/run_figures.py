"""The figures of a report: curves over steps, of one run or several."""

from collections.abc import Sequence

from ppctl.reports.charts.page_figures import curves_svg
from ppctl.reports.page_kit import SPEEDS, figure, line_legend
from ppctl.reports.run_page.read_run import RecordedRun

FROM_ZERO = {"lr": "Learning rate", **{name: f"Speed, {unit}" for name, unit in SPEEDS.items()}}
FIGURES = {"loss": "Loss", "eval_loss": "Eval loss", "grad_norm": "Gradient norm", **FROM_ZERO}


def figures_of(runs: Sequence[RecordedRun], labels: Sequence[str]) -> list[str]:
    """Return the figures that at most MOST_LINES runs have values for.

    Of one run, losses of training and of evaluations are one figure.
    """
    drawn = []
    for name, title in FIGURES.items():
        # 1. the curves
        curves = {label: run.curves.get(name, ()) for label, run in zip(labels, runs, strict=True)}
        if len(runs) == 1 and "eval_loss" in runs[0].curves:
            if name == "loss":
                curves = {"train": curves[labels[0]], "eval": runs[0].curves["eval_loss"]}
            elif name == "eval_loss":
                continue
        # 2. the figure
        values = [y for points in curves.values() for _, y in points]
        if any(y is not None for y in values):
            note = "crosses: not finite" if None in values else ""
            svg = curves_svg(curves, title=title, x_name="step", from_zero=name in FROM_ZERO)
            legend = line_legend(curves) if len(curves) > 1 else ""
            drawn.append(figure(title, svg + legend, note))
    return drawn
