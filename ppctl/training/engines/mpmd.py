"""The engine of the mpmd executor: a plan of programs on submeshes, an optimizer for each rank.

The global norm is formed across ranks: each sums the squares of its gradients, the last rank adds them up and sends the
norm back, with the other numbers of the step. The state is a tuple with a tree for each rank, of None where the rank is
other processes'; a leaf of embedding and head that ranks share gets the same update on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from ppctl.executors.compiler_preset import CompilerPreset
from ppctl.executors.layout import sharded_over
from ppctl.executors.mesh import RANK_AXES
from ppctl.executors.mpmd.division import Division
from ppctl.executors.mpmd.plan import Key, PlanEntry, ProgramId, transfer_entry, with_reductions
from ppctl.executors.mpmd.rank import GradientPrograms, rank_entries, rank_entry, rank_roles, reductions, with_shared
from ppctl.executors.mpmd.runtime import Runtime, Walk
from ppctl.executors.mpmd.task_plan import roles, task_entries
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.spmd.memory import shard_shapes
from ppctl.model.stack import divisor
from ppctl.model.trainable import trained_part
from ppctl.schedule.ir import Schedule, Task
from ppctl.training.engines import Footprint, Temporaries
from ppctl.training.engines.given import STATE, Given
from ppctl.training.engines.memory import by_part
from ppctl.training.engines.programs import Choose, StepPrograms, dispatched_programs
from ppctl.training.engines.states import States
from ppctl.training.optim import lr_numbers, lr_of, sum_of_squares
from ppctl.training.train_step import apply_gradients

Tree = Any


class Mpmd:
    """An `Engine`. `schedules` are those of training and of evaluation, each with its tasks in order of dispatch."""

    def __init__(
        self,
        states: States,
        batch_shapes: Tree,
        model: Model,
        schedules: tuple[tuple[Schedule, Sequence[Task]], tuple[Schedule, Sequence[Task]]],
        optimizer: optax.GradientTransformation,
        lr_schedule: optax.Schedule | None = None,
        compiler_options: Mapping[str, Any] | None = None,  # of XLA, as jax.jit takes them
    ):
        layout = states.layout
        self.states, self.batch_shapes, self.model, self.layout = states, batch_shapes, model, layout
        self.training, self.evaluation = schedules
        self.metric_names = ("loss", "grad_norm", *(("lr",) if lr_schedule is not None else ()))
        self.lr_numbers = lr_numbers(lr_schedule)
        have_ends = model.own_ends is None
        self.stage_roles = roles(layout.partition, are_alike=model.stack.are_alike, have_ends=have_ends)
        self.roles = rank_roles(model, layout, self.stage_roles)
        self.ranks = range(len(self.roles))
        self.first, self.last = layout.rank_of[0], layout.rank_of[-1]
        used = [model.used_by(here.has_first, here.has_last) for here in self.roles]
        holders = [tuple(r for r in self.ranks if used[r][i]) for i in range(len(model.shared))]
        self.division = Division(layout, model.ends, holders)
        self.runtime = Runtime(self.division.submeshes, _Programs(self, optimizer, lr_schedule), compiler_options)
        self.has_parts = not have_ends
        readers = {"inputs": [self.first], "targets": [self.last]}
        self.given = Given(
            *(self.division, self.runtime, states.staged, batch_shapes),
            dict.fromkeys(readers, self.ranks) if self.has_parts else readers,
            model.num_microbatches,
            self.lr_numbers,
            has_parts=self.has_parts,
        )
        self.read_at = next(r for r in (self.last, *self.ranks) if self.runtime.is_mine[r])  # the numbers of a step
        self.walks: dict[str, Walk] = {}

    # states

    def new_state(self, seed: int | None = None) -> Tree:
        return self._alone(lambda: self.division.split(jax.block_until_ready(self.states.new(seed))))

    def to_natural(self, state: Tree) -> Tree:
        return self._alone(lambda: self.states.to_natural(self.division.join(state, self.states.staged)))

    def from_natural(self, state: Tree) -> Tree:
        return self._alone(lambda: self.division.split(jax.block_until_ready(self.states.to_staged(state))))

    def _alone(self, whole: Callable[[], Tree]) -> Tree:
        """Return the result of `whole`, run alone: programs of the whole mesh take no turns with others."""
        self.runtime.wait()
        self.runtime.connect()
        return jax.block_until_ready(whole())

    def parameters(self, state: Tree) -> Sequence[Tree]:
        return tuple(of_rank["params"] for of_rank in state)

    def share(self, rank: int) -> Tree:
        shapes = self.given.shapes()
        return shard_shapes({name: shapes[name, rank] for name in STATE})

    @property
    def examples(self) -> Sequence[int]:
        return self.given.examples

    def put(self, batch: Mapping[str, Any]) -> Tree:
        return self.given.put(batch)

    # steps

    def compile(self, *, evaluate: bool) -> Footprint:
        step = self.walk("step")
        if evaluate:
            self.walk("loss")
        return self.footprint(step)

    def footprint(self, step: Walk) -> Footprint:
        """Return the footprint of a compiled plan of a step."""
        total = [sum(held.values()) for held in self.given.bytes()]
        total = [(a + b) * mine for a, b, mine in zip(total, step.peak_bytes, self.runtime.is_mine, strict=True)]
        return Footprint(max(step.peak_bytes), tuple(total), "")

    def memory(self, temporaries: Temporaries | None = None, what: str = "step") -> tuple[dict[str, int], ...]:
        ops, kept = self.plan(what)
        of = lambda program: 0 if program is None or temporaries is None else temporaries(program)  # noqa: E731
        temps = None if temporaries is None else [of(op.program) for op in ops]
        held = self.runtime.memory_breakdown(ops, self.given.shapes(), kept, temps)
        return tuple(by_part(given | of_rank) for given, of_rank in zip(self.given.bytes(), held, strict=True))

    def programs(self, choose: Choose | None = None, what: str = "step") -> StepPrograms:
        return dispatched_programs(self.runtime, self.plan(what), self.given.shapes(), choose)

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        found = self.walk("step").run(self.given.values(state, batch))
        return self.state_of(found), self.metrics_of(found)

    def step_by_step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array], dict[Task, float]]:
        seconds: dict[Task, float] = {}
        found = self.walk("step").timed(seconds).run(self.given.values(state, batch))
        return self.state_of(found), self.metrics_of(found), seconds

    def dispatched(self) -> list[list[tuple[str, Task | None]]]:
        return self.walk("step").programs

    def devices(self) -> list[int]:
        return [submesh.devices.flat[0].id for submesh in self.division.submeshes]

    def state_of(self, found: Mapping[Key, Tree], prefix: str = "") -> Tree:
        """Return the state among the values that a walk has left; `try` leaves it as next_params and so on."""
        return tuple({name: found[prefix + name, r] for name in STATE} for r in self.ranks)

    def metrics_of(self, found: Mapping[Key, Tree]) -> dict[str, jax.Array]:
        """Return the metrics among the values that a step's walk has left, readable in this process."""
        return {name: found["numbers", self.read_at][name] for name in self.metric_names}

    def loss(self, state: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        found = self.walk("loss").run(self.given.values(state, batch))
        return found["loss", self.read_at], found["number", self.read_at]

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        found = self.walk("grads").run(self.given.values(state, batch))
        of_ranks = [found["mean_grads", r] for r in self.ranks]
        shapes = trained_part(self.states.staged["params"], self.model.stack.trainable)
        natural = self._alone(lambda: jax.jit(self.layout.to_natural)(self.division.join(of_ranks, shapes)))
        return found["loss", self.read_at], natural

    def walk(self, what: str) -> Walk:
        """Return the compiled plan of that name."""
        if what not in self.walks:
            given = self.given.shapes()
            if what == "redo":
                tried = self.walk("try").shapes
                of_state = {key: shape for key, shape in given.items() if key[0] in STATE}
                given = of_state | {key: tried[key] for key in self.outcome}
            ops, kept = self.plan(what)
            self.walks[what] = self.runtime.compile(ops, given, kept)
        return self.walks[what]

    def plan(self, what: str) -> tuple[list[PlanEntry], list[Key]]:
        """Return (a plan, the keys of the values that it leaves).

        step: a train step. loss: that of a batch and its number, by forwards alone. grads: loss and gradients. try: a
        step in which each rank updates as soon as its gradients are ready, unclipped, and the norm is formed
        afterwards. redo: the update of a step that was tried, from the state before it and from its `outcome`.
        """
        if what == "redo":
            return self._updates("update", "numbers"), self.state_keys
        schedule, order = self.evaluation if what == "loss" else self.training
        before, after = rank_entries(self.layout, self.roles, with_grads=what != "loss")
        tasks = task_entries(schedule, order, self.stage_roles, keeps_input=self.model.stage.keeps_input)
        if what != "loss":
            tasks = with_reductions(tasks, reductions(self.roles, self.stage_roles))
        ops = [*before, *tasks, *self._mean()]
        if what == "loss":
            ops += [*self._sent("loss"), *self._sent("number")]
            return ops, [("loss", self.read_at), ("number", self.read_at)]
        if what == "step":
            ops += [*after, *self._norm(), *self._sent("numbers"), *self._updates("update", "numbers")]
            return ops, [("numbers", self.read_at), *self.state_keys]
        ops += [*self._sent("number"), *after]
        if what == "grads":
            kept = [("mean_grads", r) for r in self.ranks]
            ops += [self._op("divide", r, [*self._grads(r), ("number", r)], [kept[r]]) for r in self.ranks]
            return ops + self._sent("loss"), [("loss", self.read_at), *kept]
        ops += [*self._updates("try", "number"), *self._norm(), *self._sent("numbers")]
        return ops, [*((f"next_{name}", r) for name, r in self.state_keys), *self.outcome]

    @property
    def state_keys(self) -> list[Key]:
        return [(name, r) for r in self.ranks for name in STATE]

    @property
    def outcome(self) -> list[Key]:
        """The values of a tried step that `redo` reads."""
        return [key for r in self.ranks for key in (*self._grads(r), ("numbers", r))]

    def _mean(self) -> list[PlanEntry]:
        """Return entries from the sums of losses, which each part of the vocabulary has, to their mean."""
        ranks = self.ranks if self.has_parts else [self.last]
        there = {r: ("losses" if r == self.last else "losses_there", r) for r in ranks}
        moves = [transfer_entry(r, ("losses", r), self.last, key) for r, key in there.items() if r != self.last]
        return [*moves, self._op("mean", self.last, [*there.values()], [("loss",), ("number",)])]

    def _norm(self) -> list[PlanEntry]:
        """Return entries from gradients to a step's numbers: the last rank adds the sums of squares of all."""
        ops = [self._op("squares", r, [("grads", r)], [("squares", r)]) for r in self.ranks]
        ops += [
            transfer_entry(r, ("squares", r), self.last, ("squares_there", r)) for r in self.ranks if r != self.last
        ]
        squares = [("squares" if r == self.last else "squares_there", r) for r in self.ranks]
        reads = [("loss",), ("number",), ("step", self.last), *self._rates(self.last), *squares]
        return [*ops, self._op("combine", self.last, reads, [("numbers",)])]

    def _updates(self, kind: str, numbers: str) -> list[PlanEntry]:
        ops = []
        for r in self.ranks:
            state = [(name, r) for name in STATE]
            writes = [(f"next_{name}", r) for name in STATE] if kind == "try" else state
            rates = self._rates(r) if kind == "try" else []  # which goes on before the step's numbers are there
            ops.append(self._op(kind, r, [*state, *self._grads(r), *rates, (numbers, r)], writes))
        return ops

    def _rates(self, rank: int) -> list[Key]:
        """Return the key of the learning rate's numbers on a rank, if it has any."""
        return [] if self.lr_numbers is None else [("rates", rank)]

    def _op(self, kind: str, rank: int, reads: list[Key], writes: list[Key]) -> PlanEntry:
        return rank_entry(kind, self.roles[rank], rank, reads, writes)

    def _sent(self, name: str) -> list[PlanEntry]:
        """Return the moves of a value of the last rank to all, as (name, rank)."""
        return [transfer_entry(self.last, (name,), r, (name, r)) for r in self.ranks]

    def _grads(self, rank: int) -> list[Key]:
        """Return the keys of a rank's gradients: those of shared leaves come back from the rank that adds them up."""
        return [("grads", rank)] + [("shared", rank)] * (self.roles[rank].shared == "gives")


class _Programs:
    """The programs of the tasks, and those of the optimizer."""

    def __init__(self, engine: Mpmd, optimizer: optax.GradientTransformation, lr_schedule: optax.Schedule | None):
        self.engine, self.optimizer, self.lr_schedule = engine, optimizer, lr_schedule
        staged = engine.states.staged
        self.of_state = {
            here: {
                name: engine.division.described(tree, r, (jax.tree_util.DictKey(name),))[1]
                for name, tree in staged.items()
            }
            for r, here in enumerate(engine.roles)
        }
        self.axes, self.auto = engine.layout.manual(RANK_AXES), engine.layout.auto
        param_specs = {here: specs["params"] for here, specs in self.of_state.items()}
        is_one_device = engine.division.submeshes[0].size == 1
        self.library = GradientPrograms(engine.model, param_specs, self.axes, is_one_device=is_one_device)
        self.functions = {
            "mean": self._mean,
            "divide": self._divide,
            "squares": self._squares,
            "combine": self._combine,
            "update": self._update,
            "try": self._try,
        }

    def specs(self, program: ProgramId, name: str) -> Tree:
        name = name.removeprefix("next_")
        if name in ("optimizer", "step"):
            return self.of_state[program.shape][name]
        if name in ("loss", "number", "squares", "squares_there", "numbers", "rates"):
            return P()
        return self.library.specs(program, "params" if name == "mean_grads" else name)

    def all_specs(self, program: ProgramId, names: Sequence[str]) -> list[Tree]:
        if program.kind in self.functions:
            return [self.specs(program, name) for name in names]
        return self.library.all_specs(program, names)

    def divided_dims(self, program: ProgramId, name: str, value: Tree) -> Sequence[int | None] | None:
        return self.library.divided_dims(program, name, value)

    def function(self, program: ProgramId) -> Callable[..., tuple]:
        if program.kind not in self.functions:
            return self.library.function(program)
        return partial(self.functions[program.kind], program)

    def donated(self, program: ProgramId) -> tuple[str, ...]:
        if program.kind in self.functions:
            return STATE if program.kind == "update" else ()
        return self.library.donated(program)

    def preset(self, program: ProgramId) -> CompilerPreset:
        return "once" if program.kind in self.functions else self.library.preset(program)

    def _mean(self, _: ProgramId, *losses: Tree) -> tuple:
        loss, number = (jax.lax.psum(sum(a[0] for a in parts), self.axes) for parts in zip(*losses, strict=True))
        return loss / divisor(number), number

    def _scaled(self, grads: Tree, number: jax.Array, shared: Sequence[Tree]) -> Tree:
        """Return gradients of the mean loss, with those of shared leaves where they came back from another rank."""
        if shared:
            grads = grads | {"ends": with_shared(self.engine.model, grads["ends"], *shared)}
        number = divisor(number)
        return jax.tree.map(lambda g: g / number.astype(g.dtype), grads)

    def _divide(self, _: ProgramId, grads: Tree, *rest: Tree) -> tuple:
        *shared, number = rest
        return (self._scaled(grads, number, shared),)

    def _squares(self, program: ProgramId, grads: Tree) -> tuple:
        specs = jax.tree.leaves(self.specs(program, "grads"), is_leaf=lambda a: isinstance(a, P))
        shards: dict[tuple[str, ...], list] = {}
        for leaf, spec in zip(jax.tree.leaves(grads), specs, strict=True):
            axes = tuple(axis for axis in sharded_over(spec) if axis not in self.auto)
            shards.setdefault(axes, []).append(leaf)
        sums = (jax.lax.psum(sum_of_squares(leaves), axes) for axes, leaves in shards.items())
        return (sum(sums, start=jnp.zeros((), jnp.float32)),)

    def _combine(self, _: ProgramId, loss: jax.Array, number: jax.Array, step: jax.Array, *rest: jax.Array) -> tuple:
        rates, squares = (None, rest) if self.engine.lr_numbers is None else (rest[0], rest[1:])
        norm = jnp.sqrt(sum(squares)) / divisor(number)
        return ({"loss": loss, "grad_norm": norm, "number": number} | self._lr(rates, step),)

    def _lr(self, rates: Any, step: jax.Array) -> dict[str, jax.Array]:
        return {} if self.lr_schedule is None else {"lr": lr_of(self.lr_schedule, rates, step)}

    def _update(self, _: ProgramId, params: Tree, optimizer: Tree, step: jax.Array, grads: Tree, *rest: Tree) -> tuple:
        *shared, numbers = rest
        state = {"params": params, "optimizer": optimizer, "step": step}
        grads = self._scaled(grads, numbers["number"], shared)
        state = apply_gradients(self.optimizer, state, grads, numbers["grad_norm"], numbers.get("lr"))
        return state["params"], state["optimizer"], state["step"]

    def _try(
        self, program: ProgramId, params: Tree, optimizer: Tree, step: jax.Array, grads: Tree, *rest: Tree
    ) -> tuple:
        """Return the update that holds where the norm turns out to need no clipping."""
        *given, number = rest
        shared, rates = (given, None) if self.engine.lr_numbers is None else (given[:-1], given[-1])
        numbers = {"number": number, "grad_norm": jnp.zeros_like(number)} | self._lr(rates, step)
        return self._update(program, params, optimizer, step, grads, *shared, numbers)
