"""The status of a run in `<run.dir>/status.jsonl`: a line for each start, and one for its end.

A killed run leaves no line for its end. The process locks the file while it lives, and the kernel
releases the lock at any death, so the lock distinguishes a killed run from a running one. Loads no
JAX.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self

from ppctl.errors import one_line
from ppctl.user_files import open_file, read_file

FILE = "status.jsonl"
STARTED, FINISHED, STOPPED = "started", "finished", "stopped"
INTERRUPTED, FAILED = "interrupted", "failed"
ENDS = (FINISHED, STOPPED, INTERRUPTED, FAILED)
ALL = (STARTED, *ENDS)
STOP_FILE = "stop"  # file in a run directory that requests a save and the end
DIRECTORY = "directory"  # key in the line of a start: the working directory
OVERRIDES = "overrides"  # key in the line of a start: the overrides, for the command that resumes
CHANGED = "changed"  # key in the line of a start: settings that differ from the checkpoint's
COSTS = "task_costs"  # key in the line of a start: relative costs of the schedule's tasks
LOCK_S = 1.0  # seconds to retry a lock that a reader (`is_held`) holds for microseconds


class HeldError(Exception):
    """A living process records the run. pid: the process, if known and on this machine."""

    def __init__(self, pid: int | None):
        super().__init__(pid)
        self.pid = pid


class RunStatus:
    """The record of one start of a run. A context manager that records an exception as "failed".

    Creates `run_dir` if it is missing, and holds its lock. `begin` writes the first line; without
    it, `run_dir` is left as it was. Each line is a single write, so a kill of the process loses no
    line. HeldError if another process holds the lock.
    """

    def __init__(self, run_dir: Path):
        self._has_begun = self._has_ended = False
        places = (run_dir / FILE, run_dir, *run_dir.parents)
        self._made = [path for path in places if not path.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file, self._is_locked = _opened(run_dir)

    def begin(self, step: int, **facts: Any) -> None:
        """Record the start, after `step` finished training steps, and `facts`."""
        if self._is_locked:
            _drop_torn_line(self._file)
        self._has_begun = True
        process = {**here(), "pid": os.getpid(), "is_locked": self._is_locked}
        self._write({"status": STARTED, "step": step, **process, **facts})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self._has_begun and not self._has_ended:
            with suppress(OSError):  # a full disk may be what failed
                self.end(FAILED, reason=one_line(error) or type(error).__name__)
        if not self._has_begun:
            self._leave_no_trace()
        self._file.close()

    def _leave_no_trace(self) -> None:
        with suppress(OSError):  # directories with other files stay
            for path in self._made:
                path.rmdir() if path.is_dir() else path.unlink()

    def end(self, status: str, **facts: Any) -> None:
        """Record the end, one of ENDS, and `facts`."""
        self._write({"status": status, **facts})
        self._has_ended = True

    def _write(self, record: dict[str, Any]) -> None:
        append(self._file, json.dumps(record | {"at": time.time()}).encode() + b"\n")


def here() -> dict[str, str]:
    """Return the key and name of this machine, for the line of a start."""
    return {"host": platform.node()}


def held_by(run_dir: Path) -> int | None:
    """Return the id of the local process that records a run; None if none does or it is unknown."""
    until_s = time.monotonic() + LOCK_S
    with suppress(OSError):  # no such file
        while is_held(run_dir / FILE):
            if time.monotonic() > until_s:
                return _holder(run_dir)
            time.sleep(0.02)
    return None


def _holder(run_dir: Path) -> int | None:
    """Return the id of the living local process that wrote the newest start; None if unknown."""
    try:
        lines = [json.loads(line) for line in read_file(run_dir / FILE).splitlines()]
        started = next(line for line in reversed(lines) if line["status"] == STARTED)
        if not here().items() <= started.items():
            return None
        os.kill(started["pid"], 0)
    except (OSError, LookupError, ArithmeticError, ValueError, TypeError, AttributeError):
        return None  # it has not begun yet, or the file is damaged
    except (StopIteration, RecursionError):
        return None
    return started["pid"]


def is_held(path: Path) -> bool:
    """Return whether a living process, on any machine with the same locks, records the run.

    path: the run's status.jsonl. OSError if it cannot be read or locked.
    """
    with open_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: readers do not clash
        except BlockingIOError:
            return True
    return False


@contextmanager
def kept_still(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory, if it has one. HeldError if a process records the run."""
    if not os.path.lexists(run_dir / FILE):  # an imported model has no status
        yield
        return
    with (run_dir / FILE).open("rb+", buffering=0) as file:
        try:
            _lock(file)
        except BlockingIOError:
            raise HeldError(_holder(run_dir)) from None
        yield


def _opened(run_dir: Path) -> tuple[FileIO, bool]:
    """Open the status file of a run; return (file, whether it is locked). Raises HeldError."""
    while True:
        file = (run_dir / FILE).open("ab+", buffering=0)
        try:
            is_locked = _lock(file)
        except BlockingIOError:
            file.close()
            raise HeldError(_holder(run_dir)) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (run_dir / FILE).stat()):
                return file, is_locked
        file.close()  # a run that never began has removed this file
        run_dir.mkdir(parents=True, exist_ok=True)


def append(file: FileIO, line: bytes) -> None:
    """Write a whole line to an unbuffered file. OSError if a full disk takes only a part."""
    while line:
        line = line[file.write(line) :]


def _lock(file: FileIO) -> bool:
    """Lock a file; return False if its file system has no locks.

    BlockingIOError if another process holds the lock.
    """
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
        except OSError:
            return False


def _drop_torn_line(file: FileIO) -> None:
    file.seek(0)
    content = file.read()
    if not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
