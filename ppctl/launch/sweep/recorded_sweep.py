"""A sweep read from its directory, also while it runs: jobs, states, axes, the best. No JAX."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.launch.sweep.best_job import Best, best_of
from ppctl.launch.sweep.run_records import ENDS, NUMBERS, numbers_of, read_records
from ppctl.launch.sweep.sweep_jobs import FILES, MARK, Job, Sweep
from ppctl.reports.recorded_settings import differing_settings, value_text
from ppctl.reports.run_files import find_runs, run_summary

Words = Callable[[Path], Sequence[str]]


def is_sweep(directory: Path) -> bool:
    """Return whether a sweep has written to a directory."""
    return any((directory / name).is_file() for name in (MARK, FILES[1]))


def read_sweep(directory: Path, words_of: Words) -> dict[str, Any]:
    """Return the sweep in a directory, as `ppctl runs show --json` prints it.

    Its jobs are the runs below it, and those of its summary that left no run: refused, or failed
    before they began. words_of: returns the words that the run in a directory was started with.
    """
    # 1. the jobs, in the order of the summary
    recorded = {os.path.realpath(record["run_dir"]): record for record in read_records(directory)}
    jobs = _jobs_with_runs(directory, words_of)
    places = {os.path.realpath(job["run_dir"]) for job in jobs}
    jobs += [_job_without_run(record) for place, record in recorded.items() if place not in places]
    order = {place: index for index, place in enumerate(recorded)}
    jobs.sort(key=lambda job: order.get(os.path.realpath(job["run_dir"]), len(order)))
    # 2. their axes
    axes: dict[str, dict[str, None]] = {}
    for job in jobs:
        for name, value in job["values"].items():
            axes.setdefault(name, {})[value] = None
    return {
        "sweep_dir": str(directory),
        "counts": dict(Counter(job["status"] for job in jobs).most_common()),
        "axes": {name: [*values] for name, values in axes.items()},
        "best": [
            {
                "what": best.what,
                "job": best.job.index,
                "value": jobs[best.job.index][best.by],
                "place": str(best.place),
                "command": best.command,
                "text": best.text,
            }
            for best in _best(directory, jobs, words_of)
        ],
        "jobs": [{"job": index, **job} for index, job in enumerate(jobs)],
        "files": [str(directory / name) for name in FILES if (directory / name).is_file()],
    }


def _jobs_with_runs(directory: Path, words_of: Words) -> list[dict[str, Any]]:
    runs = [run_summary(name, path) for name, path in find_runs(directory) if path != directory]
    words = [[*words_of(run.path)] for run in runs]
    differ = differing_settings([run.config for run in runs], words)
    jobs = []
    for index, run in enumerate(runs):
        texts = {name: values[index] for name, values in differ.items()}
        facts = {"run_dir": str(run.path), "status": run.status, "reason": run.reason}
        facts |= {"step": run.step, "num_steps": run.num_steps}
        facts["values"] = {name: text for name, text in texts.items() if text is not None}
        jobs.append(facts | numbers_of(run.path))
    return jobs


def _job_without_run(record: Mapping[str, Any]) -> dict[str, Any]:
    varied = [key for key in record if key not in ("job", *ENDS, *NUMBERS)]
    facts = {"run_dir": record["run_dir"], "status": str(record.get("status"))}
    facts |= {"reason": record.get("error"), "step": 0, "num_steps": None}
    facts["values"] = {key: value_text(record[key]) for key in varied}
    return facts | dict.fromkeys(NUMBERS)


def job_name(job: Mapping[str, Any]) -> str:
    values = " ".join(f"{key}={value}" for key, value in job["values"].items())
    return values or Path(job["run_dir"]).name


def _best(directory: Path, jobs: Sequence[Mapping[str, Any]], words_of: Words) -> list[Best]:
    """Return the best jobs, each with the command that trains it anew in a separate directory."""
    made = []
    for index, job in enumerate(jobs):
        run_dir = Path(job["run_dir"])
        words = [word for word in words_of(run_dir) if not word.lstrip("+").startswith("run.dir=")]
        swept = tuple(f"{key}={value}" for key, value in job["values"].items())
        made.append(Job(index, swept, job["values"], ("train", *words), run_dir, None))
    return best_of(Sweep("train", directory, made), jobs)
