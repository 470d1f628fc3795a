"""FLOPs and memory traffic of the tasks of a layer, of embedding and of head, as `traced_ops` counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.executors.stage.embedding_head import add_embedding_grad, add_head_grads
from ppctl.executors.stage.layers import add_trees
from ppctl.executors.stage.stage import LayerSlots, Stage
from ppctl.model.stack import Stack as ModelStack
from ppctl.model.trainable import trained_flags
from ppctl.planner.roofline import Extent, ModelWork, Op, PieceWork, ProductShape
from ppctl.planner.traced_ops import bytes_to_make, ops_of, peak_bytes
from ppctl.schedule.remat import Remat

Tree = Any
FEW = 2, 4, 8, 16  # examples of a microbatch, and twice as many: all grows by equal steps; one is traced otherwise


@dataclass(frozen=True)
class _Counted:
    """A model, hashed by all that its work depends on."""

    stack: ModelStack
    shapes: tuple  # of parameters, and of an example; which parameters are trained
    dtype: str
    model: Model = field(compare=False)


def work_of(model: Model) -> ModelWork:
    """Return the work of `model`'s pieces for one example; its own microbatch and remat do not matter."""
    params = [(a.shape, str(a.dtype)) for a in jax.tree.leaves((model.ends, model.layer))]
    example = [(a.shape[1:], str(a.dtype)) for a in jax.tree.leaves(model.microbatch)]
    flags = trained_flags({"ends": model.ends, "layers": model.layer}, model.stack.trainable)
    work = _work_of(_Counted(model.stack, (*params, *example, flags), str(jnp.dtype(model.dtype)), model))
    return _divided_evenly(work, model.axes.tp) if model.auto else work


def with_ends_of(work: ModelWork, model: Model) -> ModelWork:
    """Return `work` with the embedding and the head of `model`, whose layers are the same."""
    few, many = CountedModel(model, FEW[0]), CountedModel(model, 2 * FEW[0])
    return model.traced(
        lambda: replace(
            work,
            embed=_piece(model, CountedModel.embed, few, many),
            head=_piece(model, CountedModel.head, few, many),
            head_bytes=_extent(few.head_bytes(), many.head_bytes()),
        )
    )


def _divided_evenly(work: ModelWork, number: int) -> ModelWork:
    """Return the work of one of so many devices over which XLA divides a model: equal parts of each operation.

    What XLA makes devices send each other is in no trace, and not counted; nor is what each does that all do alike.
    What a device has in memory counts whole, of which it may have a part.
    """

    def part(op: Op) -> Op:
        sizes = {name: getattr(op, name) / number for name in ("flops", "bytes", "fixed_bytes", "sum_bytes")}
        shape = op.shape
        if shape is not None:
            shape = replace(shape, columns=Extent(shape.columns.each / number, shape.columns.fixed / number))
        return replace(op, **sizes, shape=shape)

    def piece(of: PieceWork) -> PieceWork:
        forward, input_grad, weight_grad = (
            tuple(map(part, ops)) for ops in (of.forward, of.input_grad, of.weight_grad)
        )
        return PieceWork(forward, input_grad, weight_grad, None if of.redo is None else tuple(map(part, of.redo)))

    return replace(work, embed=piece(work.embed), layer=piece(work.layer), head=piece(work.head))


@lru_cache(64)
def _work_of(of: _Counted) -> ModelWork:
    return of.model.traced(lambda: _counted_work(of.model))


