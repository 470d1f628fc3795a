"""Floating-point operations of a function, counted in its jaxpr.

The compiler's count is not usable: it counts the body of a scan once, for any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax.extend import core

from ppctl.model.attention import cudnn_attention
from ppctl.model.experts import counted_products
from ppctl.model.stack import Stack
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.schedule.costs import Costs
from ppctl.schedule.partition.cut_layers import divided_evenly
from ppctl.schedule.partition.partition import Partition, stage_costs

Tree = Any
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
PALLAS = "pallas_call"


def matmul_flops(function: Callable, *args: Any) -> int:
    """Return the FLOPs of matrix products in function(*args), two for a multiply-add.

    args may be shapes.

    >>> a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 3), (3, 5)))
    >>> matmul_flops(lambda a, b: a @ b, a, b)
    60
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


@dataclass(frozen=True)
class RelativeCosts:
    """Costs of a model's parts, in units of the mean cost of its layers."""

    layers: tuple[float, ...]
    embed: float
    head: float

    @property
    def without_embed_head(self) -> RelativeCosts:
        """The costs without embedding and head, if every rank has a part of both."""
        return RelativeCosts(self.layers, 0.0, 0.0)

    def with_parts(self, costs: Costs) -> Costs:
        """Return costs with the seconds of E, S, T and G for one part of embedding and head.

        costs: numbers for 1/p of the model on p ranks, not tuples by stage. S runs one of the
        head's three matrix products, T runs two.
        """
        assert not isinstance(costs.forward_s, tuple), "costs of 1/p of the model"
        layers_s = costs.forward_s + costs.backward_s
        embed_s, head_s = (end * layers_s / len(self.layers) for end in (self.embed, self.head))
        parts = {"logits_s": head_s / 3, "logits_grad_s": head_s * 2 / 3}
        return replace(costs, embedding_s=embed_s / 2, embedding_grad_s=embed_s / 2, **parts)

    def of_stages(self, partition: Partition) -> tuple[float, ...]:
        """Return the cost of each stage."""
        return stage_costs(partition, **vars(self))

    def balanced(self, rank_of: Sequence[int]) -> Partition:
        """Return the partition that minimizes the largest stage cost; rank_of: rank by stage."""
        return divided_evenly(self.layers, rank_of, embed=self.embed, head=self.head)


def relative_costs(stack: Stack, batch: Tree, dtype: Any, *, recompute: bool) -> RelativeCosts:
    """Return relative costs: FLOPs of matrix products in forward and backward, from jaxprs.

    dtype: compute dtype, which selects kernels. recompute: count the forward of a layer twice.
    Embedding look-ups cost nothing.
    """
    of = lambda a, first=0: jax.ShapeDtypeStruct(a.shape[first:], dtype)  # noqa: E731
    stack, params = stack.counted(), stack.param_shapes
    layer = jax.tree.map(partial(of, first=1), params["layers"])
    embed_head = jax.tree.map(of, params["embed_head"])
    embed_of, head_of = stack.outer
    x = jax.eval_shape(embed_of, embed_head, batch["inputs"])

    # 1. forward and backward of each part
    def there_and_back(part: str, function: Callable, w: Tree, *args: Any) -> Tree:
        run = lambda trained, *args: function(with_trained(trained, w), *args)  # noqa: E731
        y, pull = jax.vjp(run, trained_part(w, stack.trains(part)), *args)
        return pull(y)

    def embed(embed_head: Tree, inputs: Any) -> Tree:  # without a gradient of inputs
        run = lambda embed_head: embed_of(embed_head, inputs)  # noqa: E731
        return there_and_back("embed_head", run, embed_head)

    def head(embed_head: Tree, x: Any, targets: Any) -> Tree:
        run = lambda embed_head, x: head_of(embed_head, x, targets)[0]  # noqa: E731
        return there_and_back("embed_head", run, embed_head, x)

    def cost(function: Callable) -> int:
        again = matmul_flops(function, layer, x) if recompute else 0
        return matmul_flops(partial(there_and_back, "layers", function), layer, x) + again

    # 2. FLOPs in units of the mean layer; equal functions are counted once
    functions = [stack.layer_of(l) for l in range(stack.num_layers)]
    cost_of = {number: cost(f) for number, f in {id(each): each for each in functions}.items()}
    costs = [cost_of[id(function)] for function in functions]
    one = sum(costs) / len(costs) or 1.0  # mean FLOPs of a layer; 1 without products
    return RelativeCosts(
        layers=tuple(cost / one for cost in costs) if any(costs) else (1.0,) * len(costs),
        embed=matmul_flops(embed, embed_head, batch["inputs"]) / one,
        head=matmul_flops(head, embed_head, x, batch["targets"]) / one,
    )


def _flops(jaxpr: core.Jaxpr) -> int:
    return sum(map(equation_flops, jaxpr.eqns))


def equation_flops(equation: core.JaxprEqn) -> int:
    """Return the FLOPs of the matrix products and convolutions in an equation.

    cuDNN's attention counts all pairs of tokens, like attention in plain JAX. A Pallas kernel
    counts at every point of its grid, even at points that it skips.
    """
    if equation.primitive.name in PRODUCTS:
        return product_flops(equation)
    target = equation.params.get("target_name")
    if counted_products.is_counted(equation):
        return counted_products.flops_of(equation)
    if target in cudnn_attention.CALLS:
        arrays: list[Any] = [v.aval for v in equation.invars]
        return cudnn_attention.flops(target, arrays[0].shape, arrays[1].shape[1])
    inner = [_flops(jaxpr) for jaxpr in inner_jaxprs(equation)]
    if equation.primitive.name == PALLAS:
        grid = equation.params["grid_mapping"].grid
        return prod(n for n in grid if isinstance(n, int)) * sum(inner)
    if equation.primitive.name == "cond":
        return max(inner, default=0)
    return equation.params.get("length", 1) * sum(inner)


def product_flops(equation: core.JaxprEqn) -> int:
    """Return the FLOPs of an equation in PRODUCTS; a convolution has a product per kernel position.

    A ragged product counts each row once, with the matrix of its group.
    """
    left, right = (v.aval.shape for v in equation.invars[:2])  # pyright: ignore[reportAttributeAccessIssue] of arrays
    out: Any = equation.outvars[0].aval
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * prod(left[dim] for dim in contracted) * prod(out.shape)
    if equation.primitive.name == "ragged_dot_general":
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        # groups divide the contracted dim: each product sums over the elements of one group
        are_divided = set(numbers.lhs_ragged_dimensions) <= {*contracted}
        num_groups = num_groups_of(equation) if are_divided else 1
        return 2 * prod(left[dim] for dim in contracted) * prod(out.shape) // num_groups
    features = equation.params["dimension_numbers"].rhs_spec[0]
    return 2 * prod(out.shape) * prod(right) // right[features]


def num_groups_of(equation: core.JaxprEqn) -> int:
    """Return the number of groups of a ragged_dot_general."""
    sizes: Any = equation.invars[2].aval
    return sizes.shape[-1]


def inner_jaxprs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the jaxprs among the parameters of an equation."""
    params = equation.params.values()
    values = [v for p in params for v in (p if isinstance(p, tuple | list) else (p,))]
    opened = (v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in values)
    return [v for v in opened if isinstance(v, core.Jaxpr)]
