"""A model given as a function of a batch, cut into layers by its author or by ppctl.

    def apply(params, x):
        x = jnp.tanh(x @ params["first"])
        x = ppctl.stage_boundary(x)
        return x @ params["last"]

Operations before a boundary, in the order of Python's execution, belong to the layers before it;
operations after it belong to later layers. Source: Alpa (Zheng et al. 2022, OSDI),
mark_pipeline_boundary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

Tree = Any  # a pytree of arrays
T = TypeVar("T")
MARK = "ppctl_stage_boundary"  # name of a boundary's call in a traced program


@dataclass(frozen=True)
class Network:
    """A model as three pure functions on pytrees, which ppctl traces and cuts into layers.

    Layers end at each `stage_boundary` that apply calls, or where ppctl balances their work
    (`layers=8` of `ppctl.pipeline`, model.layers=auto).

    Attributes:
        init: (key) -> params: any tree of floating arrays; the key is a `jax.random.key`.
        apply: (params, inputs) -> outputs, any tree. inputs: an array [examples, ...] or a dict of
            such arrays. It takes any number of examples and computes each independently, so that
            microbatches give the results of the whole batch. A parameter `key` gets one random key
            for each example in training, the same in all layers, and None otherwise.
        loss: (outputs, targets) -> (sum of losses, number of losses): scalars, summed in at least
            float32. The training loss is sum / number over the global batch.
        mixes_examples, trainable, divisors, author_model: As in `StackOptions`.

    Raises:
        ConfigError: When ppctl cuts it: two layers use the same parameter, integers cross a
            boundary, or the size of a crossing value does not grow with the examples.
    """

    init: Callable[[jax.Array], Tree]
    apply: Callable[..., Tree]
    loss: Callable[[Tree, jax.Array], tuple[jax.Array, jax.Array]]
    mixes_examples: bool | None = None  # None: unknown
    trainable: Tree = field(default=True, compare=False)
    divisors: Callable[[Tree, Tree], tuple[Any, Any]] | None = None
    author_model: Callable[[Tree], Any] | None = field(default=None, compare=False)


def stage_boundary(x: T) -> T:
    """Return x, an array or a tree of arrays, unchanged, and end a layer at this point.

    For the `apply` of a `Network`, which must use the returned value. Outside of a network it does
    nothing.

    Raises:
        ConfigError: When ppctl cuts a network that calls it in a scan, a branch or a custom
            derivative.

    >>> float(stage_boundary({"x": 2.0})["x"])
    2.0
    """
    return _marked(x)


def _identity(x: Any) -> Any:
    return x


_identity.__name__ = MARK
_marked = jax.jit(_identity)