def _counted_work(model: Model) -> ModelWork:
    few, many = counted = [CountedModel(model, number) for number in (FEW[0], 2 * FEW[0])]
    first: dict[int, int] = {}  # layer of each function
    firsts = [first.setdefault(id(model.stack.layer_of(l)), l) for l in range(model.stack.num_layers)]
    work_of_layer = {l: _piece(model, lambda counted, l=l: counted.layer(l), few, many) for l in first.values()}
    layers = [work_of_layer[l] for l in firsts]
    pieces = {
        "embed": _piece(model, CountedModel.embed, few, many),
        "layer": layers[0] if model.stack.are_alike else _mean(layers),
        "head": _piece(model, CountedModel.head, few, many),
    }
    stash, pending = {}, {}
    for remat in Remat:
        kept = [each.kept_bytes(remat) for each in counted]
        stash[remat], pending[remat] = ((high - low) // FEW[0] for low, high in zip(*kept, strict=True))
    return ModelWork(
        **pieces,
        x_bytes=tree_bytes(few.model.x) // FEW[0],
        stash_bytes=stash,
        pending_bytes=pending,
        residual_bytes=_extent(few.residual_bytes(), many.residual_bytes()).each,
        head_bytes=_extent(few.head_bytes(), many.head_bytes()),
    )


def _piece(
    model: Model, tasks: Callable[[CountedModel], tuple[list[Op], ...]], few: CountedModel, many: CountedModel
) -> PieceWork:
    """Return the work of a piece for one example. Where twice the examples run otherwise, such as in parts, of more."""
    low, high = tasks(few), tasks(many)
    for number in FEW:
        if number > FEW[0]:
            low, high = high, tasks(CountedModel(model, 2 * number))
        if all(len(a) == len(b) for a, b in zip(low, high, strict=True)):
            return PieceWork(*(_affine(a, b, number) for a, b in zip(low, high, strict=True)))
    raise AssertionError(f"a piece runs otherwise at every number of examples up to {2 * FEW[-1]}")


def _mean(layers: list[PieceWork]) -> PieceWork:
    """Return the work of a layer that takes the mean of these."""

    def part(ops: tuple[Op, ...]) -> list[Op]:
        count = len(layers)
        return [
            replace(op, flops=op.flops / count, bytes=op.bytes / count, fixed_bytes=op.fixed_bytes / count)
            for op in ops
        ]

    kinds = zip(*(vars(layer).values() for layer in layers), strict=True)
    return PieceWork(*(tuple(op for ops in kind for op in part(ops)) for kind in kinds))


class CountedModel:
    """A model with so many examples in a microbatch.

    embed, layer and head return the operations of F, I and W of all examples, as the executors run them: gradients are
    added to sums, and the backward of the embedding runs it again. Those of layer are followed by the products of F
    that are run again where the layer's input is all that is kept; I makes the element-wise rest again in any case.
    """

    def __init__(self, model: Model, examples: int):
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((examples, *a.shape[1:]), a.dtype), model.microbatch)
        self.model = replace(model, microbatch=shapes, remat=Remat.NONE)
        self.weights = [self._computed(model.layer)]  # of a stage of one layer
        of_layer = model.stack.trains("layers")
        self.stages = {r: Stage(model.stack.layer, r, self.weights[0], self.model.x, trainable=of_layer) for r in Remat}

    def _computed(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.dtype(self.model.dtype)), tree)

    def kept_bytes(self, remat: Remat) -> tuple[int, int]:
        """Return bytes of (what a forward keeps of a layer, what I hands to W).

        Gradients of norms, which I may hand on, do not grow with the examples. I hands on the same whatever of a layer
        is recomputed before it.
        """
        handing_on = self.stages[Remat.LAYER if remat.recomputes else remat]
        stash = self.stages[remat].stash_shapes(self.weights)
        return tree_bytes(stash), tree_bytes(handing_on.pending_shapes(self.weights))

    def residual_bytes(self) -> int:
        """Return the bytes that the backward of a layer, a mean one where they differ, reads of its whole forward."""
        layers = self.stages[Remat.LAYER].layers  # its programs are those of remat=full
        bytes_of = {
            layer: bytes_to_make(lambda w, x, layer=layer: layer.save(w, x)[1], self.weights[0], self.model.x)
            for layer in dict.fromkeys(layers)
        }
        return sum(bytes_of[layer] for layer in layers) // len(layers)

    def head_bytes(self) -> int:
        return peak_bytes(*self._head_grads)

    def layer(self, l: int = 0) -> tuple[list[Op], ...]:
        stage, w, x = self.stages[Remat.NONE], self.weights, self.model.x
        slots = None if self.model.stack.are_alike else LayerSlots(numbers=range(l, l + 1))
        stash, pending = stage.stash_shapes(w, slots), stage.pending_shapes(w, slots)
        acc = self.model.trained_layers([self.model.layer])
        kept = ops_of(lambda w, x: stage.forward(w, slots, x)[1], w, x, only_needed=True)
        return (
            ops_of(lambda w, x: stage.forward(w, slots, x), w, x),
            ops_of(lambda w, s, gy: stage.input_grad(w, slots, s, lambda _: (gy, None))[:2], w, stash, x),
            ops_of(lambda w, p, acc: add_trees(acc, stage.weight_grad(w, slots, p)), w, pending, acc),
            [op for op in kept if op.flops or op.axis is not None],
        )

    def embed(self) -> tuple[list[Op], ...]:
        model, inputs, ends = self.model, self.model.microbatch["inputs"], self._computed(self._held(0))
        acc = model.trained_ends(self._held(0))

        def embed(ends: Tree, inputs: Any) -> jax.Array:
            return model.stack.embed(model.fill(ends), inputs)

        def embed_grad(ends: Tree, inputs: Any, gx: jax.Array, acc: Tree) -> Tree:
            return add_embedding_grad(embed, ends, inputs, gx, acc, model.stack.trains("ends"))

        return ops_of(embed, ends, inputs), [], ops_of(embed_grad, ends, inputs, model.x, acc)

    def head(self) -> tuple[list[Op], ...]:
        return [], ops_of(*self._head_grads), []

    @property
    def _head_grads(self) -> tuple[Any, ...]:
        """(function to the gradients of the head's input and the sum of its own, shapes of its arguments)."""
        model, held = self.model, self._held(1)
        head = lambda e, y, t: model.stack.head(model.fill(e), y, t)  # noqa: E731
        of_ends = model.stack.trains("ends")
        run = lambda ends, y, targets, acc: add_head_grads(head, ends, y, targets, acc, of_ends)[:2]  # noqa: E731
        return run, self._computed(held), model.x, model.microbatch["targets"], model.trained_ends(held)

    def _held(self, end: int) -> Tree:
        """Return the shapes of the parameters of the embedding (0) or of the head (1)."""
        return self.model.keep(self.model.ends, self.model.uses[end])


