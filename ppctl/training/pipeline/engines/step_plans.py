"""The plans of executor=mpmd: the entries of a step, a loss, gradients, and a tried update.

A plan lists programs and transfers as data. The global norm is computed across ranks: each rank
sums the squares of its gradients; the last rank adds these sums and sends the norm to all ranks,
with the other numbers of the step. Ranks that share a leaf of embedding and head all apply the same
update.
"""

from collections.abc import Sequence

import numpy as np

from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, transfer_entry
from ppctl.executors.mpmd.plan_tasks import roles, task_entries
from ppctl.executors.mpmd.rank_programs import rank_entries, rank_entry, rank_roles, reductions
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.model.layer_reports import COUNTS
from ppctl.model.random_keys import SEED, key_of_seed
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.training.pipeline.engines.rank_states import STATE


class StepPlans:
    """The plans of a scheduled step. model: any of the groups' models. placement: of all ranks."""

    def __init__(self, model: Model, placement: Placement, step: ScheduledStep, meshes: RankMeshes):
        self.model, self.scheduled, self.group_of = model, step, meshes.group_of
        self.placement, self.rank_of = placement, placement.rank_of
        self.stage_roles = roles(
            placement.partition,
            are_alike=model.stack.are_alike,
            have_embed_head=model.own_embed_head is None,
        )
        self.roles = rank_roles(model, placement, self.stage_roles)
        self.ranks = range(len(self.roles))
        self.first, self.last = self.rank_of[0], self.rank_of[-1]
        # the local rank whose copy of a step's numbers this process reads
        self.read_at = next(r for r in (self.last, *self.ranks) if meshes.is_mine[r])
        self.counts = (COUNTS,) if model.stack.options.updates else ()
        self.has_parts = bool(model.axes.vocab_parts)

    @property
    def readers(self) -> dict[str, Sequence[int]]:
        """The ranks that read the inputs and the targets of a batch."""
        if self.has_parts or self.model.inputs.divisors is not None:
            return {"inputs": self.ranks, "targets": self.ranks}
        return {"inputs": [self.first], "targets": [self.last]}

    def numbers(self, seed: int) -> dict[Key, np.ndarray]:
        """Return the numbers of microbatches, parts and layers, and the key of the seed."""
        has_key = self.model.inputs.need_keys
        readers = {rank for ranks in self.readers.values() for rank in ranks}
        found: dict[Key, np.ndarray] = {
            ("m", r, m): np.asarray(m, np.int32)
            for r in (self.ranks if has_key else readers)
            for m in range(self.model.num_microbatches)
        }
        if self.has_parts:
            found |= {("part", r): np.asarray(r, np.int32) for r in self.ranks}
        if has_key:
            of_layers, key = self.placement.numbers, key_of_seed(seed)
            found |= {("layer_numbers", r): of_layers[:, r : r + 1] for r in self.ranks}
            found |= {(SEED, r): key for r in self.ranks}
        return found

    def plan(self, what: str) -> tuple[list[PlanEntry], list[Key]]:
        """Return (the plan of this name, the keys of its results); see `_plan`."""
        entries, kept = self._plan(what)
        if len({*self.group_of}) > 1:
            entries = [self._in_group(entry) for entry in entries]
        return entries, kept

    def _in_group(self, entry: PlanEntry) -> PlanEntry:
        if entry.program is None:
            return entry
        return entry._replace(program=entry.program._replace(group=self.group_of[entry.rank]))

    def _plan(self, what: str) -> tuple[list[PlanEntry], list[Key]]:
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
        before, after = rank_entries(self.rank_of, self.roles, with_grads=has_step, inputs=inputs)
        tasks = task_entries(
            step.schedule,
            step.order,
            self.stage_roles,
            keeps_input=self.model.remat.keeps_input_only,
            with_keys=has_step and inputs.need_keys,
            reductions=reductions(self.roles, self.stage_roles) if has_step else (),
        )
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
        moves, reads = self._to_last("losses", self.ranks if self.has_parts else [self.last])
        return [*moves, self._op("mean", self.last, reads, [("loss",), ("number",)])]

    def _to_last(self, name: str, ranks: Sequence[int]) -> tuple[list[PlanEntry], list[Key]]:
        """Return (moves of a value from `ranks` to the last rank, the keys of the copies)."""
        there = {r: (name if r == self.last else f"{name}_there", r) for r in ranks}
        moves = [transfer_entry(r, (name, r), self.last, there[r]) for r in ranks if r != self.last]
        return moves, [*there.values()]

    def _norm(self) -> list[PlanEntry]:
        """Return the entries for a step's numbers: the last rank combines the sums of all ranks."""
        ops = []
        for r in self.ranks:
            writes = [("squares", r), *((name, r) for name in self.counts)]
            ops.append(self._op("squares", r, [("grads", r)], writes))
        moves, squares = self._to_last("squares", self.ranks)
        sent, attached = self._to_last("attached", self.ranks if self.model.inputs.names else ())
        counted, counts = self._to_last(COUNTS, self.ranks if self.counts else ())
        reads = [("loss",), ("number",), ("step", self.last), *squares, *attached, *counts]
        combine = self._op("combine", self.last, reads, [("numbers",)])
        return [*ops, *moves, *sent, *counted, combine]

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
