"""FLOPs and memory traffic of the tasks of a layer, embedding and head, counted from traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.outer_layers import keep
from ppctl.executors.stage.layer_programs import add_trees
from ppctl.executors.stage.slot_programs import LayerSlots
from ppctl.executors.stage.stage import Stage
from ppctl.executors.work.counted_operations import bytes_to_make, ops_of, peak_bytes
from ppctl.executors.work.roofline import Extent, ModelWork, Op, PieceWork, ProductShape
from ppctl.model.stack import Stack as ModelStack
from ppctl.model.trainable_parameters import trained_flags, trained_part
from ppctl.schedule.remat import Remat

Tree = Any
# numbers of examples to trace, each with a trace of twice as many for comparison; not 1, because
# one example traces to other operations
FEW = (2, 4, 8, 16)


@dataclass(frozen=True)
class _Counted:
    """A model, hashed by everything that its work depends on."""

    stack: ModelStack
    shapes: tuple  # shapes of parameters and of an example; flags of trained parameters
    dtype: str
    model: Model = field(compare=False)


@dataclass(frozen=True, eq=False)
class CountedLate(Mapping[str, int]):
    """A number for each remat, counted when it is first read: counting traces a layer."""

    count: Callable[[Remat], int]

    def __getitem__(self, remat: str) -> int:
        return self.count(Remat(remat))

    def __iter__(self) -> Iterator[str]:
        return iter(Remat)

    def __len__(self) -> int:
        return len(Remat)


def work_of(model: Model) -> ModelWork:
    """Return the work of a model's pieces for one example, for any microbatch size and remat."""
    params = {"embed_head": model.embed_head, "layers": model.layer}
    shapes = [(a.shape, str(a.dtype)) for a in jax.tree.leaves(params)]
    shapes += [(a.shape[1:], str(a.dtype)) for a in jax.tree.leaves(model.microbatch)]
    depends = (*shapes, trained_flags(params, model.stack.options.trainable))
    return _work_of(_Counted(model.stack, depends, str(jnp.dtype(model.dtype)), model))


def with_embed_head_of(work: ModelWork, model: Model) -> ModelWork:
    """Return `work` with the embedding and head of `model`, which has the same layers."""
    few, many = CountedModel(model, FEW[0]), CountedModel(model, 2 * FEW[0])
    return model.traced(lambda: replace(work, **_embed_head(model, few, many)))


def _embed_head(model: Model, few: CountedModel, many: CountedModel) -> dict[str, Any]:
    return {
        "embed": _piece(model, CountedModel.embed, few, many),
        "head": _piece(model, CountedModel.head, few, many),
        "head_bytes": _extent(few.head_bytes(), many.head_bytes()),
    }


@lru_cache(64)
def _work_of(of: _Counted) -> ModelWork:
    return of.model.traced(lambda: _counted_work(of.model))


