"""Predict step time and memory of a run before its first step."""

from __future__ import annotations

from ppctl.config import Measure
from ppctl.planner.analytic import adds_in_place
from ppctl.planner.count import work_of
from ppctl.planner.measure import is_kept
from ppctl.planner.sizes import Microbatch, reference_bytes, workspace_bytes
from ppctl.planner.step_time import cache_dir, hardware_of, layout_of, param_bytes, predicted_time
from ppctl.training.job import TrainingJob
from ppctl.training.prediction import StepPrediction


def predict_step(job: TrainingJob) -> StepPrediction:
    """Return the prediction for a run: by costs measured before, if there are any; else as config.costs has it."""
    config, pipe, hardware = job.config, job.pipe, hardware_of(job)
    kept, costs = Measure(doctor=config.costs.doctor), config.costs
    if costs.name != "measure" and config.hardware.name == "auto" and is_kept(job, cache_dir(kept)):
        costs = kept
    time, _ = predicted_time(job, costs)
    known = max(sum(of_rank.values()) for of_rank in pipe.memory())
    examples, params = pipe.model.microbatch["inputs"].shape[0], param_bytes(pipe.states.natural, pipe.dtype)
    microbatch = Microbatch(examples, config.schedule.num_microbatches, 0, config.executor.remat)
    work, layout = work_of(job.counted_model), layout_of(pipe)
    if pipe.execution.is_pipelined:
        adds = hardware is not None and hardware.adds_products
        in_place = adds_in_place(layout, adds=adds, unroll=pipe.execution.unroll)
        workspace = workspace_bytes(work, params, layout, microbatch, adds=in_place)
    else:
        workspace = reference_bytes(work, params, layout, microbatch)
    name = "unknown hardware" if hardware is None else f"hardware={hardware.name}"
    return StepPrediction(None if time is None else time.total_s, known + workspace, f"costs={costs.name}, {name}")
