"""The status of a run, in `<run.dir>/status.jsonl`: a line at its start, and one at its end, by an error or in order.

A run that is killed leaves no last line. The file is locked as long as the process lives, and the kernel drops the lock
however it dies, so that such a run is told from one that goes on. Loads no JAX.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

FILE = "status.jsonl"
STARTED, FINISHED, INTERRUPTED, FAILED = "started", "finished", "interrupted", "failed"
OVERRIDES = "overrides"  # key of a start: the words it was asked for with, which resume the run
LOCK_S = 1.0  # `is_held` locks the file too, for microseconds


class RunStatus:
    """The record of one start of a run; use it as a context manager. An exception that leaves it is the end "failed".

    Args:
        run_dir: Holds `status.jsonl`. Lines of earlier starts stay.
        step: Finished training steps at the start.
        facts: Further entries of the line of this start.

    Raises:
        OSError: `run_dir` cannot be written.

    Each line is one write. It is on disk, as far as a kill of the process goes, when a method returns.
    """

    def __init__(self, run_dir: Path, step: int, **facts: Any):
        self._has_ended = False
        self._file = (run_dir / FILE).open("ab+", buffering=0)
        is_locked = _lock(self._file)
        if is_locked:
            _drop_torn_line(self._file)
        started = {"status": STARTED, "step": step, **here(), "pid": os.getpid(), "is_locked": is_locked}
        self._write(started | facts)

    def __enter__(self) -> RunStatus:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not self._has_ended:
            with suppress(OSError):  # a full disk may be what failed
                self.end(FAILED, reason=" ".join(str(error).split()) or type(error).__name__)
        self._file.close()

    def end(self, status: str, **facts: Any) -> None:
        """Record the end: FINISHED, INTERRUPTED or FAILED, with further facts."""
        self._write({"status": status, **facts})
        self._has_ended = True

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record | {"at": time.time()}).encode() + b"\n")


class NoRunStatus(RunStatus):
    """The record of a process that does not lead: it writes nothing."""

    def __init__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None: ...

    def end(self, status: str, **facts: Any) -> None: ...


def here() -> dict[str, str]:
    """Return the name of this machine, as a line of a start has it."""
    return {"host": platform.node()}


def held_by(run_dir: Path) -> int | None:
    """Return the process of this machine that records a run there now, None if there is none or it is not known.

    One that is about to end is waited for. A process of another machine is not reported: where that is lost, its
    lock may outlive it for minutes.
    """
    until_s = time.monotonic() + LOCK_S
    try:
        while is_held(run_dir / FILE):
            if time.monotonic() > until_s:
                lines = [json.loads(line) for line in (run_dir / FILE).read_bytes().splitlines()]
                started = next(line for line in reversed(lines) if line["status"] == STARTED)
                return started["pid"] if here().items() <= started.items() else None
            time.sleep(0.02)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None  # no such file, or a damaged one
    return None


def is_held(path: Path) -> bool:
    """Return whether a living process, of any machine that shares locks with this one, records a run in this file.

    Raises OSError where the file cannot be read or locked.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two readers do not take each other for the run
        except BlockingIOError:
            return True
    return False


def _lock(file: FileIO) -> bool:
    """Return whether this process holds the file's lock now; no process waits for another's run to end."""
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.02)
        except OSError:  # the file system has no locks
            return False


def _drop_torn_line(file: FileIO) -> None:
    file.seek(0)
    content = file.read()
    if not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
