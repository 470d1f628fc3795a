"""Step time and memory predicted before the first step, compared afterwards with the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ppctl.reports.bubbles import bubble_text
from ppctl.reports.terminal import size_text


@dataclass(frozen=True)
class StepPrediction:
    """Step time, memory and bubble of a run as the planner predicts them."""

    step_time_s: float | None  # None: nothing is known of the devices
    memory_bytes: int  # of the device that holds most: by shapes, and about what tasks need in addition
    source: str  # where the seconds come from
    ideal_bubble_fraction: float | None = None  # 0..1: of the schedule alone; None without a pipeline
    bubble_fraction: float | None = None  # 0..1: by the same costs as the seconds
    by_measured_costs_s: float | None = None  # of a step, where costs=measure has timed this request before

    def line(self) -> str:
        """Return the line that is printed before the run."""
        bubble = bubble_text(self.ideal_bubble_fraction, self.bubble_fraction)
        found = (self._time, bubble and f"bubble {bubble}", f"{size_text(self.memory_bytes)} a device predicted")
        return f"plan      {', '.join(filter(None, found))} ({self.source})"

    @property
    def _time(self) -> str:
        if self.step_time_s is None:
            return "no step time"
        return f"{self.step_time_s:.3g} s a step{by_measured_text(self.by_measured_costs_s)}"

    def compared(self, step_times_s: Sequence[float], compiled_bytes: int) -> str:
        """Return the line that is printed after the run: predicted vs. measured."""
        measured_s = statistics.median(step_times_s)
        memory = f"{size_text(self.memory_bytes)} a device predicted, {size_text(compiled_bytes)} compiled"
        if self.step_time_s is None:
            return f"plan      {memory}; {measured_s:.3g} s a step, of which nothing was predicted"
        ratio = self.step_time_s / measured_s
        return (
            f"plan      {self._time} predicted, {measured_s:.3g} measured ({ratio:.2f} times; {self.source}); {memory}"
        )


def by_measured_text(seconds: float | None) -> str:
    """Return what costs measured before say of a step, to follow what the costs of the request say; "" for nothing."""
    return "" if seconds is None else f" ({seconds:.3g} by costs=measure, timed before)"
