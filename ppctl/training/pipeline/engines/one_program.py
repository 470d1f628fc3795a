"""The engine of executors that run a step as one XLA program on the mesh: spmd, reference.

Staged and natural form: see `train_states`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from ppctl.executors.compiler_options import Flags, compiled_quickly, temp_bytes, total_bytes
from ppctl.executors.model_shapes import shard_shapes
from ppctl.executors.programs_under_way import ProgramsUnderWay
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.executors.work.rank_bytes import RankSizes, rank_bytes
from ppctl.model.layer_inputs import LOSS
from ppctl.model.random_keys import SEED, key_of_seed, with_example_keys
from ppctl.model.stack import shapes_like
from ppctl.model.trainable_parameters import averaged
from ppctl.training.pipeline.engines import step_programs as steps
from ppctl.training.pipeline.engines.train_states import PlacedBatches, States, shardings_of
from ppctl.training.pipeline.optimizers import Optimizer, train_step

Tree = Any


@dataclass(frozen=True)
class OneProgram:
    """An `Engine` with a staged state; `loss_and_grads_of` and `loss_of` take staged parameters.

    The other engines have the same methods, except those that trace, lower and compile a program.
    """

    states: States
    batches: PlacedBatches  # placement of global batches for `step`, and this process's examples
    loss_and_grads_of: Callable[[Tree, Tree], tuple[dict[str, jax.Array], Tree]]
    loss_of: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]
    optimizer: Optimizer
    lr_schedule: optax.Schedule | None = None
    sizes: RankSizes = field(default_factory=RankSizes)  # sizes of a device's arrays
    slots: Mapping[str, int] = field(default_factory=dict)  # number of slots by name
    flags: Flags = ()  # compiler options
    takes_key: bool = False  # whether layers take a random key
    compiled: dict[str, jax.stages.Compiled] = field(default_factory=dict)

    @cached_property
    def meshes(self) -> RankMeshes:
        """The mesh of each rank, and of natural order."""
        return RankMeshes.of(self.states.layout.mesh)

    def new_state(self, seed: int | None = None) -> Tree:
        """Return the initial state of model and seed; seed=None: the seed of the request."""
        return self.under_way.ended(self.states.new(seed))

    def to_natural(self, state: Tree) -> Tree:
        """Return a state in natural order, as in checkpoints, on the whole mesh."""
        return self.under_way.ended(self.states.to_natural(state))

    def from_natural(self, state: Tree) -> Tree:
        """Return the engine's state from a state in natural order."""
        return self.under_way.ended(self.states.to_staged(state))

    def share(self, rank: int) -> Tree:
        """Return the shapes of one device's share of a rank's {"params", "optimizer", "step"}."""
        return shard_shapes(self.states.staged)  # equal shares on all ranks

    def params(self, state: Tree) -> Tree:
        """Return a state's parameters in natural order on the whole mesh."""
        return self.under_way.ended(self.states.params_to_natural(state["params"]))

    def averaged(self, state: Tree) -> Tree:
        """Return a state with the average, if it has one, as parameters; it shares its arrays."""
        return averaged(state)

    @property
    def state_shapes(self) -> Tree:
        """Shapes, dtypes and shardings of a state; None in place of other processes' ranks."""
        return self.states.staged

    @cached_property
    def _seed_key(self) -> dict[str, np.ndarray]:
        """The random key of the seed, an extra entry of batches; {} if no layer takes a key."""
        return {SEED: key_of_seed(self.states.seed)} if self.takes_key else {}

    @cached_property
    def under_way(self) -> ProgramsUnderWay:
        return ProgramsUnderWay(self.states.layout.mesh)

    @property
    def train_step(self) -> Callable[..., tuple[Tree, dict[str, jax.Array]]]:
        return train_step(self.loss_and_grads_of, self.optimizer, self.lr_schedule, 2)

    def trace_train_step(self) -> jax.stages.Traced:
        """Trace the train step (state, batch) -> (state, metrics), which donates the state."""
        out = shardings_of(self.states.staged), NamedSharding(self.states.layout.mesh, P())
        step = jax.jit(self.train_step, donate_argnums=0, out_shardings=out)
        return step.trace(self.states.staged, self.batches.placed | shapes_like(self._seed_key))

    def lower_train_step(self) -> jax.stages.Lowered:
        """Return the train step lowered, ready to compile."""
        return self.trace_train_step().lower()

    def compile(self, *, evaluate: bool) -> steps.Footprint:
        """Compile the train step, and with `evaluate` the programs of `loss`."""
        self.compiled["step"] = step = self.compile_program(self.lower_train_step())
        if evaluate:
            lowered = jax.jit(self.loss_of).lower(self.states.staged["params"], self.batches.placed)
            self.compiled["loss"] = self.compile_program(lowered)
        ranks = self.states.layout.mesh.shape["pp"]
        return steps.Footprint(temp_bytes(step), (total_bytes(step),) * ranks, step.as_text() or "")

    def compile_program(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile a lowered program with the compiler options of training."""
        return lowered.compile(dict(self.flags) or None)

    def memory(self, temporaries: steps.Temporaries | None = None) -> tuple[dict[str, int], ...]:
        """Return the bytes of one device by part, for each rank, from shapes.

        temporaries: gives the bytes of a program's temporaries. None: the compiled step's total
        minus the other parts; no temporaries before `compile`.
        """
        predicted = None if temporaries is None else temporaries(None)
        of_rank = rank_bytes(self.sizes, self.slots, predicted)
        if predicted is None and (step := self.compiled.get("step")) is not None:
            rest = total_bytes(step) - sum(of_rank.values())
            # less than the parts: `weights` counts a copy of the layers that XLA did not make
            if rest < 0:
                of_rank["weights"] = max(0, of_rank["weights"] + rest)
            of_rank["temporaries"] = max(0, rest)
        return (of_rank,) * self.states.layout.mesh.shape["pp"]

    def programs(self) -> steps.StepPrograms:
        """Return the traced programs of a step."""
        traced, mesh = self.trace_train_step(), self.states.layout.mesh.shape
        ranks, compiled = tuple(range(mesh["pp"])), lambda: self.compile_program(step.lowered)
        step = steps.StepProgram("step", mesh, ranks, 1, traced, traced.lower, compiled)
        return steps.StepPrograms([step], [])

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, metrics: "loss", attached losses, "grad_norm", and "lr" if known).

        Requires `compile`. The memory of `state` is reused.
        """
        state, numbers = self.compiled["step"](state, batch | self._seed_key)
        self.under_way.add(numbers[LOSS])
        return state, numbers

    def loss(self, state: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """Return (mean loss of a batch, number of losses); requires `compile(evaluate=True)`."""
        found = self.compiled["loss"](state["params"], batch)
        self.under_way.add(found[0])
        return found

    def loss_and_grads(self, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch."""
        with_keys, loss_and_grads, to_natural = self._of_gradients
        batch = with_keys(batch | self._seed_key, state["step"])
        losses, grads = loss_and_grads(state["params"], batch)
        return self.under_way.ended((losses[LOSS], to_natural(grads)))

    @cached_property
    def _of_gradients(self) -> tuple[Callable[..., Any], ...]:
        with_keys = partial(with_example_keys, num_dims=2)
        functions = with_keys, self.loss_and_grads_of, self.states.layout.to_natural
        return tuple(map(compiled_quickly, functions))
