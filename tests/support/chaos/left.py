"""The files that a run leaves in its directory, and faults in them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from support.chaos.layouts import KEEP

LOOKS = 3  # at the checkpoints of a run that goes on: names come and go while they are listed


class Violation(Exception):
    """A fault was seen."""


class Left(NamedTuple):
    """The numbers that a run has computed."""

    results: list[list[Any]]  # step, loss, gradient norm and learning rate of every step
    checksums: dict[str, str]  # sums of the last checkpoint


def left(run_dir: Path, num_steps: int) -> Left:
    """Return the results of a finished run."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    results = [[record[key] for key in ("step", "loss", "grad_norm", "lr")] for record in records]
    return Left(results, manifest(run_dir, num_steps)["checksums"])


def check_same(name: str, found: Left, wanted: Left) -> None:
    """Raise Violation unless a run has the results of the uninterrupted one."""
    if found != wanted:
        pairs = zip(wanted.results, found.results, strict=False)
        differ = [pair for pair in pairs if pair[0] != pair[1]]
        raise Violation(
            f"{name}: not the uninterrupted run; {len(found.results)} records of "
            f"{len(wanted.results)}, those that differ: {differ[:3]}, checksums: "
            f"{found.checksums}"
        )


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / str(step) / "meta" / "data.json").read_text())


def steps(run_dir: Path) -> set[int]:
    """Return the steps of the finished checkpoints."""
    directory = run_dir / "checkpoints"
    return (
        {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}
        if directory.is_dir()
        else set()
    )


def newest(run_dir: Path) -> int:
    return max(steps(run_dir), default=0)


def records(run_dir: Path) -> dict[str, bytes]:
    """Return the records of a finished run; no later start may change them."""
    return {
        name: (run_dir / name).read_bytes()
        for name in ("metrics.jsonl", "status.jsonl", "config.yaml")
    }


def check_kept(run_dir: Path, before: set[int]) -> None:
    """Raise Violation if one of the newest checkpoints of those that there were is lost."""
    for look in range(LOOKS):
        after = steps(run_dir)
        lost = (set(sorted(before | after)[-KEEP:]) & before) - after
        if not lost:
            return
        time.sleep(look)
    raise Violation(f"finished checkpoints are lost: {sorted(lost)} of {sorted(before)}")


def check_files(run_dir: Path) -> None:
    """Raise Violation unless each checkpoint has its record, and every step up to the newest one
    its whole line.
    """
    found = steps(run_dir)
    for step in sorted(found)[-KEEP:]:  # an older one may have been killed while it was removed
        if manifest(run_dir, step)["step"] != step:
            raise Violation(f"checkpoint {step} is of another step")
    if damaged := list((run_dir / "checkpoints").glob("*.damaged*")):
        raise Violation(f"a checkpoint was found damaged: {damaged}")
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        raise Violation(f"the last line of metrics.jsonl is torn: {text[-200:]}")
    lines = [json.loads(line)["step"] for line in text.splitlines()]
    if lines != list(range(1, len(lines) + 1)) or len(lines) < max(found, default=0):
        raise Violation(f"metrics.jsonl has steps {lines}, checkpoints {sorted(found)}")


def check_sweep(directory: Path, wanted: dict[str, Left]) -> None:
    """Raise Violation unless the summary of a sweep has each job as finished, with its loss."""
    records = {
        Path(record["run_dir"]).name: record
        for record in json.loads((directory / "sweep.json").read_text())
    }
    ended = {
        name
        for name, record in records.items()
        if record["status"] in ("finished", "finished earlier")
    }
    if not set(records) == ended == set(wanted):
        raise Violation(f"sweep.json has jobs {sorted(records)}, of which finished {sorted(ended)}")
    for name, record in records.items():
        if record["final_loss"] != wanted[name].results[-1][1]:
            raise Violation(f"sweep.json has another loss of {name}: {record['final_loss']}")
    if not (directory / "sweep.html").read_text().rstrip().endswith("</html>"):
        raise Violation("sweep.html is torn")
