"""`ppctl COMMAND --multirun`: checks a sweep, runs its jobs, and writes its summary."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ppctl.errors import ConfigError
from ppctl.launch.sweep.job_runner import run_jobs
from ppctl.launch.sweep.sweep_jobs import FILES, MARK, Sweep, check_sweep, side_by_side_note
from ppctl.launch.sweep.sweep_page import sweep_page
from ppctl.launch.sweep.sweep_records import (
    Best,
    Result,
    best_of,
    decimals,
    equal_errors,
    result_of,
    state_counts,
)
from ppctl.reports.run_page.write_report import FILE as REPORT
from ppctl.reports.terminal_output import SPEEDS, json_safe, replace_file, show_lines, show_table


def run_sweep(sweep: Sweep, report: Callable[[Path], object] = lambda run_dir: None) -> int:
    """Run a sweep; return 0 if all jobs are finished, 1 if one failed, 130 or 143 if interrupted.

    `report` writes the report of the run in a directory, which the summary links to. Raises
    ConfigError, before anything is started or written, for an impossible sweep.
    """
    # 1. checks
    check_sweep(sweep)
    # 2. the jobs
    try:
        sweep.directory.mkdir(parents=True, exist_ok=True)
        (sweep.directory / MARK).write_text(sweep.document)
        if sweep.study is not None:
            sweep.study.open()
    except OSError as error:
        raise ConfigError(
            f"run.dir={sweep.directory} cannot be written: {error.strerror}. "
            "Use another run.dir, or make it writable."
        ) from error
    console = Console(stderr=True)
    outcomes, stop = run_jobs(sweep, console)
    # 3. the summary
    results = [result_of(job, outcome) for job, outcome in zip(sweep.jobs, outcomes, strict=True)]
    best = best_of(sweep.directory, results) if sweep.trains else []
    show_end(console, results, [each.by for each in best], trains=sweep.trains)
    if sweep.trains:
        for job, outcome in zip(sweep.jobs, outcomes, strict=True):
            if outcome.seconds is not None or not (job.run_dir / REPORT).exists():
                report(job.run_dir)
        for line in write_summary(sweep.directory, results, best):
            show_lines(console, f"ppctl: {line}")
    if stop is not None:
        return 128 + stop
    return int(any(outcome.status in ("failed", "interrupted") for outcome in outcomes))


def show_end(
    console: Console, results: Sequence[Result], decided_by: Sequence[str], *, trains: bool
) -> None:
    """Print the table of all jobs, with the numbers that decided the best, and the errors."""
    # 1. numbers and their forms
    forms: dict[str, str] = {}
    if trains:
        losses = ("final_loss", "eval_loss")
        digits = {name: decimals(each.numbers[name] for each in results) for name in losses}
        forms = {"steps": ",", **{name: f".{digits[name]}f" for name in losses}}
        forms |= {"step_time_s": ".4g", **dict.fromkeys(SPEEDS, ",.0f")}
        usual = ("steps", "final_loss", "step_time_s", *decided_by)
        forms = {name: form for name, form in forms.items() if name in usual}
    # 2. the table
    rows = []
    for job, outcome, numbers in ((each.job, each.outcome, each.numbers) for each in results):
        status = outcome.status + (f" ({outcome.code})" if outcome.code else "")
        cells = [_number_text(numbers[key], form) for key, form in forms.items()]
        seconds = _number_text(outcome.seconds, ".1f")
        rows.append([f"{job.index}: {job.name}", status, *cells, seconds])
    show_table(console, state_counts(results), ["job", "state", *forms, "seconds"], rows)
    # 3. the errors
    for error, jobs in equal_errors(results).items():
        others = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        show_lines(console, f"ppctl: job {jobs[0].index}: {jobs[0].name}{others}: {error}")


def _number_text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def write_summary(directory: Path, results: Sequence[Result], best: Sequence[Best]) -> list[str]:
    """Write the summary; return lines about the sweep, also where a file cannot be written."""
    lines = []
    for each in best:
        lines += [each.text, f"  in {each.place}", f"  anew: {each.command}"]
    if note := side_by_side_note([result.job for result in results]):
        lines.append(f"note: {note}")
    texts = as_json(results), sweep_page(directory, results, best)
    try:
        for name, text in zip(FILES, texts, strict=True):
            replace_file(directory / name, text)
    except OSError as error:
        return [*lines, f"the summary in {directory} cannot be written: {error.strerror}"]
    return [*lines, f"summary: {', '.join(str(directory / name) for name in FILES)}"]


def as_json(results: Sequence[Result]) -> str:
    """Return the records as a JSON list, with null for numbers that are not finite."""
    plain = json_safe([result.record for result in results])
    return json.dumps(plain, indent=1, allow_nan=False, default=str) + "\n"
