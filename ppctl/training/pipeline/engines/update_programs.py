"""The programs of executor=mpmd that run after the gradients: mean loss, norm, update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.program_library import ProgramLibrary
from ppctl.executors.mpmd.rank_programs import with_shared
from ppctl.executors.parameter_layout import gathered, sharded_over
from ppctl.model.layer_inputs import LOSS
from ppctl.model.layer_reports import counted_part, divided_by, without_counted
from ppctl.model.stack import divisor, metric_means
from ppctl.model.trainable_parameters import is_none
from ppctl.training.pipeline import optimizers as optim
from ppctl.training.pipeline.engines.rank_states import RankStates
from ppctl.training.pipeline.engines.step_plans import StepPlans

Tree = Any


class UpdatePrograms:
    """The programs of the ranks of a group after their gradients: mean loss, norm, update."""

    def __init__(
        self,
        plans: StepPlans,
        states: RankStates,
        group: int,
        optimizer: optim.Optimizer,
        lr_schedule: optax.Schedule | None,
    ):
        # 1. the specs of each rank's state
        ranks, layout, self.model = states.groups[group]
        self.num_ranks, self.whole, self.lr_schedule = len(plans.ranks), optimizer, lr_schedule
        self.optimizer, self.is_plain = optimizer, True
        if not isinstance(optimizer, optax.GradientTransformation):
            self.is_plain, is_of_group = False, optimizer.layout is layout
            self.optimizer = optimizer if is_of_group else replace(optimizer, layout=layout)
        counted = optim.counted_by(optimizer)
        is_elementwise = getattr(self.optimizer, "is_elementwise", True) and not counted
        # 2. the programs
        once = {"mean": self._mean, "divide": self._divide, "squares": self._squares}
        once |= {"combine": self._combine, "update": self._update, "try": self._try}
        self.library = ProgramLibrary(
            self.model,
            {plans.roles[r]: states.described(r)[1] for r in ranks},
            is_one_device=states.meshes.by_rank[ranks[0]].size == 1,
            once=once,
            whole_arrays=() if is_elementwise else ("update", "try"),
        )

    def _mean(self, _: ProgramId, *losses: Tree) -> tuple:
        def total(*parts: jax.Array) -> jax.Array:
            return jax.lax.psum(sum(a[0] for a in parts), self.library.device_axes)

        loss, number = jax.tree.map(total, *losses)
        return loss / divisor(number), number

    def _scaled(self, grads: Tree, number: jax.Array, shared: Sequence[Tree]) -> Tree:
        """Return gradients of the mean loss; shared: sums of leaves that another rank adds."""
        if shared:
            grads = grads | {"embed_head": with_shared(grads["embed_head"], *shared)}
        return divided_by(grads, divisor(number), self.model.stack.options.updates)

    def _divide(self, _: ProgramId, grads: Tree, *rest: Tree) -> tuple:
        *shared, number = rest
        return (self._scaled(grads, number, shared),)

    def _squares(self, program: ProgramId, grads: Tree) -> tuple:
        # 1. the squares of the gradients, by the axes that shard them
        updates, all_specs = self.model.stack.options.updates, self.library.specs(program, "grads")
        trees = (without_counted(tree, updates) for tree in (grads, all_specs))
        shards: dict[tuple[str, ...], list] = {}
        for leaf, spec in zip(*map(jax.tree.leaves, trees), strict=True):
            shards.setdefault(sharded_over(spec), []).append(leaf)
        sums = (jax.lax.psum(optim.sum_of_squares(leaves), axes) for axes, leaves in shards.items())
        squares = sum(sums, start=jnp.zeros((), jnp.float32))
        if not updates:
            return (squares,)
        # 2. the counts, gathered on each device
        counts = (counted_part(tree, updates) for tree in (grads, all_specs))
        return squares, jax.tree.map(gathered, *counts)

    def _combine(
        self, _: ProgramId, loss: jax.Array, number: jax.Array, step: jax.Array, *of_ranks: Tree
    ) -> tuple:
        n = self.num_ranks
        squares, attached, counts = of_ranks[:n], of_ranks[n:], ()
        if self.model.stack.options.updates:
            attached, counts = attached[:-n], attached[-n:]
        sums = [self.model.inputs.summed(*of_rank) for of_rank in attached]
        names = self.model.inputs.names
        total = {name: sum(each[name] for each in sums if name in each) for name in names}
        norm = jnp.sqrt(sum(squares)) / divisor(number)
        numbers: dict[str, Any] = {LOSS: loss, "grad_norm": norm, "number": number}
        if self.lr_schedule is not None:
            numbers["lr"] = self.lr_schedule(step)
        numbers |= metric_means(number)
        if counts:
            staged = {  # each leaf of embedding and head is on one rank
                "embed_head": jax.tree.map(
                    _first, *(c["embed_head"] for c in counts), is_leaf=is_none
                ),
                "layers": jax.tree.map(_joined, *(c["layers"] for c in counts)),
            }
            numbers |= optim.counts_of(self.whole, staged)
        return (numbers | {name: a / divisor(number) for name, a in total.items()},)

    def _update(
        self, program: ProgramId, params: Tree, held: Tree, step: Tree, grads: Tree, *rest: Tree
    ) -> tuple:
        *shared, numbers = rest
        state = {"params": params, "optimizer": held, "step": step}
        grads = self._scaled(grads, numbers["number"], shared)
        of_rank = {} if self.is_plain else {"layer_in_slot": program.shape.layer_in_slot}
        state = optim.apply_gradients(self.optimizer, state, grads, numbers["grad_norm"], **of_rank)
        return state["params"], state["optimizer"], state["step"]

    def _try(self, program: ProgramId, *reads: Tree) -> tuple:
        """Return the state after an unclipped update, valid if the norm needs no clipping."""
        *given, number = reads
        numbers = {"number": number, "grad_norm": jnp.zeros_like(divisor(number))}
        return self._update(program, *given, numbers)


def _first(*of_ranks: jax.Array | None) -> jax.Array | None:
    return next((a for a in of_ranks if a is not None), None)


def _joined(*of_ranks: jax.Array) -> jax.Array:
    return jnp.concatenate(of_ranks, 1)
