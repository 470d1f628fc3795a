"""Seconds of the pieces of a model on this backend: each compiled as in the executors, in a loop.

Simulated devices share cores, so on CPU all devices of the mesh run a piece at the same time.
Pieces of a stage that tp and cp divide run on its devices together, their sends included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.device_mesh import AXES, RANK_AXES
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import Layout, gather_shards, scatter_sums
from ppctl.executors.spmd.device_program import read_slot, write_arrival, write_slot
from ppctl.executors.stage.embedding_head_grads import add_embedding_grad, add_head_grads
from ppctl.model.stack import VocabularyParts
from ppctl.model.trainable_parameters import trained_part

Tree = Any
Body = Callable[[jax.Array, Tree, Tree], Tree]  # (turn's number, what stays, goes round) -> goes
Timed = tuple[Body, Tree, Tree]  # a body, what stays, what goes round
LAYERS = 2  # of a timed stage
SLOTS = 4  # read in turn, so that nothing of a turn can be done before the loop
RUNS = 5  # after one that warms up; the median counts
LEAST_S = 0.1  # of a run
MOST_TURNS = 10_000_000  # of a run: such short turns compute nothing
SCALE = 0.02  # of random numbers
DISPATCHES = 100  # of a run
TURNS = {"cpu": 1}  # in a loop of known length; of unknown length a GPU's host waits at its ends
MANY_TURNS = 8  # of other platforms


def random_like(tree: Tree) -> Tree:
    """Return arrays of the shapes, small random numbers made on the device (integers are zeros)."""
    leaves, treedef = jax.tree.flatten(tree)

    def one(key: jax.Array, a: Any) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.zeros(a.shape, a.dtype)
        return (jax.random.normal(key, a.shape, jnp.float32) * SCALE).astype(a.dtype)

    def fill() -> Tree:
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return jax.tree.unflatten(treedef, map(one, keys, leaves))

    return jax.jit(fill)()


def shapes_like(tree: Tree, dtype: Any = None, *axes: int) -> Tree:
    """Return the shapes of a tree, with axes in front; dtype: None for that of each leaf."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*axes, *a.shape), dtype or a.dtype), tree)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


class Timing(NamedTuple):
    """Seconds of a turn: on the clock, and of all cores together (not of accelerators)."""

    wall_s: float
    cpu_s: float


def turn(
    body: Body, stays: Tree, goes: Tree, mesh: Mesh, options: dict[str, Any] | None = None
) -> Timing:
    """Return the median seconds of a turn of `body` when all devices of `mesh` run it at once.

    options: of XLA, as jax.jit takes them. A body that computes nothing, as of frozen parameters,
    takes next to no time.
    """
    # 1. a loop of turns on each device
    shape, each = tuple(mesh.shape.values()), P(*mesh.axis_names)
    turns = TURNS.get(mesh.devices.flat[0].platform, MANY_TURNS)

    def loop(count: jax.Array, stays: Tree, goes: Tree) -> Tree:
        stays, goes = jax.tree.map(lambda a: a.reshape(a.shape[len(shape) :]), (stays, goes))
        several = lambda i, goes: jax.lax.fori_loop(0, turns, partial(one, i, stays), goes)  # noqa: E731
        out = jax.lax.fori_loop(0, count, several, goes)
        return jax.tree.map(lambda a: a.reshape((1,) * len(shape) + a.shape), out)

    def one(i: jax.Array, stays: Tree, j: jax.Array, goes: Tree) -> Tree:
        return body(i * turns + j, stays, goes)

    # 2. compiled, its arguments on the devices
    specs = {"in_specs": (P(), each, each), "out_specs": each}
    local = jax.shard_map(loop, mesh=mesh, **specs, check_vma=False)
    run = jax.jit(local, donate_argnums=2, compiler_options=options)
    place = lambda a: jnp.broadcast_to(a, (*shape, *a.shape))  # noqa: E731
    placed = jax.tree.map(place, (stays, goes))
    stays, goes = jax.device_put(placed, NamedSharding(mesh, each))

    def measure(count: int) -> Timing:
        nonlocal goes
        goes, measured = _timed(run, count, stays, goes)
        return measured

    # 3. enough turns for a run, then RUNS of these
    measure(count := 1)
    while (measured := measure(count)).wall_s <= LEAST_S and count * turns < MOST_TURNS:
        count = max(count + 1, min(count * 8, int(1.5 * count * LEAST_S / measured.wall_s)))
    runs = [measure(count) for _ in range(RUNS)]
    return Timing(*(seconds / (count * turns) for seconds in median(runs)))


