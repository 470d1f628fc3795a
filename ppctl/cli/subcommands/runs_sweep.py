"""`ppctl runs show SWEEP`: the axes of a sweep, its jobs and their status, and the best jobs."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ppctl.launch.sweep import sweep_records as records
from ppctl.launch.sweep.sweep_jobs import FILES
from ppctl.launch.sweep.sweep_page import sweep_page
from ppctl.reports.foreign_files import check_inside, printable
from ppctl.reports.run_files import RunSummary, is_run, run_summary
from ppctl.reports.terminal_output import OutputConsole, show_json, show_lines, write_file
from ppctl.reports.write_report import place_of


def find_sweep(name: str, tops: Sequence[Path]) -> Path | None:
    """Return the sweep directory with this path, or with this name below `tops`, else None."""
    places = filter(os.path.isdir, (Path(name), *(top / name for top in tops)))
    return next((place for place in places if records.is_sweep(place) and not is_run(place)), None)


def jobs_without_runs(top: Path) -> list[RunSummary]:
    """Return the jobs of a sweep that have no run: not started, or refused. [] for other paths."""
    summaries = []
    for each in records.read_sweep(top):
        place = each.job.run_dir
        if not is_run(place):
            written_s = (top / FILES[0]).stat().st_mtime
            end = {"status": each.status, "reason": each.error, "recorded_s": written_s}
            summaries.append(run_summary(place.name, place)._replace(**end, problems=()))
    return summaries


def report_sweep(directory: Path, out: str | None, *, as_json: bool) -> int:
    """Write the page of a sweep's current state; return 0."""
    check_inside(directory, FILES, "run.dir")
    file = place_of(out or str(directory / FILES[1]), [])
    write_file(str(file), file, sweep_page(directory, records.read_sweep(directory), file))
    if as_json:
        show_json({"file": str(file), "sweep_dir": str(directory)})
    return 0


def show_sweep(directory: Path, *, as_json: bool) -> int:
    """Print a sweep; return 0."""
    # 1. the best jobs, axes, errors and files
    results = records.read_sweep(directory)
    best = records.best_of(results)
    axes: dict[str, dict[str, None]] = {}
    for each in results:
        for key, value in each.job.values.items():
            axes.setdefault(key, {})[value] = None
    errors = [
        {"error": error, "jobs": [job.index for job in jobs]}
        for error, jobs in records.equal_errors(results).items()
    ]
    files = [str(directory / name) for name in FILES if (directory / name).is_file()]
    # 2. the JSON document
    if as_json:
        counts = Counter(each.status for each in results)
        jobs = [
            {"job": each.job.index, "run_dir": str(each.job.run_dir), "status": each.status}
            | {"reason": each.error, "values": each.job.values, **each.numbers}
            for each in results
        ]
        document = {"sweep_dir": str(directory), "counts": dict(counts.most_common())}
        document |= {"axes": {key: [*values] for key, values in axes.items()}}
        document |= {"best": [each._asdict() for each in best], "errors": errors}
        show_json(document | {"jobs": jobs, "files": files})
        return 0
    # 3. the terminal
    console = OutputConsole()
    lines = [("sweep", str(directory))]
    lines += [("axis", f"{key}: {', '.join(values)}") for key, values in axes.items()]
    for each in best:
        lines += [("best", each.text), ("  in", each.place)]
    if note := records.side_by_side_note(results):
        lines.append(("note", note))
    lines.append(("summary", ", ".join(files)))
    show_lines(console, *(printable(f"{label:9} {text}") for label, text in lines))
    records.show_results(console, results)
    return 0
