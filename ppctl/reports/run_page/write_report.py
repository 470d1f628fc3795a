"""Reports of runs: where one may be written, its text, and the same numbers as JSON."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.reports.foreign_files import printable
from ppctl.reports.recorded_settings import differing_settings
from ppctl.reports.run_page.compare_page import compare_page
from ppctl.reports.run_page.one_run_page import MARK, run_page
from ppctl.reports.run_page.read_run import RecordedRun
from ppctl.reports.runs_table import run_document
from ppctl.reports.terminal_output import check_file, show_json, write_file

FILE = "report.html"


def place_of(out: str | None, paths: Sequence[Path]) -> Path:
    """Return the file of a report of the runs in these directories, or raise ConfigError."""
    file = Path(out) if out is not None else paths[0] / FILE if len(paths) == 1 else Path(FILE)
    named = f"--out {file}" if out is not None else str(file)
    if file.suffix != ".html":
        raise ConfigError(f"{named}: a report is html. Name a FILE.html.")
    if out is None and file.is_symlink():  # a foreign directory must not choose the target
        target = printable(str(file.resolve()))
        raise ConfigError(f"{named} is a link to {target}. Name a file: --out FILE.html.")
    check_file(named, file)
    if file.exists() and not _is_ours(file):
        what = "there is such a file, which is no report of ppctl"
        raise ConfigError(f"{named}: {what}. Move it away, or name another.")
    return file


def write_report(runs: Sequence[RecordedRun], file: Path, *, as_json: bool) -> int:
    """Write the report of runs to a file that `place_of` gave; return 0."""
    configs = [run.summary.config for run in runs]
    differ = differing_settings(configs, [run.words for run in runs])
    page = run_page(runs[0], file) if len(runs) == 1 else compare_page(runs, differ, file)
    write_file(str(file), file, page)
    if as_json:
        documents = [run_document(run) for run in runs]
        if len(runs) > 1:
            for index, each in enumerate(documents):
                each["differs"] = {name: values[index] for name, values in differ.items()}
        show_json({"file": str(file), "runs": documents})
    return 0


def _is_ours(file: Path) -> bool:
    """Return whether a file is a report, which may be written again."""
    with suppress(OSError):
        return file.is_file() and MARK.encode() in file.read_bytes()
    return False
