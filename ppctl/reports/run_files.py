"""Read the files of runs without JAX: find runs, and summarize their progress and status.

Reads only the tails of records, so a thousand long runs are listed in a second;
`run_page.read_run` reads whole files.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.changed_settings import Change
from ppctl.reports import foreign_files as foreign, run_status
from ppctl.user_files import open_file, read_file

RUNNING, BROKEN_OFF, NO_END, NOT_STARTED = "running", "broken off", "no end recorded", "not started"
INSIDE = ("checkpoints", "tensorboard", "profile", "timeline", "processes")  # folders without runs
KERNEL = ("/proc", "/sys")  # the kernel's file systems
OF_TRACKERS = ("wandb", "mlflow", "mlflow.db")  # written by trackers' packages; may hold links
UNFINISHED = ".part"  # name of the directory of a model that is still being written
NO_RUNS = {*INSIDE, *OF_TRACKERS, UNFINISHED}
REMOVED = ".removed-"  # prefix of a run directory that is being removed
TRACKERS_FILE = "trackers.json"  # the run's id at each tracker
MEMORY_FILE = "memory.json"  # bytes of a device by rank and part, as compiled at the newest start
MLFLOW_UI = ("mlflow", "ui", "--backend-store-uri")
WANDB_HEADER = 7  # bytes of a .wandb file without records
SCHEDULE_FILE = "schedule.csv"  # the schedule that schedule=auto has found
FAILED_FILE = "failed.json"  # file in processes/: the first failed process and its message
RECORDS = ("metrics.jsonl", "eval.jsonl", run_status.FILE)
# files that a run set aside: damaged, or written after the step that a resumed run went back to
ASIDE = re.compile(r".*\.(damaged|after-\d+)(\.\d+)?(\.jsonl)?")
OTHERS = ("skipped.jsonl", run_status.STOP_FILE, MEMORY_FILE, TRACKERS_FILE)
WRITTEN = ("config.yaml", *RECORDS, *OTHERS, *INSIDE)  # all names that a run writes
TAILS = (4096, 65536)  # bytes of a file's end to read; a line has about 400
STEP = re.compile("0|[1-9][0-9]{0,17}")  # the name of a checkpoint
# a pattern, because a YAML parser takes 20 ms per file
NUM_STEPS = re.compile(rb"^run:\n(?:  .*\n)*?  num_steps: \d{1,18}$", re.MULTILINE)


class RunSummary(NamedTuple):
    """The state of a run, from the tails of its files."""

    name: str
    path: Path
    status: str  # one of run_status.ENDS, RUNNING, BROKEN_OFF, NO_END or NOT_STARTED
    reason: str | None  # reason of a failure or interruption
    step: int  # finished steps, as recorded
    num_steps: int | None  # None: not in the run's config
    loss: float | None  # loss of the newest step; None: not recorded or not finite
    is_finite: bool  # False if the newest loss is recorded and not finite
    eval_loss: float | None  # loss of the newest evaluation
    eval_step: int | None  # finished steps at the newest evaluation
    started_s: float | None  # first start, seconds since 1970; None: not recorded
    recorded_s: float  # newest record, seconds since 1970
    config: Mapping[str, Any]  # settings of the newest start; empty: unreadable
    checkpoints: tuple[int, ...]  # steps of the finished checkpoints
    problems: tuple[str, ...]  # a phrase for each problem of the files

    @property
    def steps_text(self) -> str:
        """Return finished and all steps, as in `3 of 10`."""
        return f"{self.step} of {'?' if self.num_steps is None else self.num_steps}"

    @property
    def eval_note(self) -> str:
        """Return "at step N" if the newest evaluation is of an earlier step than the loss."""
        return "" if self.eval_step in (None, self.step) else f"at step {self.eval_step:,}"

    @property
    def resume_note(self) -> str:
        """Return a note to read before resuming, or ""."""
        if self.status == RUNNING:
            return "running: resume it when it has ended"
        if self.status == run_status.FINISHED:
            return "finished: it goes on with a larger run.num_steps"
        return "" if self.checkpoints else "no checkpoint: it starts anew"


class _Tail(NamedTuple):
    record: dict[str, Any] | None = None  # the last record
    written_s: float | None = None  # seconds since 1970; None: no file
    problem: str | None = None


def find_runs(top: Path, closed: list[str] | None = None) -> list[tuple[str, Path]]:
    """Return (path below `top`, directory) of each run at or below `top`, runs of sweeps included.

    Links are followed, to each directory once, but not into the kernel's endless file systems.
    closed: gets a line for each unreadable directory, which is skipped.
    """

    def leave_out(error: OSError) -> None:
        if closed is not None and isinstance(error, PermissionError):
            closed.append(f"{error.filename} cannot be read: {error.strerror}.")

    kernel = {os.stat(path).st_dev for path in KERNEL if os.path.ismount(path)}
    runs: list[tuple[str, Path]] = []
    seen: set[tuple[int, int]] = set()
    for path, folders, files in os.walk(top, onerror=leave_out, followlinks=True):
        try:
            info = os.stat(path)
        except OSError:  # removed meanwhile
            continue
        inner = (name for name in folders if not name.startswith(REMOVED))
        folders[:] = sorted({*inner} - NO_RUNS)
        if (info.st_dev, info.st_ino) in seen or info.st_dev in kernel:
            folders.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        if _is_run(path, {*files}):
            name = os.path.relpath(path, top)
            runs.append((Path(path).absolute().name if name == "." else name, Path(path)))
    return runs


def is_run(path: Path) -> bool:
    """Return whether a directory is a run's; False if it cannot be read."""
    try:
        return _is_run(str(path), set(os.listdir(path)))
    except OSError:
        return False


