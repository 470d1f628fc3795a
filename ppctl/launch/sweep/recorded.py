"""A sweep as its directory has it, also while it runs: its jobs, how they stand, what varies, the best. No JAX."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.launch.sweep.best import Best, best_of
from ppctl.launch.sweep.jobs import FILES, MARK, Job, Sweep
from ppctl.launch.sweep.records import ENDS, NUMBERS, numbers_of
from ppctl.reports.foreign import from_json, read_file
from ppctl.reports.run_files import find_runs, run_summary
from ppctl.reports.run_settings import differing_settings, value_text

Words = Callable[[Path], Sequence[str]]


class RecordedJob(NamedTuple):
    """One job of a sweep."""

    run_dir: Path
    values: Mapping[str, str]  # of what the sweep varies, as one types them
    status: str  # of its run, or as the sweep recorded it
    reason: str | None  # of one that failed or was interrupted
    step: int
    num_steps: int | None
    numbers: Mapping[str, Any]  # NUMBERS of records.py

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or self.run_dir.name


class RecordedSweep(NamedTuple):
    """A sweep, by the runs in its directory and by its summary where one was written."""

    directory: Path
    jobs: Sequence[RecordedJob]
    axes: Mapping[str, Sequence[str]]  # of what it varies the values, in the order of the jobs
    best: Sequence[Best]
    files: Sequence[Path]  # its summary

    @property
    def counts(self) -> dict[str, int]:
        """Return how many jobs are in which state."""
        return dict(Counter(job.status for job in self.jobs).most_common())


def is_sweep(directory: Path) -> bool:
    """Return whether a sweep has written to a directory."""
    return any((directory / name).is_file() for name in (MARK, FILES[1]))


def read_sweep(directory: Path, words_of: Words) -> RecordedSweep:
    """Return the sweep in a directory; `words_of` returns what the run in a directory was started with.

    Its jobs are the runs below it, and those of its summary that left no run: refused, or failed before they began.
    """
    recorded = _records(directory / FILES[1])
    runs = [run_summary(name, path) for name, path in find_runs(directory) if path != directory]
    requests = [[*words_of(run.path)] for run in runs]
    differ = differing_settings([run.config for run in runs], requests)
    jobs = []
    for index, run in enumerate(runs):
        values = {name: text for name, texts in differ.items() if (text := texts[index]) is not None}
        numbers = numbers_of(run.path)
        jobs.append(RecordedJob(run.path, values, run.status, run.reason, run.step, run.num_steps, numbers))
    places = {os.path.realpath(run.path) for run in runs}
    for place, record in recorded.items():
        if place not in places:
            values = {key: value_text(value) for key, value in record.items() if key not in ("job", *ENDS, *NUMBERS)}
            error, nothing = record.get("error"), dict.fromkeys(map(str, NUMBERS))
            jobs.append(
                RecordedJob(Path(record["run_dir"]), values, str(record.get("status")), error, 0, None, nothing)
            )
    order = [*recorded]  # of the summary's records
    jobs.sort(key=lambda job: order.index(place) if (place := os.path.realpath(job.run_dir)) in order else len(order))
    names = dict.fromkeys(name for job in jobs for name in job.values)
    axes = {name: [*dict.fromkeys(job.values[name] for job in jobs if name in job.values)] for name in names}
    files = [directory / name for name in FILES if (directory / name).is_file()]
    return RecordedSweep(directory, jobs, axes, _best(directory, jobs, words_of), files)


def _records(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the records of a sweep's summary by the directories of the runs; none where it cannot be read."""
    try:
        return {os.path.realpath(record["run_dir"]): record for record in from_json(read_file(path))}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _best(directory: Path, jobs: Sequence[RecordedJob], words_of: Words) -> list[Best]:
    """Return the best of the jobs, each with the line that trains it anew in a directory of its own."""
    made = []
    for index, job in enumerate(jobs):
        words = [word for word in words_of(job.run_dir) if not word.lstrip("+").startswith("run.dir=")]
        swept = tuple(f"{key}={value}" for key, value in job.values.items())
        made.append(Job(index, swept, job.values, ("train", *words), job.run_dir, None))
    sweep = Sweep("train", directory, made)
    return best_of(sweep, [{"status": job.status, **job.numbers} for job in jobs])
