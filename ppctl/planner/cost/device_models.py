"""The model as one device holds it, for each (tp, cp) that `ppctl tune` considers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
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
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.pipeline_request import divided_by_xla, divided_stack, shards_over_tp

Tree = Any
LEAST_WIDTH = 256  # columns of x over tp: smaller products are not worth the sends
LEAST_TOKENS = 4096  # of a sequence on each device along cp, likewise


def device_models(
    config: Config,
    stack: Stack,
    state: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
) -> DeviceModels:
    """Return a cached function from (tp, cp, ranks of the vocabulary) to one device's model.

    stack: as the hardware runs it; state: shapes, in natural order; batch: shapes of a global one.
    The function raises ConfigError where the model cannot be divided so.
    """

    @cache
    def model_of(tp: int, cp: int, vocab_ranks: int = 1) -> DeviceModel:
        # 1. a device's shards
        axes = _axes(config, tp, cp, vocab_ranks)
        divided = divided_stack(stack, axes, batch)
        shards, _ = shards_over_tp(stack, divided, axes)
        held = shapes_on_device(state["params"], shards)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])

        # 2. their work; layers do not depend on the vocabulary
        shapes = held["embed_head"], layer, _example(batch)
        model = Model(divided, *shapes, 1, Remat.NONE, 0, dtype, axes)
        is_whole = vocab_ranks == 1
        work = work_of(model) if is_whole else with_embed_head_of(model_of(tp, cp).work, model)
        return DeviceModel(work, param_bytes(state, model))

    return model_of


def divisions(
    config: Config,
    stack: Stack,
    embed_head: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    most_tp: int,
    models: DeviceModels,
) -> list[tuple[int, int]]:
    """Return the sizes of (tp, cp) to choose from: by tune.tp and tune.cp, or suited to the model.

    most_tp: the devices of a host. ConfigError for a size that does not divide devices, a host or
    the model.
    """
    sizes = list[tuple[int, int]]()
    for axes in _candidates(config, stack, embed_head, _example(batch), most_tp):
        if divided_by_xla(stack, axes):
            raise ConfigError(
                f"tune.tp: {axes.tp} has XLA divide this model (Stack.sharding), whose sends along "
                "tp no trace shows and no search counts. Use tune.tp=[1] or Stack.divided."
            )
        try:
            models(axes.tp, axes.cp)
        except ConfigError:
            if config.tune.tp is not None or config.tune.cp is not None:
                raise
            continue
        sizes.append((axes.tp, axes.cp))
    return sizes


def _example(batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}


def _axes(config: Config, tp: int, cp: int, vocab_ranks: int = 1) -> StageAxes:
    executor = config.executor
    assert isinstance(executor, Pipelined), "others have one layout"
    context = executor.context if isinstance(executor, Mpmd) else "gather"
    return StageAxes(tp, cp, executor.sequence_parallel, vocab_ranks, context)


def _candidates(
    config: Config,
    stack: Stack,
    embed_head: Tree,
    example: Mapping[str, jax.ShapeDtypeStruct],
    most_tp: int,
) -> Iterator[StageAxes]:
    """Yield the sizes of the request, or all that leave a device enough to do."""
    # 1. check the requested sizes
    num_devices = config.tune.devices or config.mesh.num_devices
    tps, cps, sizes = config.tune.tp, config.tune.cp, divisors(num_devices)
    for name, size in (*(("tp", tp) for tp in tps or ()), *(("cp", cp) for cp in cps or ())):
        if num_devices % size:
            raise ConfigError(
                f"tune.{name}: {size} does not divide {num_devices} devices. Use some of "
                f"{', '.join(map(str, sizes))}."
            )
    if tps is not None and max(tps) > most_tp:
        raise ConfigError(
            f"tune.tp: {max(tps)} would go over several hosts of {most_tp} devices, but tp sends "
            f"in every layer and needs the links inside one. Use {most_tp} at most."
        )

    # 2. sizes that leave a device enough columns and tokens
    x = jax.eval_shape(stack.embed, embed_head, example["inputs"])
    divides, is_text = stack.divided is not None, len(x.shape) > 2
    width, num_tokens = (x.shape[-1], x.shape[1]) if divides and is_text else (0, 0)
    if tps is None:
        most = min(most_tp, width // LEAST_WIDTH)
        tps = [tp for tp in sizes if tp <= max(1, most)]
    if cps is None:
        cps = [cp for cp in sizes if cp <= max(1, num_tokens // LEAST_TOKENS)]
    for tp in tps:
        yield from (_axes(config, tp, cp) for cp in cps if num_devices % (tp * cp) == 0)
