"""`ppctl plan`: say what a request takes before it trains: stages, bubble and memory of each rank."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.planner.plan import predicted
from ppctl.planner.plan_page import picture_of, plan_page
from ppctl.planner.plan_terminal import show_plan
from ppctl.planner.published.compare import as_json as compared_json
from ppctl.planner.published.compare import compare
from ppctl.planner.published.rows import read_rows
from ppctl.planner.published.show import picture, show
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


def published(file: str, image: str | None, *, as_json: bool) -> int:
    """Print published steps next to their predictions, and write a picture of them; return 0."""
    if image is not None:
        if Path(image).suffix not in (".svg", ".png"):
            raise ConfigError(f"--picture {image}: neither an .svg nor a .png. Use published.svg.")
        check_file(f"--picture {image}", Path(image))  # refused before the work
    compared = compare(read_rows(Path(file)))
    if image is not None:
        write_file(f"--picture {image}", Path(image), picture(compared, Path(image).suffix[1:]))
    if as_json:
        show_json(compared_json(compared))
    else:
        show(compared)
    return 0
