"""Predict step time and memory of a run before its first step."""

from __future__ import annotations

from ppctl.config import Measure
from ppctl.planner.count import work_of
from ppctl.planner.measure import is_kept
from ppctl.planner.sizes import Microbatch, workspace_bytes
from ppctl.planner.step_time import cache_dir, hardware_of, layout_of, param_bytes, priced
from ppctl.training.job import Parts
from ppctl.training.memory import by_part
from ppctl.training.prediction import StepPrediction


def predict_step(parts: Parts) -> StepPrediction:
    """The prediction for a run: by costs that were measured before, if there are any; else as config.costs asks for."""
    config, hardware = parts.config, hardware_of(parts)
    kept, costs = Measure(doctor=config.costs.doctor), config.costs
    if costs.name != "measure" and config.hardware.name == "auto" and is_kept(parts, cache_dir(kept)):
        costs = kept
    time, _ = priced(parts, costs)
    known = max(sum(of_rank.values()) for of_rank in by_part(parts, None))
    rows, params = parts.model.microbatch["inputs"].shape[0], param_bytes(parts.states.natural, parts.dtype)
    microbatch = Microbatch(rows, config.schedule.num_microbatches, 0, config.executor.remat)
    beside = workspace_bytes(work_of(parts.model), params, layout_of(parts), microbatch)
    name = "unknown hardware" if hardware is None else f"hardware={hardware.name}"
    return StepPrediction(None if time is None else time.total_s, known + beside, f"costs={costs.name}, {name}")
