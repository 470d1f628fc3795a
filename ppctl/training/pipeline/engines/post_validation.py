"""Post-validation of the mpmd engine's updates (zero bubble: Qi et al. 2023, section 4).

Each rank updates as soon as its gradients are ready, as if the global norm needed no clipping, and
starts the next step. The norm arrives later. If the gradients must be clipped, the update is
repeated with clipping from the kept state before the step, and the work from the wrong state is
discarded. If the norm is not finite, the state before the step stays, unless the optimizer has a
rule for such gradients, such as `optax.zero_nans`. A second state and the gradients are kept in
memory until the norm is known.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from ppctl.executors.mpmd.dispatch_plan import Walk
from ppctl.schedule.ir import Task
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd
from ppctl.training.pipeline.engines.step_memory import Footprint

Tree = Any


@dataclass
class Attempt:
    """A state that is valid if the norm of its step is finite and needs no clipping.

    `before` is the state before the step, None once the attempt is settled. order: the layer in
    each slot, see `StateChecks`.
    """

    state: Tree
    before: Tree | None = None
    outcome: dict | None = None  # values of the step for a repeated update, see `StepPlans.outcome`
    norm: jax.Array | None = None
    order: np.ndarray | None = None

    def block_until_ready(self) -> Self:
        """Wait for the state; jax.block_until_ready calls this."""
        jax.block_until_ready(self.state)
        return self


class PostValidated(Mpmd):
    """An `Engine` whose states are attempts.

    max_norm: the optimizer's clipping norm, or None. guards_finite: whether the optimizer has a
    rule for gradients that are not finite.
    """

    step_plan = "try"

    def __init__(self, *arguments: Any, max_norm: float | None, guards_finite: bool = False):
        super().__init__(*arguments)
        self.max_norm, self.guards_finite = max_norm, guards_finite

    def new_state(self, seed: int | None = None) -> Attempt:
        return Attempt(super().new_state(seed))

    def to_natural(self, state: Attempt) -> Tree:
        return super().to_natural(self.settled(state))

    def params(self, state: Attempt) -> Tree:
        return super().params(self.settled(state))

    def from_natural(self, state: Tree) -> Attempt:
        return Attempt(super().from_natural(state))

    def compile(self, *, evaluate: bool) -> Footprint:
        footprint = super().compile(evaluate=evaluate)
        self.walk("redo")
        return footprint

    def step(self, state: Attempt, batch: Tree) -> tuple[Attempt, dict[str, jax.Array]]:
        walk, begun_from = self.walk("try"), state.state
        attempt, metrics = self.run_step(walk, begun_from, batch)
        if self.settled(state) is not begun_from:
            attempt, metrics = self.run_step(walk, state.state, batch)
        return attempt, metrics

    def step_by_step(
        self, state: Attempt, batch: Tree
    ) -> tuple[Attempt, dict[str, jax.Array], dict[Task, float]]:
        return super().step_by_step(self.settled(state), batch)

    def run_step(
        self, walk: Walk, state: Tree, batch: Tree
    ) -> tuple[Attempt, dict[str, jax.Array]]:
        found = walk.run(self.given(state, batch))
        metrics = self.metrics_of(found)
        outcome = {key: found[key] for key in self.plans.outcome}
        return Attempt(self.state_of(found, "next_"), state, outcome, metrics["grad_norm"]), metrics

    def loss(self, state: Attempt, batch: Tree) -> tuple[jax.Array, jax.Array]:
        return super().loss(self.settled(state), batch)

    def loss_and_grads(self, state: Attempt, batch: Tree) -> tuple[jax.Array, Tree]:
        return super().loss_and_grads(self.settled(state), batch)

    def settled(self, attempt: Attempt) -> Tree:
        """Return the valid state, after waiting for the norm and repeating the update if needed."""
        if attempt.before is not None:
            assert attempt.norm is not None, "a step has one"
            assert attempt.outcome is not None, "a step has one"
            norm = float(attempt.norm)
            if not (math.isfinite(norm) or self.guards_finite):
                attempt.state = attempt.before
            elif not math.isfinite(norm) or self.clips(norm):
                given = self.of_state(attempt.before) | attempt.outcome
                attempt.state = self.state_of(self.walk("redo").run(given))
            attempt.before = attempt.outcome = None
        return attempt.state

    def clips(self, norm: float) -> bool:
        """Return whether the optimizer clips gradients of this finite norm."""
        return self.max_norm is not None and norm >= self.max_norm
