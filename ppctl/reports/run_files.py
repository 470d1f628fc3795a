"""The files that runs leave, read without JAX: where they are, how far they got and how they ended.

Only the ends of files are read, so that a thousand long runs are listed in a second; `run_history` reads one run whole.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.changes import Change
from ppctl.reports import run_status
from ppctl.reports.foreign import (
    MOST_SETTINGS_BYTES,
    check_inside,
    cleaned,
    from_json,
    lines_of,
    open_file,
    read_file,
    read_settings,
)

RUNNING, BROKEN_OFF, NO_END, NOT_STARTED = "running", "broken off", "no end recorded", "not started"
INSIDE = ("checkpoints", "tensorboard", "profile", "timeline", "processes")  # directories of a run that hold no run
OF_TRACKERS = ("wandb", "mlflow", "mlflow.db")  # written by the trackers' own packages, which put links there
REMOVED = ".removed-"  # begins the name of a run directory that is being removed
TRACKERS_FILE = "trackers.json"  # what the run is called at its trackers, by their names
MEMORY_FILE = "memory.json"  # of each rank bytes of a device by part, as compiled at the last start
SCHEDULE_FILE = "schedule.csv"  # that schedule=auto found
FAILED_FILE = "failed.json"  # in processes/, of the first process that failed
WRITTEN = (
    "config.yaml",
    run_status.FILE,
    "metrics.jsonl",
    "eval.jsonl",
    MEMORY_FILE,
    TRACKERS_FILE,
    *INSIDE,
)  # by a run
TAILS = (4096, 65536)  # bytes read of a file's end: a line has 400, or so
STEP = re.compile("0|[1-9][0-9]{0,17}")  # the name of a checkpoint, as ppctl writes it
NUM_STEPS = re.compile(rb"^run:\n(?:  .*\n)*?  num_steps: (\d{1,18})$", re.MULTILINE)  # a parser of YAML takes 20 ms


class RunSummary(NamedTuple):
    """The state of a run, from the ends of its files."""

    name: str
    path: Path
    status: str  # running | finished | interrupted | failed | broken off | no end recorded | not started
    reason: str | None  # of a run that failed or was interrupted
    step: int  # finished steps, as recorded
    num_steps: int | None  # None: its config does not say
    loss: float | None  # of the newest step; None: there is none, or it is not finite
    is_finite: bool  # the newest loss, if there is one
    eval_loss: float | None  # of the newest evaluation
    started_s: float | None  # when it first began, seconds since 1970; None: it has not, or an older ppctl began it
    recorded_s: float  # when its newest record was written
    config: Mapping[str, Any]  # the settings of its newest start; empty: they cannot be read
    checkpoints: tuple[int, ...]  # steps of those that are finished
    problems: tuple[str, ...]  # what is wrong with its files


class RunHistory(NamedTuple):
    """A run over all its records."""

    losses: dict[str, tuple[int, float]]  # first, last, least: (step, loss); empty: no step has a loss
    eval_losses: dict[str, tuple[int, float]]  # likewise
    step_time_s: float | None  # median
    unit: str | None  # of speed: tokens_per_s or rows_per_s
    speed: float | None  # median
    changed: tuple[tuple[int, str], ...]  # (step, setting before -> after) of every start that changed one
    problems: tuple[str, ...]


class _Tail(NamedTuple):
    record: dict[str, Any] | None  # of the last line that is one
    written_s: float | None  # None: there is no file
    problem: str | None


def find_runs(top: Path) -> list[tuple[str, Path]]:
    """Return (name, directory) of each run at or below `top`, also of sweeps; a name is the path below `top`.

    Directories that cannot be read are left out. A link is followed, to each directory once.
    """
    found: list[tuple[str, Path]] = []
    seen: set[tuple[int, int]] = set()

    def walk(path: str, name: str) -> None:
        try:
            info = os.stat(path)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:
            return
        if (info.st_dev, info.st_ino) in seen:
            return
        seen.add((info.st_dev, info.st_ino))
        names = {entry.name for entry in entries}
        if _is_run(path, names):
            found.append((name or Path(path).absolute().name, Path(path)))
        for entry in entries:
            if entry.name not in (*INSIDE, *OF_TRACKERS) and not entry.name.startswith(REMOVED) and entry.is_dir():
                walk(entry.path, f"{name}/{entry.name}" if name else entry.name)

    walk(str(top), "")
    return found


def check_run_dir(run_dir: Path) -> None:
    """Raise ConfigError where a run would write through a link out of its directory, or into a pipe."""
    check_inside(run_dir, WRITTEN, "run.dir")


def is_run(path: Path) -> bool:
    """Return whether a directory is that of a run; False where it cannot be read, or is none."""
    try:
        return _is_run(str(path), set(os.listdir(path)))
    except OSError:
        return False


def _is_run(path: str, names: set[str]) -> bool:
    if "metrics.jsonl" in names or run_status.FILE in names:
        return True
    return "config.yaml" in names and _has_num_steps(path)  # other programs have files of that name


def read_config(path: Path) -> dict[str, Any] | str:
    """Return the composed config of a run, or what is wrong with its file."""
    try:
        found = cleaned(read_settings(path / "config.yaml"))
    except FileNotFoundError:
        return "config.yaml is missing"
    except OSError as error:
        return f"config.yaml cannot be read: {error.strerror}"
    except ValueError as error:
        return f"config.yaml cannot be read: {error}"
    return found if isinstance(found, dict) else "config.yaml holds no settings"


def run_summary(name: str, path: Path) -> RunSummary:
    """Return the state of a run, from the ends of its files; what is wrong with them is no exception."""
    problems: list[str] = []
    config = read_config(path)
    if isinstance(config, str):
        problems.append(config)
        config = {}
    of_run = config.get("run")
    num_steps = whole_number(of_run, "num_steps") if isinstance(of_run, dict) else None
    if config and num_steps is None:
        problems.append("config.yaml has no run.num_steps")
    ends = [_tail(str(path / file)) for file in ("metrics.jsonl", "eval.jsonl", run_status.FILE)]
    train, evaluation, status = ends
    step = whole_number(train.record, "step")
    steps: tuple[int, ...] = ()
    try:
        steps = checkpoint_steps(path / "checkpoints")
    except OSError as error:
        problems.append(f"checkpoints cannot be read: {error.strerror}")
    state, reason = _state(path, status.record, steps, num_steps, has_begun=bool(step or steps))
    if state != RUNNING:  # which may be about to write
        problems += [end.problem for end in ends if end.problem is not None]
        if train.written_s is not None and train.record is None and train.problem is None:
            problems.append("metrics.jsonl is empty")
    if train.record is not None and ("loss" not in train.record or step is None):
        problems.append("the last line of metrics.jsonl has no step or no loss")
    written = [end.written_s for end in ends if end.written_s is not None]
    return RunSummary(
        name,
        path,
        state,
        reason,
        step if step is not None else max(steps, default=0),
        num_steps,
        record_number(train.record, "loss"),
        train.record is None or train.record.get("loss", 0) is not None,
        record_number(evaluation.record, "eval_loss"),
        _started_s(path / run_status.FILE),
        max(written) if written else _written_s(path),
        config,
        steps,
        tuple(problems),
    )


def _state(
    path: Path, last: Mapping[str, Any] | None, steps: Sequence[int], num_steps: int | None, *, has_begun: bool
) -> tuple[str, str | None]:
    """Return (status, reason), by the newest line of status.jsonl and the checkpoints.

    A run that a living process has locked is running, also before that records its start. One whose last step has a
    checkpoint is finished, as `ppctl train` says of it too.
    """
    with suppress(OSError):
        if run_status.is_held(path / run_status.FILE):
            return RUNNING, None
    status = None if last is None else last.get("status")
    if last is not None and status in (run_status.FINISHED, run_status.INTERRUPTED, run_status.FAILED):
        reason = last.get("reason")
        return status, reason if isinstance(reason, str) else None
    is_locked = False
    if last is not None and status == run_status.STARTED:
        is_locked = last.get("is_locked") is True and last.get("host") == run_status.here()["host"]
    if num_steps is not None and num_steps in steps:
        return run_status.FINISHED, None
    message = _failure_of_another(path, last)
    if message is not None:
        return run_status.FAILED, message
    if is_locked:  # by a process of this machine, which is gone
        return BROKEN_OFF, None
    return (NO_END if has_begun or last is not None else NOT_STARTED), None


def _failure_of_another(path: Path, last: Mapping[str, Any] | None) -> str | None:
    """Return why another process has failed since the last start; the one that leads then leaves without a record."""
    file = path / "processes" / FAILED_FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        if last is not None and file.stat().st_mtime >= last["at"]:
            failed = from_json(read_file(file))
            return f"process {failed['process']}: {failed['message']}"
    return None


def checkpoint_steps(directory: Path) -> tuple[int, ...]:
    """Return the steps of the finished checkpoints in a directory, ascending: Orbax renames one when it is finished.

    Raises OSError where there is one that cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            return tuple(sorted(int(entry.name) for entry in entries if STEP.fullmatch(entry.name) and entry.is_dir()))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def last_record(run_dir: Path, *, since_s: float) -> dict[str, Any] | None:
    """Return the last record in metrics.jsonl, if that was written to since then and the record has a step."""
    record, written_s, _ = _tail(str(run_dir / "metrics.jsonl"))
    return (
        record if written_s is not None and written_s >= since_s and whole_number(record, "step") is not None else None
    )


