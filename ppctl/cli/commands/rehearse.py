"""`ppctl rehearse`: run the ranks of a large run one by one on one device, and simulate the whole."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ppctl.config import Config
from ppctl.planner.rehearsal_output import rehearsal_page, show_rehearsal
from ppctl.planner.rehearse import rehearse as run_ranks
from ppctl.reports.terminal import check_file, show_json, write_file


def rehearse(config: Config, *, as_json: bool) -> int:
    """Print what a step of the whole mesh takes, and write rehearse.html."""
    file = config.rehearse.html
    if file is not None:
        check_file(f"rehearse.html={file}", Path(file))  # refused before the work
    found, timeline = run_ranks(config)
    if file is not None:
        write_file(f"rehearse.html={file}", Path(file), rehearsal_page(found, timeline, config))
    if as_json:
        show_json(asdict(found))
    else:
        show_rehearsal(found, config)
    return 0
