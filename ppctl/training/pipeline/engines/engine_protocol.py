"""Engines: one protocol to train, evaluate and compare with any executor; parts of its memory."""
# pyright: reportReturnType=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.rank_programs import SHARED
from ppctl.schedule.ir import Task
from ppctl.training.pipeline.engines.step_programs import StepPrograms
from ppctl.training.pipeline.engines.train_states import PlacedBatches

Tree = Any
PARTS = (
    *("parameters", "optimizer", "weights", "gradients", "activations", "transfers", "batch"),
    "temporaries",
)
SUMS = ("acc", "acc_embed_head", "sum", "grads", *SHARED)
NAMES = {  # parts by the names of values in a plan of executor=mpmd
    **dict.fromkeys(("params", "next_params"), "parameters"),
    **dict.fromkeys(("optimizer", "next_optimizer"), "optimizer"),
    **dict.fromkeys(("inputs", "targets"), "batch"),
    **dict.fromkeys(("w", "embed_head"), "weights"),
    **dict.fromkeys(SUMS, "gradients"),
    **dict.fromkeys(("x", "y", "gx", "gy"), "transfers"),
    **dict.fromkeys(("stash", "pending", "logits"), "activations"),
}
Temporaries = Callable[[ProgramId | None], int]  # bytes on one device; None: one whole step


@dataclass(frozen=True)
class Footprint:
    """The memory of a step's compiled programs on top of state and batch."""

    temp_bytes: int  # bytes of the device that needs most
    total_bytes: tuple[int, ...]  # bytes of a device of each rank, all included; 0: others' rank
    text: str  # text of the compiled program; "" for a step of many programs


class Engine(Protocol):
    """A model, an optimizer and an executor on a mesh. `step` takes its opaque state's memory."""

    def new_state(self, seed: int | None = None) -> Tree:
        """Return the initial state: a function of model and seed. None: the seed of the request."""

    def to_natural(self, state: Tree) -> Tree:
        """Return a state in natural order on the whole mesh, as checkpoints hold it."""

    def from_natural(self, state: Tree) -> Tree:
        """Return the engine's state from one in natural order."""

    def share(self, rank: int) -> Tree:
        """Return the shapes of one device's share of a rank's {"params", "optimizer", "step"}."""

    def params(self, state: Tree) -> Tree:
        """Return a state's parameters in natural order on the whole mesh."""

    @property
    def state_shapes(self) -> Tree:
        """Shapes, dtypes and shardings of a state; None in place of other processes' ranks."""

    @property
    def batches(self) -> PlacedBatches:
        """The placing of global batches for `step`, and this process's examples of them."""

    def compile(self, *, evaluate: bool) -> Footprint:
        """Compile the train step, and with `evaluate` the programs of `loss`."""

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, {"loss", attached losses, "grad_norm", and "lr" if known}).

        After `compile`.
        """

    def loss(self, state: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """Return (mean loss of a batch, number of losses); after `compile(evaluate=True)`."""

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch."""

    def memory(self, temporaries: Temporaries | None = None) -> tuple[Mapping[str, int], ...]:
        """Return for each rank the bytes of one device by part, from shapes.

        temporaries: those of each program; None: as compiled, if it is.
        """

    def programs(self) -> StepPrograms:
        """Return the traced programs of a step."""


class TimedEngine(Engine, Protocol):
    """An engine with a program for each task, so that each can be timed."""

    def dispatched(self) -> list[list[tuple[str, Task | None]]]:
        """Return for each rank the programs of a step in order: (module name, task or None)."""

    def devices(self) -> list[int]:
        """Return for each rank the id of its first device."""

    def step_by_step(
        self, state: Tree, batch: Tree
    ) -> tuple[Tree, dict[str, jax.Array], dict[Task, float]]:
        """Run `step`, one program at a time; return also the seconds of each task."""


def by_part(held: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by part, in the order of PARTS, from bytes by the names of values.

    >>> by_part({"params": 8, "stash": 2, "temporaries": 1})["activations"]
    2
    """
    found: dict[str, int] = dict.fromkeys(PARTS[:-1], 0)
    for name, size in held.items():
        # a few numbers have no part
        part = name if name in PARTS else NAMES.get(name, "transfers")
        found[part] = found.get(part, 0) + size
    return found
