"""The library of the programs of ranks: function, PartitionSpecs, donated arguments, compiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ppctl.executors.compiler_options import CompilerPreset
from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.plan_tasks import JOINS, TASKS, Role
from ppctl.executors.mpmd.rank_programs import (
    NUMBERS,
    SHARED,
    RankRole,
    StageSums,
    finish_rank,
    prepare_rank,
    reduce_stage,
    without_shared,
)
from ppctl.executors.mpmd.task_programs import joined, run_part, run_task
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.ir import PART_KINDS
from ppctl.schedule.mesh_axes import DATA_AXES, RANK_AXES

Tree = Any


class ProgramLibrary:
    """The function, PartitionSpecs, donated arguments and compiler preset of each program.

    param_specs: those of each rank's parameters. once: functions by kind of the programs after the
    gradients; once_specs(program, name): the specs of a value that only these have, or None;
    whole_arrays: the kinds that take a rank's whole arrays, for XLA to divide.
    """

    def __init__(
        self,
        model: Model,
        param_specs: dict[RankRole, Tree],
        sum_axes: tuple[str, ...] = RANK_AXES,
        *,
        is_one_device: bool = False,  # whether a rank is
        once: Mapping[str, Callable[..., tuple]] | None = None,
        once_specs: Callable[[ProgramId, str], Tree | None] = lambda *_: None,
        whole_arrays: Sequence[str] = (),
    ):
        self.model, self.param_specs, self.sum_axes = model, param_specs, sum_axes
        self.is_one_device = is_one_device
        self.once, self.once_specs, self.auto = once or {}, once_specs, model.auto
        self.whole_arrays = whole_arrays
        self.device_axes = tuple(axis for axis in RANK_AXES if axis not in model.auto)

    def auto_axes(self, program: ProgramId) -> tuple[str, ...]:
        """Return the axes over which XLA divides a program: all of whole arrays, or the model's."""
        if program.kind in self.whole_arrays:
            return RANK_AXES
        return self.auto if program.kind in TASKS else ()

    def specs(self, program: ProgramId, name: str) -> Tree:
        """Return the spec of a value of a program: a tree, or one spec for all its leaves."""
        found = self.once_specs(program, name)
        if found is not None:
            return found
        if name == "params":
            return self.param_specs[program.shape]
        if name == "grads":
            which = self.model.stack.options.trainable
            specs = trained_part(self.param_specs[program.shape], which)
            if program.shape.shared != "gives":
                return specs
            return specs | {"embed_head": without_shared(self.model, specs["embed_head"])}
        if name in SHARED:
            return self.model.keep(self.param_specs[program.shape]["embed_head"], self.model.shared)
        if name in ("inputs", "targets"):
            return P(DATA_AXES)
        if name == "sum":
            return self._sum_specs
        if self.auto and name in ("embed_head", "acc_embed_head"):
            specs = self.model.auto_specs["embed_head"]
            trained = self.model.trained_embed_head(specs)
            return specs if name == "embed_head" else self._with_devices(trained)
        # gathered parameters: each device has its shard in the stage, or all have the same
        return P() if name in ("embed_head", *NUMBERS) else P(self.device_axes)

    def _with_devices(self, specs: Tree) -> Tree:
        """Return the specs of sums with an entry a device, from those of their parameters."""
        return jax.tree.map(lambda spec: P(self.device_axes, *spec), specs)

    def all_specs(self, program: ProgramId, names: Sequence[str]) -> list[Tree]:
        """Return the specs of all values that a program reads, or of all that it writes."""
        shape = program.shape
        stages = shape.stages if isinstance(shape, RankRole) else (shape,)
        layers = {name: iter(stages) for name in ("w", "acc")}
        return [
            self._layers_specs(name, next(layers[name]))
            if name in layers
            else self.specs(program, name)
            for name in names
        ]

    def _layers_specs(self, name: str, role: Role | StageSums) -> Tree:
        """Return the specs of a stage's layers ("w") as tasks receive them, or of their sums."""
        model, number = self.model, role.num_layers
        one = model.auto_specs["layers"] if self.auto else model.layer_specs
        if name == "acc" and not self.auto:
            return P(self.device_axes)
        if one is None:
            return P()
        one = model.inputs.extended(one, P(), P())
        stacked = jax.tree.map(lambda spec: P(None, *spec), one)
        specs = stacked if number > model.unroll else [one] * number
        return specs if name == "w" else self._with_devices(model.trained_weights(specs))

    @property
    def _sum_specs(self) -> Tree:
        """The specs of a stage's reduced sums of gradients, stacked."""
        layers = next(iter(self.param_specs.values()))["layers"]
        staged = self.model.trained_weights(self.model.inputs.extended(layers, P(), P()))
        return jax.tree.map(lambda spec: P(*spec[2:]), staged)

    def function(self, program: ProgramId) -> Callable[..., tuple]:
        """Return a program's function of one device, from the values of its reads to its writes."""
        model, shape = self.model, program.shape
        if program.kind == "prepare":
            return partial(prepare_rank, model, shape, program, self.param_specs[shape])
        if program.kind == "reduce":
            return partial(reduce_stage, model, shape, self._sum_specs, self.sum_axes)
        if program.kind == "finish":
            specs = self.param_specs[shape]
            return partial(finish_rank, model, shape, program, specs, self.sum_axes)
        if program.kind in JOINS:
            return partial(joined, program.kind)
        if program.kind in self.once:
            return partial(self.once[program.kind], program)

        def task(*values: Any) -> tuple:
            v = dict(zip(program.reads, values, strict=True))
            if program.kind in PART_KINDS:
                found = run_part(model, program.kind, v)
            else:
                found = run_task(model, program.kind, shape, v)
            return tuple(found[name] for name in program.writes)

        return task

    def donated(self, program: ProgramId) -> tuple[str, ...]:
        """Return the values read whose memory the values written reuse."""
        if program.kind in ("prepare", "reduce"):
            return ()
        if program.kind == "finish":  # sums that become gradients unchanged: of one chunk or device
            passed = (program.reads.count("sum") == 1) * ("sum",)
            passed += self.is_one_device * ("acc_embed_head",)
            return tuple(name for name in passed if name in program.reads)
        replaced = [name for name in program.reads if name in program.writes]
        if program.kind == "F":
            replaced += ["x"] * ("x" in program.reads)
        elif program.kind in ("B", "I"):
            replaced += ["gy"] * ("gy" in program.reads and "gx" in program.writes)
        return tuple(replaced)

    def preset(self, program: ProgramId) -> CompilerPreset:
        """Return the compiler's preset for a program, on CPU."""
        if program.kind == "prepare" or program.kind in self.once:
            return "once"
        return "quick" if program.kind in TASKS and not self.model.remat.recomputes else "full"
