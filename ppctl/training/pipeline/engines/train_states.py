"""Training states in natural order and staged, and the ways between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from ppctl.executors.parameter_layout import Layout

Tree = Any


@dataclass(frozen=True)
class States:
    """The states of a model on a mesh; `init` makes the first in natural order."""

    layout: Layout
    init: Callable[[int], Tree]  # seed -> state
    seed: int = 0

    def init_staged(self, seed: int | None = None) -> Tree:
        return self.layout.to_staged(self.init(self.seed if seed is None else seed))

    @cached_property
    def natural(self) -> Tree:
        """Shapes, dtypes and shardings of the state as checkpoints hold it."""
        return self._described(lambda: self.init(self.seed), self.layout.natural_specs)

    @cached_property
    def staged(self) -> Tree:
        """Shapes, dtypes and shardings of the state by stage."""
        return self._described(self.init_staged, self.layout.staged_specs)

    def _described(self, function: Callable[[], Tree], specs: Callable[[Tree], Tree]) -> Tree:
        shapes: Tree = jax.eval_shape(function)
        shardings = self.layout.shardings(specs(shapes))
        shape = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
        return jax.tree.map(shape, shapes, shardings)

    def new(self, seed: int | None = None) -> Tree:
        """Return the initial state, staged, never whole on one device of several."""
        return jax.jit(lambda: self.init_staged(seed), out_shardings=shardings_of(self.staged))()

    @cached_property
    def to_natural(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_natural, out_shardings=shardings_of(self.natural))

    @cached_property
    def to_staged(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_staged, out_shardings=shardings_of(self.staged))


def shardings_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding, tree)
