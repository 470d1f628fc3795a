"""FLOPs and memory traffic of the tasks of a layer, of embedding and of head, counted in their jaxprs.

Matrix products count their arithmetic, and their operands and results as memory traffic. Compilers fuse what is
element by element into its readers, so of all else only what is written to memory counts: results that a matrix product
reads, or the task keeps. Such a result counts twice: it is written, and something of its size was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.spmd.body import add_trees
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.executors.stage.embedding_head import add_embedding_grad, head_grads
from ppctl.executors.stage.flops import PALLAS, PRODUCTS, equation_flops
from ppctl.executors.stage.jaxprs import flatten
from ppctl.executors.stage.stage import LayerSlots, Stage
from ppctl.model import cudnn_attention
from ppctl.planner.roofline import Extent, Kernel, ModelWork, Op, PieceWork, ProductShape
from ppctl.schedule.remat import Remat

Tree = Any
SPLASH = "splash_"  # begins the names of JAX's Pallas kernels of attention, such as splash_mha_fwd
EXAMPLES = (2, 4)  # of a microbatch: all grows by equal steps with them; one alone is traced otherwise


@lru_cache(8)
def work_of(model: Model) -> ModelWork:
    """Return the work of `model`'s pieces for one example; its own microbatch and remat do not matter."""
    few, many = counted = [CountedModel(model, number) for number in EXAMPLES]
    number = 1 if model.stack.are_alike else model.stack.num_layers
    layers = [_piece(few.layer(l), many.layer(l)) for l in range(number)]
    pieces = {
        "embed": _piece(few.embed(), many.embed()),
        "layer": layers[0] if number == 1 else _mean(layers),
        "head": _piece(few.head(), many.head()),
    }
    stash, pending = {}, {}
    for remat in Remat:
        kept = [each.kept_bytes(remat) for each in counted]
        stash[remat], pending[remat] = (
            (high - low) // (EXAMPLES[1] - EXAMPLES[0]) for low, high in zip(*kept, strict=True)
        )
    return ModelWork(**pieces, x_bytes=tree_bytes(few.model.x) // EXAMPLES[0], stash_bytes=stash, pending_bytes=pending)


def _piece(few: tuple[list[Op], ...], many: tuple[list[Op], ...]) -> PieceWork:
    return PieceWork(*(_affine(a, b) for a, b in zip(few, many, strict=True)))


def _mean(layers: list[PieceWork]) -> PieceWork:
    """Return the work of a layer that takes the mean of these."""

    def part(ops: tuple[Op, ...]) -> list[Op]:
        count = len(layers)
        return [
            replace(op, flops=op.flops / count, bytes=op.bytes / count, fixed_bytes=op.fixed_bytes / count)
            for op in ops
        ]

    kinds = zip(*((layer.forward, layer.input_grad, layer.weight_grad) for layer in layers), strict=True)
    return PieceWork(*(tuple(op for ops in kind for op in part(ops)) for kind in kinds))


class CountedModel:
    """A model with so many examples in a microbatch.

    embed, layer and head return the operations of F, I and W of all examples, as the executors run them: gradients are
    added to sums, and the backward of the embedding runs it again.
    """

    def __init__(self, model: Model, examples: int):
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((examples, *a.shape[1:]), a.dtype), model.microbatch)
        self.model = replace(model, microbatch=shapes, remat=Remat.NONE)
        self.weights = [self._computed(model.layer)]  # of a stage of one layer
        self.stages = {r: Stage(model.stack.layer, r, self.weights[0], self.model.x) for r in Remat}

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

    def layer(self, l: int = 0) -> tuple[list[Op], ...]:
        stage, w, x = self.stages[Remat.NONE], self.weights, self.model.x
        slots = None if self.model.stack.are_alike else LayerSlots(numbers=range(l, l + 1))
        stash, pending = stage.stash_shapes(w, slots), stage.pending_shapes(w, slots)
        return (
            _ops(lambda w, x: stage.forward(w, slots, x), w, x),
            _ops(lambda w, s, gy: stage.input_grad(w, slots, s, lambda _: (gy, None))[:2], w, stash, x),
            _ops(lambda w, p, acc: add_trees(acc, stage.weight_grad(w, slots, p)), w, pending, [self.model.layer]),
        )

    def embed(self) -> tuple[list[Op], ...]:
        model, inputs, acc = self.model, self.model.microbatch["inputs"], self._gradients(0)

        def embed(ends: Tree, inputs: Any) -> jax.Array:
            return model.stack.embed(model.fill(ends), inputs)

        def embed_grad(ends: Tree, inputs: Any, gx: jax.Array, acc: Tree) -> Tree:
            return add_embedding_grad(embed, ends, inputs, gx, acc)

        ends = self._computed(acc)
        return _ops(embed, ends, inputs), [], _ops(embed_grad, ends, inputs, model.x, acc)

    def head(self) -> tuple[list[Op], ...]:
        model, targets, acc = self.model, self.model.microbatch["targets"], self._gradients(1)

        def head(ends: Tree, y: jax.Array, targets: Any, acc: Tree) -> Tree:
            gy, grads, *_ = head_grads(lambda e, y, t: model.stack.head(model.fill(e), y, t), ends, y, targets)
            return gy, add_trees(acc, grads)

        return [], _ops(head, self._computed(acc), model.x, targets, acc), []

    def _gradients(self, end: int) -> Tree:
        """Return the shapes of the gradients of the embedding (0) or of the head (1)."""
        return self.model.keep(self.model.ends, self.model.uses[end])


