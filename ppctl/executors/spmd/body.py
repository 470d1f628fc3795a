"""The parts of one device's spmd program, whatever its ticks: parameters, slots, stages, embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.executors.auto_axes import in_manual
from ppctl.executors.layout import gather_shards, layer_specs
from ppctl.executors.stage.embedding_head import add_embedding_grad, add_head_grads
from ppctl.executors.stage.layers import DividedWeights, zeros_like
from ppctl.executors.stage.stage import LayerSlots, Stage
from ppctl.model.stack import Stack
from ppctl.model.trainable import trained_part
from ppctl.schedule.ir import Kind
from ppctl.schedule.remat import Remat
from ppctl.schedule.ticks import Ticks

Tree = Any
MOST_PADDED = 4  # arrays; of more, XLA fuses concatenations as it does anything else

# names in the compiled program by which `profile` finds the operations of a tick's task
SCOPES: dict[Kind, str] = {"F": "tick_forward", "B": "tick_backward", "I": "tick_input_grad", "W": "tick_weight_grad"}
PART_SCOPES: dict[Kind, str] = {"E": "tick_embedding", "T": "tick_head", "G": "tick_embedding_grad"}  # "T": S and T


@dataclass(frozen=True)
class Options:
    """How the program is written; none of them changes what it computes."""

    remat: Remat = Remat.FULL  # or its name
    skip_idle: bool = True  # a rank without a task branches round it; otherwise it computes and masks the result
    gather: str = "step"  # layers over fsdp: all once a step, those of a chunk in each tick, or each before its use
    unroll: int = 16  # a rank's layers are unrolled up to this many, scanned above
    dtype: Any = jnp.float32  # of compute
    loops: bool = False  # what a tick may skip stands in a loop of one turn or none, not in a branch: see `run_if`

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", Remat.of(self.remat))


class Place(NamedTuple):
    """The place of a task, from its rank's table: scalars of the program."""

    chunk: jax.Array
    microbatch: jax.Array
    first: jax.Array  # whether its stage is the first
    last: jax.Array  # whether its stage is the last


class Kept(NamedTuple):
    """Where a task finds what the forward of its microbatch has kept: slots of either kind, and the one in each."""

    acts: jax.Array  # with remat=full
    act_slot: jax.Array
    stash: Tree  # otherwise
    stash_slot: jax.Array


