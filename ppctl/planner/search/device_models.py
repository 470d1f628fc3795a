"""The model as one device holds it, for each division of stages that `ppctl tune` considers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import shapes_on_device
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack
from ppctl.planner.cost.predict_step import param_bytes
from ppctl.planner.cost.task_flops import with_embed_head_of, work_of
from ppctl.planner.search.layout_space import DeviceModel, divisors
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.mesh_axes import STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.pipeline_request import divided_by_xla, divided_stack, shards_in_stages

Tree = Any
LEAST_WIDTH = 256  # columns of x over tp: smaller products are not worth the sends
LEAST_TOKENS = 4096  # of a sequence on each device along cp, likewise
STAGE_RECORDS = tuple(axis for axis in MESH_AXES if axis.in_stage)


@dataclass(frozen=True)
class DividedModels:
    """A model to divide: its stack as the hardware runs it, shapes of state and global batch.

    axes: how stages are divided; only their sizes vary.
    """

    stack: Stack
    state: Tree  # in natural order
    batch: Mapping[str, jax.ShapeDtypeStruct]
    dtype: jnp.dtype
    axes: StageAxes

    def __call__(self, division: MeshSizes, vocab_parts: int = 0) -> DeviceModel:
        """Return the model of one device, made once. ConfigError where it cannot be divided so.

        division: sizes of `STAGE_AXES`; vocab_parts: of the vocabulary, one on each rank; 0: whole.
        """
        key = division, vocab_parts
        if key not in self._made:
            self._made[key] = self._model(*key)
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[MeshSizes, int], DeviceModel]:
        return {}

    def _axes(self, division: MeshSizes, vocab_parts: int = 0) -> StageAxes:
        sizes = {name: getattr(division, name) for name in STAGE_AXES}
        return replace(self.axes, **sizes, vocab_parts=vocab_parts)

    def _model(self, division: MeshSizes, vocab_parts: int) -> DeviceModel:
        # 1. a device's shards
        axes = self._axes(division, vocab_parts)
        divided = divided_stack(self.stack, axes, self.batch)
        shards, _ = shards_in_stages(self.stack, divided, axes)
        held = shapes_on_device(self.state["params"], shards)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), held["layers"])

        # 2. their work; layers do not depend on the vocabulary
        shapes = held["embed_head"], layer, self._example
        how = 1, Remat.NONE, 0, self.dtype, axes
        model = Model(self.stack.in_shards(divided), *shapes, *how, parts=divided.parts)
        is_whole = vocab_parts == 0
        work = work_of(model) if is_whole else with_embed_head_of(self(division).work, model)
        return DeviceModel(work, param_bytes(self.state, model, shards))

    @property
    def _example(self) -> dict[str, jax.ShapeDtypeStruct]:
        one = lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype)  # noqa: E731
        return {name: one(a) for name, a in self.batch.items()}

    def divisions(
        self, requested: Mapping[str, Sequence[int] | None], num_devices: int, host_devices: int
    ) -> list[MeshSizes]:
        """Return the divisions of a stage to choose from.

        requested: sizes of each of `STAGE_AXES`, None: those suited to the model. ConfigError for a
        size that does not divide devices, a host or the model.
        """
        sizes = list[MeshSizes]()
        for division in self._candidates(requested, num_devices, host_devices):
            if by_xla := divided_by_xla(self.stack, self._axes(division)):
                name, size = by_xla[0], getattr(division, by_xla[0])
                raise ConfigError(
                    f"tune.{name}: {size} has XLA divide this model by its sharding, whose sends "
                    f"along {name} no trace shows and no search counts. Use "
                    f"tune.{name}=[1] or StackOptions.divided."
                )
            try:
                self(division)
            except ConfigError:
                if any(each is not None for each in requested.values()):
                    raise
                continue
            sizes.append(division)
        return sizes

    def _candidates(
        self, requested: Mapping[str, Sequence[int] | None], num_devices: int, host_devices: int
    ) -> Iterator[MeshSizes]:
        """Yield the divisions of the request, or all that leave a device enough to do."""
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

        # 2. sizes that leave a device enough columns and tokens
        embed_head = self.state["params"]["embed_head"]
        x = jax.eval_shape(self.stack.embed, embed_head, self._example["inputs"])
        is_divided = self.stack.options.divided is not None and len(x.shape) > 2
        width, num_tokens = (x.shape[-1], x.shape[1]) if is_divided else (0, 0)
        enough = {"weights": width // LEAST_WIDTH, "tokens": num_tokens // LEAST_TOKENS}
        for axis in STAGE_RECORDS:
            most = enough.get(axis.divides[0], 1)
            limit = min([num_devices, *[host_devices] * axis.in_one_host, most])
            chosen.setdefault(axis.name, [size for size in sizes if size <= max(1, limit)])
        for combination in product(*(chosen[name] for name in STAGE_AXES)):
            division = MeshSizes(**dict(zip(STAGE_AXES, combination, strict=True)))
            if num_devices % division.num_devices == 0:
                yield division
