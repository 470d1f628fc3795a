"""The engine of executor=mpmd: a plan of programs on submeshes, and an optimizer on each rank.

The global norm is computed across ranks: each rank sums the squares of its gradients; the last rank
adds these sums and sends the norm to all ranks, with the other numbers of the step. The state is a
tuple with one tree per rank; trees of other processes' ranks have None in place of arrays. Ranks
that share a leaf of embedding and head all apply the same update.

A plan lists programs and transfers as data. A `Walk` is a compiled plan: it runs them and returns
values by key.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from ppctl.executors.model_shapes import Model, shard_bytes, shard_shapes
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, Walk, transfer_entry
from ppctl.executors.mpmd.mpmd_runtime import Runtime
from ppctl.executors.mpmd.plan_tasks import roles, task_entries
from ppctl.executors.mpmd.rank_programs import rank_entries, rank_entry, rank_roles, reductions
from ppctl.executors.mpmd.rank_trees import Division
from ppctl.executors.parameter_layout import BATCH
from ppctl.model.layer_inputs import LOSS
from ppctl.model.layer_reports import COUNTS
from ppctl.model.random_keys import SEED, key_of_seed
from ppctl.model.stack import metric_means, number_of
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.ir import Task
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.training.pipeline.engines.step_memory import Footprint, Temporaries, by_part
from ppctl.training.pipeline.engines.step_programs import StepPrograms, dispatched_programs
from ppctl.training.pipeline.engines.train_states import PlacedBatches, States
from ppctl.training.pipeline.engines.update_programs import UpdatePrograms
from ppctl.training.pipeline.optimizers import Optimizer

Tree = Any
STATE = ("params", "optimizer", "step")  # keys of a rank's state


class Mpmd:
    """An `Engine` that dispatches the programs of a step in schedule order."""

    step_plan = "step"  # the name of a train step's plan

    def __init__(
        self,
        states: States,
        batch_shapes: Tree,
        model: Model,
        scheduled: ScheduledStep,
        optimizer: Optimizer,
        lr_schedule: optax.Schedule | None = None,
        compiler_options: Mapping[str, Any] | None = None,  # XLA options, as for jax.jit
    ):
        # 1. the request
        self.layout = layout = states.layout
        self.states, self.batch_shapes, self.model = states, batch_shapes, model
        self.scheduled = scheduled
        rate = ("lr",) if lr_schedule is not None else ()
        metrics = jax.eval_shape(metric_means, model.losses[1])
        self.counts = (COUNTS,) if model.stack.options.updates else ()
        others = *model.inputs.losses, *metrics, *self.counts
        self.metric_names = (LOSS, "grad_norm", *rate, *others)
        # 2. stages and ranks
        have_embed_head, are_alike = model.own_embed_head is None, model.stack.are_alike
        how = {"are_alike": are_alike, "have_embed_head": have_embed_head}
        self.stage_roles = roles(layout.placement.partition, **how)
        self.roles = rank_roles(model, layout.placement, self.stage_roles)
        self.ranks = range(len(self.roles))
        self.first, self.last = layout.placement.rank_of[0], layout.placement.rank_of[-1]
        # 3. parameters on ranks, programs, readers of the batch
        used = [model.used_by(here.has_first, here.has_head) for here in self.roles]
        holders = [tuple(r for r in self.ranks if used[r][i]) for i in range(len(model.shared))]
        self.division = Division(layout, model.embed_head, holders)
        library = UpdatePrograms(self, optimizer, lr_schedule).library
        self.runtime = Runtime(self.division.submeshes, library, compiler_options)
        self.vocab_parts = model.axes.vocab_parts
        readers = {"inputs": [self.first], "targets": [self.last]}  # ranks that read each
        all_read = self.vocab_parts or model.inputs.divisors is not None
        self.readers = dict.fromkeys(readers, self.ranks) if all_read else readers
        # 4. the local rank whose copy of a step's numbers this process reads
        self.read_at = next(r for r in (self.last, *self.ranks) if self.runtime.is_mine[r])
        self.walks: dict[str, Walk] = {}

    # states

    def new_state(self, seed: int | None = None) -> Tree:
        return self._alone(lambda: self._split(self.states.new(seed)))

    def to_natural(self, state: Tree) -> Tree:
        join = self.division.join
        return self._alone(lambda: self.states.to_natural(join(state, self.states.staged)))

    def from_natural(self, state: Tree) -> Tree:
        return self._alone(lambda: self._split(self.states.to_staged(state)))

    def _split(self, staged: Tree) -> Tree:
        return self.division.split(jax.block_until_ready(staged))

    def _alone(self, whole: Callable[[], Tree]) -> Tree:
        """Return whole(), a call of programs on the whole mesh, after all dispatched programs.

        The runtime orders the programs of each rank, but not those on the whole mesh, so this waits
        until the ranks' programs have ended.
        """
        self.runtime.wait()
        self.runtime.connect()
        return jax.block_until_ready(whole())

    def share(self, rank: int) -> Tree:
        shapes = self.given_shapes
        return shard_shapes({name: shapes[name, rank] for name in STATE})

    def params(self, state: Tree) -> Tree:
        of_ranks, shapes = [each["params"] for each in state], self.states.staged["params"]
        join, to_natural = self.division.join, self.states.params_to_natural
        return self._alone(lambda: to_natural(join(of_ranks, shapes)))

    @cached_property
    def state_shapes(self) -> Tree:
        shapes, placed = self.given_shapes, self.runtime.placed
        of_rank = lambda r: {name: placed(r, shapes[name, r]) for name in STATE}  # noqa: E731
        return tuple(of_rank(r) if self.runtime.is_mine[r] else None for r in self.ranks)

    # inputs of the plans, by key: (name, rank) or (name, rank, microbatch)

    @cached_property
    def batches(self) -> PlacedBatches:
        submeshes = self.division.submeshes
        pairs = ((name, rank) for name, ranks in self.readers.items() for rank in ranks)
        shardings = {(name, r): NamedSharding(submeshes[r], BATCH) for name, r in pairs}
        return PlacedBatches(self.batch_shapes, shardings, self.model.num_microbatches)

    @cached_property
    def _numbers(self) -> dict[Key, np.ndarray]:
        """Numbers of microbatches and vocabulary parts; layer numbers and seeds for random keys."""
        has_key = self.model.inputs.has_key
        readers = {rank for ranks in self.readers.values() for rank in ranks}
        found: dict[Key, np.ndarray] = {
            ("m", r, m): np.asarray(m, np.int32)
            for r in (self.ranks if has_key else readers)
            for m in range(self.model.num_microbatches)
        }
        if self.vocab_parts:
            found |= {("part", r): np.asarray(r, np.int32) for r in self.ranks}
        if has_key:
            numbers, seed = self.layout.placement.numbers, key_of_seed(self.states.seed)
            found |= {("layer_numbers", r): numbers[:, r : r + 1] for r in self.ranks}
            found |= {(SEED, r): seed for r in self.ranks}
        return found

    @cached_property
    def _placed_numbers(self) -> dict[Key, jax.Array | None]:
        return {key: self.runtime.numbers(value, key[1]) for key, value in self._numbers.items()}

    def given(self, state: Tree, batch: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the inputs of a plan: state, batch and numbers."""
        return {**batch} | self.of_state(state) | self._placed_numbers

    def of_state(self, state: Tree) -> dict[Key, Tree]:
        """Return the trees of a state by (name, rank)."""
        return {(name, r): tree for r, each in enumerate(state) for name, tree in each.items()}

    @cached_property
    def given_shapes(self) -> dict[Key, Tree]:
        """The shapes of the inputs of a plan, with shardings on a submesh."""
        shape, described = self.runtime.shape, self.division.described
        shapes: dict[Key, Tree] = {
            key: shape(tree, BATCH) for key, tree in self.batches.placed.items()
        }
        for name, tree in self.states.staged.items():
            path = (DictKey(name),)
            shapes |= {(name, r): shape(*described(tree, r, path)) for r in self.ranks}
        return shapes | {key: shape(value, P()) for key, value in self._numbers.items()}

    @property
    def _given_bytes(self) -> list[dict[str, int]]:
        """For each rank, the bytes of its state and batch on one device, by name."""
        found: list[dict[str, int]] = [{} for _ in self.ranks]
        for (name, rank, *_), shapes in self.given_shapes.items():
            if name in STATE or name in self.readers:
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
        ops, kept = self.plan(self.step_plan)
        of = lambda program: 0 if program is None or temporaries is None else temporaries(program)  # noqa: E731
        temps = None if temporaries is None else [of(op.program) for op in ops]
        held = self.runtime.memory_breakdown(ops, self.given_shapes, kept, temps)
        pairs = zip(self._given_bytes, held, strict=True)
        return tuple(by_part(given | of_rank) for given, of_rank in pairs)

    def programs(self) -> StepPrograms:
        ops, _ = self.plan(self.step_plan)
        return dispatched_programs(self.runtime, ops, self.given_shapes)

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
        return [submesh.devices.flat[0].id for submesh in self.division.submeshes]

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
        of_ranks = [found["mean_grads", r] for r in self.ranks]
        shapes = trained_part(self.states.staged["params"], self.model.stack.options.trainable)
        to_natural, join = jax.jit(self.layout.to_natural), self.division.join
        return found["loss", self.read_at], self._alone(lambda: to_natural(join(of_ranks, shapes)))

    def walk(self, what: str) -> Walk:
        """Return the compiled plan of this name, compiled at the first call."""
        if what not in self.walks:
            given = self.given_shapes
            if what == "redo":
                tried = self.walk("try").shapes
                of_state = {key: shape for key, shape in given.items() if key[0] in STATE}
                given = of_state | {key: tried[key] for key in self.outcome}
            ops, kept = self.plan(what)
            self.walks[what] = self.runtime.compile(ops, given, kept)
        return self.walks[what]

    def plan(self, what: str) -> tuple[list[PlanEntry], list[Key]]:
        """Return (the plan of this name, the keys of its results).

        step: a train step. loss: the mean loss of a batch and the number of losses, by forwards
        only. grads: loss and gradients. try: a step with unclipped updates: each rank updates as
        soon as its gradients are ready, before the norm is known. redo: the update of a tried step
        again, from the state before the step and its `outcome`.
        """
        # 1. the tasks
        if what == "redo":
            return self._updates("update", "numbers"), self.state_keys
        inputs, has_step = self.model.inputs, what != "loss"
        step = self.scheduled if has_step else self.scheduled.evaluation
        rank_of = self.layout.placement.rank_of
        before, after = rank_entries(rank_of, self.roles, with_grads=has_step, inputs=inputs)
        how = {"keeps_input": self.model.remat.keeps_input_only}
        how["with_keys"] = has_step and inputs.has_key
        sums = reductions(self.roles, self.stage_roles) if has_step else ()
        tasks = task_entries(step.schedule, step.order, self.stage_roles, **how, reductions=sums)
        ops = [*before, *tasks, *self._mean()]
        # 2. a loss, or a step
        if what == "loss":
            ops += [*self._sent("loss"), *self._sent("number")]
            return ops, [("loss", self.read_at), ("number", self.read_at)]
        if what == "step":
            ops += [*after, *self._norm(), *self._sent("numbers")]
            ops += self._updates("update", "numbers")
            return ops, [("numbers", self.read_at), *self.state_keys]
        # 3. gradients, or a tried step
        ops += [*self._sent("number"), *after]
        if what == "grads":
            kept = [("mean_grads", r) for r in self.ranks]
            for r in self.ranks:
                ops.append(self._op("divide", r, [*self._grads(r), ("number", r)], [kept[r]]))
            return ops + self._sent("loss"), [("loss", self.read_at), *kept]
        ops += [*self._updates("try", "number"), *self._norm(), *self._sent("numbers")]
        return ops, [*((f"next_{name}", r) for name, r in self.state_keys), *self.outcome]

    @property
    def state_keys(self) -> list[Key]:
        return [(name, r) for r in self.ranks for name in STATE]

    @property
    def outcome(self) -> list[Key]:
        """The keys of the values that `redo` reads from a tried step: gradients and numbers."""
        return [key for r in self.ranks for key in (*self._grads(r), ("numbers", r))]

    def _mean(self) -> list[PlanEntry]:
        """Return the entries that add the ranks' sums of losses and compute the mean."""
        moves, reads = self._to_last("losses", self.ranks if self.vocab_parts else [self.last])
        return [*moves, self._op("mean", self.last, reads, [("loss",), ("number",)])]

    def _to_last(self, name: str, ranks: Sequence[int]) -> tuple[list[PlanEntry], list[Key]]:
        """Return (moves of a value from `ranks` to the last rank, the keys of the copies)."""
        there = {r: (name if r == self.last else f"{name}_there", r) for r in ranks}
        moves = [transfer_entry(r, (name, r), self.last, there[r]) for r in ranks if r != self.last]
        return moves, [*there.values()]

    def _norm(self) -> list[PlanEntry]:
        """Return the entries for a step's numbers: the last rank combines the sums of all ranks."""
        writes = ("squares", *self.counts)
        ops = [
            self._op("squares", r, [("grads", r)], [(name, r) for name in writes])
            for r in self.ranks
        ]
        moves, squares = self._to_last("squares", self.ranks)
        sent, attached = self._to_last("attached", self.ranks if self.model.inputs.losses else ())
        counted, counts = self._to_last(COUNTS, self.ranks if self.counts else ())
        reads = [("loss",), ("number",), ("step", self.last), *squares, *attached, *counts]
        return [
            *ops,
            *moves,
            *sent,
            *counted,
            self._op("combine", self.last, reads, [("numbers",)]),
        ]

    def _updates(self, kind: str, numbers: str) -> list[PlanEntry]:
        ops = []
        for r in self.ranks:
            state = [(name, r) for name in STATE]
            writes = [(f"next_{name}", r) for name in STATE] if kind == "try" else state
            ops.append(self._op(kind, r, [*state, *self._grads(r), (numbers, r)], writes))
        return ops

    def _op(self, kind: str, rank: int, reads: list[Key], writes: list[Key]) -> PlanEntry:
        return rank_entry(kind, self.roles[rank], rank, reads, writes)

    def _sent(self, name: str) -> list[PlanEntry]:
        """Return the moves of a value from the last rank to all ranks, with key (name, rank)."""
        return [transfer_entry(self.last, (name,), r, (name, r)) for r in self.ranks]

    def _grads(self, rank: int) -> list[Key]:
        """Return the keys of a rank's gradients, and of shared leaves' sums from another rank."""
        return [("grads", rank)] + [("shared", rank)] * (self.roles[rank].shared == "gives")
