"""Engines: one protocol by which commands and the Python API train, evaluate and compare, whatever the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ppctl.executors.mpmd.plan import ProgramId
from ppctl.schedule.ir import Task
from ppctl.training.engines.programs import Choose, StepPrograms

Tree = Any
Temporaries = Callable[[ProgramId | None], int]  # bytes of a program on one device; None: a step that is one program


@dataclass(frozen=True)
class Footprint:
    """The memory that the compiled programs of a step take in addition to state and batch."""

    temp_bytes: int  # of one device, the one that needs most
    total_bytes: tuple[int, ...]  # of one device of each rank, state and batch included; 0 for ranks of other processes
    text: str  # of the compiled program; "" where a step is many


class Engine(Protocol):
    """A model, an optimizer and an executor on a mesh. States are opaque to its user; `step` takes their memory."""

    def new_state(self, seed: int | None = None) -> Tree:
        """Return the initial state: a function of the model and the seed alone. None: the seed of the request."""
        ...

    def to_natural(self, state: Tree) -> Tree:
        """Return a state in natural order on the whole mesh, as checkpoints hold it."""
        ...

    def from_natural(self, state: Tree) -> Tree:
        """Return the engine's state of one in natural order."""
        ...

    def parameters(self, state: Tree) -> Sequence[Tree]:
        """Return a state's parameters, staged: one tree, or one for each rank, of None if other processes'."""
        ...

    def share(self, rank: int) -> Tree:
        """Return the shapes of one device's share of a rank's state: {"params", "optimizer", "step"}."""
        ...

    @property
    def examples(self) -> Sequence[int]:
        """The examples of a global batch that this process's devices work on, ascending."""
        ...

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """Place a global batch where a step wants it; `batch` holds `examples` alone."""
        ...

    def compile(self, *, evaluate: bool) -> Footprint:
        """Compile the train step, and with `evaluate` what `loss` runs; they compile nothing afterwards."""
        ...

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, {"loss", "grad_norm", and "lr" where a learning rate is known}); after `compile`."""
        ...

    def loss(self, state: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """Return (mean loss of a batch, number of losses that it is the mean of); after `compile(evaluate=True)`."""
        ...

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch."""
        ...

    def memory(self, temporaries: Temporaries | None = None) -> tuple[Mapping[str, int], ...]:
        """Return for each rank the bytes of one device by part: exact from shapes.

        temporaries: those of each program; None: as compiled, once it is.
        """
        ...

    def programs(self, choose: Choose | None = None) -> StepPrograms:
        """Return the programs of a step, traced; `choose` leaves out some of those that a host dispatches."""
        ...


class TimedEngine(Engine, Protocol):
    """An engine whose tasks are programs of their own, so that each can be timed."""

    def dispatched(self) -> list[list[tuple[str, Task | None]]]:
        """Return for each rank the programs of a step in order: name of the module, and its task if it is one."""
        ...

    def devices(self) -> list[int]:
        """Return for each rank the id of its first device."""
        ...

    def step_by_step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array], dict[Task, float]]:
        """Run `step`, one program at a time; return also the seconds of each task."""
        ...
