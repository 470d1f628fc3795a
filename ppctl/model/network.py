"""A model given as a function of a batch, cut into layers by its author or by ppctl.

    def apply(params, x):
        x = jnp.tanh(x @ params["first"])
        x = ppctl.stage_boundary(x)
        return x @ params["last"]

Work before a mark belongs to the layers before it, work after it to later layers, in the order in
which Python runs the function. Source: Alpa (Zheng et al. 2022, OSDI), mark_pipeline_boundary.
"""

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
    apply(params, inputs) -> outputs: inputs [examples, ...] or a dict of such arrays, outputs any
    tree; for any number of examples, each computed by itself, so that microbatches equal the whole
    batch. If it names a parameter `key`, it gets a random key for each example in training, as
    layers of a `Stack` do (the same in all its layers), and None otherwise.
    loss(outputs, targets) -> (sum of losses, number of losses): scalars, summed in at least
    float32; the training loss is sum / number over the global batch.
    mixes_examples, trainable: as in `StackOptions`.

    Layers end at each `stage_boundary` that apply calls, or where ppctl balances their work
    (`layers=8` of `ppctl.pipeline`, model.layers=auto). Cutting is a ConfigError if two layers use
    a parameter, integers cross a boundary, or crossing values do not grow with the examples.
    """

    init: Callable[[jax.Array], Tree]
    apply: Callable[..., Tree]
    loss: Callable[[Tree, jax.Array], tuple[jax.Array, jax.Array]]
    mixes_examples: bool | None = None  # None: unknown
    trainable: Tree = field(default=True, compare=False)


def stage_boundary(x: T) -> T:
    """Return x, an array or a tree of arrays, unchanged, and end a layer here.

    For the `apply` of a `Network`, which must use the returned value. In a scan, a branch or a
    custom derivative, cutting raises a ConfigError; outside of a network it does nothing.

    >>> float(stage_boundary({"x": 2.0})["x"])
    2.0
    """
    return _marked(x)


def _identity(x: Any) -> Any:
    return x


_identity.__name__ = MARK
_marked = jax.jit(_identity)
