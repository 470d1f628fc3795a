"""`ppctl runs show SWEEP`: the axes of a sweep, its jobs and their status, and the best."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ppctl.launch.sweep.sweep_jobs import FILES
from ppctl.launch.sweep.sweep_records import best_of, is_sweep, read_sweep, show_results
from ppctl.reports.foreign_files import printable
from ppctl.reports.run_files import is_run
from ppctl.reports.terminal_output import OutputConsole, show_json, show_lines


def find_sweep(name: str, tops: Sequence[Path]) -> Path | None:
    """Return the directory of the sweep of this path, or of this name below `tops`, if any."""
    places = filter(os.path.isdir, (Path(name), *(top / name for top in tops)))
    return next((place for place in places if is_sweep(place) and not is_run(place)), None)


def show_sweep(directory: Path, *, as_json: bool) -> int:
    """Show a sweep; return 0."""
    results = read_sweep(directory)
    best = best_of(results)
    axes: dict[str, dict[str, None]] = {}
    for each in results:
        for key, value in each.job.values.items():
            axes.setdefault(key, {})[value] = None
    files = [str(directory / name) for name in FILES if (directory / name).is_file()]
    if as_json:
        counts = Counter(each.status for each in results)
        jobs = [
            {"job": each.job.index, "run_dir": str(each.job.run_dir), "status": each.status}
            | {"reason": each.error, "values": each.job.values, **each.numbers}
            for each in results
        ]
        document = {"sweep_dir": str(directory), "counts": dict(counts.most_common())}
        document |= {"axes": {key: [*values] for key, values in axes.items()}}
        show_json(
            document | {"best": [each._asdict() for each in best], "jobs": jobs, "files": files}
        )
        return 0
    console = OutputConsole()
    lines = [("sweep", str(directory))]
    lines += [("axis", f"{key}: {', '.join(values)}") for key, values in axes.items()]
    for each in best:
        lines += [("best", each.text), ("  in", each.place)]
    lines.append(("summary", ", ".join(files)))
    show_lines(console, *(printable(f"{label:9} {text}") for label, text in lines))
    show_results(console, results)
    return 0
