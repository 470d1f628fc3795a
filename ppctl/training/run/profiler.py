"""Profiler traces: a window of steps, for xprof and Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax


class Window:
    """A trace of steps start..start+num_steps-1 below `directory`; use `step` around each.

    start: None for no trace.
    """

    def __init__(self, directory: Path, start: int | None, num_steps: int):
        self.directory, self.start, self.num_steps = directory, start, num_steps
        self.running = False

    def step(self, step: int) -> Any:
        """Return a context for the dispatch of one step (0-based)."""
        if step == self.start:
            self.directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.directory), create_perfetto_trace=True)
            self.running = True
        if self.running:
            return jax.profiler.StepTraceAnnotation("train", step_num=step)
        return nullcontext()

    def is_due(self, num_finished: int) -> bool:
        """Return whether the trace should end now, all its steps having finished."""
        last = (self.start or 0) + self.num_steps
        return self.running and num_finished >= last

    def finish(self) -> Path:
        """Write the trace, and return its directory."""
        jax.profiler.stop_trace()
        self.running = False
        return self.directory


@contextmanager
def traced(window: Window) -> Iterator[Window]:
    """Yield `window`; at the end, write a trace that still runs, as of an interrupted run."""
    try:
        yield window
    finally:
        if window.running:
            window.finish()