class Device:
    """One device, traced inside shard_map.

    `sums` in the methods are the sums over tasks so far: of losses, their number, the gradients of embedding and
    head, and the gradients of the layers, a tree for each chunk.
    """

    def __init__(
        self,
        stack: Stack,
        ticks: Ticks,
        options: Options,
        params: Tree,
        specs: Tree,
        microbatches: Tree,
        layer_slots: Sequence[LayerSlots | None],  # of each chunk
        divided: DividedWeights | None = None,  # by XLA, over an axis of the specs
    ):
        self.auto = auto = () if divided is None else ("tp",)
        self.stack, self.ticks, self.options = stack, ticks, options
        self.params, self.specs, self.microbatches, self.layer_slots = params, specs, microbatches, layer_slots
        self.num_ranks, self.num_chunks = ticks.schedule.num_ranks, ticks.schedule.num_chunks
        self.has_parts = ticks.schedule.divides_vocabulary  # `ends` are this rank's
        self.ends = in_manual(gather_shards, self._compute(params["ends"]), specs["ends"], auto)
        gathered = partial(self._gathered, params["layers"])
        self.whole = jax.eval_shape(gathered)  # shapes
        by_layer = options.gather == "layer"
        self.chunks = self._chunks(self._compute(params["layers"])) if by_layer else gathered()
        self.x = jax.eval_shape(stack.embed, self.ends, self.microbatch("inputs", 0))
        w = self.whole[0]
        w0 = w[0] if isinstance(w, list) else jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), w)
        gather = partial(gather_shards, specs=layer_specs(specs["layers"])) if by_layer else None
        layer = stack.layer, options.remat, w0, self.x, gather, divided, stack.trains("layers")
        self.stage = Stage(*layer, in_order=options.loops)

    # parameters and data

    def _compute(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: a.astype(self.options.dtype), tree)

    def _gathered(self, layers: Tree) -> list[Any]:
        """Return the layers of each chunk, whole and in the compute dtype, in which they are gathered."""
        return self._chunks(in_manual(gather_shards, self._compute(layers), self.specs["layers"], self.auto))

    def _chunks(self, staged: Tree) -> list[Any]:
        """Return the layers of each chunk, of [V, 1, K, ...]: a list of layers, or stacked for a scan."""
        num_chunks, _, num_layers = jax.tree.leaves(staged)[0].shape[:3]
        take = lambda *index: jax.tree.map(lambda a: a[index], staged)  # noqa: E731
        if self.num_chunks * num_layers > self.options.unroll:
            return [take(v, 0) for v in range(num_chunks)]
        return [[take(v, 0, k) for k in range(num_layers)] for v in range(num_chunks)]

    def chunk(self, v: int) -> tuple[Any, LayerSlots | None]:
        """Return (layers, their slots) of chunk v: the first arguments of every task of a stage."""
        if self.options.gather == "tick":
            (layers,) = self._gathered(jax.tree.map(lambda a: a[v : v + 1], self.params["layers"]))
        else:
            layers = self.chunks[v]
        return layers, self.layer_slots[v]

    def run_if(
        self, active: jax.Array, run: Callable[[Tree], tuple[Tree, Tree]], otherwise: Callable[[], Tree], carry: Tree
    ) -> tuple[Tree, Tree]:
        """Return value, carry = run(carry) where active, else (otherwise(), carry).

        XLA updates what a loop carries in place, and for GPUs copies much of what a branch passes on: sums of gradients
        and slots, in every tick. For CPUs it does not, and runs loops slower.
        """
        if self.options.loops:
            return jax.lax.fori_loop(0, active.astype(jnp.int32), lambda _, state: run(state[1]), (otherwise(), carry))
        return jax.lax.cond(active, run, lambda carry: (otherwise(), carry), carry)

    def on_chunk(self, chunk: jax.Array, run: Callable[[int], Any]) -> Any:
        """Return run(v) for the chunk that a tick names."""
        if self.num_chunks == 1:
            return run(0)
        return jax.lax.switch(chunk, [partial(run, v) for v in range(self.num_chunks)])

    def add_on_chunk(
        self, chunk: jax.Array, run: Callable[[int, Tree], tuple[Tree, Tree]], value: Tree, sums: Tree
    ) -> tuple[Tree, Tree]:
        """Return run(v, sums) for the chunk that a tick names; value: of the shapes that it gives with the sums."""
        if not self.options.loops or self.num_chunks == 1:
            return self.on_chunk(chunk, lambda v: run(v, sums))
        for v in range(self.num_chunks):
            value, sums = self.run_if(chunk == v, partial(run, v), lambda value=value: value, sums)
        return value, sums

    def microbatch(self, name: str, m: Any) -> Tree:
        """Return the inputs or targets of microbatch m."""
        return read_slot(self.microbatches[name], m)

    # slots and sums

    def slots_of_x(self, kind: str) -> jax.Array:
        """Return empty slots for activations or gradients."""
        return _slots(self.ticks.num_slots[kind], self.x)

    def stash_slots(self) -> Tree:
        """Return empty slots for the stashes of forwards; None where a stash is the stage's input."""
        if not self.ticks.num_slots["stash"]:
            return None
        return _slots(self.ticks.num_slots["stash"], self.stage.stash_shapes(*self.chunk(0)))

    def pending_slots(self) -> Tree:
        """Return empty slots for `pending`, from input gradients to weight gradients; None where none is split."""
        if not self.ticks.num_slots["pending"]:
            return None
        return _slots(self.ticks.num_slots["pending"], self.stage.pending_shapes(*self.chunk(0)))

    def zero_sums(self) -> Tree:
        master = jax.tree.leaves(self.params)[0].dtype
        sums = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, master), tree)  # noqa: E731
        head = jax.eval_shape(self.stack.head, self.ends, self.x, self.microbatch("targets", 0))
        if not self.ticks.has_backward:
            return (*zeros_like(head), None, None)
        of_layer = partial(trained_part, trainable=self.stack.trains("layers"))
        layers = [[*map(of_layer, chunk)] if isinstance(chunk, list) else of_layer(chunk) for chunk in self.whole]
        return (*zeros_like(head), sums(trained_part(self.ends, self.stack.trains("ends"))), sums(layers))

    def results(
        self, sums: Tree, reduced: Callable[[Tree, Tree], Tree], are_scattered: bool
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """Return (sum of losses, number of losses, sums of gradients as parameters are laid out) of this device.

        reduced: what makes of gradients and their specs the sums over all replicas; are_scattered: to shards, layer by
        layer. They are stacked only then: before it, whole gradients would be there twice, and XLA transposes what it
        scatters along another dim than the first.
        """
        loss, number, ends, layers = sums
        if not self.ticks.has_backward:
            return loss, number, None
        if are_scattered:
            layers = [self._apart(chunk) for chunk in layers]
        is_list = isinstance(layers[0], list)
        trained = trained_part(self.specs, self.stack.trainable)
        one = layer_specs(trained["layers"], are_stacked=not is_list)
        specs = {"ends": trained["ends"], "layers": [[one] * len(chunk) if is_list else one for chunk in layers]}
        grads = in_manual(reduced, {"ends": ends, "layers": layers}, specs, self.auto)
        layers: Tree = grads["layers"]
        num_slots = len(layers) * (len(layers[0]) if is_list else 1)
        stack = padded_sum if self.options.loops and num_slots <= MOST_PADDED else jnp.stack
        if is_list:
            layers = [jax.tree.map(lambda *leaves: stack(leaves), *chunk) for chunk in layers]
        layers = jax.tree.map(lambda *leaves: stack(leaves)[:, None], *layers)
        return loss, number, {"ends": grads["ends"], "layers": layers}

    def _apart(self, layers: Tree) -> list[Tree]:
        """Return what is there of each layer of a chunk, a list of them or stacked, as a list."""
        if isinstance(layers, list):
            return layers
        num_layers = jax.tree.leaves(self.whole[0])[0].shape[0]
        return [jax.tree.map(lambda a, k=k: a[k], layers) for k in range(num_layers)]

    # embedding and head

    def input(self, place: Place, slots: jax.Array, slot: jax.Array) -> jax.Array:
        """Return the input of a stage: embedded tokens on the first, else the activation that arrived.

        Where the vocabulary is divided, what was embedded is in a slot, too.
        """
        if self.has_parts:
            return read_slot(slots, slot)
        embed = lambda: self.stack.embed(self.ends, self.microbatch("inputs", place.microbatch))  # noqa: E731
        if slots.shape[0] == 0:
            return embed()
        return jax.lax.cond(place.first, embed, lambda: read_slot(slots, slot))

    def head(self, place: Place, y: jax.Array, otherwise: Callable | None, sums: Tree) -> tuple[jax.Array, Tree]:
        """Return (gradient of the loss, sums with the loss) on the last stage, else (otherwise(), sums).

        otherwise=None: the stage is the only one. Of the sums it needs the first three alone.
        """

        def run(sums: Tree) -> tuple[jax.Array, Tree]:
            targets = self.microbatch("targets", place.microbatch)
            of_ends = self.stack.trains("ends")
            gy, ends, loss, number = add_head_grads(self.stack.head, self.ends, y, targets, sums[2], of_ends)
            return gy, (sums[0] + loss, sums[1] + number, ends)

        own, layers = sums[:3], sums[3:]
        gy, own = run(own) if otherwise is None else self.run_if(place.last, run, otherwise, own)
        return gy, (*own, *layers)

    def loss(self, place: Place, y: jax.Array, sums: Tree) -> Tree:
        """Return the sums with the loss of y added if the stage is the last one; for forwards alone."""

        def run(sums: Tree) -> Tree:
            loss, number = self.stack.head(self.ends, y, self.microbatch("targets", place.microbatch))
            return (sums[0] + loss, sums[1] + number, *sums[2:])

        return jax.lax.cond(place.last, run, lambda sums: sums, sums)

    def embedded(self, place: Place, gx: jax.Array, sums: Tree) -> Tree:
        """Return the sums with the embedding's gradient added if the stage is the first one.

        Where the vocabulary is divided, all ranks do that after the tick's tasks.
        """
        if self.has_parts:
            return sums

        def run(total: Tree) -> tuple[None, Tree]:
            inputs = self.microbatch("inputs", place.microbatch)
            of_ends = self.stack.trains("ends")
            return None, add_embedding_grad(self.stack.embed, self.ends, inputs, gx, total, of_ends)

        return (*sums[:2], self.run_if(place.first, run, lambda: None, sums[2])[1], sums[3])

    # parts of a vocabulary that is divided over the ranks: all of them take the same branch

    def embed_part(self, at: dict[str, jax.Array]) -> jax.Array:
        """Return the embedding of the microbatch that a tick names, the sum of all ranks' parts; of none, zeros."""

        def run() -> jax.Array:
            return jax.lax.psum(self.stack.embed(self.ends, self.microbatch("inputs", at["embedded"] - 1)), "pp")

        return jax.lax.cond(at["embedded"] > 0, run, lambda: zeros_like(self.x))

    def head_part(self, at: dict[str, jax.Array], y: jax.Array, is_last: jax.Array, sums: Tree) -> tuple[Any, Tree]:
        """Return (gradient of the last stage's output y, sums with this rank's part of the loss and of its gradients).

        is_last: whether y is this rank's. Of a tick that names no microbatch the gradient is y. S and T in one: ranks
        in lockstep would only wait longer. For forwards alone y, and the loss.
        """

        def run(sums: Tree) -> tuple[jax.Array, Tree]:
            targets = self.microbatch("targets", at["head"] - 1)
            whole = jax.lax.psum(jnp.where(is_last, y, 0), "pp")
            if not self.ticks.has_backward:
                loss, number = self.stack.head(self.ends, whole, targets)
                return y, (sums[0] + loss, sums[1] + number, *sums[2:])
            of_ends = self.stack.trains("ends")
            gy, ends, loss, number = add_head_grads(self.stack.head, self.ends, whole, targets, sums[2], of_ends)
            own = sums[0] + loss, sums[1] + number, ends
            return jax.lax.psum(gy, "pp"), (*own, *sums[3:])

        return self.run_if(at["head"] > 0, run, lambda: y, sums)

    def embedding_grad_part(self, at: dict[str, jax.Array], gx: jax.Array, is_first: jax.Array, sums: Tree) -> Tree:
        """Return the sums with this rank's part of the embedding's gradient; is_first: whether gx is of stage 0."""

        def run(total: Tree) -> tuple[None, Tree]:
            inputs, of_ends = self.microbatch("inputs", at["embedding_grad"] - 1), self.stack.trains("ends")
            whole = jax.lax.psum(jnp.where(is_first, gx, 0), "pp")
            return None, add_embedding_grad(self.stack.embed, self.ends, inputs, whole, total, of_ends)

        return (*sums[:2], self.run_if(at["embedding_grad"] > 0, run, lambda: None, sums[2])[1], sums[3])

    # tasks, whatever the ticks they run in

    def forward(self, place: Place, slots: jax.Array, slot: jax.Array) -> tuple[jax.Array, Tree]:
        """(output, stash) of the forward whose input is in a slot, or is embedded."""
        x = self.input(place, slots, slot)
        return self.on_chunk(place.chunk, lambda v: self.stage.forward(*self.chunk(v), x))

    def stash_and_cotangent(
        self, place: Place, kept: Kept, grads: jax.Array, grad: jax.Array
    ) -> tuple[Tree, Callable[[Tree], Callable]]:
        """(stash, function from the sums to the cotangent) for `Stage.backward` and `Stage.input_grad`.

        Their aux is what is left of the first three sums, () where these do not change.
        kept: where the stash is; grads, grad: the slots of gradients, and the one that this task reads.
        """
        arrived = lambda: read_slot(grads, grad)  # noqa: E731
        if not self.stage.keeps_input:
            return read_slot(kept.stash, kept.stash_slot), lambda sums: lambda _: (arrived(), ())
        if self.has_parts:
            return read_slot(kept.acts, kept.act_slot), lambda sums: lambda _: (arrived(), ())
        otherwise = arrived if grads.shape[0] else None  # no gradient ever arrives at a single stage
        stash = self.input(place, kept.acts, kept.act_slot)
        return stash, lambda sums: lambda y: self.head(place, y, otherwise, sums[:3])

    def backward(
        self,
        place: Place,
        stash: Tree,
        cotangent: Callable[[Tree], Callable],
        sums: Tree,
        masked: Callable[[Tree, Tree], Tree] = lambda new, old: new,
    ) -> tuple[jax.Array, Tree]:
        """(gradient of the input, sums with the gradients of a whole backward added; those of layers `masked`)."""

        def run(v: int, sums: Tree) -> tuple[jax.Array, Tree]:
            gx, layers, own = self.stage.backward(*self.chunk(v), stash, cotangent(sums), sums[3][v])
            return gx, with_layers(with_own(sums, own), v, masked(layers, sums[3][v]))

        gx, sums = self.add_on_chunk(place.chunk, run, zeros_like(self.x), sums)
        return gx, self.embedded(place, gx, sums)

    def hop(self, value: jax.Array, step: int) -> jax.Array:
        """Return the value of the rank that is `step` ranks before this one, round the ring."""
        return jax.lax.ppermute(value, "pp", [(r, (r + step) % self.num_ranks) for r in range(self.num_ranks)])


def with_own(sums: Tree, own: Tree) -> Tree:
    """Return the sums with the first ones as a backward's aux has them; (): as they were."""
    return (*own, *sums[len(own) :])


def with_layers(sums: Tree, v: int, layers: Tree) -> Tree:
    """Return the sums with these of chunk v's layers."""
    return (*sums[:3], [layers if i == v else total for i, total in enumerate(sums[3])])


def _slots(count: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), tree)


def padded_sum(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return jnp.stack(arrays), as a sum of arrays that are each padded with zeros in the places of the others.

    XLA for GPUs makes a concatenation of up to `MOST_PADDED` large arrays a kernel with one result, so that the
    optimizer's update of stacked gradients would be a pass for each of its moments and one for the parameters.
    """
    last = len(arrays) - 1
    first, *rest = (jnp.pad(a[None], [(k, last - k), *[(0, 0)] * a.ndim]) for k, a in enumerate(arrays))
    return sum(rest, start=first)


def read_slot(slots: Tree, slot: Any) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, slot, keepdims=False), slots)


def write_slot(slots: Tree, slot: jax.Array, value: Tree) -> Tree:
    return jax.tree.map(lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, slot, 0), slots, value)


def write_arrival(slots: jax.Array, slot: jax.Array, value: jax.Array, arrives: jax.Array) -> jax.Array:
    """Return the slots with `value` written where `arrives`."""
    return write_slot(slots, slot, jnp.where(arrives, value, read_slot(slots, slot)))
