"""The engine of executor=mpmd: a plan of programs on the meshes of ranks, an optimizer on each.

A `Walk` is a compiled plan of `step_plans`: it runs the programs and returns values by key. The
state is a tuple with one tree per rank: see `rank_states`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.model_shapes import shard_bytes, shard_shapes
from ppctl.executors.mpmd.compiled_programs import CompiledPrograms, memory_breakdown
from ppctl.executors.mpmd.dispatch_plan import Key, Walk
from ppctl.executors.mpmd.mpmd_runtime import Runtime
from ppctl.executors.parameter_layout import BATCH
from ppctl.model.layer_inputs import LOSS
from ppctl.model.stack import metric_means, number_of
from ppctl.schedule.ir import Task
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.training.pipeline.engines.rank_states import STATE, GroupModel, RankStates
from ppctl.training.pipeline.engines.step_memory import Footprint, Temporaries, by_part
from ppctl.training.pipeline.engines.step_plans import StepPlans
from ppctl.training.pipeline.engines.step_programs import StepPrograms, dispatched_programs
from ppctl.training.pipeline.engines.train_states import PlacedBatches, States
from ppctl.training.pipeline.engines.update_programs import UpdatePrograms
from ppctl.training.pipeline.optimizers import Optimizer

Tree = Any


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
        return self._alone(lambda: self.rank_states.to_natural(state))

    def from_natural(self, state: Tree) -> Tree:
        return self._alone(lambda: self.rank_states.from_natural(state))

    def params(self, state: Tree) -> Tree:
        of_ranks = [each["params"] for each in state]
        return self._alone(lambda: self.rank_states.to_natural(of_ranks, "params"))

    def _alone(self, whole: Callable[[], Tree]) -> Tree:
        """Return whole(), a call of programs of several ranks, after all dispatched programs.

        The runtime orders the programs of each rank, but not those of several ranks, so this waits
        until the ranks' programs have ended.
        """
        self.runtime.wait()
        self.runtime.connect()
        return jax.block_until_ready(whole())

    def share(self, rank: int) -> Tree:
        shapes = self.given_shapes
        return shard_shapes({name: shapes[name, rank] for name in STATE})

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
        described = [self.rank_states.described(r) for r in self.ranks]
        for name in STATE:
            for r, (shapes, specs) in enumerate(described):
                found[name, r] = shape(shapes[name], specs[name], group_of[r])
        numbers = {key: shape(a, P(), group_of[key[1]]) for key, a in self.numbers.items()}
        return found | numbers

    @property
    def _given_bytes(self) -> list[dict[str, int]]:
        """For each rank, the bytes of its state and batch on one device, by name."""
        found: list[dict[str, int]] = [{} for _ in self.ranks]
        for (name, rank, *_), shapes in self.given_shapes.items():
            if name in STATE or name in self.plans.readers:
                found[rank][name] = shard_bytes(shapes)
        return found

    # steps

    def compile(self, *, evaluate: bool) -> Footprint:
        step = self.walk(self.step_plan)
        if evaluate:
            self.walk("loss")
        state_and_batch = (sum(held.values()) for held in self._given_bytes)
        terms = zip(state_and_batch, step.peak_bytes, self.runtime.is_mine, strict=True)
        return Footprint(max(step.peak_bytes), tuple((a + b) * mine for a, b, mine in terms), "")

    def memory(self, temporaries: Temporaries | None = None) -> tuple[dict[str, int], ...]:
        entries, kept = self.plans.plan(self.step_plan)
        temps = None
        if temporaries is not None:
            programs = (entry.program for entry in entries)
            temps = [0 if each is None else temporaries(each) for each in programs]
        held = memory_breakdown(self.compiled, entries, self.given_shapes, kept, temps)
        pairs = zip(self._given_bytes, held, strict=True)
        return tuple(by_part(given | of_rank) for given, of_rank in pairs)

    def programs(self) -> StepPrograms:
        entries, _ = self.plans.plan(self.step_plan)
        return dispatched_programs(self.compiled, entries, self.given_shapes)

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        return self.run_step(self.walk(self.step_plan), state, batch)

    def step_by_step(
        self, state: Tree, batch: Tree
    ) -> tuple[Tree, dict[str, jax.Array], dict[Task, float]]:
        """Run `step` one program at a time; return also the seconds of each task."""
        seconds: dict[Task, float] = {}
        walk = self.walk(self.step_plan).timed(seconds)
        return *self.run_step(walk, state, batch), seconds

    def run_step(self, walk: Walk, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, metrics) after running the compiled plan of a step."""
        found = walk.run(self.given(state, batch))
        return self.state_of(found), self.metrics_of(found)

    def dispatched(self) -> list[list[tuple[str, Task | None]]]:
        """Return each rank's programs of a step in dispatch order: (module name, task or None)."""
        return self.walk(self.step_plan).programs

    def devices(self) -> list[int]:
        """Return the id of each rank's first device."""
        return [mesh.devices.flat[0].id for mesh in self.meshes.by_rank]

    def state_of(self, found: Mapping[Key, Tree], prefix: str = "") -> Tree:
        """Return the state that a walk computed. prefix: "next_" for the plan `try`, else empty."""
        return tuple({name: found[prefix + name, r] for name in STATE} for r in self.ranks)

    def metrics_of(self, found: Mapping[Key, Tree]) -> dict[str, jax.Array]:
        """Return the metrics among the values of a step's walk, from a rank of this process."""
        return {name: found["numbers", self.read_at][name] for name in self.metric_names}

    def loss(self, state: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        found = self.walk("loss").run(self.given(state, batch))
        return found["loss", self.read_at], number_of(found["number", self.read_at])

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        found = self.walk("grads").run(self.given(state, batch))
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