def _is_run(path: str, names: set[str]) -> bool:
    if names & {"metrics.jsonl", run_status.FILE}:
        return True
    with suppress(OSError):  # other programs write config.yaml, too: look into it
        content = read_file(os.path.join(path, "config.yaml"), foreign.MOST_SETTINGS_BYTES)
        return NUM_STEPS.search(content) is not None
    return False


def read_config(path: Path) -> dict[str, Any] | str:
    """Return the composed config of a run, or a phrase that states the problem of its file."""
    try:
        config = foreign.cleaned(foreign.read_settings(path / "config.yaml"))
    except FileNotFoundError:
        return "config.yaml is missing"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"config.yaml cannot be read: {reason}"
    return config if isinstance(config, dict) else "config.yaml holds no settings"


def run_summary(name: str, path: Path) -> RunSummary:
    """Return the state of a run; problems of its files are listed in it, not raised."""
    # 1. settings and checkpoints
    found = read_config(path)
    problems, config = ([found], {}) if isinstance(found, str) else ([], found)
    of_run = config.get("run")
    num_steps = whole_number(of_run, "num_steps") if isinstance(of_run, dict) else None
    if config and num_steps is None:
        problems.append("config.yaml has no run.num_steps")
    steps: tuple[int, ...] = ()
    try:
        steps = checkpoint_steps(path / "checkpoints")
    except OSError as error:
        problems.append(f"checkpoints cannot be read: {error.strerror}")
    # 2. records
    ends = [_tail(str(path / file)) for file in RECORDS]
    train, evaluation, status = ends
    step = whole_number(train.record, "step")
    state, reason = _state(path, status.record, steps, num_steps, has_begun=bool(step or steps))
    if state != RUNNING:  # a running process may be about to write
        problems += [end.problem for end in ends if end.problem is not None]
        if train.written_s is not None and train.record is None and train.problem is None:
            problems.append("metrics.jsonl is empty")
    loss, recorded = record_number(train.record, "loss"), (train.record or {}).get("loss", "")
    # a loss that was not finite is recorded as null
    is_finite = recorded is not None and (loss is None or math.isfinite(loss))
    if train.record is not None and (step is None or (loss is None and is_finite)):
        problems.append("the last line of metrics.jsonl has no step or no loss")
    if status.record is not None and status.record.get("status") not in run_status.ALL:
        problems.append("the last line of status.jsonl has no status of a run")
    # 3. the newest numbers and times
    finished = step if step is not None else max((whole_number(status.record, "step") or 0, *steps))
    losses = loss if is_finite else None, is_finite, record_number(evaluation.record, "eval_loss")
    written = [end.written_s for end in ends if end.written_s is not None]
    for file in (path / "config.yaml", path):  # without records
        with suppress(OSError):
            written = written or [file.stat().st_mtime]
    times = _started_s(path / run_status.FILE), max(written, default=0.0)
    progress = state, reason, finished, num_steps, *losses, whole_number(evaluation.record, "step")
    return RunSummary(name, path, *progress, *times, config, steps, tuple(problems))


def _state(
    path: Path,
    last: Mapping[str, Any] | None,
    steps: Sequence[int],
    num_steps: int | None,
    *,
    has_begun: bool,
) -> tuple[str, str | None]:
    """Return (status, reason). steps: of checkpoints. has_begun: a step or checkpoint exists."""
    # 1. a living process, or a recorded end
    with suppress(OSError):
        if run_status.is_held(path / run_status.FILE):
            return RUNNING, None
    line = last or {}
    status, reason = line.get("status"), line.get("reason")
    if status in run_status.ENDS:
        return status, reason if isinstance(reason, str) else None
    # 2. other traces of an end
    if num_steps is not None and num_steps in steps:
        return run_status.FINISHED, None
    message = _failure_of_another(path, last)
    if message is not None:
        return run_status.FAILED, message
    if status == run_status.STARTED and line.get("host") == run_status.here()["host"]:
        return BROKEN_OFF, None  # its process is gone
    return (NO_END if has_begun or last is not None else NOT_STARTED), None


