"""The end of a run on request: Ctrl-C, SIGTERM, and a reader of the output that has gone."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ppctl.launch import join_processes as distributed
from ppctl.launch.supervisor import STOP_SIGNALS, handling
from ppctl.reports.terminal_output import OutputConsole


@contextmanager
def stop_requests(console: OutputConsole) -> Iterator[Callable[[int], int | None]]:
    """Yield (finished steps) -> the signal that requests the run to end, or None.

    The second signal of a kind ends the process at once. In a run of several processes JAX hears
    SIGTERM and brings all to the same step; SIGINT is handled so too, and SIGPIPE, sent when the
    reader of the output has gone.
    """
    received: list[int] = []
    is_joined = distributed.is_joined()

    def handle(number: int, _frame: Any) -> None:
        received.append(number)
        if number != signal.SIGPIPE:  # Python's handler would still wait for the step and the save
            signal.signal(number, signal.SIG_DFL)
        if is_joined:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_requested(finished: int) -> int | None:
        if is_joined:
            return signal.SIGTERM if distributed.stop_requested(finished) else None
        return received[0] if received else None

    numbers = (signal.SIGINT,) if is_joined else STOP_SIGNALS
    console.when_reader_gone = lambda: handle(signal.SIGPIPE, None)
    try:
        with handling(numbers, handle):
            yield stop_requested
    finally:
        console.when_reader_gone = None
