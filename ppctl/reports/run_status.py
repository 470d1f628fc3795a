"""The status of a run, in `<run.dir>/status.jsonl`: a line at each start, and one at its end.

A killed run leaves no last line. The file is locked as long as the process lives, and the kernel
drops the lock however it dies: that tells such a run from one that goes on. Loads no JAX.
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
STOP_FILE = "stop"  # in a run directory: a request to save and end
DIRECTORY = "directory"  # key of a start: the directory in which it was started
OVERRIDES = "overrides"  # key of a start: the requested words, which resume the run
CHANGED = "changed"  # key of a start: settings that differ from those of the resumed checkpoint
COSTS = "task_costs"  # key of a start: the relative costs of its schedule's tasks
LOCK_S = 1.0  # seconds to wait for a lock: `is_held` takes it for microseconds


class HeldError(Exception):
    """A living process records a run here; `pid` where that is one of this machine and known."""

    def __init__(self, pid: int | None):
        super().__init__(pid)
        self.pid = pid


class RunStatus:
    """The record of one start of a run, a context manager: an exception that leaves it is "failed".

    It holds the lock of `run_dir`, which is made where it is missing. `begin` writes the first
    line; a run that never begins leaves no trace. Each line is one write, so that a kill of the
    process loses none. HeldError if another process holds the lock.
    """

    def __init__(self, run_dir: Path):
        self._has_begun = self._has_ended = False
        places = (run_dir / FILE, run_dir, *run_dir.parents)
        self._made = [path for path in places if not path.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file, self._is_locked = _opened(run_dir)

    def begin(self, step: int, **facts: Any) -> None:
        """Record the start, after `step` finished training steps, with further facts."""
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
        """Record the end, one of ENDS, with further facts."""
        self._write({"status": status, **facts})
        self._has_ended = True

    def _write(self, record: dict[str, Any]) -> None:
        append(self._file, json.dumps(record | {"at": time.time()}).encode() + b"\n")


def here() -> dict[str, str]:
    """Return the name of this machine, for a line of a start."""
    return {"host": platform.node()}


def held_by(run_dir: Path) -> int | None:
    """Return the process of this machine that records a run there and goes on, None if unknown."""
    until_s = time.monotonic() + LOCK_S
    with suppress(OSError):  # no such file
        while is_held(run_dir / FILE):
            if time.monotonic() > until_s:
                return _holder(run_dir)
            time.sleep(0.02)
    return None


def _holder(run_dir: Path) -> int | None:
    """Return the living process of this machine that wrote the newest start, None if unknown."""
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
    """Return whether a living process, of any machine with the same locks, records a run here.

    Raises OSError where the file cannot be read or locked.
    """
    with open_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: readers do not clash
        except BlockingIOError:
            return True
    return False


@contextmanager
def kept_still(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory that has one. HeldError if a process records a run there."""
    if not os.path.lexists(run_dir / FILE):  # an imported model's
        yield
        return
    with (run_dir / FILE).open("rb+", buffering=0) as file:
        try:
            _lock(file)
        except BlockingIOError:
            raise HeldError(_holder(run_dir)) from None
        yield


def _opened(run_dir: Path) -> tuple[FileIO, bool]:
    """Return the status file of a run, and whether this process has its lock. Raises HeldError."""
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
        file.close()  # a run that never began has taken it away
        run_dir.mkdir(parents=True, exist_ok=True)


def append(file: FileIO, line: bytes) -> None:
    """Write a line to an unbuffered file; OSError where a full disk takes only a part of it."""
    while line:
        line = line[file.write(line) :]


def _lock(file: FileIO) -> bool:
    """Return False in a file system without locks. BlockingIOError if another process holds it."""
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
