"""A device's spmd program for any ticks: parameters, slots, stages, embedding and head."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import Layout, gather_shards, layer_specs
from ppctl.executors.stage.layer_programs import zeros_like
from ppctl.executors.stage.slot_programs import LayerSlots
from ppctl.model.layer_inputs import LOSS
from ppctl.model.random_keys import KEYS
from ppctl.model.stack import Stack, flat_batch
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.ir import Kind
from ppctl.schedule.tick_lowering import Ticks

Tree = Any
MOST_PADDED = 4  # maximum number of arrays in `padded_sum`; XLA fuses concatenations of more

# names of a tick's tasks in the compiled program; profiles use them to find operations
SCOPES: dict[Kind, str] = {
    "F": "tick_forward",
    "B": "tick_backward",
    "I": "tick_input_grad",
    "W": "tick_weight_grad",
    "E": "tick_embedding",
    "T": "tick_head",  # both S and T
    "G": "tick_embedding_grad",
}


class Device:
    """One device, traced inside shard_map.

    It carries two sums over the tasks so far: `ends`, (losses, their number, gradients of embedding
    and head), and `layers`, the gradients of the layers, a tree for each chunk.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        ticks: Ticks,
        params: Tree,
        specs: Tree,
        batch: Tree,
        table: jax.Array,  # ticks of this rank, [1, tick, column]
        counts: jax.Array,  # layers of each chunk, [V, 1]
        numbers: jax.Array,  # layer number of each slot, [V, 1, K]
        *,
        total: Callable[[Tree], Tree] = lambda numbers: numbers,  # sum over devices with other data
    ):
        # 1. the arguments
        self.model, self.stack, self.ticks, self.x = model, model.stack, ticks, model.x
        self.outer = model.outer
        self.table, placement, self.microbatches = table[0], layout.placement, batch
        self.num_chunks = placement.num_chunks
        self.stage = model.stage if KEYS in batch else model.evaluation_stage
        chunks = range(self.num_chunks)
        self.layer_slots = [
            _layer_slots(self.stack, placement, v, counts[v, 0], numbers[v, 0]) for v in chunks
        ]
        self.are_sharded = layout.mesh.shape["fsdp"] > 1
        # 2. parameters, gathered here unless the stage gathers its layers
        place = 1
        if ticks.has_backward:
            place = model.inputs.places(flat_batch(batch), total, model.master)
        shards, by_rank = model.computed_params(params, numbers, place), P(None, "pp")
        embed_head = model.outer.extended(specs["embed_head"], P(), P())
        layers = model.inputs.extended(specs["layers"], by_rank, by_rank)
        self.specs = {"embed_head": embed_head, "layers": layers}
        self.embed_head = gather_shards(shards["embed_head"], embed_head)
        stacked = shards["layers"]
        if model.layer_specs is None:
            stacked = model.gather_layers(stacked, layers)
        self.chunks = self._chunks(stacked)

    # parameters and data

    def _chunks(self, staged: Tree) -> list[Any]:
        """Return the layers of each chunk of [V, 1, K, ...]: a list, or stacked for a scan."""
        num_chunks, _, num_layers = jax.tree.leaves(staged)[0].shape[:3]
        take = lambda *index: jax.tree.map(lambda a: a[index], staged)  # noqa: E731
        if self.num_chunks * num_layers > self.model.unroll:
            return [take(v, 0) for v in range(num_chunks)]
        return [[take(v, 0, k) for k in range(num_layers)] for v in range(num_chunks)]

    def chunk(self, v: int, m: Any = 0) -> tuple[Any, LayerSlots | None]:
        """Return (layers, their slots) of chunk v; m: microbatch whose random keys layers take."""
        return self.model.inputs.with_keys(self.chunks[v], self._keys(m)), self.layer_slots[v]

    def _keys(self, m: Any) -> jax.Array | None:
        """Return the random keys of microbatch m's examples, if functions take keys."""
        return self.microbatch(KEYS, m) if KEYS in self.microbatches else None

    def _embed_head(self, m: Any) -> Tree:
        """Return the parameters of embedding and head, with the keys of microbatch m."""
        return self.outer.with_keys(self.embed_head, self._keys(m))

    def run_if(
        self,
        active: jax.Array,
        run: Callable[[Tree], tuple[Tree, Tree]],
        otherwise: Callable[[], Tree],
        carry: Tree,
    ) -> tuple[Tree, Tree]:
        """Return value, carry = run(carry) where active, else (otherwise(), carry).

        On GPUs this is a loop of at most one iteration: XLA updates a loop's carry in place, but
        copies much of a branch's carry (sums and slots) in every tick. On CPUs branches copy
        nothing, and loops are slower.
        """
        if not self.model.for_gpu:
            return jax.lax.cond(active, run, lambda carry: (otherwise(), carry), carry)
        turn = lambda _, state: run(state[1])  # noqa: E731
        return jax.lax.fori_loop(0, active.astype(jnp.int32), turn, (otherwise(), carry))

    def on_chunk(self, chunk: jax.Array, run: Callable[[int], Any]) -> Any:
        """Return run(v), where v is the value of the traced `chunk`."""
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
        """Return run(v, sums) for the value v of `chunk`; value: zeros like its first result."""
        if not self.model.for_gpu or self.num_chunks == 1:
            return self.on_chunk(chunk, lambda v: run(v, sums))
        for v in range(self.num_chunks):
            value, sums = self.run_if(chunk == v, partial(run, v), lambda value=value: value, sums)
        return value, sums

    def microbatch(self, name: str, m: Any) -> Tree:
        """Return the inputs, targets or keys of microbatch m."""
        return read_slot(self.microbatches[name], m)

    # sums

    def zero_sums(self) -> tuple[Tree, Tree]:
        """Return zero (`ends`, layer gradients); without backwards all gradients are None."""
        losses, model = zeros_like(self.outer.losses), self.model
        if not self.ticks.has_backward:
            return (*losses, None), None
        sums = lambda *dims: lambda a: jnp.zeros((*dims, *a.shape), model.master)  # noqa: E731
        layer = model.trained_weights(model.with_inputs(model.layer))
        layers = [
            [jax.tree.map(sums(), layer) for _ in chunk]
            if isinstance(chunk, list)
            else jax.tree.map(sums(len(jax.tree.leaves(chunk)[0])), layer)
            for chunk in self.chunks
        ]
        embed_head = model.outer.trained(model.with_outer_inputs(model.embed_head))
        return (*losses, jax.tree.map(sums(), embed_head)), layers

    def results(
        self, ends: Tree, layers: Tree, reduced: Callable[[Tree, Tree], Tree]
    ) -> tuple[dict[str, jax.Array], jax.Array, Tree]:
        """Return (sums of losses by name, their number, sums of gradients laid out as parameters).

        reduced(gradients, specs): returns the sums over all replicas. If it scatters them to
        shards, layers are stacked only afterwards. Otherwise stacked gradients would be in memory
        twice, and XLA would transpose them, to scatter another dim than the first.
        """
        # 1. sums over all replicas
        loss, number, embed_head = ends
        inputs = self.model.inputs
        if not self.ticks.has_backward:
            return {LOSS: loss}, number, None
        if self.are_sharded and not isinstance(layers[0], list):
            slots = range(len(jax.tree.leaves(self.chunks[0])[0]))
            layers = [[jax.tree.map(lambda a, k=k: a[k], w) for k in slots] for w in layers]
        is_list = isinstance(layers[0], list)
        trained = trained_part(self.specs, inputs.trainable(self.stack))
        embed_head, outer = inputs.outer.separate(embed_head)
        one = layer_specs(trained["layers"], are_stacked=not is_list)
        specs = {
            "embed_head": inputs.outer.separate(trained["embed_head"])[0],
            "layers": (
                [[one] * len(chunk) if is_list else one for chunk in layers],
                dict.fromkeys(outer, P()),
            ),
        }
        grads = reduced({"embed_head": embed_head, "layers": (layers, outer)}, specs)
        layers, outer = grads["layers"]
        # 2. layers, stacked
        num_slots = len(layers) * (len(layers[0]) if is_list else 1)
        stack = padded_sum if self.model.for_gpu and num_slots <= MOST_PADDED else jnp.stack
        if is_list:
            layers = [jax.tree.map(lambda *leaves: stack(leaves), *chunk) for chunk in layers]
        layers = jax.tree.map(lambda *leaves: stack(leaves)[:, None], *layers)
        layers, attached = inputs.separate(layers)
        sums = {LOSS: loss} | inputs.summed(attached, outer)
        return sums, number, {"embed_head": grads["embed_head"], "layers": layers}

    # embedding and head

    def embed(self, m: Any) -> jax.Array:
        """Return the embedding of microbatch m."""
        return self.outer.embed(self._embed_head(m), self.microbatch("inputs", m))

    def add_head(self, y: jax.Array, m: Any, ends: Tree) -> tuple[jax.Array, Tree]:
        """Return (gradient of y, or y without backwards; `ends` with microbatch m added)."""
        args = self._embed_head(m), y, self.microbatch("targets", m)
        if not self.ticks.has_backward:
            return y, (*jax.tree.map(jnp.add, ends[:2], self.outer.head(*args)), None)
        gy, total, losses = self.outer.add_head(*args, ends[2])
        return gy, (*jax.tree.map(jnp.add, ends[:2], losses), total)

    def add_embedding(
        self, active: jax.Array, gx: Callable[[], jax.Array], m: jax.Array, ends: Tree
    ) -> Tree:
        """Return `ends`, with microbatch m's gradient of the embedding added if active."""

        def run(total: Tree) -> tuple[None, Tree]:
            inputs = self.microbatch("inputs", m)
            return None, self.outer.add_embedding(self._embed_head(m), inputs, gx(), total)

        return (*ends[:2], self.run_if(active, run, lambda: None, ends[2])[1])


