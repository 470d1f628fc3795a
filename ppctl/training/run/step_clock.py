"""The seconds of each step, measured by a thread that waits for the step's arrays."""

import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self

import jax

Tree = Any


class StepClock:
    """Times of steps, in the order of dispatch. A context manager: its exit stops the thread."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[tuple[Tree, Future[float]] | None] = SimpleQueue()
        self._done_s = 0.0  # seconds of time.perf_counter at the previous step's end
        # a daemon thread: a failing process must not wait for a step that others never finish
        threading.Thread(target=self._wait, name="step clock", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.put(None)

    def watch(self, numbers: Tree) -> Future[float]:
        """Return a future of the time (time.perf_counter) when a step's arrays are done."""
        done: Future[float] = Future()
        self._steps.put((numbers, done))
        return done

    def step_time_s(self, dispatched_s: float, done: Future[float]) -> float:
        """Wait for a step; return its seconds, from its dispatch or the previous step's end."""
        done_s = done.result()
        began_s, self._done_s = max(self._done_s, dispatched_s), done_s
        return done_s - began_s

    def _wait(self) -> None:
        for numbers, done in iter(self._steps.get, None):
            try:
                jax.block_until_ready(numbers)
                done.set_result(time.perf_counter())
            except BaseException as error:  # raised by `step_time_s`
                done.set_exception(error)
