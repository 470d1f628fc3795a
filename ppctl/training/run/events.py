"""run.on_event: the user's command, called at each event of a run.

It reads one JSON document from standard input. A separate thread makes the calls one by one, so no
step waits for them. The first call that fails or takes too long prints a note; training goes on.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ppctl.errors import NonFiniteError, PpctlError, one_line
from ppctl.launch.event_command import event_document, fault_of_call
from ppctl.training.run.heartbeat import POLL_S
from ppctl.training.run.process_group import lost_contact

NAMES = ("started", "saved", "evaluated", "skipped", "non_finite", "stalled", "lost")
NAMES += ("finished", "stopped", "interrupted", "failed")
END_S = 30.0  # seconds after the run for the remaining calls
LOST_S = 2 * POLL_S  # seconds for the heartbeat to name the failed process and its error


class Events:
    """The events of one run. A context manager: an exception of its body is an event, too.

    command: run.on_event; None: no calls. note: prints a line.
    """

    def __init__(self, command: str | None, run_dir: Path, note: Callable[[str], None]):
        self._command, self._run_dir, self._note = command, run_dir, note
        self._waiting = queue.SimpleQueue[dict[str, Any] | None]()
        self._has_failed, self._is_lost = False, threading.Event()
        self._thread = threading.Thread(target=self._call_all, name="events", daemon=True)

    def __enter__(self) -> Self:
        if self._command is not None:
            self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, NonFiniteError):
            self.tell("non_finite", reason=one_line(str(error)))
        lost = None if error is None else lost_contact(error)
        if lost is not None:
            if not self._is_lost.wait(LOST_S):
                self.tell("lost", reason=f"lost contact with another process ({lost})")
        elif error is not None:
            kind = error.kind if isinstance(error, PpctlError) else type(error).__name__
            self.tell("failed", kind=kind, reason=one_line(str(error)))
        if self._command is not None:
            self._waiting.put(None)
            self._thread.join(END_S)
            if self._thread.is_alive():
                self._note(f"note      run.on_event: calls left after {END_S:g} s were dropped")

    def tell(self, event: str, **facts: Any) -> None:
        """Call the command, without waiting, with {"event", "time", "run_dir", **facts}."""
        assert event in NAMES, event
        if event == "lost":
            self._is_lost.set()
        if self._command is not None:
            self._waiting.put(event_document(event, self._run_dir, **facts))

    def _call_all(self) -> None:
        assert self._command is not None, "the thread runs only with a command"
        for document in iter(self._waiting.get, None):
            fault = fault_of_call(self._command, document)
            if fault is not None and not self._has_failed:
                self._has_failed = True
                what = f"note      run.on_event at {document['event']}"
                self._note(f"{what}: {fault}. Training goes on; later failures are not printed")
