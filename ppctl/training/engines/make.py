"""The engine of a request: the one place where executors are told apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ppctl.executors.layout import Layout, layer_specs, shapes_on_device
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.reference import reference
from ppctl.executors.spmd.memory import spmd_bytes
from ppctl.executors.spmd.program import Options, spmd
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import Stack
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.simulate import simulate
from ppctl.schedule.ticks import Ticks, forward_only, ticks
from ppctl.training import optim
from ppctl.training.engines import Engine
from ppctl.training.engines.mpmd import Mpmd
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.engines.post_validation import PostValidated
from ppctl.training.engines.states import States
from ppctl.training.execution import Execution

Tree = Any
LossAndGrads = Callable[[Tree, Tree], tuple[jax.Array, Tree]]  # (params, batch) -> (loss, gradients)
Loss = Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]  # (params, batch) -> (loss, number of losses)


def make_engine(
    stack: Stack,
    model: Model,
    states: States,
    schedule: Schedule,
    lowered: Ticks | None,
    shapes: Tree,
    optimizer: optax.GradientTransformation,
    lr_schedule: optax.Schedule | None,
    execution: Execution,
    clip_norm: float | None,
    costs: Costs,
) -> Engine:
    """Return the engine that runs a schedule.

    stack: the whole model; model: as one device computes it; shapes: of a global batch; clip_norm: of the optimizer's
    clipping; costs: relative, of tasks.
    """
    if execution.dispatches_tasks:
        training, evaluation = ((each, dispatch_order(each, costs)) for each in (schedule, forward_only(schedule)))
        engine = Mpmd(states, shapes, model, (training, evaluation), optimizer, lr_schedule, dict(execution.xla_flags))
        if not execution.post_validation:
            return engine
        return PostValidated(engine, partial(optim.needs_no_clipping, max_norm=clip_norm))
    if lowered is None:
        gradients, loss = _by_reference(stack, model, states.layout, execution)
        return OneProgram(states, shapes, gradients, loss, optimizer, lr_schedule, flags=execution.xla_flags)
    gradients, loss = _in_ticks(model, states.layout, schedule, lowered, execution, costs)
    gather = tick_options(states.layout, execution, model.dtype).gather
    held = spmd_bytes(model, states.layout, lowered, gather, states.staged["params"]["layers"])
    return OneProgram(states, shapes, gradients, loss, optimizer, lr_schedule, held, execution.xla_flags)


def model_of(
    stack: Stack,
    states: States,
    shapes: Tree,
    num_microbatches: int,
    execution: Execution,
    dtype: jnp.dtype,
    axes: StageAxes = WHOLE,
) -> Model:
    """Return the model as the tasks of one device see it; stack: divided over `axes`."""
    mesh, layout = states.layout.mesh, states.layout
    params = shapes_on_device(states.natural["params"], {} if layout.auto else layout.shards)
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    size = shapes["inputs"].shape[0] // (mesh.shape["dp"] * mesh.shape["fsdp"] * num_microbatches)
    microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype), shapes)
    specs = None
    if execution.dispatches_tasks and execution.gathers_by_layer and mesh.shape["fsdp"] > 1:
        specs = layer_specs(states.layout.staged_specs(states.staged["params"])["layers"])
    auto_specs = layout.auto_specs({"ends": params["ends"], "layers": layer}) if layout.auto else None
    sizes = num_microbatches, execution.remat, execution.unroll, dtype, axes
    divided = layout.own_ends(params["ends"]), specs, auto_specs
    return Model(stack, params["ends"], layer, microbatch, *sizes, *divided, in_order=_is_gpu(layout))


def _by_reference(stack: Stack, model: Model, layout: Layout, execution: Execution) -> tuple[LossAndGrads, Loss]:
    """Return the gradients, and the loss of an evaluation, that devices take without a pipeline.

    The reference knows layers in natural order only.
    """

    def gradients(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        loss, grads = of(with_grads=True)(layout.to_natural(params), batch)
        return loss, layout.to_staged(grads)

    of = partial(
        reference,
        stack,
        num_microbatches=model.num_microbatches,
        remat=execution.remat,
        unroll=execution.unroll,
        dtype=model.dtype,
    )
    return gradients, lambda params, batch: of(with_grads=False)(layout.to_natural(params), batch)


def _in_ticks(
    model: Model, layout: Layout, schedule: Schedule, lowered: Ticks, execution: Execution, costs: Costs
) -> tuple[LossAndGrads, Loss]:
    """Return the gradients, and the loss of an evaluation, that ranks take in lockstep."""
    options = tick_options(layout, execution, model.dtype)
    evaluation = ticks(forward_only(schedule), costs, execution.remat)
    return spmd(model.stack, layout, lowered, options), spmd(model.stack, layout, evaluation, options)


def tick_options(layout: Layout, execution: Execution, dtype: jnp.dtype) -> Options:
    """Return how a program of ticks is written for the devices of a layout."""
    return Options(
        remat=execution.remat,
        skip_idle=execution.idle != "compute",
        gather=execution.gather if layout.mesh.shape["fsdp"] > 1 else "step",  # nothing is gathered
        unroll=execution.unroll,
        dtype=dtype,
        loops=_is_gpu(layout),
    )


def _is_gpu(layout: Layout) -> bool:
    return layout.mesh.devices.flat[0].platform in ("gpu", "cuda")


def dispatch_order(schedule: Schedule, costs: Costs) -> list[Task]:
    """Return the tasks by their start on free-running ranks; a task comes after those that it reads from."""
    start_s = simulate(schedule, costs).start_s  # in an order that ranks can run: ties keep it
    return sorted(start_s, key=start_s.__getitem__)
