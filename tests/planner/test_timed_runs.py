"""Seconds of runs are those until all of a result is computed; no test here depends on how fast
anything runs.
"""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from ppctl.planner.rehearsal import timed_runs


class Unfinished:
    """A result of a device whose dispatch returns at once: a second later it is there."""

    def __init__(self, clock):
        self.clock, self.is_there = clock, False

    def block_until_ready(self):
        self.clock["s"] += 0.0 if self.is_there else 1.0
        self.is_there = True
        return self


def test_timed_programs_are_finished_although_dispatch_returns_early(monkeypatch):
    clock = {"s": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["s"])
    _, measured = timed_runs.timed(lambda: Unfinished(clock))
    assert measured.wall_s == 1.0

    engine = SimpleNamespace(
        compile=lambda **_: None,
        new_state=lambda: None,
        batches=SimpleNamespace(put=lambda batch: batch),
        step=lambda state, batch: (Unfinished(clock), Unfinished(clock)),
    )
    job = SimpleNamespace(
        pipe=SimpleNamespace(engine=engine), data=SimpleNamespace(batches=lambda: iter([None]))
    )
    assert (
        timed_runs.run_steps(job, count=2).wall_s == 2.0
    )  # both results are waited for, one after the other


def test_random_arrays_are_small_and_have_their_shapes():
    tree = {
        "x": jax.ShapeDtypeStruct((50, 40), jnp.bfloat16),
        "tokens": jax.ShapeDtypeStruct((3,), jnp.int32),
    }
    found = timed_runs.random_like(tree)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(
        lambda a: (a.shape, a.dtype), tree
    )
    assert 0.01 < float(jnp.std(found["x"].astype(jnp.float32))) < 0.03
    assert not found["tokens"].any()
