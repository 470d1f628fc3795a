"""What `ppctl train` says beforehand of its steps, and afterwards beside what they took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ppctl.assemble import Parts
from ppctl.config import Measure
from ppctl.measure import is_kept
from ppctl.plan.sizes import Microbatch, workspace_bytes
from ppctl.price import cache_dir, hardware_of, layout_of, param_bytes, priced
from ppctl.report import size_text
from ppctl.weigh import by_part


@dataclass(frozen=True)
class Foreseen:
    """What the planner predicts for a run, beside what the compiler planned."""

    step_time_s: float | None  # None: nothing is known of the devices
    memory_bytes: int  # of the device that holds most: by shapes, and about what tasks need beside
    source: str  # where the seconds come from

    def line(self) -> str:
        """For people, before the run."""
        time = "no step time" if self.step_time_s is None else f"{self.step_time_s:.3g} s a step"
        return f"plan      {time}, {size_text(self.memory_bytes)} a device predicted ({self.source})"

    def compared(self, step_times_s: Sequence[float], compiled_bytes: int) -> str:
        """For people, after the run."""
        measured_s = statistics.median(step_times_s)
        memory = f"{size_text(self.memory_bytes)} a device predicted, {size_text(compiled_bytes)} compiled"
        if self.step_time_s is None:
            return f"plan      {memory}; {measured_s:.3g} s a step, of which nothing was predicted"
        ratio = self.step_time_s / measured_s
        return (
            f"plan      {self.step_time_s:.3g} s a step predicted, {measured_s:.3g} taken ({ratio:.2f} times; "
            f"{self.source}); {memory}"
        )


def foresee(parts: Parts) -> Foreseen:
    """The prediction for a run: by costs that were measured before, if there are any; else as config.costs asks for."""
    config, hardware = parts.config, hardware_of(parts)
    kept, costs = Measure(doctor=config.costs.doctor), config.costs
    if costs.name != "measure" and config.hardware.name == "auto" and is_kept(parts, cache_dir(kept)):
        costs = kept
    time, _ = priced(parts, costs)
    known = max(sum(of_rank.values()) for of_rank in by_part(parts, None))
    rows, params = parts.model.microbatch["inputs"].shape[0], param_bytes(parts.states.natural, parts.dtype)
    microbatch = Microbatch(rows, config.schedule.num_microbatches, 0, config.executor.remat)
    beside = workspace_bytes(parts.work, params, layout_of(parts), microbatch)
    name = "unknown hardware" if hardware is None else f"hardware={hardware.name}"
    return Foreseen(None if time is None else time.total_s, known + beside, f"costs={costs.name}, {name}")