def run_history(path: Path) -> RunHistory:
    """Return the run in a directory over all its records."""
    problems: list[str] = []
    steps = list(read_lines(path / "metrics.jsonl", problems))
    evaluations = list(read_lines(path / "eval.jsonl", problems))
    unit = next((unit for unit in ("tokens_per_s", "rows_per_s") if any(unit in each for each in steps)), None)
    return RunHistory(
        _extremes(steps, "loss"),
        _extremes(evaluations, "eval_loss"),
        _median(steps, "step_time_s"),
        unit,
        None if unit is None else _median(steps, unit),
        tuple(setting_changes(list(read_lines(path / run_status.FILE, problems)))),
        tuple(problems),
    )


def setting_changes(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return (step, setting before -> after) of every setting that a start, a line of status.jsonl, has changed."""
    found = []
    for line in lines:
        step, changed = whole_number(line, "step"), line.get(run_status.CHANGED)
        if line.get("status") == run_status.STARTED and step is not None and isinstance(changed, list):
            for each in changed:
                with suppress(TypeError):  # not what ppctl writes
                    found.append((step, Change(**each).arrow))
    return found


def read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield every line that is a record; add to `problems` how many are not, if they are not the end of the file."""
    bad = 0
    try:
        with open_file(path) as file:
            for line in lines_of(file):
                record = _record(line)
                if record is not None:
                    yield record
                elif line.endswith(b"\n"):  # else the torn last one, which `run_summary` reports
                    bad += 1
    except OSError:
        return  # `run_summary` reports
    if bad:
        problems.append(f"{bad} line{'s' if bad > 1 else ''} of {path.name} {'are' if bad > 1 else 'is'} no record")


def whole_number(record: Mapping[str, Any] | None, key: str) -> int | None:
    """Return an entry of a record, if it is a whole number."""
    value = None if record is None else record.get(key)
    return value if type(value) is int else None


def record_number(record: Mapping[str, Any] | None, key: str) -> float | None:
    """Return an entry of a record, if it is a number; it may be one that is not finite."""
    value = None if record is None else record.get(key)
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 10**300) else None


