"""Step time and memory as predicted before the first step and compared with measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ppctl.reports.bubble_names import bubble_text
from ppctl.reports.terminal_output import size_text


@dataclass(frozen=True)
class StepPrediction:
    """Step time, memory and bubble of a run as the planner predicts them."""

    step_time_s: float | None  # None: unknown devices
    memory_bytes: int  # of the fullest device: exact shapes, and an estimate of temporaries
    source: str  # of the seconds
    ideal_bubble_fraction: float | None = None  # 0..1, by unit costs; None without a pipeline
    bubble_fraction: float | None = None  # 0..1, by the costs of the seconds

    def line(self) -> str:
        """Return the line that is printed before the run."""
        bubble = bubble_text(self.ideal_bubble_fraction, self.bubble_fraction)
        step = "no step time" if self.step_time_s is None else f"{self.step_time_s:.3g} s a step"
        memory = f"{size_text(self.memory_bytes)} a device predicted"
        parts = filter(None, (step, bubble and f"bubble {bubble}", memory))
        return f"plan      {', '.join(parts)} ({self.source})"

    def compared(self, step_times_s: Sequence[float], compiled_bytes: int) -> str:
        """Return the line that is printed after the run: predicted vs. measured."""
        measured_s = statistics.median(step_times_s)
        sizes = size_text(self.memory_bytes), size_text(compiled_bytes)
        memory = "{} a device predicted, {} compiled".format(*sizes)
        if self.step_time_s is None:
            return f"plan      {memory}; {measured_s:.3g} s a step, of which nothing was predicted"
        ratio = self.step_time_s / measured_s
        times = f"{self.step_time_s:.3g} s a step predicted, {measured_s:.3g} measured"
        return f"plan      {times} ({ratio:.2f} times; {self.source}); {memory}"
