"""The parts of a device's spmd program for any ticks: parameters, slots, stages, embed_head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import gather_shards, layer_specs
from ppctl.executors.spmd.slots import empty_slots, padded_sum, read_slot
from ppctl.executors.stage.layer_programs import add_embedding_grad, add_head_grads, zeros_like
from ppctl.executors.stage.stage import LayerSlots
from ppctl.model.layer_inputs import LOSS
from ppctl.model.layer_reports import cast_layers
from ppctl.model.random_keys import KEYS
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.ir import Kind
from ppctl.schedule.tick_lowering import Ticks

Tree = Any
MOST_PADDED = 4  # arrays; XLA fuses concatenations of more of them

# names in the compiled program by which a profile finds the operations of a tick's task
SCOPES: dict[Kind, str] = {
    "F": "tick_forward",
    "B": "tick_backward",
    "I": "tick_input_grad",
    "W": "tick_weight_grad",
}
PART_SCOPES: dict[Kind, str] = {"E": "tick_embedding", "T": "tick_head", "G": "tick_embedding_grad"}
# "T": S and T


class Place(NamedTuple):
    """The place of a task, from its rank's table: scalars of the program."""

    chunk: jax.Array
    microbatch: jax.Array
    first: jax.Array  # whether its stage is the first
    last: jax.Array  # whether its stage is the last


