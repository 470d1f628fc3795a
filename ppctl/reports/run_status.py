"""The status of a run in `<run.dir>/status.jsonl`: a line for each start, and one for its end.

A killed run leaves no line for its end. The process locks the file while it lives, and the kernel
releases the lock at any death, so the lock distinguishes a killed run from a running one. On file
systems without locks, host, process and time of the last line do. Loads no JAX.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
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
SILENT_S = 600.0  # seconds without a new file after which a process on another machine is gone
CLOCK_S = 60.0  # seconds by which the clock of this machine may have been set
NO_LOCKS = (
    "note      run.dir is on a file system without locks: another `ppctl train`, stop or runs rm "
    "knows this run by host, process and time of its files"
)
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

    @property
    def notes(self) -> list[str]:
        """The lines to print at the start."""
        return [] if self._is_locked else [NO_LOCKS]

    def begin(self, step: int, **facts: Any) -> None:
        """Record the start, after `step` finished training steps, and `facts`."""
        if self._is_locked:  # drop a torn line
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)
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
            with suppress(OSError):  # directories with other files stay
                for path in self._made:
                    path.rmdir() if path.is_dir() else path.unlink()
        self._file.close()

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
    """Return the id of the living local process of the newest start; None if it is unknown."""
    line = _open_start(run_dir / FILE)
    return (
        line["pid"]
        if line is not None and here().items() <= line.items() and _lives(line)
        else None
    )


def is_held(path: Path) -> bool:
    """Return whether a living process, on any machine with the same locks, records the run.

    Without locks it is what `_seems_held` returns. path: the run's status.jsonl. OSError if it
    cannot be read.
    """
    with open_file(path) as file:
        has_lock = True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: readers do not clash
        except BlockingIOError:
            return True
        except OSError:  # no locks, as on NFS without lockd
            has_lock = False
        return _seems_held(path, has_lock=has_lock)


def _seems_held(path: Path, *, has_lock: bool) -> bool:
    """Return whether another process seems to record the run, by a start without an end.

    has_lock: of this process: a run's process that had it, too, is gone. Otherwise a local process
    decides, and of another machine the time of the newest file.
    """
    line = _open_start(path)
    if line is None or (has_lock and line.get("is_locked") is not False):
        return False
    if here().items() <= line.items():
        return line.get("pid") != os.getpid() and _lives(line)
    with os.scandir(path.parent) as entries:
        newest_s = max(entry.stat().st_mtime for entry in entries)
    return time.time() - newest_s < SILENT_S


def _open_start(path: Path) -> dict[str, Any] | None:
    """Return the last line of a status.jsonl if it records a start; None: an end, or unreadable."""
    content = b""
    with suppress(FileNotFoundError):  # a run that never began has removed it
        content = read_file(path)
    for text in reversed(content.splitlines()):
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("status") in ALL:
                return line if line["status"] == STARTED else None
    return None


def _lives(line: Mapping[str, Any]) -> bool:
    """Return whether the local process of a start lives; another may have its id by now."""
    try:
        os.kill(line["pid"], 0)
        if not os.path.isdir("/proc/self"):
            return True
        ticks = int(Path(f"/proc/{line['pid']}/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age_s < line["at"] + CLOCK_S
    except PermissionError:
        return True
    except (OSError, LookupError, ArithmeticError, ValueError, TypeError):
        return False  # the process is gone, or the line damaged


@contextmanager
def kept_still(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory, if it has one. HeldError if a process records the run."""
    if not os.path.lexists(run_dir / FILE):  # an imported model has no status
        yield
        return
    with (run_dir / FILE).open("rb+", buffering=0) as file:
        _lock_run(file, run_dir)
        yield


def _opened(run_dir: Path) -> tuple[FileIO, bool]:
    """Open the status file of a run; return (file, whether it is locked). Raises HeldError."""
    while True:
        file = (run_dir / FILE).open("ab+", buffering=0)
        try:
            is_locked = _lock_run(file, run_dir)
        except HeldError:
            file.close()
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (run_dir / FILE).stat()):
                return file, is_locked
        file.close()  # a run that never began has removed this file
        run_dir.mkdir(parents=True, exist_ok=True)


def append(file: FileIO, line: bytes) -> None:
    """Write a whole line to an unbuffered file. OSError if a full disk takes only a part."""
    while line:
        line = line[file.write(line) :]


def _lock_run(file: FileIO, run_dir: Path) -> bool:
    """Lock the status file of a run; return whether it has locks. HeldError if it is held."""
    is_locked = _lock(file)
    if is_locked is None or _seems_held(run_dir / FILE, has_lock=is_locked):
        raise HeldError(_holder(run_dir))
    return is_locked


def _lock(file: FileIO) -> bool | None:
    """Lock a file; return False if its file system has no locks, None if another process has it."""
    until_s = time.monotonic() + LOCK_S
    while time.monotonic() <= until_s:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return False
    return None