def _counted_work(model: Model) -> ModelWork:
    # 1. layers: each distinct function is traced once
    few, many = CountedModel(model, FEW[0]), CountedModel(model, 2 * FEW[0])
    work_of_layer: dict[int, PieceWork] = {}
    layers, with_experts = list[PieceWork](), 0
    for l in range(model.stack.num_layers):
        function = id(model.stack.layer_of(l))
        if function not in work_of_layer:
            work_of_layer[function] = _piece(
                model, lambda counted, l=l: counted.layer(l), few, many
            )
            if any(op.kernel == "experts" for op in work_of_layer[function].forward):
                with_experts = l
        layers.append(work_of_layer[function])
    has_experts = any(op.kernel == "experts" for op in layers[with_experts].forward)

    # 2. bytes of values, by remat; a job reads those of its remat only
    @cache
    def kept_bytes(remat: Remat) -> tuple[int, ...]:
        sizes = (model.traced(partial(each.kept_bytes, remat)) for each in (few, many))
        return tuple((high - low) // FEW[0] for low, high in zip(*sizes, strict=True))

    experts = {}
    for remat in Remat if has_experts else ():
        peaks = (counted.expert_bytes(remat, with_experts) for counted in (few, many))
        experts[remat] = _extent(*peaks)
    return ModelWork(
        **_embed_head(model, few, many),
        layer=layers[0] if model.stack.are_alike else _mean(layers),
        x_bytes=tree_bytes(few.model.x) // FEW[0],
        stash_bytes=CountedLate(lambda remat: kept_bytes(remat)[0]),
        pending_bytes=CountedLate(lambda remat: kept_bytes(remat)[1]),
        residual_bytes=_extent(few.residual_bytes(), many.residual_bytes()).each,
        expert_bytes=experts,
    )


def _piece(
    model: Model,
    tasks: Callable[[CountedModel], tuple[list[Op], ...]],
    few: CountedModel,
    many: CountedModel,
) -> PieceWork:
    """Return a piece's work for one example, from traces of n and 2n examples.

    n is the first number in FEW whose two traces have equally many operations.
    """
    low, high = tasks(few), tasks(many)
    for number in FEW:
        if number > FEW[0]:
            low, high = high, tasks(CountedModel(model, 2 * number))
        if all(len(a) == len(b) for a, b in zip(low, high, strict=True)):
            return PieceWork(*(_affine(a, b, number) for a, b in zip(low, high, strict=True)))
    raise AssertionError(f"a piece differs at every number of examples up to {2 * FEW[-1]}")


def _mean(layers: list[PieceWork]) -> PieceWork:
    """Return the layers' mean work: all operations, each divided by the number of layers."""
    kinds, count = zip(*(vars(layer).values() for layer in layers), strict=True), len(layers)
    names = "flops", "bytes", "fixed_bytes", "sum_bytes"

    def share(op: Op) -> Op:
        times = Extent(op.times.each / count, op.times.fixed / count)
        return replace(op, times=times, **{name: getattr(op, name) / count for name in names})

    return PieceWork(*(tuple(share(op) for ops in kind for op in ops) for kind in kinds))


class CountedModel:
    """A model with `examples` examples in a microbatch.

    embed, layer and head return the operations of F, I and W for all examples, as the executors run
    them: gradients are added to sums, and the embedding's backward runs the embedding again. layer
    also returns the matrix products and collectives of F that I recomputes if only the layer's
    input is kept. I always recomputes the element-wise operations.
    """

    def __init__(self, model: Model, examples: int):
        resized = lambda a: jax.ShapeDtypeStruct((examples, *a.shape[1:]), a.dtype)  # noqa: E731
        shapes = jax.tree.map(resized, model.microbatch)
        self.model = replace(model, microbatch=shapes, remat=Remat.NONE)
        self.weights = [self._computed(model.layer)]  # weights of a stage with one layer
        of_stage, trainable = (self.weights[0], self.model.x), model.stack.trains("layers")
        stage = partial(Stage, model.stack.without_keys().layer, trainable=trainable)
        self.stages = {remat: stage(remat, *of_stage) for remat in Remat}

    def _computed(self, tree: Tree) -> Tree:
        dtype = jnp.dtype(self.model.dtype)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), tree)

    def kept_bytes(self, remat: Remat) -> tuple[int, int]:
        """Return the bytes of a layer's stash, and of the values that I hands to W."""
        # with remat=layer and remat=full, I hands the same values to W
        handing_on = self.stages[Remat.LAYER if remat.recomputes else remat].programs
        stash = self.stages[remat].programs.stash_shapes(self.weights)
        return tree_bytes(stash), tree_bytes(handing_on.pending_shapes(self.weights))

    def residual_bytes(self) -> int:
        """Return the mean bytes of a layer's residuals: the values that its backward reads."""
        layers = self.stages[Remat.LAYER].programs.layers  # the same programs as with remat=full

        @cache
        def bytes_of(layer: Any) -> int:
            return bytes_to_make(lambda w, x: layer.save(w, x)[1], self.weights[0], self.model.x)

        return sum(map(bytes_of, layers)) // len(layers)

    def expert_bytes(self, remat: Remat, l: int) -> int:
        """Return the peak bytes of I in layer l, which has experts, besides its residuals."""
        stage, w = self.stages[Remat.LAYER if remat.recomputes else remat], self.weights
        slots = None if self.model.stack.are_alike else LayerSlots(numbers=range(l, l + 1))
        counted = self.residual_bytes()
        if not remat.recomputes:
            counted -= self.kept_bytes(remat)[0]

        def input_grad(w: Tree, stash: Tree, gy: jax.Array) -> tuple[jax.Array, Tree]:
            return stage.input_grad(w, slots, stash, lambda _: (gy, None))[:2]

        peak = peak_bytes(input_grad, w, stage.programs.stash_shapes(w, slots), self.model.x)
        return max(0, peak - counted)

    def head_bytes(self) -> int:
        return peak_bytes(*self._head_grads)

    def layer(self, l: int = 0) -> tuple[list[Op], ...]:
        stage, w, x = self.stages[Remat.NONE], self.weights, self.model.x
        slots = None if self.model.stack.are_alike else LayerSlots(numbers=range(l, l + 1))
        stash = stage.programs.stash_shapes(w, slots)
        pending = stage.programs.pending_shapes(w, slots)
        acc = [trained_part(self.model.layer, self.model.stack.trains("layers"))]

        def forward(w: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
            return stage.forward(w, slots, x)

        def input_grad(w: Tree, stash: Tree, gy: jax.Array) -> tuple[jax.Array, Tree]:
            return stage.input_grad(w, slots, stash, lambda _: (gy, None))[:2]

        def weight_grad(w: Tree, pending: Tree, acc: Tree) -> Tree:
            return add_trees(acc, stage.weight_grad(w, slots, pending))

        kept = ops_of(lambda w, x: forward(w, x)[1], w, x, only_needed=True)
        f, i = ops_of(forward, w, x), ops_of(input_grad, w, stash, x)
        redo = [op for op in kept if op.flops or op.axes]
        return f, i, ops_of(weight_grad, w, pending, acc), redo

    def embed(self) -> tuple[list[Op], ...]:
        model, held, inputs = self.model, self._held(0), self.model.microbatch["inputs"]
        embed_head, acc = self._extended(held)
        grads = ops_of(model.outer.add_embedding, embed_head, inputs, model.x, acc)
        return ops_of(model.outer.embed, embed_head, inputs), [], grads

    def head(self) -> tuple[list[Op], ...]:
        return [], ops_of(*self._head_grads), []

    @property
    def _head_grads(self) -> tuple[Any, ...]:
        """Return a function that computes the head's gradients, and the shapes of its arguments."""
        model, held = self.model, self._held(1)
        run = lambda e, y, t, acc: model.outer.add_head(e, y, t, acc)[:2]  # noqa: E731
        embed_head, acc = self._extended(held)
        return run, embed_head, model.x, model.microbatch["targets"], acc

    def _extended(self, held: Tree) -> tuple[Tree, Tree]:
        """Return the shapes of (parameters of embedding or head, sums of their gradients)."""
        embed_head, sums = map(self.model.with_outer_inputs, (self._computed(held), held))
        return embed_head, self.model.outer.trained(sums)

    def _held(self, end: int) -> Tree:
        """Return the shapes of the parameters of the embedding (0) or of the head (1)."""
        return keep(self.model.embed_head, self.model.outer.uses[end])


def _affine(few: list[Op], many: list[Op], number: int) -> tuple[Op, ...]:
    """Return the operations of one example, from those of `number` and 2 * `number` examples."""

    def grown(a: Op, b: Op) -> Op:
        flops, traffic = (b.flops - a.flops) / number, _extent(a.bytes, b.bytes, number)
        how = {"shape": _shape(a.shape, b.shape, number), "fixed_bytes": traffic.fixed}
        times = _extent(a.times.fixed, b.times.fixed, number)
        return replace(a, flops=flops, bytes=traffic.each, times=times, **how)

    return tuple(op for op in map(grown, few, many) if not op.is_nothing)


def _extent(few: float, many: float, number: int = FEW[0]) -> Extent:
    """Return the affine size that is `few` for `number` examples and `many` for twice as many."""
    return Extent((many - few) / number, 2 * few - many)


def _shape(few: ProductShape | None, many: ProductShape | None, number: int) -> ProductShape | None:
    if few is None or many is None:
        return None
    sizes = zip(vars(few).values(), vars(many).values(), strict=True)
    return ProductShape(*(_extent(a.fixed, b.fixed, number) for a, b in sizes))
