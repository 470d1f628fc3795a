"""`ppctl plan`: predict a run's stages, bubble, step time and memory of each rank."""

from dataclasses import asdict
from pathlib import Path

from ppctl.cli.choices import request_words
from ppctl.config import Config
from ppctl.planner.make_plan import predicted
from ppctl.planner.show.plan_page import cluster_of, picture_of, plan_page
from ppctl.planner.show.plan_terminal import show_plan
from ppctl.reports.terminal_output import check_file, show_json, write_file
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.job_checks import check_evaluations


def plan(config: Config, *, as_json: bool) -> int:
    """Print the prediction, write the page plan.html; return 1 if memory is too small, else 0."""
    file = config.plan.html
    if file is not None:
        check_file(f"plan.html={file}", Path(file))  # checked before the work
    job = assemble(config, only_planned=True)
    note = check_evaluations(config.run, job.data)
    found = predicted(job)
    if file is not None:
        words = request_words(asdict(config))
        cluster = cluster_of(job, found)
        page = plan_page(found, picture_of(job, found.unknown), words, cluster)
        write_file(f"plan.html={file}", Path(file), page)
    if as_json:
        show_json(asdict(found))
    else:
        show_plan(found, note)
    return int(found.fits is False)
