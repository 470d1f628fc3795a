"""The engine of the mpmd executor: a plan of programs on submeshes, an optimizer for each rank.

The global norm is formed across ranks: each sums the squares of its gradients, the last rank adds them up and sends the
norm back. The state is a tuple with a tree for each rank; a tied leaf of the ends is on two of them and gets the same
update on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.engine import Footprint
from ppctl.engine.states import States
from ppctl.mesh import DATA_AXES
from ppctl.optim import sum_of_squares
from ppctl.runtime.mpmd.machine import Machine, Walk
from ppctl.runtime.mpmd.plan import Key, Op, Program, roles, task_ops
from ppctl.runtime.mpmd.rank import Library, rank_op, rank_ops, rank_roles, with_tied
from ppctl.runtime.mpmd.split import Split
from ppctl.runtime.mpmd.tasks import Model
from ppctl.schedule.ir import Schedule, Task
from ppctl.train import apply_gradients

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
        lr_schedule: optax.Schedule,
        compiler_options: Mapping[str, Any] | None = None,  # of XLA, as jax.jit takes them
    ):
        layout = states.layout
        self.states, self.batch_shapes, self.model, self.layout = states, batch_shapes, model, layout
        self.training, self.evaluation = schedules
        self.sizes = [len(layers) for layers in layout.partition]
        self.roles = rank_roles(model, layout, roles(self.training[0], self.sizes))
        self.ranks = range(len(self.roles))
        self.first, self.last = layout.rank_of[0], layout.rank_of[-1]
        used = [model.used_by(here.has_first, here.has_last) for here in self.roles]
        holders = [tuple(r for r in self.ranks if used[r][i]) for i in range(len(model.tied))]
        self.split = Split(layout, model.ends, holders)
        self.machine = Machine(self.split.submeshes, _Programs(self, optimizer, lr_schedule), compiler_options)
        self.walks: dict[str, Walk] = {}

    # states

    def new_state(self) -> Tree:
        return self.split.split(self.states.new())

    def to_natural(self, state: Tree) -> Tree:
        return self.states.to_natural(self.split.join(state, self.states.staged))

    def from_natural(self, state: Tree) -> Tree:
        return self.split.split(self.states.to_staged(state))

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """The inputs on the first stage's submesh, the targets on the last one's."""
        ranks = {"inputs": self.first, "targets": self.last}
        shardings = {name: NamedSharding(self.split.submeshes[rank], P(DATA_AXES)) for name, rank in ranks.items()}
        return jax.device_put(dict(batch), shardings)

    # steps

    def compile(self, *, evaluate: bool) -> Footprint:
        step = self.walk("step")
        if evaluate:
            self.walk("loss")
        return Footprint(max(step.peak_bytes), "")

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        found = self.walk("step").run(self._given(state, batch))
        keys = ("params", "optimizer", "step")
        return tuple({key: found[key, r] for key in keys} for r in self.ranks), found["metrics",]

    def loss(self, state: Tree, batch: Tree) -> jax.Array:
        return self.walk("loss").run(self._given(state, batch))["loss",]

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        found = self.walk("grads").run(self._given(state, batch))
        grads = self.split.join([found["mean_grads", r] for r in self.ranks], self.states.staged["params"])
        return found["loss",], jax.jit(self.layout.to_natural)(grads)

    def walk(self, what: str) -> Walk:
        """The compiled plan of a step, of a loss alone, or of loss and gradients ("grads")."""
        if what not in self.walks:
            ops, kept = self.plan(what)
            self.walks[what] = self.machine.compile(ops, self.given_shapes(), kept)
        return self.walks[what]

    def plan(self, what: str) -> tuple[list[Op], list[Key]]:
        """(the plan, what it leaves)."""
        schedule, order = self.evaluation if what == "loss" else self.training
        before, after = rank_ops(self.layout, self.roles, with_grads=what != "loss")
        tasks = task_ops(schedule, order, self.sizes, keeps_input=self.model.stage.keeps_input)
        ops = [*before, *tasks, *after, self._op("mean", self.last, [("losses",)], [("loss",), ("number",)])]
        if what == "loss":
            return ops, [("loss",)]
        if what == "grads":
            ops += self._sent("number", ("number",))
            kept = [("mean_grads", r) for r in self.ranks]
            ops += [self._op("divide", r, [*self._grads(r), ("number", r)], [kept[r]]) for r in self.ranks]
            return ops, [("loss",), *kept]
        ops += [self._op("squares", r, [("grads", r)], [("squares", r)]) for r in self.ranks]
        for r in self.ranks:
            ops += [Op(None, self.last, (("squares", r),), (("squares_there", r),))] if r != self.last else []
        squares = [("squares" if r == self.last else "squares_there", r) for r in self.ranks]
        reads = [("loss",), ("number",), ("step", self.last), *squares]
        ops.append(self._op("combine", self.last, reads, [("metrics",), ("scale",)]))
        ops += self._sent("scale", ("scale",))
        kept = []
        for r in self.ranks:
            state = [("params", r), ("optimizer", r), ("step", r)]
            ops.append(self._op("update", r, [*state, *self._grads(r), ("scale", r)], state))
            kept += state
        return ops, [("metrics",), *kept]

    def _op(self, kind: str, rank: int, reads: list[Key], writes: list[Key]) -> Op:
        return rank_op(kind, self.roles[rank], rank, reads, writes)

    def _sent(self, name: str, key: Key) -> list[Op]:
        """Moves of a value of the last rank to all, as (name, rank)."""
        return [Op(None, r, (key,), ((name, r),)) for r in self.ranks]

    def _grads(self, rank: int) -> list[Key]:
        """All of a rank's gradients: those of tied leaves come back from the rank that adds them up."""
        return [("grads", rank)] + [("tied", rank)] * (self.roles[rank].tied == "head")

    # what a plan is given

    @cached_property
    def _numbers(self) -> dict[Key, jax.Array]:
        """The number of each microbatch, on the ranks that look it up."""
        shardings = {r: NamedSharding(self.split.submeshes[r], P()) for r in (self.first, self.last)}
        many = range(self.model.num_microbatches)
        return {("m", r, m): jax.device_put(np.int32(m), sharding) for r, sharding in shardings.items() for m in many}

    def _given(self, state: Tree, batch: Tree) -> dict[Key, Tree]:
        given: dict[Key, Tree] = {(name,): array for name, array in batch.items()}
        for r, of_rank in enumerate(state):
            given |= {(name, r): tree for name, tree in of_rank.items()}
        return given | self._numbers

    def given_shapes(self) -> dict[Key, Tree]:
        shape = self.machine.shape
        shapes: dict[Key, Tree] = {(name,): shape(a, P(DATA_AXES)) for name, a in self.batch_shapes.items()}
        for name, tree in self.states.staged.items():
            path = (jax.tree_util.DictKey(name),)
            shapes |= {(name, r): shape(*self.split.described(tree, r, path)) for r in self.ranks}
        return shapes | {key: shape(number, P()) for key, number in self._numbers.items()}


