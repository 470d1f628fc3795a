"""Zero-bubble's post-validation around the mpmd engine (Qi et al. 2023, section 4).

Each rank updates as soon as its gradients are ready, as if the global norm needed no clipping, and
goes on with the next step. The norm follows. If it fails the test, the kept state before the step
takes the update again with clipping (or none, if the norm is not finite), and work from the wrong
state is thrown away. This costs a second state and the gradients in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ppctl.executors.mpmd.mpmd_runtime import Walk
from ppctl.schedule.ir import Task
from ppctl.training.pipeline.engines.engine_protocol import Footprint, Temporaries
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd
from ppctl.training.pipeline.engines.step_programs import Choose, StepPrograms

Tree = Any


@dataclass
class Attempt:
    """A state that holds if the norm of its step does. `before` is None once it is settled."""

    state: Tree
    before: Tree | None = None
    outcome: dict | None = None  # values of the step to `state`, see `Mpmd.outcome`
    norm: jax.Array | None = None

    def block_until_ready(self) -> Attempt:
        """Wait for the state; jax.block_until_ready calls this."""
        jax.block_until_ready(self.state)
        return self


class PostValidated:
    """An `Engine`. needs_no_clipping(finite norm): whether the unclipped update is right."""

    def __init__(self, engine: Mpmd, needs_no_clipping: Callable[[float], bool]):
        self.engine, self.needs_no_clipping = engine, needs_no_clipping

    def new_state(self, seed: int | None = None) -> Attempt:
        return Attempt(self.engine.new_state(seed))

    def to_natural(self, state: Attempt) -> Tree:
        return self.engine.to_natural(self.settled(state))

    def from_natural(self, state: Tree) -> Attempt:
        return Attempt(self.engine.from_natural(state))

    def parameters(self, state: Attempt) -> Sequence[Tree]:
        return self.engine.parameters(self.settled(state))

    def share(self, rank: int) -> Tree:
        return self.engine.share(rank)

    @property
    def examples(self) -> Sequence[int]:
        return self.engine.examples

    def put(self, batch: Mapping[str, Any]) -> Tree:
        return self.engine.put(batch)

    def compile(self, *, evaluate: bool) -> Footprint:
        step = self.engine.walk("try")
        self.engine.walk("redo")
        if evaluate:
            self.engine.walk("loss")
        return self.engine.footprint(step)

    def memory(self, temporaries: Temporaries | None = None) -> tuple[dict[str, int], ...]:
        return self.engine.memory(temporaries, "try")

    def programs(self, choose: Choose | None = None) -> StepPrograms:
        return self.engine.programs(choose, "try")

    def step(self, state: Attempt, batch: Tree) -> tuple[Attempt, dict[str, jax.Array]]:
        begun_from = state.state
        attempt, metrics = self._try(begun_from, batch)
        if self.settled(state) is not begun_from:
            attempt, metrics = self._try(state.state, batch)
        return attempt, metrics

    def loss(self, state: Attempt, batch: Tree) -> tuple[jax.Array, jax.Array]:
        return self.engine.loss(self.settled(state), batch)

    def loss_and_grads(self, state: Attempt, batch: Tree) -> tuple[jax.Array, Tree]:
        return self.engine.loss_and_grads(self.settled(state), batch)

    def settled(self, attempt: Attempt) -> Tree:
        """Return the right state; waits for the norm."""
        if attempt.before is not None:
            assert attempt.norm is not None, "a step has one"
            assert attempt.outcome is not None, "a step has one"
            norm = float(attempt.norm)
            if not math.isfinite(norm):
                attempt.state = attempt.before
            elif not self.needs_no_clipping(norm):
                given = self.engine.given.of_state(attempt.before) | attempt.outcome
                attempt.state = self.engine.state_of(self.engine.walk("redo").run(given))
            attempt.before = attempt.outcome = None
        return attempt.state

    def step_by_step(
        self, state: Attempt, batch: Tree
    ) -> tuple[Attempt, dict[str, jax.Array], dict[Task, float]]:
        seconds: dict[Task, float] = {}
        walk = self.engine.walk("try").timed(seconds)
        return *self._try(self.settled(state), batch, walk), seconds

    def dispatched(self) -> list[list[tuple[str, Task | None]]]:
        return self.engine.walk("try").programs

    def devices(self) -> list[int]:
        return self.engine.devices()

    def _try(
        self, state: Tree, batch: Tree, walk: Walk | None = None
    ) -> tuple[Attempt, dict[str, jax.Array]]:
        engine = self.engine
        found = (walk or engine.walk("try")).run(engine.given.values(state, batch))
        metrics = engine.metrics_of(found)
        outcome = {key: found[key] for key in engine.outcome}
        following = engine.state_of(found, "next_")
        return Attempt(following, state, outcome, metrics["grad_norm"]), metrics