def _layer_slots(
    stack: Stack, placement: Placement, v: int, count: jax.Array, numbers: jax.Array
) -> LayerSlots | None:
    """Return the layer slots of chunk v on this rank: `count` layers with these numbers."""
    least = int(placement.counts[v].min())
    if stack.are_alike:
        return None if placement.is_even else LayerSlots(count, least=least)
    number, is_one_of = None if placement.is_even else count, placement.num_chunks > 1
    return LayerSlots(number, numbers, placement.among(v), is_one_of=is_one_of, least=least)


# --- slots and sums that a device carries from tick to tick


def slots_of(device: Device) -> dict[str, Tree]:
    """Return all slots, zeroed; stash or pending is None if the ticks have no slots for it."""
    programs = device.stage.programs
    shapes = {"stash": programs.stash_shapes, "pending": programs.pending_shapes}
    found: dict[str, Tree] = {}
    for name, number in device.ticks.num_slots.items():
        if name in shapes:
            found[name] = empty_slots(number, shapes[name](*device.chunk(0))) if number else None
        else:
            found[name] = empty_slots(number, device.x)
    return found


def empty_slots(count: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), tree)


def padded_sum(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return jnp.stack(arrays), as a sum of arrays padded with zeros.

    XLA for GPUs fuses a sum with its reader, here the optimizer's update. A concatenation of few
    large arrays becomes a kernel with one result, and the update takes a separate pass for the
    parameters and for each moment.
    """
    last = len(arrays) - 1
    widths = ([(k, last - k), *[(0, 0)] * a.ndim] for k, a in enumerate(arrays))
    first, *rest = (jnp.pad(a[None], each) for a, each in zip(arrays, widths, strict=True))
    return sum(rest, start=first)


def read_slot(slots: Tree, slot: Any) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, slot, keepdims=False), slots)


def write_slot(slots: Tree, slot: jax.Array, value: Tree) -> Tree:
    write = lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, slot, 0)  # noqa: E731
    return jax.tree.map(write, slots, value)


def write_arrival(
    slots: jax.Array, slot: jax.Array, value: jax.Array, arrives: jax.Array
) -> jax.Array:
    """Return the slots, with `value` written at index `slot` if `arrives`."""
    return write_slot(slots, slot, jnp.where(arrives, value, read_slot(slots, slot)))
