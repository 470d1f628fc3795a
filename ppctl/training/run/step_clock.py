"""The seconds of each step, measured by a thread that waits for the step's arrays."""

import queue
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import jax

Tree = Any


@dataclass
class Watched:
    """A step whose arrays the thread waits for."""

    numbers: Tree
    dispatched_s: float  # seconds of time.perf_counter
    step_time_s: Future[float] = field(default_factory=Future[float])
    ended_s: float = float("inf")  # a time at which the arrays were known to be done

    @property
    def is_done(self) -> bool:
        arrays = (a for a in jax.tree.leaves(self.numbers) if hasattr(a, "is_ready"))
        return all(a.is_ready() for a in arrays)


class StepClock(AbstractContextManager["StepClock"]):
    """Times of steps, in the order of dispatch. A context manager: its exit stops the thread.

    A step lasts from its dispatch or the previous step's end until its arrays are done. The thread
    may learn of an end too late, such as after a pause of the process. Then the next step would
    take no time. Two rules prevent it: a step that is done when the next one begins has ended by
    then, and steps that are all done when the thread wakes share the time equally.
    """

    def __init__(self) -> None:
        self._steps = queue.SimpleQueue[Watched | None]()
        self._newest: Watched | None = None
        self._began_s = 0.0
        # a daemon thread: a failing process must not wait for a step that others never finish
        threading.Thread(target=self._wait, name="step clock", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        self._steps.put(None)

    def begin(self) -> None:
        """Note that the next step is dispatched now."""
        self._began_s = time.perf_counter()
        if self._newest is not None and self._newest.is_done:
            self._newest.ended_s = self._began_s

    def watch(self, numbers: Tree) -> Future[float]:
        """Return a future of the seconds of the step that began last; numbers: its arrays."""
        self._newest = step = Watched(numbers, self._began_s)
        self._steps.put(step)
        return step.step_time_s

    def _wait(self) -> None:
        end_s, early = 0.0, list[Watched | None]()  # early: the next in line, if taken too early
        for first in iter(lambda: early.pop() if early else self._steps.get(), None):
            with suppress(BaseException):  # noted below
                jax.block_until_ready(first.numbers)
            now_s, steps = time.perf_counter(), [first]
            while not (early or self._steps.empty()):
                step = self._steps.get()
                if step is not None and step.is_done:
                    steps.append(step)
                else:
                    early.append(step)
            began_s = max(end_s, first.dispatched_s)
            end_s = min(now_s, steps[-1].ended_s)
            for step in steps:
                try:
                    jax.block_until_ready(step.numbers)
                except BaseException as failure:  # raised by the reader of the future
                    step.step_time_s.set_exception(failure)
                else:
                    step.step_time_s.set_result((end_s - began_s) / len(steps))
