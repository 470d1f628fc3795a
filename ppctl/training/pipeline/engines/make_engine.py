"""Make the engine of an executor."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import BATCH, Layout, layer_specs, shapes_on_device
from ppctl.executors.reference import reference
from ppctl.executors.spmd.spmd_program import spmd, spmd_sizes, state_sizes
from ppctl.model.layer_inputs import check_parts
from ppctl.model.stack import DividedStack, Stack, flat_batch, num_examples, shapes_like
from ppctl.schedule.mesh_axes import DATA_AXES, MeshSizes
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd, PostValidated
from ppctl.training.pipeline.engines.one_program import OneProgram
from ppctl.training.pipeline.engines.rank_states import GroupModel
from ppctl.training.pipeline.engines.train_states import PlacedBatches, States
from ppctl.training.pipeline.execution import Execution
from ppctl.training.pipeline.optimizers import LossAndGrads, ModelOptimizer

Tree = Any
Engine = OneProgram | Mpmd
Loss = Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]  # (params, batch) -> (mean, number)


def make_engine(
    groups: Sequence[GroupModel],
    states: States,
    step: ScheduledStep,
    shapes: Tree,
    optimizer: ModelOptimizer,
    lr_schedule: optax.Schedule | None,
    execution: Execution,
    clip_norm: float | None,
) -> Engine:
    """Return the engine that runs a step.

    groups: the model on each group of ranks of equal sizes; mpmd may have several. shapes: shapes
    and dtypes of a global batch. clip_norm: the optimizer's clipping norm, or None.
    """
    how, model = (optimizer, lr_schedule), groups[0].model
    # 1. mpmd
    if execution.engine.dispatches_tasks:
        arguments = states, shapes, groups, step, *how, dict(execution.xla_flags)
        if execution.post_validation:
            guards_finite = optimizer.guards_finite
            return PostValidated(*arguments, max_norm=clip_norm, guards_finite=guards_finite)
        return Mpmd(*arguments)
    # 2. the reference
    if step.ticks is None:
        functions = _by_reference(model, states.layout, execution)
        sizes, slots = state_sizes(model, states.staged), {}
    # 3. spmd
    else:
        in_ticks, evaluation = partial(spmd, model, states.layout), step.evaluation.ticks
        assert evaluation is not None, "lowered as the step is"
        functions = in_ticks(step.ticks), in_ticks(evaluation)
        slots = step.ticks.num_slots
        sizes = spmd_sizes(model, states.layout, states.staged, splits=bool(slots.get("pending")))
    options = execution.xla_flags, model.stack.takes_key
    shardings = dict.fromkeys(shapes, NamedSharding(states.layout.mesh, BATCH))
    batches = PlacedBatches(shapes, shardings, model.num_microbatches)
    return OneProgram(states, batches, *functions, *how, sizes, slots, *options)


def model_of(
    stack: Stack,
    divided: DividedStack,
    states: States,
    shapes: Tree,
    num_microbatches: int,
    execution: Execution,
    dtype: jnp.dtype,
) -> Model:
    """Return the model with the shapes and functions of one device.

    divided: the stack divided over execution.axes. ConfigError if layers do not report the counts
    that the stack declares, or a metric has the name of an attached loss.
    """
    # 1. shapes of a layer and of a microbatch on one device
    if divided.parts is not None:
        check_parts(stack, states.natural["params"]["embed_head"], shapes)
    mesh, of_rank = states.layout.mesh, states.layout.of_rank
    params = shapes_on_device(states.natural["params"], {} if of_rank.auto else of_rank.shards)
    layer = shapes_like(params["layers"], first=1)
    parts = num_microbatches * MeshSizes.of(mesh.shape).along(DATA_AXES)
    microbatch = shapes_like(shapes, num_examples(shapes["inputs"]) // parts, first=1)
    # 2. the specs of gathered layers, and of parameters that XLA divides
    specs = None
    if execution.gather == "layer" and mesh.shape["fsdp"] > 1:
        specs = layer_specs(states.layout.staged_specs(states.staged["params"])["layers"])
    embed_head = params["embed_head"]
    parts = {"embed_head": embed_head, "layers": layer}
    auto_specs = of_rank.auto_specs(parts) if of_rank.auto else None
    # 3. the model, checked
    platform = mesh.devices.flat[0].platform
    found = Model(
        stack=stack.in_shards(divided),
        embed_head=embed_head,
        layer=layer,
        microbatch=microbatch,
        num_microbatches=num_microbatches,
        remat=execution.remat,
        unroll=execution.unroll,
        dtype=dtype,
        axes=execution.axes,
        own_embed_head=of_rank.own_embed_head(embed_head),
        layer_specs=specs,
        auto_specs=auto_specs,
        platform="gpu" if platform == "cuda" else platform,  # a described GPU's is "cuda"
        parts=divided.parts,
    )
    counted = found.outer.losses[1]
    for name in found.inputs.names:
        if isinstance(counted, dict) and name in counted:
            raise ConfigError(f"metrics has {name!r}, the name of an attached loss. Use another.")
    found.check_reports()
    return found


def _by_reference(model: Model, layout: Layout, execution: Execution) -> tuple[LossAndGrads, Loss]:
    """Return the un-pipelined functions of gradients and mean loss, on staged parameters."""

    def gradients(params: Tree, batch: Tree) -> tuple[dict[str, jax.Array], Tree]:
        losses, grads = of_batch(layout.to_natural(params), flat_batch(batch))
        return losses, layout.to_staged(grads)

    def mean_loss(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        return of_loss(layout.to_natural(params), flat_batch(batch))

    number, remat, dtype = model.num_microbatches, execution.remat, model.dtype
    of = partial(reference, model.stack, num_microbatches=number, remat=remat, dtype=dtype)
    of_batch, of_loss = of(with_grads=True), of(with_grads=False)
    return gradients, mean_loss
