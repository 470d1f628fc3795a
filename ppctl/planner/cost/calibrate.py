"""Op times corrected by a step: pieces timed alone miss effects of whole programs and caches.

One small step of the same executor, mesh, schedule and size of microbatch is run, with fewer
layers. All op times are scaled by its time over its own prediction. Too small a step misleads, for
the cost besides tasks grows with layers and microbatches: with 2 layers of 16 it was 7% to 17%
short, with 2 microbatches of 8 up to 14% long, now within 8%. (Tried and rejected: two small steps.
A line through two noisy points misses a distant third one by several times the noise.)
"""

from __future__ import annotations

from dataclasses import astuple, replace
from math import inf

from ppctl.config import Config, Csv, Uniform
from ppctl.executors.tree_bytes import shard_bytes
from ppctl.planner.cost.op_times import OpTimes, PieceTimes
from ppctl.planner.cost.piece_timing import Timing
from ppctl.planner.cost.step_runs import run_steps, time_of
from ppctl.training.pipeline.job import TrainingJob, assemble

LEAST_LAYERS, MOST_LAYERS = 2, 8  # of a stage of the small step
SHARE = 4  # between: one layer in four
WAVES = 8  # its microbatches at most, over the ranks


def small_request(job: TrainingJob) -> Config | None:
    """Return the request of the small step; None where a smaller one would be another schedule."""
    config, pipe, schedule = job.config, job.pipe, job.pipe.schedule
    if isinstance(config.schedule, Csv):
        return None
    number = min(schedule.num_microbatches, WAVES * schedule.num_ranks)
    examples = pipe.model.microbatch["inputs"].shape[0] * config.mesh.dp * config.mesh.fsdp
    sizes = [len(layers) for layers in pipe.partition]
    if not pipe.execution.is_pipelined:
        sizes = [pipe.stack.num_layers]
    layers = min(max(LEAST_LAYERS, -(-max(sizes) // SHARE)), MOST_LAYERS)
    return replace(
        config,
        model=replace(config.model, num_layers=len(sizes) * layers),
        schedule=replace(config.schedule, num_microbatches=number),
        data=replace(config.data, batch_size=examples * number),
        partition=Uniform(),
    )


def small_step(job: TrainingJob) -> dict[str, Timing]:
    """Run the small step; return its seconds as {"small": ...}, {} where there is none."""
    request = small_request(job)
    return {} if request is None else {"small": run_steps(assemble(request))}


def corrected(job: TrainingJob, op_times: OpTimes, measured: Timing) -> OpTimes:
    """Return op times that predict the measured small step, with shared cores in CPU s too.

    Of `op_times` overhead_s and overhead_cpu_s are the request's, the others the small step's.
    """
    request = small_request(job)
    assert request is not None, "it was run"
    small = assemble(request)
    of_device, of_small = (
        shard_bytes(pipe.states.staged["params"]) for pipe in (job.pipe, small.pipe)
    )
    share = of_small / of_device
    time = time_of(small.pipe, op_times)
    longer = (measured.wall_s - share * op_times.overhead_s) / time.pipeline_s
    busier = (measured.cpu_s - share * op_times.overhead_cpu_s) / (time.work_s * op_times.cores)
    if longer <= 0 or (op_times.capacity < inf and busier <= 0):
        return op_times  # nothing of the small step is left to its tasks
    scaled = _scaled(op_times, longer)
    if op_times.capacity == inf:
        return scaled
    return replace(scaled, cores=op_times.cores * busier / longer)


def _scaled(op_times: OpTimes, factor: float) -> OpTimes:
    """Return the op times with all times of tasks and transfers multiplied by a factor."""

    def scaled(piece: PieceTimes) -> PieceTimes:
        return PieceTimes(*(seconds * factor for seconds in astuple(piece)))

    pieces = {name: scaled(getattr(op_times, name)) for name in ("embed", "layer", "head")}
    task_s, hop_s = op_times.task_s * factor, op_times.hop_s * factor
    return replace(op_times, **pieces, task_s=task_s, hop_s=hop_s)
