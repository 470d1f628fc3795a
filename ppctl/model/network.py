"""A model that is no stack: a function of a batch, cut into layers where its author, or ppctl, sets boundaries.

    def apply(params, x):
        x = jnp.tanh(x @ params["first"])
        x = ppctl.stage_boundary(x)
        return x @ params["last"]

What is computed before a mark belongs to the layers before it, what is computed after it to those behind, in the order
in which Python runs the function. Source: Alpa (Zheng et al. 2022, OSDI), mark_pipeline_boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

Tree = Any  # a pytree of arrays
T = TypeVar("T")
MARK = "ppctl_stage_boundary"  # the name of a call in a traced program


@dataclass(frozen=True)
class Network:
    """A model as three pure functions on pytrees, which ppctl traces and cuts into layers.

    init(key) -> params: any tree of floating arrays, from a `jax.random.key`.
    apply(params, inputs) -> outputs: inputs [examples, ...], outputs any tree; for any number of examples, each
    computed by itself, so that microbatches give what the whole batch gives.
    loss(outputs, targets) -> (sum of losses, number of losses): scalars, summed in at least float32; the training loss
    is sum / number over the global batch.
    mixes_examples: as of a `Stack`.
    sharding: PartitionSpecs over tp like the tree of parameters, in which one, or None, may stand for all below it. XLA
    divides the network by them; what is computed is the same.

    trainable: which parameters are trained: booleans like the tree of parameters, of which one may stand for all below
    it, as of a `Stack`.

    Layers end at each `stage_boundary` that apply calls, or where ppctl balances their work (model.layers=auto).
    Cutting is a ConfigError where a parameter is used by two layers, where integers cross a boundary, where what
    crosses does not grow with the examples, or where the number of marks is not num_layers - 1.
    """

    init: Callable[[jax.Array], Tree]
    apply: Callable[[Tree, jax.Array], Tree]
    loss: Callable[[Tree, jax.Array], tuple[jax.Array, jax.Array]]
    mixes_examples: bool | None = None  # None: not known
    sharding: Tree = field(default=None, compare=False)  # of parameters over tp
    trainable: Tree = field(default=True, compare=False)  # of parameters, which are trained


def stage_boundary(x: T) -> T:
    """Return x, an array or a tree of arrays, unchanged, and end a layer here.

    For the `apply` of a `Network`, which must go on with the value returned. Inside of a scan, a branch or a custom
    derivative it is a ConfigError when the network is cut; outside of a network it does nothing.

    >>> float(stage_boundary({"x": 2.0})["x"])
    2.0
    """
    return _marked(x)


def _identity(x: Any) -> Any:
    return x


_identity.__name__ = MARK
_marked = jax.jit(_identity)
