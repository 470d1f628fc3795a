"""The engine of executor=mpmd: a plan of programs on the meshes of ranks, an optimizer on each.

A `Walk` is a compiled plan of `step_plans`: it runs the programs and returns values by key. The
state is a tuple with one tree per rank: see `rank_states`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from ppctl.executors.model_shapes import shard_bytes, shard_shapes
from ppctl.executors.mpmd.compiled_programs import CompiledPrograms, memory_breakdown
from ppctl.executors.mpmd.dispatch_plan import Key, Walk
from ppctl.executors.mpmd.mpmd_runtime import Runtime
from ppctl.executors.parameter_layout import BATCH
from ppctl.model.layer_inputs import LOSS
from ppctl.model.stack import metric_means, number_of
from ppctl.model.trainable_parameters import averaged
from ppctl.schedule.ir import Task
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.training.pipeline.engines import step_programs as steps
from ppctl.training.pipeline.engines.rank_states import STATE, GroupModel, RankStates
from ppctl.training.pipeline.engines.step_plans import StepPlans
from ppctl.training.pipeline.engines.train_states import PlacedBatches, States
from ppctl.training.pipeline.engines.update_programs import UpdatePrograms
from ppctl.training.pipeline.optimizers import Optimizer

Tree = Any
Numbers = dict[str, jax.Array]  # metrics of a step, by name


class Mpmd:
    """An `Engine` that dispatches the programs of a step in schedule order.

    groups: the model on each group of ranks of equal sizes.
    """

    step_plan = "step"  # the name of a train step's plan

    def __init__(
        self,
        states: States,
        batch_shapes: Tree,
        groups: Sequence[GroupModel],
        scheduled: ScheduledStep,
        optimizer: Optimizer,
        lr_schedule: optax.Schedule | None = None,
        compiler_options: Mapping[str, Any] | None = None,  # XLA options, as for jax.jit
    ):
        # 1. states and plans
        self.batch_shapes, self.model, self.scheduled = batch_shapes, groups[0].model, scheduled
        self.layout = states.layout
        self.rank_states = RankStates(states, groups)
        self.meshes = self.rank_states.meshes
        self.plans = StepPlans(self.model, self.layout.placement, scheduled, self.meshes)
        self.ranks, self.read_at = self.plans.ranks, self.plans.read_at
        self.numbers = self.plans.numbers(states.seed)
        # 2. programs
        libraries = [
            UpdatePrograms(self.plans, self.rank_states, g, optimizer, lr_schedule).library
            for g in range(len(groups))
        ]
        self.compiled = CompiledPrograms(self.meshes, libraries, compiler_options)
        self.runtime = Runtime(self.compiled)
        self.walks: dict[str, Walk] = {}
        # 3. the names of a step's metrics
        rate = ("lr",) if lr_schedule is not None else ()
        metrics = jax.eval_shape(metric_means, self.model.outer.losses[1])
        others = *self.model.inputs.names, *metrics, *self.plans.counts
        self.metric_names = (LOSS, "grad_norm", *rate, *others)

    # states

    def new_state(self, seed: int | None = None) -> Tree:
        return self._alone(lambda: self.rank_states.new(seed))

    def to_natural(self, state: Tree) -> Tree:
        of_ranks = self.settled(state)
        return self._alone(lambda: self.rank_states.to_natural(of_ranks))

    def from_natural(self, state: Tree) -> Tree:
        return self._alone(lambda: self.rank_states.from_natural(state))

    def params(self, state: Tree) -> Tree:
        of_ranks = [each["params"] for each in self.settled(state)]
        return self._alone(lambda: self.rank_states.to_natural(of_ranks, "params"))

    def averaged(self, state: Tree) -> Tree:
        return tuple(map(averaged, self.settled(state)))

    def settled(self, state: Tree) -> Tree:
        """Return the trees of the ranks."""
        return state

    def _alone(self, whole: Callable[[], Tree]) -> Tree:
        """Return whole(): programs of several ranks, which the runtime does not order."""
        self.runtime.wait()
        self.runtime.connect()
        return jax.block_until_ready(whole())

    def share(self, rank: int) -> Tree:
        return shard_shapes({name: self.given_shapes[name, rank] for name in STATE})

    @cached_property
    def state_shapes(self) -> Tree:
        shapes, placed, is_mine = self.given_shapes, self.compiled.placed, self.runtime.is_mine

        def of_rank(r: int) -> Tree:
            return {name: placed(r, shapes[name, r]) for name in STATE}

        return tuple(of_rank(r) if is_mine[r] else None for r in self.ranks)

    # inputs of the plans, by key: (name, rank) or (name, rank, microbatch)

    @cached_property
    def batches(self) -> PlacedBatches:
        meshes = self.meshes.by_rank
        pairs = ((name, rank) for name, ranks in self.plans.readers.items() for rank in ranks)
        shardings = {(name, r): NamedSharding(meshes[r], BATCH) for name, r in pairs}
        return PlacedBatches(self.batch_shapes, shardings, self.model.num_microbatches)

    @cached_property
    def _placed_numbers(self) -> dict[Key, jax.Array | None]:
        return {key: self.runtime.numbers(value, key[1]) for key, value in self.numbers.items()}

    def given(self, state: Tree, batch: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the inputs of a plan: state, batch and numbers."""
        return {**batch} | self.of_state(state) | self._placed_numbers

    def of_state(self, state: Tree) -> dict[Key, Tree]:
        """Return the trees of a state by (name, rank)."""
        return {(name, r): tree for r, each in enumerate(state) for name, tree in each.items()}

    @cached_property
    def given_shapes(self) -> dict[Key, Tree]:
        """The shapes of the inputs of a plan, with shardings on the mesh of a group."""
        shape, group_of = self.compiled.shape, self.meshes.group_of
        found = {key: shape(a, P(), group_of[key[1]]) for key, a in self.numbers.items()}
        for key, a in self.batches.placed.items():
            found[key] = shape(a, BATCH, group_of[key[1]])
        for r in self.ranks:
            shapes, specs = self.rank_states.described(r)
            found |= {(n, r): shape(shapes[n], specs[n], group_of[r]) for n in STATE}
        return found

    @property
    def _given_bytes(self) -> list[dict[str, int]]:
        """For each rank, the bytes of its state and batch on one device, by name."""
        found: list[dict[str, int]] = [{} for _ in self.ranks]
        for (name, rank, *_), shapes in self.given_shapes.items():
            if name in STATE or name in self.plans.readers:
                found[rank][name] = shard_bytes(shapes)
        return found

    # steps

    def compile(self, *, evaluate: bool) -> steps.Footprint:
        step = self.walk(self.step_plan)
        if evaluate:
            self.walk("loss")
        state_and_batch = (sum(held.values()) for held in self._given_bytes)
        terms = zip(state_and_batch, step.peak_bytes, self.runtime.is_mine, strict=True)
        return steps.Footprint(
            max(step.peak_bytes), tuple((a + b) * mine for a, b, mine in terms), ""
        )

    def memory(self, temporaries: steps.Temporaries | None = None) -> tuple[dict[str, int], ...]:
        (entries, kept), temps = self.plans.plan(self.step_plan), None
        if temporaries is not None:
            temps = [0 if e.program is None else temporaries(e.program) for e in entries]
        held = memory_breakdown(self.compiled, entries, self.given_shapes, kept, temps)
        pairs = zip(self._given_bytes, held, strict=True)
        return tuple(steps.by_part(given | of_rank) for given, of_rank in pairs)

    def programs(self) -> steps.StepPrograms:
        entries, _ = self.plans.plan(self.step_plan)
        return steps.dispatched_programs(self.compiled, entries, self.given_shapes)

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Numbers]:
        return self.run_step(self.walk(self.step_plan), state, batch)

    def step_by_step(self, state: Tree, batch: Tree) -> tuple[Tree, Numbers, dict[Task, float]]:
        """Run `step` one program at a time; return also the seconds of each task."""
        seconds: dict[Task, float] = {}
        walk = self.walk(self.step_plan).timed(seconds)
        return *self.run_step(walk, self.settled(state), batch), seconds

    def run_step(self, walk: Walk, state: Tree, batch: Tree) -> tuple[Tree, Numbers]:
        """Return (next state, metrics) after running the compiled plan of a step."""
        found = walk.run(self.given(state, batch))
        return self.state_of(found), self.metrics_of(found)

    def dispatched(self) -> list[list[tuple[str, Task | None]]]:
        """Return each rank's programs of a step in dispatch order: (module name, task or None)."""
        return self.walk(self.step_plan).programs

    def state_of(self, found: Mapping[Key, Tree], prefix: str = "") -> Tree:
        """Return the state that a walk computed. prefix: "next_" for the plan `try`, else empty."""
        return tuple({name: found[prefix + name, r] for name in STATE} for r in self.ranks)

    def metrics_of(self, found: Mapping[Key, Tree]) -> Numbers:
        """Return the metrics among the values of a step's walk, from a rank of this process."""
        return {name: found["numbers", self.read_at][name] for name in self.metric_names}

    def loss(self, state: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        found = self.walk("loss").run(self.given(self.settled(state), batch))
        return found["loss", self.read_at], number_of(found["number", self.read_at])

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        found = self.walk("grads").run(self.given(self.settled(state), batch))
        grads = [found["mean_grads", r] for r in self.ranks]
        natural = self._alone(lambda: self.rank_states.to_natural(grads, "gradients"))
        return found["loss", self.read_at], natural

    def walk(self, what: str) -> Walk:
        """Return the compiled plan of this name, compiled at the first call."""
        if what not in self.walks:
            given = self.given_shapes
            if what == "redo":
                tried = self.walk("try").shapes
                of_state = {key: shape for key, shape in given.items() if key[0] in STATE}
                given = of_state | {key: tried[key] for key in self.plans.outcome}
            entries, kept = self.plans.plan(what)
            self.walks[what] = self.runtime.compile(entries, given, kept)
        return self.walks[what]


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
    """An `Engine` with post-validated updates (zero bubble: Qi et al. 2023, section 4).

    Each rank updates as soon as its gradients are ready, as if the global norm needed no clipping,
    and starts the next step. The norm arrives later. If the gradients must be clipped, the update
    is repeated with clipping from the kept state before the step, and the work from the wrong state
    is discarded. If the norm is not finite, the state before the step stays, unless the optimizer
    has a rule for such gradients, such as `optax.zero_nans`. A second state and the gradients are
    kept in memory until the norm is known.

    max_norm: the optimizer's clipping norm, or None. guards_finite: whether the optimizer has a
    rule for gradients that are not finite.
    """

    step_plan = "try"

    def __init__(self, *arguments: Any, max_norm: float | None, guards_finite: bool = False):
        super().__init__(*arguments)
        self.max_norm, self.guards_finite = max_norm, guards_finite

    def new_state(self, seed: int | None = None) -> Attempt:
        return Attempt(super().new_state(seed))

    def from_natural(self, state: Tree) -> Attempt:
        return Attempt(super().from_natural(state))

    def averaged(self, state: Attempt) -> Attempt:
        return Attempt(super().averaged(state))

    def compile(self, *, evaluate: bool) -> steps.Footprint:
        footprint = super().compile(evaluate=evaluate)
        self.walk("redo")
        return footprint

    def step(self, state: Attempt, batch: Tree) -> tuple[Attempt, Numbers]:
        walk, begun_from = self.walk("try"), state.state
        attempt, metrics = self.run_step(walk, begun_from, batch)
        if self.settled(state) is not begun_from:
            attempt, metrics = self.run_step(walk, state.state, batch)
        return attempt, metrics

    def run_step(self, walk: Walk, state: Tree, batch: Tree) -> tuple[Attempt, Numbers]:
        found = walk.run(self.given(state, batch))
        metrics = self.metrics_of(found)
        outcome = {key: found[key] for key in self.plans.outcome}
        return Attempt(self.state_of(found, "next_"), state, outcome, metrics["grad_norm"]), metrics

    def settled(self, state: Attempt) -> Tree:
        """Return the valid state, after waiting for the norm and repeating the update if needed."""
        if state.before is not None:
            assert state.norm is not None, "a step has one"
            assert state.outcome is not None, "a step has one"
            norm = float(state.norm)
            if not (math.isfinite(norm) or self.guards_finite):
                state.state = state.before
            elif not math.isfinite(norm) or self.clips(norm):
                given = self.of_state(state.before) | state.outcome
                state.state = self.state_of(self.walk("redo").run(given))
            state.before = state.outcome = None
        return state.state

    def clips(self, norm: float) -> bool:
        """Return whether the optimizer clips gradients of this finite norm."""
        return self.max_norm is not None and norm >= self.max_norm