def _timed(run: Callable, count: int, stays: Tree, goes: Tree) -> tuple[Tree, Timing]:
    return timed(lambda: run(jnp.int32(count), stays, goes))


def timed(call: Callable[[], Tree]) -> tuple[Tree, Timing]:
    """Return the result of a call, and the seconds until all of it is computed."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = jax.block_until_ready(call())
    return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def timed_at_once(calls: Sequence[Callable[[], Tree]]) -> Timing:
    """Return the seconds of one call while all run at once, as on devices that share cores."""
    if len(calls) == 1:
        return timed(calls[0])[1]
    with ThreadPoolExecutor(len(calls)) as threads:
        _, all_of_them = timed(lambda: list(threads.map(lambda call: call(), calls)))
    return Timing(all_of_them.wall_s, all_of_them.cpu_s / len(calls))


def median(measured: Sequence[Timing]) -> Timing:
    """Return the medians of several timings."""
    return Timing(*map(statistics.median, zip(*measured, strict=True)))


def layer_bodies(model: Model, *, split: bool) -> dict[str, Timed]:
    """Return for "F", "B" (or "I", "W") of LAYERS layers: (body, what stays, what goes round)."""
    # 1. a stage, its weights and slots
    stage, w = model.stage, [shapes_like(model.layer, model.dtype)] * LAYERS
    slots = lambda tree: random_like(shapes_like(tree, None, SLOTS))  # noqa: E731
    weights, x = random_like(w), random_like(model.x)
    stashes = slots(model.traced(lambda: stage.stash_shapes(w)))
    acc = zeros_like(model.trained_layers([model.layer] * LAYERS))

    # 2. its tasks
    def forward(i: jax.Array, w: Tree, goes: Tree) -> Tree:
        y, stash = stage.forward(w, None, goes[0])
        return y, goes[1] if stage.keeps_input else write_slot(goes[1], i % SLOTS, stash)

    def backward(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        stash = read_slot(stays[1], i % SLOTS)
        return stage.backward(stays[0], None, stash, lambda y: (goes[0], None), goes[1])[:2]

    def input_grad(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        stash = read_slot(stays[1], i % SLOTS)
        gx, pending, _ = stage.input_grad(stays[0], None, stash, lambda y: (goes[0], None))
        return gx, write_slot(goes[1], i % SLOTS, pending)

    def weight_grad(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        return stage.weight_grad(stays[0], None, read_slot(stays[1], i % SLOTS), goes)

    bodies: dict[str, Timed] = {"F": (forward, weights, (x, stashes))}
    if not split:
        return bodies | {"B": (backward, (weights, stashes), (x, acc))}
    pending = slots(model.traced(lambda: stage.pending_shapes(w)))
    bodies["I"] = (input_grad, (weights, stashes), (x, pending))
    bodies["W"] = (weight_grad, (weights, pending), acc)
    return bodies


def embed_head_bodies(model: Model, examples: Mapping[str, Any]) -> dict[str, Timed]:
    """Return the same for "embed", "embed_grad" and "head" (with its gradients).

    examples: {"inputs", "targets"} of real data. With equal tokens a GPU may take many times as
    long: the sums of their gradients wait for each other at one row of the embedding.
    """
    # 1. parameters, activations, slots of examples
    stack, parts, trains = model.stack, model.stack.parts, model.stack.trains("embed_head")
    plain_embed, plain_head = (stack.embed, stack.head) if parts is None else of_one_rank(parts)
    embed_head = random_like(shapes_like(model.embed_head, model.dtype))
    x, acc = random_like(model.x), zeros_like(model.trained_embed_head(model.embed_head))
    slots = {name: _in_slots(examples[name], a) for name, a in model.microbatch.items()}

    # 2. tasks
    def embed(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        return plain_embed(stays[0], read_slot(stays[1]["inputs"], i % SLOTS)).astype(goes.dtype)

    def embed_grad(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        inputs = read_slot(stays[1]["inputs"], i % SLOTS)
        return add_embedding_grad(plain_embed, stays[0], inputs, stays[2], goes, trains)

    def head(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        targets = read_slot(stays[1]["targets"], i % SLOTS)
        return add_head_grads(plain_head, stays[0], goes[0], targets, goes[1], trains)[:2]

    return {
        "embed": (embed, (embed_head, slots), x),
        "embed_grad": (embed_grad, (embed_head, slots, x), acc),
        "head": (head, (embed_head, slots), (x, acc)),
    }


def of_one_rank(parts: VocabularyParts) -> tuple[Callable, Callable]:
    """Return (embed, head) of a rank's part alone: as much work as with all ranks' log sums."""

    def head(embed_head: Tree, y: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums, kept = parts.log_sums(*jax.lax.stop_gradient((embed_head, y)), jnp.int32(0))
        return parts.head(embed_head, y, targets, sums, kept, jnp.int32(0))

    return lambda embed_head, inputs: parts.embed(embed_head, inputs, jnp.int32(0)), head


def _in_slots(examples: Any, microbatch: jax.ShapeDtypeStruct) -> jax.Array:
    """Return examples as SLOTS microbatches, again from the first where there are fewer."""
    rows = np.arange(SLOTS * microbatch.shape[0]) % len(examples)
    taken = jnp.asarray(np.asarray(examples)[rows], microbatch.dtype)
    return taken.reshape(SLOTS, *microbatch.shape)


def dispatched(model: Model, rank: Mesh, next_rank: Mesh) -> Timing:
    """Return the host's seconds to start a program with a task's arguments and to move its result.

    Nothing is computed. rank, next_rank: the submeshes of two ranks.
    """
    # 1. a program with the arguments of a task, each of one number a device
    each, shape = P(*rank.axis_names), tuple(rank.shape.values())
    little = jax.tree.map(lambda a: jnp.zeros(shape, a.dtype), [model.layer] * LAYERS)

    def task(
        number: jax.Array, w: Tree, acc: Tree, x: jax.Array
    ) -> tuple[jax.Array, Tree, jax.Array]:
        return number + 1, acc, x

    specs = {"in_specs": (P(), each, each, each), "out_specs": (P(), each, each)}
    whole = jax.shard_map(task, mesh=rank, **specs)
    w, acc, x = jax.device_put((little, little, jnp.zeros(shape)), NamedSharding(rank, each))
    number = jax.device_put(jnp.int32(0), NamedSharding(rank, P()))
    run = jax.jit(whole, donate_argnums=(0, 2)).lower(number, w, acc, x).compile()

    # 2. its turns
    def turns(count: int) -> Tree:
        nonlocal number, acc
        moved = x
        for _ in range(count):
            number, acc, y = run(number, w, acc, x)
            moved = jax.device_put(y, NamedSharding(next_rank, each))
        return number, moved

    turns(1)
    runs = [timed(partial(turns, DISPATCHES))[1] for _ in range(RUNS)]
    return Timing(*(seconds / DISPATCHES for seconds in median(runs)))


def tick_body(x: jax.ShapeDtypeStruct, num_ranks: int) -> Timed:
    """Return the transfers of a tick: a value to the next rank, and one to the rank before."""
    slots = jnp.zeros((SLOTS, *x.shape), x.dtype)

    def arrived(i: jax.Array, slots: jax.Array, step: int) -> jax.Array:
        ring = [(r, (r + step) % num_ranks) for r in range(num_ranks)]
        received = jax.lax.ppermute(read_slot(slots, (i + 1) % SLOTS), "pp", ring)
        return write_arrival(slots, i % SLOTS, received, i % 3 > 0)

    def body(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        return arrived(i, goes[0], 1), arrived(i, goes[1], -1)

    return body, (), (slots, slots)


def without_tasks(
    layout: Layout, dtype: Any, trainable: Tree = True
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return the spmd program without tasks: it gathers parameters and reduces gradients.

    trainable: as of a `Stack`; gradients of frozen parameters are None.
    """

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        specs = layout.staged_specs(params)
        grad_specs = trained_part(specs, trainable)

        def local(params: Tree) -> tuple[jax.Array, Tree]:
            whole = jax.tree.map(lambda a: a.astype(dtype), gather_shards(params, specs))
            grads = jax.tree.map(lambda g, a: (g * 0.5).astype(a.dtype), whole, params)
            grads, axes = trained_part(grads, trainable), {"embed_head": AXES, "layers": RANK_AXES}
            sums = {k: scatter_sums(grads[k], grad_specs[k], over) for k, over in axes.items()}
            return jax.lax.psum(jnp.float32(1), AXES), sums

        how = {"in_specs": (specs,), "out_specs": (P(), grad_specs), "check_vma": False}
        return jax.shard_map(local, mesh=layout.mesh, **how)(params)

    return loss_and_grads