def _affine(few: list[Op], many: list[Op]) -> tuple[Op, ...]:
    """Return the operations of one example, from those of few examples and of many."""
    (low, high), grown = EXAMPLES, list[Op]()
    for a, b in zip(few, many, strict=True):
        traffic = _extent(a.bytes, b.bytes)
        flops = (b.flops - a.flops) / (high - low)
        grown.append(Op(flops, traffic.each, traffic.fixed, a.kernel, _shape(a.shape, b.shape)))
    return tuple(op for op in grown if not op.is_nothing)


def _extent(few: float, many: float) -> Extent:
    """Return what grows from `few` to `many` as EXAMPLES do."""
    low, high = EXAMPLES
    each = (many - few) / (high - low)
    return Extent(each, few - low * each)


def _shape(few: ProductShape | None, many: ProductShape | None) -> ProductShape | None:
    """Return the shape of a product, from those of few examples and of many."""
    if few is None or many is None:
        return None
    return ProductShape(*(_extent(a.fixed, b.fixed) for a, b in zip(_sizes(few), _sizes(many), strict=True)))


def _sizes(shape: ProductShape) -> tuple[Extent, ...]:
    return shape.rows, shape.columns, shape.depth, shape.number


def _ops(function: Callable, *args: Tree) -> list[Op]:
    return _of_jaxpr(flatten(jax.make_jaxpr(function)(*args)).jaxpr)


def _of_jaxpr(jaxpr: core.Jaxpr) -> list[Op]:
    products = {id(v) for eqn in jaxpr.eqns if _is_product(eqn) for v in eqn.invars}
    written = products | {id(v) for v in jaxpr.outvars}
    ops = []
    for eqn in jaxpr.eqns:
        made = sum(_size(v) for v in eqn.outvars if id(v) in written)
        if _is_product(eqn):
            traffic = sum(map(_size, (*eqn.invars, *eqn.outvars)))
            ops.append(Op(float(equation_flops(eqn)), traffic, kernel=_kernel(eqn), shape=_product_shape(eqn)))
        elif eqn.primitive.name == "scan":
            inner = _of_jaxpr(eqn.params["jaxpr"].jaxpr)
            length = eqn.params["length"]  # its iterations run one after the other
            ops += [replace(op, flops=length * op.flops, bytes=length * op.bytes) for op in inner]
        else:
            ops.append(Op(0.0, 2.0 * made))
    return ops


def _is_product(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation reads and writes its arrays in memory itself: a product, a kernel of attention."""
    return eqn.primitive.name in (*PRODUCTS, PALLAS) or eqn.params.get("target_name") in cudnn_attention.CALLS


def _kernel(eqn: core.JaxprEqn) -> Kernel:
    """Return what computes a product, or a kernel of attention."""
    call = eqn.params.get("target_name")
    if call in cudnn_attention.CALLS:
        return "attention_forward" if call == cudnn_attention.FORWARD else "attention_backward"
    name = str(eqn.params["name"]) if eqn.primitive.name == PALLAS else ""
    if name.startswith(SPLASH):
        return "attention_forward" if "_fwd" in name else "attention_backward"
    return "product"


def _product_shape(eqn: core.JaxprEqn) -> ProductShape | None:
    """Return the shape of a matrix product, all fixed; a convolution is one of all positions with all features."""
    if eqn.primitive.name not in PRODUCTS:
        return None
    out = prod(eqn.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue] of an array
    left, right = (v.aval.shape for v in eqn.invars)  # pyright: ignore[reportAttributeAccessIssue] of arrays
    number = 1
    if eqn.primitive.name == "dot_general":
        (_, contracted), (batch, right_batch) = eqn.params["dimension_numbers"]
        number = prod(left[dim] for dim in batch)
        taken = {*contracted, *right_batch}
        columns = prod(size for dim, size in enumerate(right) if dim not in taken)
    else:
        columns = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    rows = out // max(1, columns * number)
    depth = equation_flops(eqn) / max(1, 2 * out)
    return ProductShape(*(Extent(fixed=float(size)) for size in (rows, columns, depth, number)))


def _size(v: Any) -> int:
    return prod(v.aval.shape) * v.aval.dtype.itemsize