def _affine(few: list[Op], many: list[Op], number: int) -> tuple[Op, ...]:
    """Return the operations of one example, from those of so many and of twice as many."""
    grown = list[Op]()
    for a, b in zip(few, many, strict=True):
        traffic = _extent(a.bytes, b.bytes, number)
        flops = (b.flops - a.flops) / number
        shape, times = _shape(a.shape, b.shape, number), _extent(a.times.fixed, b.times.fixed, number)
        grown.append(replace(a, flops=flops, bytes=traffic.each, fixed_bytes=traffic.fixed, shape=shape, times=times))
    return tuple(op for op in grown if not op.is_nothing)


def _extent(few: float, many: float, number: int = FEW[0]) -> Extent:
    """Return what grows from `few`, of so many examples, to `many`, of twice as many."""
    return Extent((many - few) / number, 2 * few - many)


def _shape(few: ProductShape | None, many: ProductShape | None, number: int) -> ProductShape | None:
    """Return the shape of a product, likewise."""
    if few is None or many is None:
        return None
    return ProductShape(*(_extent(a.fixed, b.fixed, number) for a, b in zip(_sizes(few), _sizes(many), strict=True)))


def _sizes(shape: ProductShape) -> tuple[Extent, ...]:
    return shape.rows, shape.columns, shape.depth, shape.number
