"""Timed runs of functions and train steps, and arrays to run them on."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.stack import in_microbatches
from ppctl.training.pipeline.job import TrainingJob

Tree = Any
STEPS = 5  # timed steps after a warm-up step
SCALE = 0.02  # standard deviation of random numbers


class Timing(NamedTuple):
    """Seconds of a run: wall-clock, and CPU seconds summed over the cores."""

    wall_s: float
    cpu_s: float


def timed(call: Callable[[], Tree]) -> tuple[Tree, Timing]:
    """Return the result of a call, and the time until all of it is computed."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = jax.block_until_ready(call())
    return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def median(measured: Sequence[Timing]) -> Timing:
    """Return the medians of several timings."""
    return Timing(*map(statistics.median, zip(*measured, strict=True)))


def run_steps(job: TrainingJob, count: int = STEPS) -> Timing:
    """Compile a job's train step and return the median times of `count` steps on one batch."""
    engine = job.pipe.engine
    engine.compile(evaluate=False)
    state, batch = engine.new_state(), engine.batches.put(next(job.data.batches()))
    measured = []
    for _ in range(count + 1):
        (state, _), seconds = timed(partial(engine.step, state, batch))
        measured.append(seconds)
    return median(measured[1:])


# arrays


def examples_of_device(job: TrainingJob) -> dict[str, jax.Array]:
    """Return a device's share of a placed batch of the job's data: {"inputs", "targets"}."""
    model = job.pipe.model
    number = model.num_microbatches * model.microbatch["inputs"].shape[0]
    batch = next(job.data.batches(rows=range(number)))
    parts = {name: jnp.asarray(batch[name], a.dtype) for name, a in model.microbatch.items()}
    return in_microbatches(parts, model.num_microbatches)


def random_like(tree: Tree) -> Tree:
    """Return arrays of these shapes, made on the device: small random numbers; integers are 0."""
    leaves, treedef = jax.tree.flatten(tree)

    def one(key: jax.Array, a: Any) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.zeros(a.shape, a.dtype)
        return (jax.random.normal(key, a.shape, jnp.float32) * SCALE).astype(a.dtype)

    def fill() -> Tree:
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return jax.tree.unflatten(treedef, map(one, keys, leaves))

    return jax.jit(fill)()