def _failure_of_another(path: Path, last: Mapping[str, Any] | None) -> str | None:
    """Return a failure of a process other than 0 since the last start: 0 then writes no end."""
    file = path / "processes" / FAILED_FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        if last is not None and file.stat().st_mtime >= last["at"]:
            failed = foreign.from_json(read_file(file))
            return f"process {failed['process']}: {failed['message']}"
    return None


def checkpoint_steps(directory: Path) -> tuple[int, ...]:
    """Return the steps of the finished checkpoints in a directory, ascending.

    Orbax renames a checkpoint when it is finished. Raises OSError for an unreadable directory.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(int(name) for name in names if STEP.fullmatch(name)))


def last_record(run_dir: Path, *, since_s: float) -> dict[str, Any] | None:
    """Return the last record of metrics.jsonl, if it has a step and was written since `since_s`."""
    record, written_s, _ = _tail(str(run_dir / "metrics.jsonl"))
    is_new = written_s is not None and written_s >= since_s
    return record if is_new and whole_number(record, "step") is not None else None


def setting_changes(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return (step, "setting before -> after") of each change in the lines of status.jsonl."""
    changes = []
    for line in lines:
        step, changed = whole_number(line, "step"), line.get(run_status.CHANGED)
        is_start = line.get("status") == run_status.STARTED
        if is_start and step is not None and isinstance(changed, list):
            for each in changed:
                with suppress(TypeError):  # a line that ppctl did not write
                    changes.append((step, Change(**each).arrow))
    return changes


def read_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a file's records; add a phrase on the number of other lines to `problems`."""
    bad = 0
    try:
        with open_file(path) as file:
            for line in foreign.lines_of(file):
                record = _record(line)
                if record is not None:
                    yield record
                elif line.endswith(b"\n"):
                    bad += 1
    except OSError:
        return
    if bad:
        lines = "1 line" if bad == 1 else f"{bad} lines"
        problems.append(f"{lines} of {path.name} {'is' if bad == 1 else 'are'} no record")


def whole_number(record: Mapping[str, Any] | None, key: str) -> int | None:
    """Return an entry of a record if it is an int, else None."""
    value = None if record is None else record.get(key)
    return value if type(value) is int else None


def record_number(record: Mapping[str, Any] | None, key: str) -> float | None:
    """Return an entry of a record as a float, maybe not finite, if it is a number; else None."""
    value: Any = None if record is None else record.get(key)
    is_number = type(value) is float or (type(value) is int and abs(value) < 10**300)
    return float(value) if is_number else None


def tracker_commands(run_dir: Path) -> list[tuple[str, str]]:
    """Return (tracker, command) for each tracker with records in a run directory.

    The command shows the records; that of Weights & Biases uploads its offline runs.
    """
    events, database = run_dir / "tensorboard", run_dir / "mlflow.db"
    files = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    # `wandb sync` fails for the records of a start that was killed before the first one
    offline = sorted(str(file.parent) for file in files if file.stat().st_size > WANDB_HEADER)
    commands = (
        ("TensorBoard", os.path.isdir(events), ["tensorboard", "--logdir", str(events)]),
        ("Weights & Biases", offline, ["wandb", "sync", *offline]),
        ("MLflow", os.path.isfile(database), [*MLFLOW_UI, f"sqlite:///{database}"]),
    )
    return [(name, shlex.join(words)) for name, has_records, words in commands if has_records]


def disk_bytes(path: Path) -> int:
    """Return the disk space, in bytes, of all files below a directory; skips vanished files."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, file)).st_blocks * 512
    return total


def _started_s(path: Path) -> float | None:
    """Return the time of the first start in a status.jsonl, in seconds since 1970, or None."""
    with suppress(OSError), open_file(path) as file:
        for line in file.read(TAILS[-1]).split(b"\n"):
            record = _record(line)
            if record is not None and record.get("status") == run_status.STARTED:
                return record_number(record, "at")
    return None


def _tail(path: str) -> _Tail:
    """Return the last record of a file, the file's time, and the problem of its last line."""
    name = os.path.basename(path)
    # 1. the tail of the file, with at least one whole line
    try:
        with open_file(path) as file:
            info = os.fstat(file.fileno())
            content = b""
            for size in TAILS:
                content = os.pread(file.fileno(), size, max(0, info.st_size - size))
                if content.count(b"\n") > 1 or size >= info.st_size:
                    break
    except FileNotFoundError:
        return _Tail()
    except OSError as error:
        return _Tail(problem=f"{name} cannot be read: {error.strerror}")
    # 2. the last record
    *lines, rest = content.split(b"\n")
    problem = f"the last line of {name} is torn" if rest else None
    for line in reversed(lines):
        record = _record(line)
        if record is not None:
            return _Tail(record, info.st_mtime, problem)
        problem = problem or f"the last line of {name} is no record"
    return _Tail(None, info.st_mtime, problem)


def _record(line: bytes) -> dict[str, Any] | None:
    try:  # may run a million times, and suppress would take 10 % longer
        record = foreign.from_json(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
