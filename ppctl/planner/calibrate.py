"""Op times corrected by a step: pieces timed alone miss what a whole program adds, and what its caches save.

One small step of the same executor, mesh, schedule and size of microbatch is run, with fewer layers. By as much as it
takes more or less than its own prediction, all op times are scaled. The cost of a step besides its tasks grows with
layers and microbatches alike (memory is touched for the first time, caches overflow), so that too small a step
misleads: with 2 layers of 16 it was 7% to 17% short, with 2 microbatches of 8 up to 14% long, as it is now within 8%.
Two small steps could tell tasks from their layers, but a line through two noisy points misses a distant third one by
several times the noise.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf

from ppctl.config import Config, Csv, Uniform
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.planner.op_times import OpTimes, PieceTimes
from ppctl.planner.step_runs import run_steps, time_of
from ppctl.planner.timing import Timing
from ppctl.training.job import TrainingJob, assemble
from ppctl.training.pipeline import Pipeline

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
    """Run the small step here; return its seconds as {"small": ...}, {} where there is none."""
    request = small_request(job)
    if request is None:
        return {}
    return {"small": run_steps(assemble(request))}


def corrected(job: TrainingJob, op_times: OpTimes, measured: Timing) -> OpTimes:
    """Return op times by which the small step takes what was measured, in seconds and, with shared cores, CPU seconds.

    `op_times` are those of the small step but for overhead_s and overhead_cpu_s, which are this request's.
    """
    request = small_request(job)
    assert request is not None, "it was run"
    small = assemble(request)
    share = _state_bytes(small.pipe) / _state_bytes(job.pipe)
    time = time_of(small.pipe, op_times)
    longer = (measured.wall_s - share * op_times.overhead_s) / time.pipeline_s
    busier = (measured.cpu_s - share * op_times.overhead_cpu_s) / (time.work_s * op_times.cores)
    if longer <= 0 or (op_times.capacity < inf and busier <= 0):
        return op_times  # nothing of the small step is left to its tasks
    scaled = _scaled(op_times, longer)
    return scaled if op_times.capacity == inf else replace(scaled, cores=op_times.cores * busier / longer)


def _state_bytes(pipe: Pipeline) -> int:
    """Return the bytes of one device's share of the parameters."""
    return shard_bytes(pipe.states.staged["params"])


def _scaled(op_times: OpTimes, factor: float) -> OpTimes:
    """Return the op times with all times of tasks and transfers multiplied by a factor."""
    pieces = {
        name: PieceTimes(*(getattr(piece, field.name) * factor for field in fields(PieceTimes)))
        for name, piece in (("embed", op_times.embed), ("layer", op_times.layer), ("head", op_times.head))
    }
    return replace(op_times, **pieces, task_s=op_times.task_s * factor, hop_s=op_times.hop_s * factor)
