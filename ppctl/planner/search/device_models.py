"""The work and parameter bytes of one device, for each division of stages in `ppctl tune`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError, as_setting, written_as
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import shapes_on_device
from ppctl.executors.work.parameter_bytes import ParamBytes, param_bytes
from ppctl.executors.work.roofline import ModelWork
from ppctl.executors.work.task_flops import with_embed_head_of, work_of
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack
from ppctl.planner.search.layout_space import divisors
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.mesh_axes import STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.pipeline_request import divided_by_xla, divided_stack, shards_in_stages

Tree = Any
# below these sizes, sends outweigh the saved work
LEAST_WIDTH = 256  # columns of x per device along tp
LEAST_TOKENS = 4096  # tokens of a sequence per device along cp
STAGE_RECORDS = tuple(axis for axis in MESH_AXES if axis.in_stage)


class DeviceModel(NamedTuple):
    """The model of one device of a divided stage: its work on one example, its bytes."""

    work: ModelWork
    params: ParamBytes
    counted: Model  # the traced model, with a batch of one example


# (sizes of `STAGE_AXES`, number of vocabulary parts; 0: undivided) -> the model of one device
DeviceModels = Callable[[MeshSizes, int], DeviceModel]
Requested = Mapping[str, Sequence[int] | None]  # sizes by name of `STAGE_AXES`; None: open


def example(batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of one example of a batch."""
    return {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}


def device_models(
    stack: Stack,
    state: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
    axes: StageAxes,
    update_flops: int,
) -> DeviceModels:
    """Return a memoized function from a division of stages to the work and bytes of one device.

    state: shapes of the training state, layers in model order. batch: shapes of a global batch.
    axes: axes whose sizes the function replaces. update_flops: as in `ParamBytes`. The function
    raises ConfigError for a division that the model does not allow.
    """

    @cache
    def model(division: MeshSizes, vocab_parts: int) -> DeviceModel:
        # 1. a device's shards
        there = replace(axes, **_sizes(division), vocab_parts=vocab_parts)
        divided = divided_stack(stack, there, batch)
        shards, _ = shards_in_stages(stack, divided, there)
        if there.ep > 1 and not any("ep" in shard.axes for shard in shards.values()):
            raise ConfigError(
                f"tune.ep: {there.ep} divides experts, and the model has no expert. Use "
                "tune.ep=[1]."
            )
        held = shapes_on_device(state["params"], shards)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])

        # 2. their work; a divided vocabulary does not change the work of layers
        shapes, how = (held["embed_head"], layer, example(batch)), (1, Remat.NONE, 0, dtype, there)
        counted = Model(stack.in_shards(divided), *shapes, *how, parts=divided.parts)
        whole = with_embed_head_of(model(division, 0).work, counted) if vocab_parts else None
        params = param_bytes(state, counted, shards, update_flops)
        return DeviceModel(whole or work_of(counted), params, counted)

    return model


def _sizes(division: MeshSizes) -> dict[str, int]:
    return {name: getattr(division, name) for name in STAGE_AXES}


def stage_divisions(
    models: DeviceModels,
    stack: Stack,
    x: jax.ShapeDtypeStruct,
    axes: StageAxes,
    requested: Requested,
    num_devices: int,
    host_devices: int,
) -> list[MeshSizes]:
    """Return the candidate divisions of a stage: the requested sizes, or those that suit the model.

    x: shape of one example's activation between layers. ConfigError for a requested size that does
    not divide the devices, a host or the model.
    """
    sizes = list[MeshSizes]()
    is_divided = stack.options.divided is not None and len(x.shape) > 2
    for division in _candidates(requested, x if is_divided else None, num_devices, host_devices):
        # 1. refuse divisions by XLA: its sends are not in the trace
        if by_xla := divided_by_xla(stack, replace(axes, **_sizes(division))):
            name, size = by_xla[0], getattr(division, by_xla[0])
            raise ConfigError(
                f"tune.{name}: {size} has XLA divide this model by its sharding, and its sends "
                f"along {name} cannot be predicted. Use tune.{name}=[1] or "
                "StackOptions.divided."
            )
        # 2. drop chosen sizes that the model does not allow; requested ones are an error
        try:
            with written_as(_as_choice):
                models(division, 0)
        except ConfigError:
            chosen = (name for name, each in requested.items() if each is None)
            if all(getattr(division, name) == 1 for name in chosen):
                raise
            continue
        sizes.append(division)
    return sizes


def _as_choice(name: str, value: object, _argument: str | None) -> str:
    """Return a setting as text; an axis inside a stage as tune's: tune.tp=[2] for mesh.tp=2."""
    group, _, axis = name.partition(".")
    if (group, axis in STAGE_AXES) != ("mesh", True):
        return as_setting(name, value)
    return as_setting(f"tune.{axis}", None if value is None else f"[{value}]")


def _candidates(
    requested: Requested, x: jax.ShapeDtypeStruct | None, num_devices: int, host_devices: int
) -> Iterator[MeshSizes]:
    """Yield divisions with the requested sizes; on open axes, with sizes that leave enough work."""
    # 1. check the requested sizes
    sizes, chosen = divisors(num_devices), dict[str, Sequence[int]]()
    for axis in STAGE_RECORDS:
        name, asked = axis.name, requested[axis.name]
        for size in asked or ():
            if num_devices % size:
                raise ConfigError(
                    f"tune.{name}: {size} does not divide {num_devices} devices. Use some of "
                    f"{', '.join(map(str, sizes))}."
                )
        if asked is not None:
            chosen[name] = asked
        if axis.in_one_host and max(asked or [1]) > host_devices:
            raise ConfigError(
                f"tune.{name}: {max(chosen[name])} would go over several hosts of "
                f"{host_devices} devices, but {name} sends in every layer and needs the links "
                f"inside one. Use {host_devices} at most."
            )

    # 2. choose the other sizes: those that leave a device enough work
    enough = {"experts": num_devices}
    if x is not None:
        enough |= {"weights": x.shape[-1] // LEAST_WIDTH, "tokens": x.shape[1] // LEAST_TOKENS}
    for axis in STAGE_RECORDS:
        most = max(enough.get(part, 1) for part in axis.divides)
        limit = min([num_devices, *[host_devices] * axis.in_one_host, most])
        chosen.setdefault(axis.name, [size for size in sizes if size <= max(1, limit)])
    for combination in product(*(chosen[name] for name in STAGE_AXES)):
        division = MeshSizes(**dict(zip(STAGE_AXES, combination, strict=True)))
        # unless requested, ep stays inside a host; if a stage exceeds a host, ep spans hosts first
        is_far = division.num_devices > host_devices and division.ep > 1 and requested["ep"] is None
        if num_devices % division.num_devices == 0 and not is_far:
            yield division
