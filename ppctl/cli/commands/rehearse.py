"""`ppctl rehearse`: run the ranks of a large run one by one on one device, simulate the whole."""

from dataclasses import asdict
from pathlib import Path

from ppctl.config import Config
from ppctl.planner.rehearsal.rehearse_ranks import rehearse as run_ranks
from ppctl.planner.show.plan_page import rehearsal_page
from ppctl.planner.show.plan_terminal import show_rehearsal
from ppctl.reports.terminal_output import check_file, show_json, write_file


def rehearse(config: Config, *, as_json: bool) -> int:
    """Print a step's time and memory on the whole mesh, write the page plan.html; return 0."""
    file = config.plan.html
    if file is not None:
        check_file(f"plan.html={file}", Path(file))  # checked before the work
    found, timeline = run_ranks(config)
    if file is not None:
        write_file(f"plan.html={file}", Path(file), rehearsal_page(found, timeline))
    if as_json:
        show_json(asdict(found))
    else:
        show_rehearsal(found)
    return 0
