"""Step time and memory predicted before the first step, compared afterwards with the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ppctl.reports.terminal import size_text


@dataclass(frozen=True)
class StepPrediction:
    """Step time and memory of a run as the planner predicts them."""

    step_time_s: float | None  # None: nothing is known of the devices
    memory_bytes: int  # of the device that holds most: by shapes, and about what tasks need in addition
    source: str  # where the seconds come from

    def line(self) -> str:
        """Return the line that is printed before the run."""
        time = "no step time" if self.step_time_s is None else f"{self.step_time_s:.3g} s a step"
        return f"plan      {time}, {size_text(self.memory_bytes)} a device predicted ({self.source})"

    def compared(self, step_times_s: Sequence[float], compiled_bytes: int) -> str:
        """Return the line that is printed after the run: predicted vs. measured."""
        measured_s = statistics.median(step_times_s)
        memory = f"{size_text(self.memory_bytes)} a device predicted, {size_text(compiled_bytes)} compiled"
        if self.step_time_s is None:
            return f"plan      {memory}; {measured_s:.3g} s a step, of which nothing was predicted"
        ratio = self.step_time_s / measured_s
        return (
            f"plan      {self.step_time_s:.3g} s a step predicted, {measured_s:.3g} measured ({ratio:.2f} times; "
            f"{self.source}); {memory}"
        )
