"""Profiler traces: a window of steps, for xprof and Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax


class Window:
    """A trace of steps start..start+num_steps-1, written below `directory`; use `step` around each of them.

    start: None for no trace. `finish` returns the traced directory once, when the window has just ended.
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
        return jax.profiler.StepTraceAnnotation("train", step_num=step) if self.running else nullcontext()

    def is_due(self, num_finished: int) -> bool:
        """Return whether the trace should end now, all its steps having finished."""
        return self.running and self.start is not None and num_finished >= self.start + self.num_steps

    def finish(self) -> Path:
        """Write the trace, and return its directory."""
        jax.profiler.stop_trace()
        self.running = False
        return self.directory


@contextmanager
def traced(window: Window) -> Iterator[Window]:
    """Yield `window`; a trace that still runs at the end (of an interrupted run) is written as it is."""
    try:
        yield window
    finally:
        if window.running:
            window.finish()
