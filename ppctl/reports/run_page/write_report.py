"""From runs to a report: where it may be written, its text, and the same numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError
from ppctl.reports.run_page import compare, page
from ppctl.reports.run_page.read import CURVES, Run
from ppctl.reports.terminal import check_file, show_json, write_file

MOST_RUNS = 8  # whose curves are told from each other
FILE = "report.html"


def place_of(out: str | None, paths: Sequence[Path]) -> Path:
    """The file of a report of the runs in these directories; ConfigError where it may not be written."""
    file = Path(out) if out is not None else paths[0] / FILE if len(paths) == 1 else Path(FILE)
    said = f"--out {file}" if out is not None else str(file)
    if file.suffix != ".html":
        raise ConfigError(f"{said}: a report is html. Name a FILE.html.")
    check_file(said, file)
    if file.exists() and not _is_ours(file):
        raise ConfigError(f"{said}: there is such a file, which is no report of ppctl. Move it away, or name another.")
    return file


def serve(runs: Sequence[Run], file: Path, *, as_json: bool) -> int:
    """0 after writing the report of runs to a file that `place_of` gave."""
    write_file(str(file), file, page.page(runs[0], file) if len(runs) == 1 else compare.page(runs, file))
    if as_json:
        differ = compare.differences(runs)
        told = [document(run) for run in runs]
        if len(runs) > 1:
            for index, each in enumerate(told):
                each["differs"] = {name: values[index] for name, values in differ.items()}
        show_json({"file": str(file), "runs": told})
    return 0


def document(run: Run) -> dict[str, Any]:
    """The numbers of a run as JSON has them; null where it has none."""
    said = run.standing
    return {
        "name": said.name,
        "run_dir": str(said.path),
        "status": said.status,
        "reason": said.reason,
        "step": said.step,
        "num_steps": said.num_steps,
        "asked": list(run.words),
        "resume": run.command or None,
        "loss": said.loss,
        "eval_loss": said.eval_loss,
        "medians": {name: run.median(name) for name in CURVES if name not in ("loss", "lr") and name in run.curves},
        **run.newest,
        "measured_bubble_fraction": run.measured_bubble,
        "checkpoints": list(said.checkpoints),
        "slow_steps": [{"step": step, "step_time_s": seconds} for step, seconds in run.slow_steps()[: page.MOST_SLOW]],
        "versions": dict(run.versions),
        "starts": list(run.starts),
        "warnings": page.warnings(run),
    }


def _is_ours(file: Path) -> bool:
    """Whether a file is a report, which may be written again."""
    if not file.is_file():
        return False
    try:
        return page.MARK.encode() in file.read_bytes()
    except OSError:
        return False
