"""The model as one device holds it, for each division of stages that `ppctl tune` considers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.config import Config
from ppctl.config.groups.executor_settings import Mpmd, Pipelined
from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import shapes_on_device
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack
from ppctl.planner.cost.step_time import param_bytes
from ppctl.planner.cost.task_flops import with_embed_head_of, work_of
from ppctl.planner.search.layout_space import DeviceModel, DeviceModels, divisors
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.mesh_axes import STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.pipeline_request import divided_by_xla, divided_stack, shards_in_stages

Tree = Any
LEAST_WIDTH = 256  # columns of x over tp: smaller products are not worth the sends
LEAST_TOKENS = 4096  # of a sequence on each device along cp, likewise
STAGE_RECORDS = tuple(axis for axis in MESH_AXES if axis.in_stage)


def device_models(
    config: Config,
    stack: Stack,
    state: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
) -> DeviceModels:
    """Return a cached function from (division, ranks of the vocabulary) to one device's model.

    stack: as the hardware runs it; state: shapes, in natural order; batch: shapes of a global one.
    The function raises ConfigError where the model cannot be divided so.
    """

    @cache
    def model_of(division: MeshSizes, vocab_ranks: int = 1) -> DeviceModel:
        # 1. a device's shards
        axes = _axes(config, division, vocab_ranks)
        divided = divided_stack(stack, axes, batch)
        shards, _ = shards_in_stages(stack, divided, axes)
        held = shapes_on_device(state["params"], shards)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])

        # 2. their work; layers do not depend on the vocabulary
        shapes = held["embed_head"], layer, _example(batch)
        model = Model(divided, *shapes, 1, Remat.NONE, 0, dtype, axes)
        is_whole = vocab_ranks == 1
        work = work_of(model) if is_whole else with_embed_head_of(model_of(division).work, model)
        return DeviceModel(work, param_bytes(state, model))

    return model_of


def divisions(
    config: Config,
    stack: Stack,
    embed_head: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    host_devices: int,
    models: DeviceModels,
) -> list[MeshSizes]:
    """Return the divisions of a stage to choose from: by tune.tp and the like, or by the model.

    ConfigError for a size that does not divide devices, a host or the model.
    """
    sizes = list[MeshSizes]()
    is_requested = any(getattr(config.tune, name) is not None for name in STAGE_AXES)
    for division in _candidates(config, stack, embed_head, _example(batch), host_devices):
        if by_xla := divided_by_xla(stack, _axes(config, division)):
            name, size = by_xla[0], getattr(division, by_xla[0])
            raise ConfigError(
                f"tune.{name}: {size} has XLA divide this model (Stack.sharding), whose sends "
                f"along {name} no trace shows and no search counts. Use tune.{name}=[1] or "
                "Stack.divided."
            )
        try:
            models(division)
        except ConfigError:
            if is_requested:
                raise
            continue
        sizes.append(division)
    return sizes


def _example(batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}


def _axes(config: Config, division: MeshSizes, vocab_ranks: int = 1) -> StageAxes:
    executor = config.executor
    assert isinstance(executor, Pipelined), "others have one layout"
    context = executor.context if isinstance(executor, Mpmd) else "gather"
    how = {"vocab_ranks": vocab_ranks, "context": context}
    return StageAxes.of(division.by_axis, sequence_parallel=executor.sequence_parallel, **how)


def _candidates(
    config: Config,
    stack: Stack,
    embed_head: Tree,
    example: Mapping[str, jax.ShapeDtypeStruct],
    host_devices: int,
) -> Iterator[MeshSizes]:
    """Yield the divisions of the request, or all that leave a device enough to do."""
    # 1. check the requested sizes
    num_devices = config.tune.devices or config.mesh.num_devices
    sizes, chosen = divisors(num_devices), dict[str, list[int]]()
    for axis in STAGE_RECORDS:
        name, requested = axis.name, getattr(config.tune, axis.name)
        for size in requested or ():
            if num_devices % size:
                raise ConfigError(
                    f"tune.{name}: {size} does not divide {num_devices} devices. Use some of "
                    f"{', '.join(map(str, sizes))}."
                )
        if requested is not None:
            chosen[name] = requested
        if axis.in_one_host and max(requested or [1]) > host_devices:
            raise ConfigError(
                f"tune.{name}: {max(chosen[name])} would go over several hosts of {host_devices} "
                f"devices, but {name} sends in every layer and needs the links inside one. Use "
                f"{host_devices} at most."
            )

    # 2. sizes that leave a device enough columns and tokens
    x = jax.eval_shape(stack.embed, embed_head, example["inputs"])
    divides, is_text = stack.divided is not None, len(x.shape) > 2
    width, num_tokens = (x.shape[-1], x.shape[1]) if divides and is_text else (0, 0)
    most = {"weights": width // LEAST_WIDTH, "tokens": num_tokens // LEAST_TOKENS}
    for axis in STAGE_RECORDS:
        limit = min([num_devices, *[host_devices] * axis.in_one_host, most.get(axis.divides[0], 1)])
        chosen.setdefault(axis.name, [size for size in sizes if size <= max(1, limit)])
    for combination in product(*(chosen[name] for name in STAGE_AXES)):
        division = MeshSizes(**dict(zip(STAGE_AXES, combination, strict=True)))
        if num_devices % division.num_devices == 0:
            yield division