class Device:
    """One device, traced inside shard_map.

    `sums` in the methods are the sums over tasks so far: losses, their number, gradients of
    embedding and head, and gradients of the layers, a tree for each chunk.
    """

    def __init__(
        self,
        model: Model,
        ticks: Ticks,
        params: Tree,
        specs: Tree,
        microbatches: Tree,
        layer_slots: Sequence[LayerSlots | None],  # one a chunk
        numbers: jax.Array,  # of its layers in the model, as they are staged
    ):
        # 1. the arguments
        self.model, self.stack, self.ticks, self.x = model, model.stack, ticks, model.x
        self.microbatches, self.layer_slots = microbatches, layer_slots
        self.num_chunks, self.stage = ticks.schedule.num_chunks, model.evaluation_stage
        self.keys = None
        if KEYS in microbatches:
            self.keys, self.stage = microbatches[KEYS], model.stage
        self.vocab_parts = ticks.schedule.vocab_parts  # `embed_head` is this rank's part
        # 2. embedding and head gathered
        shards = jax.tree.map(lambda a: a.astype(model.dtype), params["embed_head"])
        self.embed_head = gather_shards(shards, specs["embed_head"])
        # 3. the layers with their inputs, gathered here or by the stage
        places, by_rank = jnp.zeros(numbers.shape, model.master), P(None, "pp")
        shards = cast_layers(params["layers"], model.dtype, self.stack.options.updates)
        shards = model.inputs.extended(shards, places, numbers)
        layers = model.inputs.extended(specs["layers"], by_rank, by_rank)
        self.specs, by_layer = specs | {"layers": layers}, model.layer_specs is not None
        self.chunks = self._chunks(shards if by_layer else gather_shards(shards, layers))

    # parameters and data

    def _chunks(self, staged: Tree) -> list[Any]:
        """Return the layers of each chunk of [V, 1, K, ...]: a list, or stacked for a scan."""
        num_chunks, _, num_layers = jax.tree.leaves(staged)[0].shape[:3]
        take = lambda *index: jax.tree.map(lambda a: a[index], staged)  # noqa: E731
        if self.num_chunks * num_layers > self.model.unroll:
            return [take(v, 0) for v in range(num_chunks)]
        return [[take(v, 0, k) for k in range(num_layers)] for v in range(num_chunks)]

    def chunk(self, v: int, m: Any = 0) -> tuple[Any, LayerSlots | None]:
        """Return (layers, their slots) of chunk v, the first arguments of a task of microbatch m.

        m: of a function's shapes, any.
        """
        keys = None if self.keys is None else read_slot(self.keys, m)
        return self.model.inputs.with_keys(self.chunks[v], keys), self.layer_slots[v]

    def run_if(
        self,
        active: jax.Array,
        run: Callable[[Tree], tuple[Tree, Tree]],
        otherwise: Callable[[], Tree],
        carry: Tree,
    ) -> tuple[Tree, Tree]:
        """Return value, carry = run(carry) where active, else (otherwise(), carry).

        XLA updates a loop's carry in place, but for GPUs copies much of a branch's: sums and slots,
        in every tick. For CPUs it does not, and runs loops slower.
        """
        if not self.model.for_gpu:
            return jax.lax.cond(active, run, lambda carry: (otherwise(), carry), carry)
        turn = lambda _, state: run(state[1])  # noqa: E731
        return jax.lax.fori_loop(0, active.astype(jnp.int32), turn, (otherwise(), carry))

    def on_chunk(self, chunk: jax.Array, run: Callable[[int], Any]) -> Any:
        """Return run(v) for the chunk that a tick names."""
        if self.num_chunks == 1:
            return run(0)
        return jax.lax.switch(chunk, [partial(run, v) for v in range(self.num_chunks)])

    def add_on_chunk(
        self,
        chunk: jax.Array,
        run: Callable[[int, Tree], tuple[Tree, Tree]],
        value: Tree,
        sums: Tree,
    ) -> tuple[Tree, Tree]:
        """Return run(v, sums) for the chunk of a tick; value: zeros like its first result."""
        if not self.model.for_gpu or self.num_chunks == 1:
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
        return empty_slots(self.ticks.num_slots[kind], self.x)

    def stash_slots(self) -> Tree:
        """Return empty slots for stashes; None if a stash is the stage's input."""
        number = self.ticks.num_slots["stash"]
        return empty_slots(number, self.stage.stash_shapes(*self.chunk(0))) if number else None

    def pending_slots(self) -> Tree:
        """Return empty slots for `pending`, from I to W; None without split backwards."""
        number = self.ticks.num_slots.get("pending")
        return empty_slots(number, self.stage.pending_shapes(*self.chunk(0))) if number else None

    def zero_sums(self) -> Tree:
        losses, model = zeros_like(self.model.losses), self.model
        if not self.ticks.has_backward:
            return (*losses, None, None)
        sums = lambda *dims: lambda a: jnp.zeros((*dims, *a.shape), model.master)  # noqa: E731
        layer = model.trained_weights(model.with_inputs(model.layer))
        layers = [
            [jax.tree.map(sums(), layer) for _ in chunk]
            if isinstance(chunk, list)
            else jax.tree.map(sums(len(jax.tree.leaves(chunk)[0])), layer)
            for chunk in self.chunks
        ]
        embed_head = model.trained_embed_head(model.embed_head)
        return (*losses, jax.tree.map(sums(), embed_head), layers)

    def results(
        self, sums: Tree, reduced: Callable[[Tree, Tree], Tree], are_scattered: bool
    ) -> tuple[dict[str, jax.Array], jax.Array, Tree]:
        """Return (sums of losses, number, sums of gradients laid out as the parameters).

        The sums are {"loss": this device's, name: an attached loss, of all replicas of the rank}.
        reduced: returns the sums over all replicas of gradients and their specs. are_scattered: to
        shards, layer by layer, and stacked only then. Stacked earlier, gradients would be in memory
        twice, and XLA transposes arrays to scatter another dim than the first.
        """
        # 1. sums over all replicas
        loss, number, embed_head, layers = sums
        if not self.ticks.has_backward:
            return {LOSS: loss}, number, None
        if are_scattered:
            layers = [self._apart(chunk) for chunk in layers]
        is_list = isinstance(layers[0], list)
        trained = trained_part(self.specs, self.model.inputs.trainable(self.stack))
        one = layer_specs(trained["layers"], are_stacked=not is_list)
        specs = {
            "embed_head": trained["embed_head"],
            "layers": [[one] * len(chunk) if is_list else one for chunk in layers],
        }
        grads = reduced({"embed_head": embed_head, "layers": layers}, specs)
        layers: Tree = grads["layers"]
        # 2. stacked
        num_slots = len(layers) * (len(layers[0]) if is_list else 1)
        stack = padded_sum if self.model.for_gpu and num_slots <= MOST_PADDED else jnp.stack
        if is_list:
            layers = [jax.tree.map(lambda *leaves: stack(leaves), *chunk) for chunk in layers]
        layers = jax.tree.map(lambda *leaves: stack(leaves)[:, None], *layers)
        layers, attached = self.model.inputs.separate(layers)
        sums = {LOSS: loss} | {name: a.sum() for name, a in attached.items()}
        return sums, number, {"embed_head": grads["embed_head"], "layers": layers}

    def _apart(self, layers: Tree) -> list[Tree]:
        """Return the layers of a chunk, a list or stacked, as a list."""
        if isinstance(layers, list):
            return layers
        num_layers = len(jax.tree.leaves(self.chunks[0])[0])
        return [jax.tree.map(lambda a, k=k: a[k], layers) for k in range(num_layers)]

    # embedding and head

    def input(self, place: Place, slots: jax.Array, slot: jax.Array) -> jax.Array:
        """Return the input of a stage: the first's tokens embedded, else the arrived activation.

        With a divided vocabulary, the embedded tokens are in a slot too.
        """
        if self.vocab_parts:
            return read_slot(slots, slot)
        inputs = lambda: self.microbatch("inputs", place.microbatch)  # noqa: E731
        embed = lambda: self.stack.embed(self.embed_head, inputs())  # noqa: E731
        if slots.shape[0] == 0:
            return embed()
        return jax.lax.cond(place.first, embed, lambda: read_slot(slots, slot))

    def _with_head(self, y: jax.Array, m: jax.Array, sums: Tree) -> tuple[jax.Array, Tree]:
        """Return (gradient of y, or y without backwards; sums with microbatch m's head)."""
        head, targets = self.stack.head, self.microbatch("targets", m)
        if not self.ticks.has_backward:
            loss, number = head(self.embed_head, y, targets)
            return y, (*jax.tree.map(jnp.add, sums[:2], (loss, number)), *sums[2:])
        args = self.embed_head, y, targets, sums[2], self.stack.trains("embed_head")
        gy, total, loss, number = add_head_grads(head, *args)
        return gy, (*jax.tree.map(jnp.add, sums[:2], (loss, number)), total, *sums[3:])

    def _with_embedding(self, gx: jax.Array, m: jax.Array, total: Tree) -> tuple[None, Tree]:
        """Return (None, sums with the embedding's gradient of microbatch m)."""
        inputs, which = self.microbatch("inputs", m), self.stack.trains("embed_head")
        return None, add_embedding_grad(self.stack.embed, self.embed_head, inputs, gx, total, which)

    def head(
        self, place: Place, y: jax.Array, otherwise: Callable | None, sums: Tree
    ) -> tuple[jax.Array, Tree]:
        """Return (gradient of the loss, sums with it) on the last stage, else (otherwise(), sums).

        otherwise=None: the only stage. Only the first three sums are read.
        """
        run = lambda sums: self._with_head(y, place.microbatch, sums)  # noqa: E731
        own, layers = sums[:3], sums[3:]
        gy, own = run(own) if otherwise is None else self.run_if(place.last, run, otherwise, own)
        return gy, (*own, *layers)

    def loss(self, place: Place, y: jax.Array, sums: Tree) -> Tree:
        """Return the sums, with the loss of y on the last stage; only without backwards."""
        run = lambda sums: self._with_head(y, place.microbatch, sums)[1]  # noqa: E731
        return jax.lax.cond(place.last, run, lambda sums: sums, sums)

    def embedded(self, place: Place, gx: jax.Array, sums: Tree) -> Tree:
        """Return the sums, with the embedding's gradient on the first stage.

        With a divided vocabulary, all ranks add it after the tick's tasks.
        """
        if self.vocab_parts:
            return sums
        run = partial(self._with_embedding, gx, place.microbatch)
        return (*sums[:2], self.run_if(place.first, run, lambda: None, sums[2])[1], sums[3])

    # parts of a vocabulary divided over the ranks: all ranks take the same branch

    def embed_part(self, at: dict[str, jax.Array]) -> jax.Array:
        """Return the embedding of the tick's microbatch, summed over ranks; zeros without one."""

        def run() -> jax.Array:
            inputs = self.microbatch("inputs", at["embedded"] - 1)
            return jax.lax.psum(self.stack.embed(self.embed_head, inputs), "pp")

        return jax.lax.cond(at["embedded"] > 0, run, lambda: zeros_like(self.x))

    def head_part(
        self, at: dict[str, jax.Array], y: jax.Array, is_last: jax.Array, sums: Tree
    ) -> tuple[Any, Tree]:
        """Return (gradient of the last stage's output y, sums with this rank's part of the head).

        is_last: whether y is this rank's. Without a microbatch in the tick, or without backwards,
        the gradient is y. S and T in one: apart, ranks in lockstep would only wait longer.
        """

        def run(sums: Tree) -> tuple[jax.Array, Tree]:
            whole = jax.lax.psum(jnp.where(is_last, y, 0), "pp")
            gy, sums = self._with_head(whole, at["head"] - 1, sums)
            return jax.lax.psum(gy, "pp") if self.ticks.has_backward else y, sums

        return self.run_if(at["head"] > 0, run, lambda: y, sums)

    def embedding_grad_part(
        self, at: dict[str, jax.Array], gx: jax.Array, is_first: jax.Array, sums: Tree
    ) -> Tree:
        """Return the sums with this rank's part of the embedding; is_first: gx is of stage 0."""

        def run(total: Tree) -> tuple[None, Tree]:
            whole = jax.lax.psum(jnp.where(is_first, gx, 0), "pp")
            return self._with_embedding(whole, at["embedding_grad"] - 1, total)

        _, total = self.run_if(at["embedding_grad"] > 0, run, lambda: None, sums[2])
        return (*sums[:2], total, sums[3])

    # tasks, in any ticks

    def forward(self, place: Place, slots: jax.Array, slot: jax.Array) -> tuple[jax.Array, Tree]:
        """Return (output, stash) of the forward whose input is in a slot, or is embedded."""
        x = self.input(place, slots, slot)
        run = lambda v: self.stage.forward(*self.chunk(v, place.microbatch), x)  # noqa: E731
        return self.on_chunk(place.chunk, run)

    def hop(self, value: jax.Array, step: int) -> jax.Array:
        """Return the value of the rank `step` ranks before this one, round the ring."""
        number = self.ticks.schedule.num_ranks
        return jax.lax.ppermute(value, "pp", [(r, (r + step) % number) for r in range(number)])
