"""A model as one device has it, for each way to divide its stages over tp and cp that `ppctl tune` looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.config import Config
from ppctl.config.executor import Pipelined
from ppctl.errors import ConfigError
from ppctl.executors.layout import shapes_on_device
from ppctl.executors.mpmd.tasks import Model
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import Stack
from ppctl.planner.count import with_ends_of, work_of
from ppctl.planner.space import DeviceModel, divisors
from ppctl.planner.step_time import of_one_device, param_bytes
from ppctl.schedule.remat import Remat
from ppctl.training.request import divided_by_xla, divided_stack, shards_over_tp

Tree = Any
LEAST_WIDTH = 256  # columns of x over tp: with fewer, products are too small to be worth what is sent
LEAST_TOKENS = 4096  # of a sequence on each device along cp, likewise


def device_models(
    config: Config, stack: Stack, state: Tree, batch: Mapping[str, jax.ShapeDtypeStruct], dtype: jnp.dtype, most_tp: int
) -> dict[tuple[int, int], DeviceModel]:
    """Return the model by (tp, cp): whole, and for those of tune.tp and tune.cp, or those that suit it.

    stack: as the hardware runs it; state: shapes, in natural order; batch: shapes of a global one; most_tp: the devices
    of a host.

    Raises:
        ConfigError: tune.tp or tune.cp has a size that the devices, a host or the model cannot be divided by.
    """
    params, found = state["params"], dict[tuple[int, int], DeviceModel]()
    for axes in (WHOLE, *_divisions(config, stack, params["ends"], _example(batch), most_tp)):
        if (axes.tp, axes.cp) in found:
            continue
        if divided_by_xla(stack, axes):
            raise ConfigError(
                f"tune.tp: {axes.tp} has XLA divide this model (Stack.sharding), and what devices then send along tp "
                "is in no trace, so that a search would take it for free. Use tune.tp=[1], or a Stack.divided."
            )
        try:
            model = _model_of(config, stack, params, batch, dtype, axes)
        except ConfigError:
            if config.tune.tp is not None or config.tune.cp is not None:
                raise
            continue
        found[axes.tp, axes.cp] = DeviceModel(
            work_of(model), of_one_device(param_bytes(state, dtype, stack.trainable), model)
        )
    return found


def models_by_parts(
    config: Config,
    stack: Stack,
    state: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
    models: Mapping[tuple[int, int], DeviceModel],
) -> Callable[[int, int, int], DeviceModel]:
    """Return a function from (tp, cp, pp) to the model whose vocabulary lies over pp ranks too; `models`: before that.

    What it has counted it keeps.
    """

    @cache
    def by_parts(tp: int, cp: int, pp: int) -> DeviceModel:
        model = _model_of(config, stack, state["params"], batch, dtype, _axes(config, tp, cp, pp))
        work = with_ends_of(models[tp, cp].work, model)
        return DeviceModel(work, of_one_device(param_bytes(state, dtype, stack.trainable), model))

    return by_parts


def _model_of(
    config: Config,
    stack: Stack,
    params: Tree,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
    axes: StageAxes,
) -> Model:
    """Return the model of one device. ConfigError where it cannot be divided so."""
    divided = divided_stack(stack, axes, batch)
    shards, _ = shards_over_tp(stack, divided, axes)
    held = shapes_on_device(params, shards)
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])
    return Model(divided, held["ends"], layer, _example(batch), 1, Remat.NONE, config.executor.unroll, dtype, axes)


def _example(batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}


def _axes(config: Config, tp: int, cp: int, vocab_ranks: int = 1) -> StageAxes:
    executor = config.executor
    assert isinstance(executor, Pipelined), "others have one layout"
    return StageAxes(tp, cp, executor.sequence_parallel, executor.context, vocab_ranks)


def _divisions(
    config: Config, stack: Stack, ends: Tree, example: Mapping[str, jax.ShapeDtypeStruct], most_tp: int
) -> Iterator[StageAxes]:
    """Yield the sizes to try, those of the request or all that leave a device enough to do."""
    num_devices = config.tune.devices or config.mesh.num_devices
    tps, cps = config.tune.tp, config.tune.cp
    for name, sizes in (("tp", tps), ("cp", cps)):
        for size in sizes or ():
            if num_devices % size:
                raise ConfigError(
                    f"tune.{name}: {size} does not divide {num_devices} devices. Use some of "
                    f"{', '.join(map(str, divisors(num_devices)))}."
                )
    if tps is not None and max(tps) > most_tp:
        raise ConfigError(
            f"tune.tp: {max(tps)} would go over several hosts of {most_tp} devices: what tp sends in every layer needs "
            f"the links inside one. Use {most_tp} at most."
        )
    x = jax.eval_shape(stack.embed, ends, example["inputs"])
    divides, is_text = stack.divided is not None, len(x.shape) > 2
    width, num_tokens = (x.shape[-1], x.shape[1]) if divides and is_text else (0, 0)
    if tps is None:
        tps = [tp for tp in divisors(num_devices) if tp == 1 or (tp <= most_tp and width // tp >= LEAST_WIDTH)]
    if cps is None:
        cps = [cp for cp in divisors(num_devices) if cp == 1 or num_tokens // cp >= LEAST_TOKENS]
    if config.executor.IN_TICKS and _axes(config, 1, 1).context == "ring" and max(cps) > 1:
        raise ConfigError(
            "executor.context=ring with executor=spmd needs executor.idle=compute where there is a pipeline, which "
            "`ppctl tune` does not predict. Use executor.context=gather, executor=mpmd, or tune.cp=[1]."
        )
    for tp in tps:
        yield from (_axes(config, tp, cp) for cp in cps if num_devices % (tp * cp) == 0)