def disk_bytes(path: Path) -> int:
    """Return the disk space of all files below a directory; a file that vanishes meanwhile has none."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, file)).st_blocks * 512
    return total


def _extremes(records: Sequence[Mapping[str, Any]], key: str) -> dict[str, tuple[int, float]]:
    found = [(whole_number(each, "step"), record_number(each, key)) for each in records]
    pairs = [(step, loss) for step, loss in found if step is not None and loss is not None]
    if not pairs:
        return {}
    return {"first": pairs[0], "last": pairs[-1], "least": min(pairs, key=lambda pair: pair[1])}


def _median(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [value for each in records if (value := record_number(each, key)) is not None]
    return statistics.median(values) if values else None


def _has_num_steps(path: str) -> bool:
    try:
        return NUM_STEPS.search(read_file(os.path.join(path, "config.yaml"), MOST_SETTINGS_BYTES)) is not None
    except OSError:
        return False


def _started_s(path: Path) -> float | None:
    """Return when the first start in a status.jsonl began, by the beginning of the file."""
    with suppress(OSError), open_file(path) as file:
        for line in file.read(TAILS[-1]).split(b"\n"):
            record = _record(line)
            if record is not None and record.get("status") == run_status.STARTED:
                return record_number(record, "at")
    return None


def _tail(path: str) -> _Tail:
    """Return the last record of a file of records, and what is wrong with its end."""
    name = os.path.basename(path)
    try:
        with open_file(path) as file:
            info = os.fstat(file.fileno())
            content = b""
            for size in TAILS:
                content = os.pread(file.fileno(), size, max(0, info.st_size - size))
                if content.count(b"\n") > 1 or size >= info.st_size:
                    break
    except FileNotFoundError:
        return _Tail(None, None, None)
    except OSError as error:
        return _Tail(None, None, f"{name} cannot be read: {error.strerror}")
    *whole, rest = content.split(b"\n")
    problem = f"the last line of {name} is torn" if rest else None
    for line in reversed(whole):
        record = _record(line)
        if record is not None:
            return _Tail(record, info.st_mtime, problem)
        problem = problem or f"the last line of {name} is no record"
    return _Tail(None, info.st_mtime, problem)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = from_json(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _written_s(path: Path) -> float:
    for file in (path / "config.yaml", path):
        with suppress(OSError):
            return file.stat().st_mtime
    return 0.0
