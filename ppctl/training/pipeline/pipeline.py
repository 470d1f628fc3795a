"""A model pipelined over a mesh: the object that trains, for the command line and scripts."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.parameter_layout import Layout
from ppctl.executors.stage.jaxpr_flops import RelativeCosts
from ppctl.model.stack import Stack, num_examples
from ppctl.model.trainable_parameters import trained_part
from ppctl.reports.charts.draw_schedule import pipeline_html
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.mesh_axes import DATA_AXES, MeshSizes
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.call_checks import StateChecks, check_natural, on_host, whole_number
from ppctl.training.pipeline.engines.make_engine import Engine
from ppctl.training.pipeline.engines.step_memory import Footprint
from ppctl.training.pipeline.engines.step_programs import StepPrograms
from ppctl.training.pipeline.engines.train_states import States, shardings_of
from ppctl.training.pipeline.execution import Execution
from ppctl.training.pipeline.mixing import MOST_BYTES, few_examples, refuse_mixing
from ppctl.training.pipeline.optimizers import ModelOptimizer
from ppctl.training.pipeline.unpipelined.head_metrics import Metric
from ppctl.training.pipeline.unpipelined.whole_model import WholeModel, of_author

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A model, its optimizer and a schedule on a mesh. Made by `ppctl.pipeline`.

    A state is a pytree of sharded arrays that Orbax saves; `step` takes its memory. A batch is
    {"inputs", "targets"}: arrays [batch, ...] of the shapes that the pipeline was made for, on the
    host or placed by `put`.
    """

    stack: Stack
    scheduled: ScheduledStep
    execution: Execution
    costs_of_layers: Callable[[], RelativeCosts]
    states: States
    optimizer: ModelOptimizer
    dtype: jnp.dtype  # of compute
    batch_shapes: Tree  # shapes and dtypes of a global batch
    engine: Engine
    model: Model  # as the tasks of one device see it
    lr_schedule: optax.Schedule | None = None
    examples: Tree = None  # a few of the batch that it was made with
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    # what is tried or compiled already: "examples", "step", "loss"
    _done: set[str] = field(default_factory=set[str], init=False, repr=False, compare=False)

    # its parts

    @property
    def schedule(self) -> Schedule:
        return self.scheduled.schedule

    @property
    def ticks(self) -> Ticks | None:
        """The schedule in ticks; None unless executor=spmd."""
        return self.scheduled.ticks

    @property
    def mesh(self) -> Mesh:
        return self.states.layout.mesh

    @property
    def layout(self) -> Layout:
        return self.states.layout

    @property
    def partition(self) -> Partition:
        """The layers of each stage."""
        return self.states.layout.partition

    @property
    def batch_size(self) -> int:
        return num_examples(self.batch_shapes["inputs"])

    @property
    def relative_costs(self) -> RelativeCosts:
        """The costs of layers, embedding and head in layers, by FLOPs; 0 for parts on all ranks."""
        return self.costs_of_layers()

    @property
    def plain(self) -> tuple[Stack, jnp.dtype, int, int]:
        """The arguments of `plain_functions`."""
        return self.stack, self.dtype, self._num_parts, self.states.seed

    @property
    def _num_parts(self) -> int:
        """The microbatches of all replicas."""
        return self.schedule.num_microbatches * MeshSizes.of(self.mesh.shape).along(DATA_AXES)

    @cached_property
    def num_parameters(self) -> int:
        return sum(jax.tree.leaves(self.stack.counts(self.states.natural["params"])))

    @cached_property
    def num_trained(self) -> int:
        """The number of parameters that are trained."""
        counts = self.stack.counts(self.states.natural["params"])
        return sum(jax.tree.leaves(trained_part(counts, self.stack.options.trainable)))

    @property
    def attached_losses(self) -> tuple[str, ...]:
        """The names of the losses that layers attach, among the metrics of a step."""
        return self.model.inputs.losses

    # training

    def init(self, seed: int | None = None) -> Tree:
        """Return the initial state, a function of model and seed, independent of the layout."""
        number = None if seed is None else whole_number("seed", seed, 0)
        self._try_examples()
        return self._state_checks.remember(self.engine.new_state(number))

    def step(self, state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, metrics) of one train step.

        metrics: "loss", "grad_norm" (before clipping), "lr" where an lr_schedule was given, the
        losses that layers attach, by name, and the metrics of the request, of the step's forwards.
        With `StackOptions.updates` also "counts": by name those of each layer, [L, ...], of the
        global batch. The request's metrics are missing where tp, cp or vocab=parallel divides the
        head, so that no device has whole outputs: `evaluate` has them.

        Compiled at the first call, unless `compile` did it. The state's memory is reused.
        """
        placed = self._placed(state, batch)
        if "step" not in self._done:
            self.compile()
        state, metrics = self.engine.step(state, placed)
        return self._state_checks.remember(state), metrics

    def loss(self, state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        """Return the mean loss of a batch of any number of examples, by forwards only.

        A batch of the pipeline's size goes through its stages, any other as in `evaluate`.
        """
        if isinstance(batch, Mapping) and "inputs" in batch and not self._is_whole(batch):
            return self.evaluate(state, batch)["loss"]
        placed = self._placed(state, batch)
        if "loss" not in self._done:
            self.compile(evaluate=True)
        return self.engine.loss(state, placed)[0]

    def loss_and_grads(self, state: Tree, batch: Mapping[str, Any]) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch; the state stays."""
        return self.engine.loss_and_grads(state, self._placed(state, batch))

    def _is_whole(self, batch: Mapping[str, Any]) -> bool:
        is_array = lambda a: not isinstance(a, Mapping)  # noqa: E731
        arrays = jax.tree.leaves(batch["inputs"], is_leaf=is_array)
        return [np.shape(a)[:1] for a in arrays[:1]] == [(self.batch_size,)]

    def evaluate(self, state: Tree, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the means over a batch {"inputs", "targets"} of the loss and of each metric.

        Any number of examples will do: each device of the mesh computes some of them with the whole
        model, compiled once. Means are over losses (examples or tokens), and over a metric's
        values by their weights: those of an accuracy are `outputs.argmax(-1) == batch["targets"]`,
        with weights `batch["targets"] >= 0` where some tokens have no target.

        ConfigError: the batch has other shapes than [examples, ...] of the pipeline's batch.
        """
        return self._whole.evaluate(*self._of_whole(state, batch))

    def predict(self, state: Tree, inputs: Any) -> Tree:
        """Return the model's outputs, such as logits, for inputs [examples, ...], as `evaluate`.

        Outputs are [examples, ...] each, in the dtype of compute. ConfigError for a `Stack` without
        outputs, and for inputs of other shapes.
        """
        if self.stack.options.outputs is None:
            raise ConfigError(
                "The Stack has no outputs, only a loss. Give it outputs=..., a function "
                "(embed_head, x)."
            )
        params, batch = self._of_whole(state, {"inputs": inputs})
        return self._whole.predict(params, batch["inputs"])

    def params(self, state: Tree) -> Tree:
        """Return a state's parameters as their author has them.

        Of a `Network` the tree that its init returns, of a `Stack` {"embed_head", "layers"}, whose
        layers are [L, ...] in model order.
        """
        self._state_checks.check(state)
        return of_author(self.stack, self.engine.params(state))

    def _of_whole(self, state: Tree, batch: Any) -> tuple[Tree, dict[str, np.ndarray]]:
        """Return (natural parameters, a batch of any number of examples on the host), checked."""
        self._state_checks.check(state)
        if self.stack.options.mixes_examples:
            raise ConfigError(
                "The model mixes the examples of a batch (mixes_examples=True), so that none has "
                f"outputs or a loss by itself. Use pipe.loss with batches of {self.batch_size}."
            )
        arrays = on_host(batch, self.batch_shapes, self.stack, any_number=True)
        return self.engine.params(state), arrays

    @cached_property
    def _whole(self) -> WholeModel:
        how = self.stack, self.mesh, self.dtype, self.metrics
        return WholeModel(*how, self.model.num_examples)

    def _placed(self, state: Tree, batch: Mapping[str, Any]) -> Tree:
        self._state_checks.check(state)
        return self.put(batch)

    @cached_property
    def _state_checks(self) -> StateChecks:
        return StateChecks(self.engine.state_shapes, (self.partition, self.layout.rank_of))

    def compile(self, *, evaluate: bool = False) -> Footprint:
        """Compile the train step, with `evaluate` also `loss`; return the step's memory."""
        self._try_examples()
        footprint = self.engine.compile(evaluate=evaluate)
        self._done.update({"step", "loss"} if evaluate else {"step"})
        return footprint

    def check_examples(self, name: str, examples: Mapping[str, Any]) -> str | None:
        """Return why the model could not be tried for mixing the examples of a batch, or None.

        Untried if the model states that it mixes or not, or the batch is computed as a whole.
        name: of the model, for messages; examples: a few of a batch.

        ConfigError: the model mixes them, so that microbatches would train another function.
        """
        self._done.add("examples")
        if self.stack.options.mixes_examples is not None or self._num_parts == 1:
            return None
        size = tree_bytes(self.states.natural["params"])
        if size > MOST_BYTES:
            return (
                f"{name} was not tried for mixing the examples of a batch: its parameters take "
                f"{size_text(size)}, more than the {size_text(MOST_BYTES)} of one device for it."
            )
        few = few_examples(examples, self.batch_shapes)
        return refuse_mixing(name, self.stack, few, self.dtype)

    def _try_examples(self) -> None:
        if "examples" in self._done:
            return
        note = self.check_examples("The model", self.examples)
        if note is not None:
            warnings.warn(note, stacklevel=3)

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """Return a global batch on the devices of its step, unless it is there already.

        ConfigError: the batch has other names or shapes than the pipeline was made for.
        """
        shardings = self.engine.batches.shardings
        is_at = lambda a, to: isinstance(a, jax.Array) and a.sharding == to  # noqa: E731
        if isinstance(batch, Mapping) and all(
            key in batch and all(is_at(a, to) for a in jax.tree.leaves(batch[key]))
            for key, to in shardings.items()
        ):
            return {key: batch[key] for key in shardings}
        arrays = on_host(batch, self.batch_shapes, self.stack)
        rows = list(self.engine.batches.examples)
        return self.engine.batches.put(jax.tree.map(lambda a: a[rows], arrays))

    def to_natural(self, state: Tree) -> Tree:
        """Return a state in natural order, as in checkpoints: layers [L, ...] in model order."""
        self._state_checks.check(state)
        return self.engine.to_natural(state)

    def from_natural(self, state: Tree) -> Tree:
        """Return the pipeline's state of one in natural order."""
        check_natural(state, self.states.natural)
        state = jax.device_put(state, shardings_of(self.states.natural))
        return self._state_checks.remember(self.engine.from_natural(state))

    # its memory and time

    def memory(self) -> tuple[Mapping[str, int], ...]:
        """Return each rank's bytes a device by part: by shapes; "temporaries" once compiled."""
        return self.engine.memory()

    def _repr_html_(self) -> str:
        """Return what notebooks show: sizes, the layers and memory of each rank, the schedule."""
        axes = " x ".join(f"{axis}={n}" for axis, n in self.mesh.shape.items() if n > 1)
        layers = [f"{each.start}-{each[-1]}" if each else "none" for each in self.partition]
        held = [
            ", ".join(l for l, at in zip(layers, self.layout.rank_of, strict=True) if at == rank)
            for rank in range(self.mesh.shape["pp"])
        ]
        bubble, numbers = self.bubble(), (self.num_parameters, self.num_trained)
        facts = {
            "model": "{:,} parameters, {:,} trained, in {}".format(*numbers, self.dtype),
            "mesh": f"{axes or 'one device'}, {self.mesh.devices.flat[0].device_kind}",
            "executor": f"{self.execution.executor}, remat={self.execution.remat}",
        }
        if bubble is not None:
            numbers = f"{self.schedule.num_microbatches} microbatches, bubble {bubble:.1%}"
            facts["schedule"] = f"{self.schedule.name}, {numbers}"
        shown = self.schedule if self.execution.engine.is_pipelined else None
        return pipeline_html(facts, held, self.memory(), shown)

    def programs(self) -> StepPrograms:
        """Return the traced programs of a step (jaxpr, StableHLO, HLO, collectives, transfers)."""
        return self.engine.programs()

    def bubble(self, costs: Costs | None = None) -> float | None:
        """Return the idle share of all ranks that the schedule predicts for this executor, 0..1.

        costs: seconds of tasks; None: relative ones, in equal stages. None without a pipeline.
        """
        if not self.execution.engine.is_pipelined:
            return None
        return self.scheduled.bubble_fraction(self.scheduled.costs if costs is None else costs)
