"""Seconds of the pieces of a model on this backend: each compiled as the executors run it, in a loop, and timed.

Simulated devices share cores, so on CPU all devices of the mesh run a piece at the same time. Pieces of a stage that tp
and cp divide run on its devices together, and what these send each other is in their seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.layout import Layout, gather_shards, scatter_sums
from ppctl.executors.mesh import AXES, RANK_AXES
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.spmd.body import read_slot, write_arrival, write_slot
from ppctl.executors.stage.embedding_head import add_embedding_grad, add_head_grads
from ppctl.model.stack import VocabularyParts
from ppctl.model.trainable import trained_part

Tree = Any
Body = Callable[[jax.Array, Tree, Tree], Tree]  # (number of the turn, what stays, what goes round) -> what goes round
LAYERS = 2  # of a timed stage
SLOTS = 4  # read in turn, so that nothing of a turn can be done before the loop
RUNS = 5  # after one that warms up; the median counts
LEAST_S = 0.1  # of a run
MOST_TURNS = 10_000_000  # of a run: such short turns compute nothing
SCALE = 0.02  # of random numbers
DISPATCHES = 100  # of a run
TURNS = {"cpu": 1}  # in a loop of known length; a GPU's host waits at each end of one of unknown length
MANY_TURNS = 8  # of other platforms


def random_like(tree: Tree) -> Tree:
    """Return arrays of the shapes, small random numbers made on the device (integers are zeros)."""

    def fill() -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return jax.tree.unflatten(treedef, [one(key, a) for key, a in zip(keys, leaves, strict=True)])

    def one(key: jax.Array, a: Any) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.zeros(a.shape, a.dtype)
        return (jax.random.normal(key, a.shape, jnp.float32) * SCALE).astype(a.dtype)

    return jax.jit(fill)()


class Timing(NamedTuple):
    """Seconds of a turn: on the clock, and of all cores together (not of accelerators)."""

    wall_s: float
    cpu_s: float


def turn(body: Body, stays: Tree, goes: Tree, mesh: Mesh, compiler_options: Mapping[str, Any] | None = None) -> Timing:
    """Return the seconds of a turn of `body` when all devices of `mesh` run it at the same time; medians.

    compiler_options: of XLA, as jax.jit takes them. A body that computes nothing, as of frozen parameters, takes next
    to no time.
    """
    shape = tuple(mesh.shape.values())
    turns = TURNS.get(mesh.devices.flat[0].platform, MANY_TURNS)

    def loop(count: jax.Array, stays: Tree, goes: Tree) -> Tree:
        own = jax.tree.map(lambda a: a.reshape(a.shape[len(shape) :]), (stays, goes))
        several = lambda i, goes: jax.lax.fori_loop(0, turns, lambda j, goes: body(i * turns + j, own[0], goes), goes)  # noqa: E731
        out = jax.lax.fori_loop(0, count, several, own[1])
        return jax.tree.map(lambda a: a.reshape((1,) * len(shape) + a.shape), out)

    each = P(*mesh.axis_names)
    run = jax.jit(
        jax.shard_map(loop, mesh=mesh, in_specs=(P(), each, each), out_specs=each, check_vma=False),
        donate_argnums=2,
        compiler_options=None if compiler_options is None else dict(compiler_options),
    )
    sharding = NamedSharding(mesh, each)
    place = lambda tree: jax.tree.map(  # noqa: E731
        lambda a: jax.device_put(jnp.broadcast_to(a, (*shape, *a.shape)), sharding), tree
    )
    stays, goes, count = place(stays), place(goes), 1
    goes, _ = _timed(run, 1, stays, goes)
    while True:
        goes, measured = _timed(run, count, stays, goes)
        if measured.wall_s > LEAST_S or count * turns >= MOST_TURNS:
            break
        count = max(count + 1, min(count * 8, int(1.5 * count * LEAST_S / measured.wall_s)))
    runs = []
    for _ in range(RUNS):
        goes, measured = _timed(run, count, stays, goes)
        runs.append(measured)
    return Timing(*(seconds / (count * turns) for seconds in median(runs)))


def _timed(run: Callable, count: int, stays: Tree, goes: Tree) -> tuple[Tree, Timing]:
    return timed(lambda: run(jnp.int32(count), stays, goes))


def timed(call: Callable[[], Tree]) -> tuple[Tree, Timing]:
    """Return what a call gives, when all of it is there, and the seconds until then."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = jax.block_until_ready(call())
    return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def timed_at_once(calls: Sequence[Callable[[], Tree]]) -> Timing:
    """Return the seconds of one of these calls while all run at the same time, as on devices that share cores."""
    if len(calls) == 1:
        return timed(calls[0])[1]
    with ThreadPoolExecutor(len(calls)) as threads:
        _, all_of_them = timed(lambda: list(threads.map(lambda call: call(), calls)))
    return Timing(all_of_them.wall_s, all_of_them.cpu_s / len(calls))


