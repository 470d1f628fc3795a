"""A model as one device has it, for each way to divide its stages over tp and cp that `ppctl tune` looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from ppctl.planner.count import work_of
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
    params, trainable = state["params"], stack.trainable
    example = {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}
    found = {}
    for axes in (WHOLE, *_divisions(config, stack, params["ends"], example, most_tp)):
        if (axes.tp, axes.cp) in found:
            continue
        if divided_by_xla(stack, axes):
            raise ConfigError(
                f"tune.tp: {axes.tp} has XLA divide this model (Stack.sharding), and what devices then send along tp "
                "is in no trace, so that a search would take it for free. Use tune.tp=[1], or a Stack.divided."
            )
        try:
            divided = divided_stack(stack, axes, batch)
        except ConfigError:
            if config.tune.tp is not None or config.tune.cp is not None:
                raise
            continue
        shards, _ = shards_over_tp(stack, divided, axes)
        held = shapes_on_device(params, shards)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])
        model = Model(divided, held["ends"], layer, example, 1, Remat.NONE, config.executor.unroll, dtype, axes)
        found[axes.tp, axes.cp] = DeviceModel(
            work_of(model), of_one_device(param_bytes(state, dtype, trainable), model)
        )
    return found


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
    executor = config.executor
    assert isinstance(executor, Pipelined), "others have one layout"
    rows, context = executor.sequence_parallel, executor.context
    if executor.IN_TICKS and context == "ring" and max(cps) > 1:
        raise ConfigError(
            "executor.context=ring with executor=spmd needs executor.idle=compute where there is a pipeline, which "
            "`ppctl tune` does not predict. Use executor.context=gather, executor=mpmd, or tune.cp=[1]."
        )
    for tp in tps:
        yield from (StageAxes(tp, cp, rows, context) for cp in cps if num_devices % (tp * cp) == 0)
