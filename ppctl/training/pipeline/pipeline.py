"""`Pipeline`: a model on a mesh that trains and evaluates, for commands and scripts."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.parameter_layout import Layout
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.executors.stage.jaxpr_flops import RelativeCosts
from ppctl.model.stack import Stack, num_examples
from ppctl.model.trainable_parameters import trained_part
from ppctl.reports.charts.draw_schedule import pipeline_html
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.mesh_axes import data_size
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.call_checks import StateChecks, check_natural, on_host, whole_number
from ppctl.training.pipeline.engines.make_engine import Engine
from ppctl.training.pipeline.engines.rank_states import GroupModel
from ppctl.training.pipeline.engines.step_programs import Footprint, StepPrograms
from ppctl.training.pipeline.engines.train_states import States, shardings_of
from ppctl.training.pipeline.execution import Execution
from ppctl.training.pipeline.mixing import MOST_BYTES, few_examples, refuse_mixing
from ppctl.training.pipeline.optimizers import ModelOptimizer, init_state
from ppctl.training.pipeline.whole_model import Metric, WholeModel, flax_model_of, of_author

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A model, its optimizer and a schedule on a mesh. Made by `ppctl.pipeline`.

    A state is a pytree of sharded arrays, which Orbax can save, with the layer in each slot; `step`
    reuses its memory. A batch
    is {"inputs", "targets"}: arrays [batch, ...] with the shapes of the pipeline's batch, on the
    host or placed by `put`.
    """

    stack: Stack
    scheduled: ScheduledStep
    execution: Execution
    costs_of_layers: Callable[[], RelativeCosts]
    states: States
    optimizer: ModelOptimizer
    dtype: jnp.dtype  # compute dtype
    batch_shapes: Tree  # shapes and dtypes of a global batch
    engine: Engine
    groups: Sequence[GroupModel]  # the model with the shapes of one device, by ranks of equal sizes
    lr_schedule: optax.Schedule | None = None
    examples: Tree = None  # first examples of the batch given to `ppctl.pipeline`
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    # checks and compilations that are done: "examples", "step", "loss"
    _done: set[str] = field(default_factory=set[str], init=False, repr=False, compare=False)

    # parts

    @property
    def schedule(self) -> Schedule:
        return self.scheduled.schedule

    @property
    def ticks(self) -> Ticks | None:
        """The schedule lowered to ticks; None unless executor=spmd."""
        return self.scheduled.ticks

    @property
    def meshes(self) -> RankMeshes:
        """The mesh of each rank, and of natural order."""
        return self.engine.meshes

    @property
    def model(self) -> Model:
        """The model with the shapes of one device of rank 0."""
        return self.groups[0].model

    def group_of(self, rank: int) -> GroupModel:
        """Return the group of a rank."""
        return self.groups[self.meshes.group_of[rank]]

    @property
    def layout(self) -> Layout:
        return self.states.layout

    @property
    def partition(self) -> Partition:
        """The layers of each stage."""
        return self.layout.placement.partition

    @property
    def batch_size(self) -> int:
        return num_examples(self.batch_shapes["inputs"])

    @property
    def relative_costs(self) -> RelativeCosts:
        """FLOPs of layers, embedding and head, relative to the mean layer.

        Embedding and head have 0 if all ranks have a part of them.
        """
        return self.costs_of_layers()

    @property
    def plain(self) -> tuple[Stack, jnp.dtype, int, int]:
        """The arguments of `plain_functions`."""
        return self.stack, self.dtype, self._num_parts, self.states.seed

    @property
    def _num_parts(self) -> int:
        """The number of microbatches in all replicas."""
        return self.schedule.num_microbatches * data_size(self.meshes.sizes_by_rank)

    @cached_property
    def num_parameters(self) -> int:
        return sum(jax.tree.leaves(self.stack.counts(self.states.natural["params"])))

    @cached_property
    def num_trained(self) -> int:
        """The number of trained parameters."""
        counts = self.stack.counts(self.states.natural["params"])
        return sum(jax.tree.leaves(trained_part(counts, self.stack.options.trainable)))

    @property
    def attached_losses(self) -> tuple[str, ...]:
        """The names of the losses that layers attach; a step reports them as metrics."""
        return self.model.inputs.names

    # training

    def init(self, seed: int | None = None, *, params: Tree = None) -> Tree:
        """Return the initial state, which depends on model and seed only, not on the layout.

        seed: seed of the parameters; None: the seed of the pipeline. params: the parameters, in
        the form that `params` returns, in place of drawn ones.
        """
        number = None if seed is None else whole_number("seed", seed, 0)
        self._try_examples()
        if params is None:
            return self._state_checks.ordered(self.engine.new_state(number))
        network, natural = self.stack.options.network, self.states.natural
        given = params if network is None else network.parameters.to_parts(params)
        check_natural({**natural, "params": given}, natural)
        return self.from_natural(init_state(given, self.optimizer, self.stack.options.trainable))

    def step(self, state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, metrics) of one train step.

        The step is compiled at the first call, unless `compile` did it.

        Args:
            state: A state of this pipeline. Its memory is reused.
            batch: {"inputs", "targets"} of the pipeline's batch size.

        Returns:
            The next state, and metrics: "loss"; "grad_norm", before clipping; "lr" with an
            lr_schedule; each attached loss; with `StackOptions.updates` "counts": name -> counts
            [L, ...] over the global batch; and the `metrics` of `ppctl.pipeline`, from the step's
            forwards. The latter are missing if vocab=parallel divides the head, because no rank has
            whole outputs (or a custom `DividedStack` has no `outputs`); `evaluate` has them.
        """
        of_engine, placed = self._state_checks.checked(state, is_donated=True), self.put(batch)
        if "step" not in self._done:
            self.compile()
        found, metrics = self.engine.step(of_engine, placed)
        return self._state_checks.ordered(found, state), metrics

    def loss(self, state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        """Return the mean loss of a batch with any number of examples, by forwards only.

        A batch of the pipeline's size runs through its stages, any other as in `evaluate`.
        """
        if isinstance(batch, Mapping) and "inputs" in batch and not self._is_whole(batch):
            return self.evaluate(state, batch)["loss"]
        state, placed = self._state_checks.checked(state), self.put(batch)
        if "loss" not in self._done:
            self.compile(evaluate=True)
        return self.engine.loss(state, placed)[0]

    def loss_and_grads(self, state: Tree, batch: Mapping[str, Any]) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch; the state stays usable."""
        return self.engine.loss_and_grads(self._state_checks.checked(state), self.put(batch))

    def _is_placed(self, batch: Any) -> bool:
        batches = self.engine.batches
        return isinstance(batch, Mapping) and all(
            key in batch and all(batches.is_placed(a, key) for a in jax.tree.leaves(batch[key]))
            for key in batches.shardings
        )

    def _is_whole(self, batch: Mapping[str, Any]) -> bool:
        if self._is_placed(batch):
            return True
        arrays = jax.tree.leaves(batch["inputs"], is_leaf=lambda a: not isinstance(a, Mapping))
        return [np.shape(a)[:1] for a in arrays[:1]] == [(self.batch_size,)]

    def evaluate(self, state: Tree, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the means of the loss and of each metric over a batch.

        Each device of the mesh computes some of the examples with the whole model, compiled once.
        The loss is averaged over all losses (examples or tokens), a metric over its values by their
        weights. An accuracy has the values `outputs.argmax(-1) == batch["targets"]`, and the
        weights `batch["targets"] >= 0` if some tokens have no target.

        Args:
            state: A state of this pipeline.
            batch: {"inputs", "targets"}, arrays [examples, ...] with any number of examples.

        Raises:
            ConfigError: Apart from the number of examples, the arrays do not fit the pipeline.
        """
        return self._whole.evaluate(*self._of_whole(state, batch, "inputs", "targets"))

    def predict(self, state: Tree, inputs: Any) -> Tree:
        """Return the model's outputs, such as logits, computed as in `evaluate`.

        Args:
            state: A state of this pipeline.
            inputs: Arrays [examples, ...] with any number of examples.

        Returns:
            The outputs, arrays [examples, ...] in the compute dtype.

        Raises:
            ConfigError: The `Stack` has no outputs, or the inputs have other shapes.
        """
        if self.stack.options.outputs is None:
            what = "The Stack has no outputs, only a loss"
            raise ConfigError(f"{what}. Give it outputs=..., a function (embed_head, x).")
        params, batch = self._of_whole(state, {"inputs": inputs}, "inputs")
        return self._whole.predict(params, batch["inputs"])

    def params(self, state: Tree) -> Tree:
        """Return a state's parameters in the form of their author.

        For a `Network` this is the tree that its init returns; for a `Stack` {"embed_head",
        "layers"}, with layers [L, ...] in model order.
        """
        return of_author(self.stack, self.engine.params(self._state_checks.checked(state)))

    def averaged(self, state: Tree) -> Tree:
        """Return a state whose parameters are the average of `state`, with `ppctl.pipeline(ema=)`.

        It is for `evaluate`, `predict`, `loss`, `params` and `flax_model`. It has the arrays of
        `state`, so `step` refuses it. ConfigError if the pipeline has no average.
        """
        if self.optimizer.ema is None:
            raise ConfigError("The pipeline has no average. Use ppctl.pipeline(..., ema=0.999).")
        checks = self._state_checks
        return checks.ordered(self.engine.averaged(checks.checked(state)), state)

    def flax_model(self, state: Tree) -> Any:
        """Return the model as a Flax module with a state's parameters.

        A model from `ppctl.flax` becomes a module like the given one, or the variables of a linen
        module; any other `Stack` with outputs a `ppctl.flax.StackModule`.
        """
        return flax_model_of(self.stack, self.params(state))

    def _of_whole(self, state: Tree, batch: Any, *names: str) -> tuple[Tree, dict[str, np.ndarray]]:
        """Return (natural parameters, a checked batch of any number of examples on the host)."""
        state = self._state_checks.checked(state)
        if self.stack.options.mixes_examples:
            raise ConfigError(
                "The model mixes the examples of a batch (mixes_examples=True), so an example has "
                f"no outputs or loss by itself. Use pipe.loss with batches of {self.batch_size}."
            )
        shapes = {name: self.batch_shapes[name] for name in names}
        examples = self.engine.batches.in_examples(batch)
        return self.engine.params(state), on_host(examples, shapes, self.stack, any_number=True)

    @cached_property
    def _whole(self) -> WholeModel:
        number = self.model.num_examples
        return WholeModel(self.stack, self.meshes.storage, self.dtype, self.metrics, number)

    @cached_property
    def _state_checks(self) -> StateChecks:
        return StateChecks(self.engine.state_shapes, self.layout)

    def compile(self, *, evaluate: bool = False) -> Footprint:
        """Compile the train step, and with `evaluate` also `loss`; return the step's memory."""
        self._try_examples()
        footprint = self.engine.compile(evaluate=evaluate)
        self._done.update({"step", "loss"} if evaluate else {"step"})
        return footprint

    def check_examples(self, name: str, examples: Mapping[str, Any]) -> str | None:
        """Check that the model does not mix examples; return a note if it cannot be checked.

        No check if the model states `mixes_examples`, or the batch is computed whole. ConfigError
        if it mixes examples, so microbatches would train another function. name: the model's name
        in messages. examples: a batch; its first few examples are used.
        """
        self._done.add("examples")
        if self.stack.options.mixes_examples is not None or self._num_parts == 1:
            return None
        size = tree_bytes(self.states.natural["params"])
        if size > MOST_BYTES:
            what = f"{name} was not checked for mixing the examples of a batch: its parameters take"
            most = f"the {size_text(MOST_BYTES)} allowed on one device"
            return f"{what} {size_text(size)}, more than {most}."
        few = few_examples(examples, self.batch_shapes)
        return refuse_mixing(name, self.stack, few, self.dtype)

    def _try_examples(self) -> None:
        if "examples" in self._done:
            return
        note = self.check_examples("The model", self.examples)
        if note is not None:
            warnings.warn(note, stacklevel=3)

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """Return a global batch placed on the devices of a step; a placed batch is returned as is.

        Raises:
            ConfigError: The batch has other names or shapes than the pipeline's batch.
        """
        if self._is_placed(batch):
            return {key: batch[key] for key in self.engine.batches.shardings}
        arrays = on_host(batch, self.batch_shapes, self.stack)
        rows = list(self.engine.batches.examples)
        return self.engine.batches.put(jax.tree.map(lambda a: a[rows], arrays))

    def to_natural(self, state: Tree) -> Tree:
        """Return the state in natural order, as in checkpoints: layers [L, ...] in model order."""
        return self.engine.to_natural(self._state_checks.checked(state))

    def from_natural(self, state: Tree) -> Tree:
        """Return the pipeline's state from a state in natural order."""
        check_natural(state, self.states.natural)
        state = jax.device_put(state, shardings_of(self.states.natural))
        return self._state_checks.ordered(self.engine.from_natural(state))

    # memory and time

    def memory(self) -> tuple[Mapping[str, int], ...]:
        """Return for each rank the bytes per device by part; with "temporaries" once compiled."""
        return self.engine.memory()

    def _repr_html_(self) -> str:
        """Return the HTML view in notebooks: sizes, each rank's layers and memory, the schedule."""
        sizes = self.meshes.sizes.by_axis
        axes = " x ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"
        axes = axes if self.meshes.text is None else f"ranks of {self.meshes.text}"
        held: list[list[str]] = [[] for _ in range(self.meshes.num_ranks)]
        for each, rank in self.layout.placement.stages:
            held[rank].append(f"{each.start}-{each[-1]}" if each else "none")
        bubble, numbers = self.bubble(), (self.num_parameters, self.num_trained)
        facts = {
            "model": "{:,} parameters, {:,} trained, in {}".format(*numbers, self.dtype),
            "mesh": f"{axes}, {self.meshes.device.device_kind}",
            "executor": f"{self.execution.executor}, remat={self.execution.remat}",
        }
        if bubble is not None:
            numbers = f"{self.schedule.num_microbatches} microbatches, bubble {bubble:.1%}"
            facts["schedule"] = f"{self.schedule.name}, {numbers}"
        shown = self.schedule if self.execution.engine.is_pipelined else None
        return pipeline_html(facts, list(map(", ".join, held)), self.memory(), shown)

    def programs(self) -> StepPrograms:
        """Return the traced programs of a step (jaxpr, StableHLO, HLO, collectives, transfers)."""
        return self.engine.programs()

    def bubble(self, costs: Costs | None = None) -> float | None:
        """Return the predicted idle share of all ranks, 0..1; None for executor=reference.

        costs: seconds of each task; None: relative costs, with equal stages.
        """
        if not self.execution.engine.is_pipelined:
            return None
        return self.scheduled.bubble_fraction(self.scheduled.costs if costs is None else costs)
