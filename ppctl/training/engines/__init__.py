"""Engines: one protocol by which commands train, evaluate and compare, whatever the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ppctl.schedule.ir import Task

Tree = Any


@dataclass(frozen=True)
class Footprint:
    """What the compiled programs of a step take, beside state and batch."""

    temp_bytes: int  # of one device, the one that needs most
    total_bytes: tuple[int, ...]  # of one device of each rank, state and batch included; 0 for ranks of other processes
    text: str  # of the compiled program; "" where a step is many


class Engine(Protocol):
    """A model, an optimizer and an executor on a mesh. States are opaque to its user; `step` takes their memory."""

    def new_state(self) -> Tree:
        """The initial state: a function of the model and the seed alone."""
        ...

    def to_natural(self, state: Tree) -> Tree:
        """A state in natural order on the whole mesh, as checkpoints hold it."""
        ...

    def from_natural(self, state: Tree) -> Tree:
        """The state that such a one is."""
        ...

    def parameters(self, state: Tree) -> Sequence[Tree]:
        """The arrays of a state's parameters, staged: one tree, or one for each rank, of None if other processes'."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """The rows of a global batch that this process's devices work on, ascending."""
        ...

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """A global batch where a step wants it; `batch` holds `rows` alone."""
        ...

    def compile(self, *, evaluate: bool) -> Footprint:
        """Compiles the train step, and with `evaluate` what `loss` runs; they compile nothing afterwards."""
        ...

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """(next state, {"loss", "grad_norm", "lr"}); after `compile`."""
        ...

    def loss(self, state: Tree, batch: Tree) -> jax.Array:
        """The mean loss of a batch; after `compile(evaluate=True)`."""
        ...

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """(mean loss, gradients in natural order) of a batch."""
        ...


class TimedEngine(Engine, Protocol):
    """An engine whose tasks are programs of their own, so that each can be timed."""

    def programs(self) -> list[list[tuple[str, Task | None]]]:
        """For each rank the programs of a step in order: name of the module, and its task if it is one."""
        ...

    def devices(self) -> list[int]:
        """For each rank the id of its first device."""
        ...

    def step_by_step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array], dict[Task, float]]:
        """`step`, one program at a time, with the seconds that each task took."""
        ...
