"""Heartbeats of a run's processes, which name the one that is slow or has failed.

`<directory>/<process>.json` states the step of a process and since when. Process 0 reads all when
its step makes no progress. A failing process leaves `failed.json`, and the others then leave too.
The directory must be shared, as that of the checkpoints.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.errors import LostError
from ppctl.reports.run_files import FAILED_FILE

DOING = {  # in the order in which a step does them
    "compile": "compiling",
    "start": "waiting to start",
    "read": "reading the data of step {}",
    "run": "running step {}",
    "evaluate": "evaluating after step {}",
    "save": "saving step {}",
}
POLL_S = 1.0


class Heartbeat:
    """The heartbeat of one process: it writes what the process does, and reads those of the others.

    Without a directory (a run of one process) nothing is written or read.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        process: int = 0,
        num_processes: int = 1,
        slow_after_s: float = 0.0,
        say: Callable[[str], None] = print,
    ):
        self.tell: Callable[[str, str], None] = lambda event, reason: None  # of a run's events
        self.directory, self.process = directory, process
        self.num_processes, self.say = num_processes, say
        self._slow_after_s = slow_after_s
        self._poll_s = min(POLL_S, slow_after_s / 4)
        self._now: dict[str, Any] = {"step": 0, "doing": "compile", "since": time.time()}
        self._due_s = slow_after_s  # seconds without progress until the next report
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def note(self, doing: str, step: int) -> None:
        """Record that from now on this process is `doing` (a key of DOING) the step."""
        self._now = {"step": step, "doing": doing, "since": time.time()}
        self._due_s = self._slow_after_s

    @property
    def text(self) -> str:
        """This process's activity in words."""
        return note_text(self._now)

    def start(self) -> None:
        """Begin to write this heartbeat and to read the others."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat and remove its file."""
        if self.directory is not None:
            self._done.set()
            self._thread.join()
            self._file.unlink(missing_ok=True)

    def fail(self, message: str) -> bool:
        """Record a failure, so that the others leave; return whether its message is the first.

        Process 0 runs the service that the others need, so it gives them time to leave.
        """
        if self.directory is None or self._done.is_set():
            return True
        is_first = True
        try:
            with (self.directory / FAILED_FILE).open("x") as file:
                json.dump({"process": self.process, "message": message}, file)
        except FileExistsError:
            failed = _read(self.directory / FAILED_FILE)
            is_first = failed is None or failed["message"] != message
        except OSError:  # a full disk may be what failed
            pass
        if self.process == 0:
            time.sleep(3 * POLL_S)
        return is_first

    @property
    def _file(self) -> Path:
        assert self.directory is not None, "only then anything is written"
        return self.directory / f"{self.process}.json"

    def _beat(self) -> None:
        while not self._done.wait(self._poll_s):
            with suppress(OSError):
                self._write()
            self._leave_if_another_failed()
            if self.process == 0 and (line := self._late_line()) is not None:
                self.say(line)
                self.tell("stalled", line)

    def _write(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._now | {"at": time.time()}))
        os.replace(temporary, self._file)

    def _leave_if_another_failed(self) -> None:
        assert self.directory is not None, "only then others are read"
        failed = _read(self.directory / FAILED_FILE)
        if failed is None or failed["process"] == self.process:
            return
        if self.process == 0:
            reason = f"process {failed['process']} has failed: {failed['message']}"
            self.tell("lost", reason)
            self.say(f"{reason.replace(' has failed:', ' has failed, and all others leave:')}")
            time.sleep(3 * POLL_S)  # the others need this process while they leave
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(LostError.exit_code)  # nothing interrupts a main thread that is in a collective

    def _late_line(self) -> str | None:
        """Return a line if this process's step makes no progress; again after twice the time."""
        now, note = time.time(), self._now
        if now - note["since"] < self._due_s:
            return None
        self._due_s *= 2
        assert self.directory is not None, "only then others are read"
        notes = {p: _read(self.directory / f"{p}.json") for p in range(self.num_processes)}
        notes[self.process] = note | {"at": now}
        return late_text(notes, now, silent_after_s=self._slow_after_s / 2 + 2 * POLL_S)


def late_text(
    notes: dict[int, dict[str, Any] | None], now: float, *, silent_after_s: float
) -> str | None:
    """Return a line about the processes that the others wait for; None while all compile.

    >>> notes = {0: {"step": 8, "doing": "run", "since": 1.0, "at": 70.0}}
    >>> notes[1] = {"step": 8, "doing": "read", "since": 9.0, "at": 69.0}
    >>> late_text(notes, 70.0, silent_after_s=30.0)
    'process 1 is slow: reading the data of step 8 for 61 s; 1 of 2 processes wait.'
    """

    # 1. the processes that are last; among them, those without a sign of life
    places = {}
    for process, note in notes.items():
        is_alive = note is not None and now - note["at"] <= silent_after_s
        step, doing = (-1, "compile") if note is None else (note["step"], note["doing"])
        places[process] = (step, list(DOING).index(doing), is_alive)
    least = min(places.values())
    behind = [process for process in notes if places[process] == least]
    # 2. what they do, and how many wait for them
    note = notes[behind[0]]
    doing = "nothing yet" if note is None else f"{note_text(note)} for {now - note['since']:.0f} s"
    if note is not None and not least[2]:
        doing += f", without a sign of life for {now - note['at']:.0f} s"
    if len(behind) == len(notes):
        if note is not None and note["doing"] == "compile":
            return None
        return f"all {len(notes)} processes are {doing}."
    names = ", ".join(map(str, behind))
    who = f"process {names} is" if len(behind) == 1 else f"processes {names} are"
    return f"{who} slow: {doing}; {len(notes) - len(behind)} of {len(notes)} processes wait."


def note_text(note: dict[str, Any]) -> str:
    """Return a note in words.

    >>> note_text({"step": 8, "doing": "save"})
    'saving step 8'
    """
    return DOING[note["doing"]].format(note["step"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # missing, or half written where a rename is not atomic
        return None