def median(measured: Sequence[Timing]) -> Timing:
    """Return the medians of several timings."""
    return Timing(*map(statistics.median, zip(*measured, strict=True)))


def layer_bodies(model: Model, *, split: bool) -> dict[str, tuple[Body, Tree, Tree]]:
    """Return for "F", "B" (or "I" and "W") of a stage of LAYERS layers: its body, what stays and what goes round."""
    stage = model.stage
    w = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, model.dtype), model.layer)] * LAYERS
    stash = model.traced(lambda: stage.stash_shapes(w))
    slots = lambda tree: random_like(jax.tree.map(lambda a: jax.ShapeDtypeStruct((SLOTS, *a.shape), a.dtype), tree))  # noqa: E731
    weights, x = random_like(w), random_like(model.x)
    acc = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), model.trained_layers([model.layer] * LAYERS))

    def forward(i: jax.Array, w: Tree, goes: Tree) -> Tree:
        y, stash = stage.forward(w, None, goes[0])
        return y, goes[1] if stage.keeps_input else write_slot(goes[1], i % SLOTS, stash)

    def backward(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        stash = read_slot(stays[1], i % SLOTS)
        return stage.backward(stays[0], None, stash, lambda y: (goes[0], None), goes[1])[:2]

    def input_grad(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        gx, pending, _ = stage.input_grad(stays[0], None, read_slot(stays[1], i % SLOTS), lambda y: (goes[0], None))
        return gx, write_slot(goes[1], i % SLOTS, pending)

    def weight_grad(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        return stage.weight_grad(stays[0], None, read_slot(stays[1], i % SLOTS), goes)

    stashes = slots(stash)
    bodies: dict[str, tuple[Body, Tree, Tree]] = {"F": (forward, weights, (x, stashes))}
    if not split:
        return bodies | {"B": (backward, (weights, stashes), (x, acc))}
    pending = slots(model.traced(lambda: stage.pending_shapes(w)))
    bodies["I"] = (input_grad, (weights, stashes), (x, pending))
    bodies["W"] = (weight_grad, (weights, pending), acc)
    return bodies


def embed_head_bodies(model: Model, examples: Mapping[str, Any]) -> dict[str, tuple[Body, Tree, Tree]]:
    """Return the same for "embed", "embed_grad" and "head" (with its gradients).

    examples: {"inputs", "targets"} of real data. With tokens that are all alike a GPU may take many times as long: the
    sums of their gradients wait for each other at one row of the embedding.
    """
    stack, parts = model.stack, model.stack.parts
    plain_embed, plain_head = (stack.embed, stack.head) if parts is None else of_one_rank(parts)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, model.dtype), model.ends)
    ends, x = random_like(shapes), random_like(model.x)
    acc = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), model.trained_ends(model.ends))
    slots = {name: _in_slots(examples[name], a) for name, a in model.microbatch.items()}

    def embed(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        return plain_embed(stays[0], read_slot(stays[1]["inputs"], i % SLOTS)).astype(goes.dtype)

    def embed_grad(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        inputs = read_slot(stays[1]["inputs"], i % SLOTS)
        return add_embedding_grad(plain_embed, stays[0], inputs, stays[2], goes, stack.trains("ends"))

    def head(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        targets = read_slot(stays[1]["targets"], i % SLOTS)
        return add_head_grads(plain_head, stays[0], goes[0], targets, goes[1], stack.trains("ends"))[:2]

    return {
        "embed": (embed, (ends, slots), x),
        "embed_grad": (embed_grad, (ends, slots, x), acc),
        "head": (head, (ends, slots), (x, acc)),
    }


def of_one_rank(parts: VocabularyParts) -> tuple[Callable, Callable]:
    """Return (embed, head) of a rank's part alone: as much work as with the log sums of the others."""

    def head(ends: Tree, y: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums, kept = parts.log_sums(*jax.lax.stop_gradient((ends, y)), jnp.int32(0))
        return parts.head(ends, y, targets, sums, kept, jnp.int32(0))

    return lambda ends, inputs: parts.embed(ends, inputs, jnp.int32(0)), head


def _in_slots(examples: Any, microbatch: jax.ShapeDtypeStruct) -> jax.Array:
    """Return examples as SLOTS microbatches, again from the first where there are fewer."""
    rows = np.arange(SLOTS * microbatch.shape[0]) % len(examples)
    return jnp.asarray(np.asarray(examples)[rows], microbatch.dtype).reshape(SLOTS, *microbatch.shape)


def dispatched(model: Model, here: Mesh, there: Mesh) -> Timing:
    """Return the seconds of the host to start a program with the arguments of a task, and to move its result.

    Nothing is computed.
    here, there: the submeshes of two ranks.
    """
    each = P(*here.axis_names)
    own, other = NamedSharding(here, each), NamedSharding(there, each)
    shape = tuple(here.shape.values())
    little = jax.tree.map(lambda a: jnp.zeros(shape, a.dtype), [model.layer] * LAYERS)

    def task(number: jax.Array, w: Tree, acc: Tree, x: jax.Array) -> tuple[jax.Array, Tree, jax.Array]:
        return number + 1, acc, x

    whole = jax.shard_map(task, mesh=here, in_specs=(P(), each, each, each), out_specs=(P(), each, each))
    w, acc, x = jax.device_put((little, little, jnp.zeros(shape)), own)
    number = jax.device_put(jnp.int32(0), NamedSharding(here, P()))
    run = jax.jit(whole, donate_argnums=(0, 2)).lower(number, w, acc, x).compile()

    def times(count: int) -> Timing:
        nonlocal number, acc
        moved, cpu, wall = x, time.process_time(), time.perf_counter()
        for _ in range(count):
            number, acc, y = run(number, w, acc, x)
            moved = jax.device_put(y, other)
        jax.block_until_ready((number, moved))
        return Timing((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count)

    times(1)
    measured = [times(DISPATCHES) for _ in range(RUNS)]
    return median(measured)


def tick_body(x: jax.ShapeDtypeStruct, num_ranks: int) -> tuple[Body, Tree, Tree]:
    """The transfers of a tick: a value of every rank to the next one, and one to the rank before."""
    slots = jnp.zeros((SLOTS, *x.shape), x.dtype)

    def arrived(i: jax.Array, slots: jax.Array, step: int) -> jax.Array:
        ring = [(r, (r + step) % num_ranks) for r in range(num_ranks)]
        return write_arrival(
            slots, i % SLOTS, jax.lax.ppermute(read_slot(slots, (i + 1) % SLOTS), "pp", ring), i % 3 > 0
        )

    def body(i: jax.Array, stays: Tree, goes: Tree) -> Tree:
        return arrived(i, goes[0], 1), arrived(i, goes[1], -1)

    return body, (), (slots, slots)


def without_tasks(layout: Layout, dtype: Any, trainable: Tree = True) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return a function like the spmd program's without its tasks: it gathers parameters and reduces gradients.

    trainable: as of a `Stack`; those of frozen parameters are None.
    """

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        specs = layout.staged_specs(params)
        grad_specs = trained_part(specs, trainable)

        def local(params: Tree) -> tuple[jax.Array, Tree]:
            whole = jax.tree.map(lambda a: a.astype(dtype), gather_shards(params, specs))
            grads = trained_part(jax.tree.map(lambda g, a: (g * 0.5).astype(a.dtype), whole, params), trainable)
            loss = jax.lax.psum(jnp.float32(1), AXES)
            grads = {
                "ends": scatter_sums(grads["ends"], grad_specs["ends"], AXES),
                "layers": scatter_sums(grads["layers"], grad_specs["layers"], RANK_AXES),
            }
            return loss, grads

        return jax.shard_map(local, mesh=layout.mesh, in_specs=(specs,), out_specs=(P(), grad_specs), check_vma=False)(
            params
        )

    return loss_and_grads
