"""`ppctl plan`: say what a request takes before it trains: stages, bubble and memory of each rank."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ppctl.config import Config
from ppctl.planner.plan import predicted
from ppctl.planner.plan_page import picture_of, plan_page
from ppctl.planner.plan_terminal import show_plan
from ppctl.reports.terminal import check_file, show_json, write_file
from ppctl.training.checks import check_evaluations
from ppctl.training.job import assemble


def plan(config: Config, *, as_json: bool) -> int:
    """Print the prediction for a request, and write plan.html; return 1 where it does not fit, else 0."""
    file = config.plan.html
    if file is not None:
        check_file(f"plan.html={file}", Path(file))  # refused before the work
    job = assemble(config, only_planned=True)
    note = check_evaluations(config.run, job.data)
    found = predicted(job)
    if file is not None:
        write_file(f"plan.html={file}", Path(file), plan_page(found, config, picture_of(job, found.unknown)))
    if as_json:
        show_json(asdict(found))
    else:
        show_plan(found, config)
        if note is not None:
            print(f"note      {note}")
    return int(found.fits is False)
