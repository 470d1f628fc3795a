"""Heartbeats of a run's processes: they identify a process that is slow or has failed.

`<directory>/<process>.json` holds a process's step, its activity and the start of that activity.
Process 0 reads all heartbeats when its step makes no progress. A failing process writes
`failed.json`; the others read it and exit. All processes must share the directory.
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
from ppctl.reports.terminal_output import replace_file

DOING = {  # activities, in the order of a step
    "compile": "compiling",
    "start": "waiting to start",
    "read": "reading the data of step {}",
    "run": "running step {}",
    "evaluate": "evaluating after step {}",
    "save": "saving step {}",
}
POLL_S = 1.0
Note = dict[str, Any]  # step, activity, and seconds since 1970


class Heartbeat:
    """The heartbeat of one process: writes its activity and reads the other processes' files.

    directory: None in a run of one process, which writes and reads no files. slow_after_s: seconds
    without progress after which process 0 prints a line. say: prints a line.
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
        self.tell: Callable[[str, str], None] = lambda event, reason: None  # reports an event
        self.directory, self.process = directory, process
        self.num_processes, self.say = num_processes, say
        self._slow_after_s = slow_after_s
        self._poll_s = min(POLL_S, slow_after_s / 4)
        self._now: Note = {"step": 0, "doing": "compile", "since": time.time()}
        self._due_s = slow_after_s  # seconds without progress until the next report
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def note(self, doing: str, step: int) -> None:
        """Record that an activity of a step starts; doing: a key of DOING."""
        self._now = {"step": step, "doing": doing, "since": time.time()}
        self._due_s = self._slow_after_s

    @property
    def text(self) -> str:
        """This process's activity in words."""
        return note_text(self._now)

    def start(self) -> None:
        """Start writing this heartbeat and reading the others."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat and remove its file."""
        if self.directory is not None:
            self._done.set()
            self._thread.join()
            self._file.unlink(missing_ok=True)

    def fail(self, message: str) -> bool:
        """Record a failure, so that the other processes exit.

        Returns False if another process has already failed with the same message. Process 0 hosts
        the service that the others need, so it gives them time to exit.
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
        assert self.directory is not None, "a run of one process has no files"
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
        replace_file(self._file, json.dumps(self._now | {"at": time.time()}))

    def _leave_if_another_failed(self) -> None:
        assert self.directory is not None, "a run of one process reads no others"
        failed = _read(self.directory / FAILED_FILE)
        if failed is None or failed["process"] == self.process:
            return
        if self.process == 0:
            who, why = f"process {failed['process']} has failed", failed["message"]
            self.tell("lost", f"{who}: {why}")
            self.say(f"{who}, and all others leave: {why}")
            time.sleep(3 * POLL_S)  # the others need this process until they have exited
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(LostError.exit_code)  # a main thread in a collective cannot be interrupted

    def _late_line(self) -> str | None:
        """Return a line if this process makes no progress, repeated at doubling intervals."""
        now, note = time.time(), self._now
        if now - note["since"] < self._due_s:
            return None
        self._due_s *= 2
        assert self.directory is not None, "a run of one process reads no others"
        notes = {p: _read(self.directory / f"{p}.json") for p in range(self.num_processes)}
        notes[self.process] = note | {"at": now}
        return late_text(notes, now, silent_after_s=self._slow_after_s / 2 + 2 * POLL_S)


def late_text(notes: dict[int, Note | None], now: float, *, silent_after_s: float) -> str | None:
    """Return a line naming the processes that the others wait for; None while all compile.

    notes: the last heartbeat of each process; None: none yet. now: seconds since 1970.
    silent_after_s: seconds without a heartbeat after which a process counts as silent.

    >>> notes = {0: {"step": 8, "doing": "run", "since": 1.0, "at": 70.0}}
    >>> notes[1] = {"step": 8, "doing": "read", "since": 9.0, "at": 69.0}
    >>> late_text(notes, 70.0, silent_after_s=30.0)
    'process 1 is slow: reading the data of step 8 for 61 s; 1 of 2 processes wait.'
    """
    # 1. the processes furthest behind; among equal ones, the silent ones
    places = {}
    for process, note in notes.items():
        is_alive = note is not None and now - note["at"] <= silent_after_s
        step, doing = (-1, "compile") if note is None else (note["step"], note["doing"])
        places[process] = (step, list(DOING).index(doing), is_alive)
    least = min(places.values())
    behind = [process for process in notes if places[process] == least]
    # 2. their activity, and the number of processes that wait
    note = notes[behind[0]]
    doing = "no heartbeat" if note is None else f"{note_text(note)} for {now - note['since']:.0f} s"
    if note is not None and not least[2]:
        doing += f", without a sign of life for {now - note['at']:.0f} s"
    if len(behind) == len(notes):
        is_compiling = note is not None and note["doing"] == "compile"
        return None if is_compiling else f"all {len(notes)} processes are {doing}."
    names = ", ".join(map(str, behind))
    who = f"process {names} is" if len(behind) == 1 else f"processes {names} are"
    return f"{who} slow: {doing}; {len(notes) - len(behind)} of {len(notes)} processes wait."


def note_text(note: Note) -> str:
    """Return the activity of a heartbeat in words.

    >>> note_text({"step": 8, "doing": "save"})
    'saving step 8'
    """
    return DOING[note["doing"]].format(note["step"])


def _read(path: Path) -> Note | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # missing, or half written: a rename may not be atomic
        return None
