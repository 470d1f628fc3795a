"""The columns of a list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ppctl.reports.recorded_settings import setting_text
from ppctl.reports.run_files import RunSummary
from ppctl.reports.terminal_output import age_text

Column = Callable[[RunSummary, float], str]  # text at a time, in seconds since 1970


def columns_of(runs: Sequence[RunSummary]) -> dict[str, Column]:
    """Return the columns by title; those that are empty for all runs are left out."""
    found: dict[str, Column] = {
        "run": lambda run, _: run.name,
        "status": lambda run, _: run.status,
        "step": lambda run, _: steps_text(run),
        "loss": lambda run, _: _loss_text(run),
        "eval loss": lambda run, _: _eval_text(run),
        "mesh": lambda run, _: setting_text(run.config, "mesh") or "",
        "schedule": lambda run, _: setting_text(run.config, "schedule") or "",
        "lr": lambda run, _: setting_text(run.config, "optim.lr") or "",
        "age": lambda run, now_s: age_text(now_s - run.recorded_s),
    }
    return {title: text for title, text in found.items() if any(text(run, 0.0) for run in runs)}


def steps_text(run: RunSummary) -> str:
    """Return steps as in `3 of 10`."""
    return f"{run.step} of {'?' if run.num_steps is None else run.num_steps}"


def _loss_text(run: RunSummary) -> str:
    if not run.is_finite:
        return "not finite"
    return "" if run.loss is None else f"{run.loss:.4f}"


def _eval_text(run: RunSummary) -> str:
    return "" if run.eval_loss is None else f"{run.eval_loss:.4f}"
