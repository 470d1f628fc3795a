"""`ppctl.pipeline`: check a request and build its `Pipeline`, for commands and scripts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ppctl.config import AutoHardware, Reference
from ppctl.errors import ConfigError
from ppctl.executors.layer_placement import Placement
from ppctl.executors.parameter_layout import Layout, RankLayout
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.executors.stage.jaxpr_flops import RelativeCosts, relative_costs
from ppctl.model.network import Network
from ppctl.model.stack import DividedStack, Stack
from ppctl.model.trainable_parameters import checked_flags, trained_part, trained_share
from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import BASELINE, FamilyWithKnobs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.scheduled_step import ScheduledStep, scheduled_step
from ppctl.schedule.vocabulary_parallel import with_vocabulary
from ppctl.training.pipeline import optimizers as optim, pipeline_request as request
from ppctl.training.pipeline.call_checks import (
    checked_optimizer,
    compute_dtype,
    flax_faults,
    whole_number,
)
from ppctl.training.pipeline.engines.make_engine import make_engine, model_of
from ppctl.training.pipeline.engines.rank_states import GroupModel
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.execution import Execution, execution_of
from ppctl.training.pipeline.known_hardware import default_dtype
from ppctl.training.pipeline.layer_optimizers import LayerOptimizer
from ppctl.training.pipeline.mixing import few_examples
from ppctl.training.pipeline.network_optimizers import network_optimizer
from ppctl.training.pipeline.optimizers import ModelOptimizer
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.whole_model import Metric, with_metrics

Tree = Any


@flax_faults()
def pipeline(
    model: Stack | Network,
    mesh: Mesh | RankMeshes,
    schedule: request.AnySchedule = BASELINE,
    optimizer: optax.GradientTransformation | None = None,
    *,
    batch: Tree,
    num_microbatches: int | None = None,
    executor: str | Reference = "spmd",
    partition: str | Sequence[int] = "uniform",
    vocab: str = "whole",
    dtype: Any = None,
    clip_norm: float | None = None,
    ema: float | None = None,
    lr_schedule: optax.Schedule | None = None,
    seed: int = 0,
    layers: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    **options: Any,
) -> Pipeline:
    """Return a model pipelined over a mesh. ConfigError, ScheduleError: before any compilation.

    Args:
        model: A `Stack`, or a `Network` cut at stage_boundary or in `layers` layers of equal work.
        mesh: A result of `ppctl.mesh`, also with ranks of unequal sizes (executor=mpmd).
        schedule: The name of a family, `ppctl.family(...)`, or a `Schedule`.
        num_microbatches: Microbatches of a step in each replica; needed unless given a `Schedule`.
        batch: {"inputs", "targets"}: a global batch, or its shapes and dtypes.
        optimizer, ema: An optax optimizer of each parameter by itself; decay of `pipe.averaged`.
        executor: spmd | mpmd | reference, or with options, such as `ppctl.spmd(...)`.
        partition: uniform | balanced (by FLOPs) | the number of layers of each stage.
        vocab: whole (embedding on the first stage, head on the last) | parallel (on all ranks).
        dtype: The compute dtype. None: float64 if parameters are, else bfloat16 on accelerators.
        metrics: By name, (outputs, {"targets"}) -> values [examples, ...], or (values, weights).
        clip_norm, lr_schedule, seed: Limit of the global norm; rates to report; seed of all keys.
        options: Options of the executor (remat, gather, ...) and the schedule (num_chunks=2).
    """
    # 1. the request
    optimizer = checked_optimizer(optimizer, model, mesh, clip_norm, ema)
    meshes = RankMeshes.of(mesh)
    dtype = compute_dtype(dtype, model, default_dtype(AutoHardware(), meshes.device))
    seed, shapes = whole_number("seed", seed, 0), request.shapes_of(batch)
    execution, knobs = execution_of(executor, meshes, vocab, options)
    plan = request.schedule_for(schedule, meshes, num_microbatches, knobs, shapes)
    stack = request.layered_stack(model, batch, layers, dtype)
    # 2. tasks in schedule order; layers on stages, stages on devices
    work = _scheduled(stack, shapes, dtype, schedule, plan, vocab, execution)
    step, execution, of_stages = work
    layers_of = request.partition_for(partition, stack.num_layers, plan, of_stages)
    counting = with_metrics(stack, metrics or {}, shapes, dtype)
    divided, layout = _divided(counting, execution, meshes, (layers_of, plan.rank_of), shapes)
    # 3. the initial state, the engine that runs the steps, and the pipeline
    on_layers = _on_layers(stack, layout, optim.clipped(optimizer, clip_norm), execution, ema)
    start, of_all = optim.first_state(stack, on_layers), optim.state_shapes(stack, on_layers)
    states = States(layout, start, of_all, seed)
    groups = _groups(stack, meshes, divided, states, shapes, plan, execution, dtype)
    request.check_groups(groups, stack, step, layers_of, execution)
    engine = make_engine(groups, states, step, shapes, on_layers, lr_schedule, execution, clip_norm)
    parts = on_layers, dtype, shapes, engine, groups, lr_schedule, few_examples(batch, shapes)
    return Pipeline(stack, *work, states, *parts, metrics or {})


def _divided(
    stack: Stack,
    execution: Execution,
    meshes: RankMeshes,
    stages: tuple[Partition, tuple[int, ...]],
    shapes: request.Shapes,
) -> tuple[list[tuple[DividedStack, Layout]], Layout]:
    """Return (for each group the model on a device and the group's layout, the whole layout).

    stages: their layers and their ranks.
    """
    found, placement = list[tuple[DividedStack, Layout]](), Placement(*stages)
    is_equal = meshes.text is None
    for mesh, ranks in meshes.groups:
        divided, of_rank = request.divided(stack, execution.on(mesh), mesh, shapes)
        held = placement if is_equal else placement.on(ranks)
        found.append((divided, Layout(mesh, held, of_rank)))
    whole = Layout(meshes.storage, placement, RankLayout(meshes.sizes))
    return found, found[0][1] if is_equal else whole


def _groups(
    stack: Stack,
    meshes: RankMeshes,
    divided: Sequence[tuple[DividedStack, Layout]],
    states: States,
    shapes: request.Shapes,
    plan: Schedule,
    execution: Execution,
    dtype: jnp.dtype,
) -> list[GroupModel]:
    """Return the model on each group of ranks. divided: a result of `_divided`."""
    found = []
    for (mesh, ranks), (of_device, layout) in zip(meshes.groups, divided, strict=True):
        held, on = replace(states, layout=layout), execution.on(mesh)
        model = model_of(stack, of_device, held, shapes, plan.num_microbatches, on, dtype)
        found.append(GroupModel(ranks, layout, model))
    return found


def _scheduled(
    stack: Stack,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
    requested: request.AnySchedule,
    plan: Schedule,
    vocab: str,
    execution: Execution,
) -> tuple[ScheduledStep, Execution, Callable[[], RelativeCosts]]:
    """Return (the scheduled step, its execution, a function that returns layers' relative costs).

    requested: the `schedule` argument of `pipeline`. plan: the `Schedule` made from it. With
    vocab=parallel the step also has the embedding and head passes of all ranks.
    """
    remat, params = execution.remat, stack.param_shapes
    checked_flags(params, stack.options.trainable)
    trained = trained_share(params["layers"], stack.trains("layers"))
    relative = cache(lambda: relative_costs(stack, shapes, dtype, recompute=remat.recomputes))
    if vocab not in ("whole", "parallel"):
        raise ConfigError(f"vocab={vocab} is not one of whole, parallel.")
    if vocab == "parallel":
        if not isinstance(requested, str | FamilyWithKnobs):
            why = f"for a schedule family, not for a custom {type(requested).__name__}"
            raise ConfigError(f"vocab=parallel is {why}. Use with_vocabulary(schedule).")
        costs = relative().with_parts(task_costs(remat, trained))
        plan = with_vocabulary(plan, 0 if execution.engine.in_ticks else None, costs)
    step = scheduled_step(plan, execution.engine, remat, trained, fuses=execution.fuse != "none")
    if execution.engine.is_pipelined:
        execution = replace(execution, axes=replace(execution.axes, vocab_parts=plan.vocab_parts))
    if not plan.vocab_parts:
        return step, execution, relative
    step = replace(step, costs=relative().with_parts(step.costs))
    return step, execution, lambda: relative().without_embed_head


def _on_layers(
    stack: Stack,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    execution: Execution,
    ema: float | None,
) -> ModelOptimizer:
    """Return the `ModelOptimizer` of the trained parameters. ConfigError if they are divided."""
    params = trained_part(stack.param_shapes, stack.options.trainable)
    if stack.options.network is not None:
        return network_optimizer(optimizer, stack.options.network.parameters, params, layout, ema)
    on_layers = LayerOptimizer(optimizer, params, layout, stack.options.updates, ema)
    over_ranks = ["pp" in shard.axes for shard in layout.of_rank.shards.values()]
    if execution.engine.dispatches_tasks and any(over_ranks) and not on_layers.is_elementwise:
        raise ConfigError(
            "vocab=parallel divides embedding and head over the ranks, and with executor=mpmd each "
            "rank updates its part, but the optimizer needs whole parameters (norms, factors or "
            "products of them). Use vocab=whole, or executor=spmd."
        )
    return on_layers
