"""The steps of a run that JAX's profiler traces (run.profile)."""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import jax

from ppctl.config import Run
from ppctl.launch import join_processes as distributed
from ppctl.training.run.run_environment import writing


class ProfileWindow:
    """The traced steps of one start, on process 0. A context manager: an error closes the trace.

    steps: the steps of run.profile from `start` on, counted from 0; empty: no trace.
    """

    def __init__(self, run: Run, start: int) -> None:
        requested = run.profile_steps if distributed.is_lead() else None
        self._requested, self._start = requested or range(0), start
        self.steps = self._requested[max(0, start - self._requested.start) :]
        self.directory = Path(run.dir) / "profile"
        self._trace = ExitStack()
        self.is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._trace.close()

    @property
    def passed(self) -> str | None:
        """Return a line on the requested steps that lie before this start, or None.

        >>> ProfileWindow(Run(profile="2-9"), 4).passed
        'run.profile traces only steps 4-9: this start begins with step 4 (the first is 0)'
        """
        if len(self.steps) == len(self._requested):
            return None
        what = f"traces only {_text(self.steps)}" if self.steps else "traces nothing"
        return f"run.profile {what}: this start begins with step {self._start} (the first is 0)"

    def begin(self) -> None:
        """Start the trace."""
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            recording = jax.profiler.trace(str(self.directory), create_perfetto_trace=True)
            self._trace.enter_context(recording)
        self.is_open = True

    def end(self, finished: int) -> str:
        """Write the trace; return a note if the end of the run cut it short, else ""."""
        self.is_open = False
        with writing(self.directory):
            self._trace.close()
        traced = self.steps[: finished - self.steps.start]
        lacks = f"{_text(traced)} of {_text(self.steps)}"
        return "" if traced == self.steps else f", cut by the end of the run: {lacks}"


def _text(steps: range) -> str:
    return f"steps {steps.start}-{steps.stop - 1}"