class _Programs:
    """The programs of the tasks, and those of the optimizer."""

    def __init__(self, engine: Mpmd, optimizer: optax.GradientTransformation, lr_schedule: optax.Schedule):
        self.engine, self.optimizer, self.lr_schedule = engine, optimizer, lr_schedule
        staged = engine.states.staged
        self.of_state = {
            here: {
                name: engine.split.described(tree, r, (jax.tree_util.DictKey(name),))[1]
                for name, tree in staged.items()
            }
            for r, here in enumerate(engine.roles)
        }
        self.library = Library(engine.model, {here: specs["params"] for here, specs in self.of_state.items()})
        self.functions = {
            "mean": self._mean,
            "divide": self._divide,
            "squares": self._squares,
            "combine": self._combine,
            "update": self._update,
        }

    def specs(self, program: Program, name: str) -> Tree:
        if name in ("optimizer", "step"):
            return self.of_state[program.shape][name]
        if name in ("loss", "number", "squares", "squares_there", "metrics", "scale"):
            return P()
        return self.library.specs(program, "params" if name == "mean_grads" else name)

    def function(self, program: Program) -> Callable[..., tuple]:
        if program.kind not in self.functions:
            return self.library.function(program)
        return partial(self.functions[program.kind], program)

    def donated(self, program: Program) -> tuple[str, ...]:
        if program.kind in self.functions:
            return ("params", "optimizer", "step") if program.kind == "update" else ()
        return self.library.donated(program)

    def _mean(self, _: Program, losses: Tree) -> tuple:
        loss, number = (jax.lax.psum(a[0], DATA_AXES) for a in losses)
        return loss / number, number

    def _scaled(self, grads: Tree, number: jax.Array, tied: Sequence[Tree]) -> Tree:
        """Gradients of the mean loss, with those of tied leaves where they came back from another rank."""
        if tied:
            grads = grads | {"ends": with_tied(self.engine.model, grads["ends"], *tied)}
        return jax.tree.map(lambda g: g / number.astype(g.dtype), grads)

    def _divide(self, _: Program, grads: Tree, *rest: Tree) -> tuple:
        *tied, number = rest
        return (self._scaled(grads, number, tied),)

    def _squares(self, program: Program, grads: Tree) -> tuple:
        specs = jax.tree.leaves(self.specs(program, "grads"), is_leaf=lambda a: isinstance(a, P))
        shards: dict[bool, list] = {True: [], False: []}
        for leaf, spec in zip(jax.tree.leaves(grads), specs, strict=True):
            shards[any(spec)].append(leaf)
        return (jax.lax.psum(sum_of_squares(shards[True]), "fsdp") + sum_of_squares(shards[False]),)

    def _combine(self, _: Program, loss: jax.Array, number: jax.Array, step: jax.Array, *squares: jax.Array) -> tuple:
        norm = jnp.sqrt(sum(squares)) / number
        return {"loss": loss, "grad_norm": norm, "lr": self.lr_schedule(step)}, (number, norm)

    def _update(self, _: Program, params: Tree, optimizer: Tree, step: jax.Array, grads: Tree, *rest: Tree) -> tuple:
        *tied, (number, norm) = rest
        state = {"params": params, "optimizer": optimizer, "step": step}
        state = apply_gradients(self.optimizer, state, self._scaled(grads, number, tied), norm)
        return state["params"], state["optimizer"], state["step"]
