"""Checks of the arguments of `ppctl.pipeline`: schedule, batch, partition and model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from ppctl.errors import ConfigError, setting
from ppctl.executors import parameter_layout as layout
from ppctl.executors.model_shapes import Model
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.executors.stage.jaxpr_flops import RelativeCosts
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.network import Network
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import DividedStack, Stack, num_examples, over_ranks, shapes_like
from ppctl.schedule import mesh_axes
from ppctl.schedule.families.registry import FamilyWithKnobs, family
from ppctl.schedule.fused_pairs import with_pairs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.partition import Partition, explicit, uniform
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.schedule.validation import validate
from ppctl.training.pipeline import call_checks
from ppctl.training.pipeline.engines.rank_states import GroupModel
from ppctl.training.pipeline.execution import Execution

Tree = Any
AnyModel = Stack | Network
AnySchedule = str | FamilyWithKnobs | Schedule
Shapes = Mapping[str, jax.ShapeDtypeStruct]  # shapes of a global batch by name
Knobs = Mapping[str, float]  # settings of a schedule family, by name
CostsOf = Callable[[], RelativeCosts]
XLA_AXES = mesh_axes.axes_dividing("weights")  # axes that XLA can divide by the sharding of a model


def shapes_of(batch: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a global batch. ConfigError if batch sizes differ."""
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))  # noqa: E731
    shapes = jax.tree.map(shape, call_checks.arrays_of(batch))
    sizes = {name: a.shape for name, a in call_checks.named(shapes).items()}
    if len({size[:1] for size in sizes.values()}) > 1 or () in sizes.values():
        text = " and ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"{text} differ in batch size.")
    return shapes


def schedule_for(
    schedule: AnySchedule,
    meshes: RankMeshes,
    num_microbatches: int | None,
    knobs: Knobs,
    shapes: Shapes,
) -> Schedule:
    """Return the requested schedule, validated. ConfigError if it does not divide the batch."""
    plan = _schedule_for(schedule, meshes.num_ranks, num_microbatches, knobs)
    ranks = meshes.sizes_by_rank
    mesh_axes.check_batch(num_examples(shapes["inputs"]), plan.num_microbatches, ranks)
    return plan


def _schedule_for(
    schedule: AnySchedule, num_ranks: int, num_microbatches: int | None, knobs: Knobs
) -> Schedule:
    # 1. build a schedule family, given by name or with settings
    if num_microbatches is not None:
        num_microbatches = call_checks.whole_number("num_microbatches", num_microbatches, 1)
    if isinstance(schedule, str):
        schedule, knobs = family(schedule, **knobs), {}
    if isinstance(schedule, FamilyWithKnobs) and not knobs:
        if num_microbatches is None:
            name, example = schedule.name, 2 * num_ranks
            raise ConfigError(f"schedule={name} needs num_microbatches, such as {example}.")
        return schedule.build(num_ranks, num_microbatches)
    if not isinstance(schedule, FamilyWithKnobs | Schedule):
        raise ConfigError(
            f"schedule={schedule} is not a schedule. Use the name of a family, ppctl.family(name), "
            "or a ppctl.Schedule."
        )
    if isinstance(schedule, FamilyWithKnobs):
        (name, value), *_ = knobs.items()
        call = f'ppctl.family("{schedule.name}", {name}={value!r})'
        raise ConfigError(f"{name}={value} is a setting of the schedule. Use schedule={call}.")
    # 2. check a complete schedule
    plan = validate(schedule)
    if knobs:
        why = f"settings of a schedule family, but {plan.name} is a complete schedule"
        raise ConfigError(f"{', '.join(knobs)}: {why}. Leave it out.")
    if num_microbatches not in (None, plan.num_microbatches):
        why = f"num_microbatches={num_microbatches}, but the schedule has {plan.num_microbatches}"
        raise ConfigError(f"{why}. Leave it out.")
    if plan.num_ranks != num_ranks:
        why = f"The mesh has pp={num_ranks}, but the schedule has {plan.num_ranks} ranks"
        raise ConfigError(f"{why}. Use pp={plan.num_ranks}.")
    return plan


def layered_stack(model: AnyModel, batch: Tree, layers: int | None, dtype: jnp.dtype) -> Stack:
    """Return a model as a stack of layers. ConfigError if it does not accept the batch.

    A network is cut at each `stage_boundary`, or into `layers` layers of about equal work.
    """
    shapes = shapes_of(batch)
    if isinstance(model, Stack):
        call_checks.check_values(call_checks.arrays_of(batch), shapes, model)
        if layers is not None:
            why = f"layers={layers} cuts a Network, but this Stack has {model.num_layers} layers"
            raise ConfigError(f"{why}. Leave it out.")
        return model
    layers = None if layers is None else call_checks.whole_number("layers", layers, 1)
    inputs = shapes_like(shapes["inputs"], 2, first=1)
    wide = jnp.promote_types(dtype, call_checks.parameter_dtype(model))  # dtype of the parameters
    how = {"inputs": inputs, "dtype": wide, "compute": dtype}
    return stack_of(TracedNetwork(model, layers, auto=layers is not None, **how))


def divided(
    stack: Stack, execution: Execution, mesh: Mesh, shapes: Shapes
) -> tuple[DividedStack, layout.RankLayout]:
    """Return (the model on one device, the storage of its parameters).

    ConfigError if XLA cannot divide a model over tp: with spmd, or with gather=layer.
    """
    axes = execution.axes if execution.engine.is_pipelined else WHOLE
    part = divided_stack(stack, axes, shapes)
    shards, auto = shards_in_stages(stack, part, execution.axes)
    if auto and execution.engine.in_ticks:
        raise ConfigError(
            f"{setting('mesh.tp', mesh.shape['tp'])} divides a model by its PartitionSpecs with "
            "executor=mpmd only: in the one program of executor=spmd XLA's collectives would "
            "be in branches that other ranks skip. Use executor=mpmd, or divide the model by "
            "hand (StackOptions.divided with ppctl.parallel)."
        )
    if auto and execution.gather == "layer" and mesh.shape["fsdp"] > 1:
        raise ConfigError(
            f"gather=layer with fsdp={mesh.shape['fsdp']} and tp={mesh.shape['tp']} needs a model "
            "that divides itself over tp (StackOptions.divided), but XLA divides this one "
            "(sharding). Use gather=step."
        )
    return part, layout.RankLayout(mesh_axes.MeshSizes.of(mesh.shape), shards, auto)


def divided_stack(stack: Stack, axes: StageAxes, shapes: Shapes) -> DividedStack:
    """Return the model on one device; the whole model if XLA divides it by its `sharding`.

    ConfigError if the stages of the model cannot be divided.
    """
    options = stack.options
    whole = DividedStack(stack.embed, stack.layer, stack.head, options.sharding)
    is_needed = axes.num_devices > 1 or axes.vocab_parts
    if not is_needed or (options.divided is None and not axes.need_a_model):
        return whole
    # 1. division of the vocabulary over ranks
    by_hand = None if options.divided is None else _divided(options.divided, axes)
    if axes.vocab_parts and (by_hand is None or by_hand.parts is None):
        raise ConfigError(
            f"{setting('schedule.vocab', 'parallel')} divides embedding and head over "
            f"{axes.vocab_parts} ranks by their vocabulary, but this model has no functions for it "
            f"(DividedStack.parts). Use {setting('schedule.vocab', 'whole')}."
        )
    # 2. division over the axes inside a stage
    ones = " ".join(setting(f"mesh.{name}", 1) for name in axes.divided)
    pp, fsdp = setting("mesh.pp"), setting("mesh.fsdp")
    if by_hand is None and options.sharding is None:
        raise ConfigError(
            f"{axes.text} divides stages, but this model does not define how "
            f"(StackOptions.divided, or sharding for tp). Use {ones}, and more of {pp} or {fsdp}."
        )
    if by_hand is None:
        for name in axes.divided.keys() - set(XLA_AXES):
            raise ConfigError(
                f"{setting(f'mesh.{name}', axes.divided[name])} divides stages, but this model "
                "defines PartitionSpecs (sharding), not StackOptions.divided: they divide over "
                f"{XLA_AXES[0]} only. Use {setting(f'mesh.{name}', 1)}, and more of "
                f"{setting('mesh.tp')}, {pp} or {fsdp}."
            )
        return whole
    sequences = (a.shape for a in jax.tree.leaves(shapes["inputs"]) if len(a.shape) > 1)
    mesh_axes.check_sequences(axes.cp, max((shape[1] for shape in sequences), default=1))
    return by_hand


def divided_by_xla(stack: Stack, axes: StageAxes) -> tuple[str, ...]:
    """Return the axes that XLA divides: those of a model with `sharding` but without `divided`."""
    is_stated = stack.options.divided is None and stack.options.sharding is not None
    return tuple(name for name in XLA_AXES if is_stated and name in axes.divided)


def shards_in_stages(
    stack: Stack, divided: DividedStack, axes: StageAxes
) -> tuple[dict[tuple[str, ...], layout.Shard], tuple[str, ...]]:
    """Return (shards of the parameters divided inside a stage, the axes that XLA divides).

    divided: the result of `divided_stack`. ConfigError if the PartitionSpecs do not fit.
    """
    if axes.parts(("pp", *mesh_axes.SHARD_AXES)) == 1:
        return {}, ()
    params, by_xla = stack.param_shapes, divided_by_xla(stack, axes)
    specs = _checked_specs(params, divided.sharding, axes, is_padded=not by_xla)
    return layout.shards_of(params, specs, axes), by_xla


def _checked_specs(params: Tree, sharding: Tree, axes: StageAxes, *, is_padded: bool) -> Tree:
    """Return the PartitionSpec of each parameter {"embed_head", "layers"}, with one layer.

    params: shapes in natural order. sharding: their specs; one spec, or None, may stand for a whole
    subtree. is_padded: whether sizes that are not divisible are padded. ConfigError if the trees
    differ, or a spec has a wrong axis, too many dims, or a dim that is not divisible.
    """
    specs = _spread(sharding, params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = leaf.shape[layout.is_layer(path) :]
        _check_spec(name, shape, spec)
        if not is_padded:
            _check_size(name, shape, spec, axes)
    for axis in mesh_axes.axes_dividing("weights"):
        is_named = any(axis in layout.sharded_over(spec) for spec in specs)
        if axes.parts(("pp", axis)) > 1 and not is_named:
            raise ConfigError(
                f"sharding divides no parameter over {axis}: all devices of "
                f"{setting(f'mesh.{axis}', axes.parts([axis]))} would do the same. Give weights a "
                f'PartitionSpec with "{axis}", or use {setting(f"mesh.{axis}", 1)}.'
            )
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def _check_size(name: str, shape: tuple[int, ...], spec: P, axes: StageAxes) -> None:
    """Raise ConfigError if the sharded dim is not divisible by the axes of its spec."""
    names = layout.sharded_over(spec)
    size, number = shape[layout.sharded_dim(spec)] if names else 0, axes.parts(names)
    if size % number == 0:
        return
    fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * number)
    product = "*".join(setting(f"mesh.{axis}") for axis in names)
    equation = f"is not a multiple of {product}={number} ({size} % {number} = {size % number})"
    what = f"sharding of {name} is {spec}, but the sharded dim, {size} of {shape}, {equation}"
    raise ConfigError(f"{what}. Use {product}={fitting}, or other sizes.")


def _spread(sharding: Tree, params: Tree) -> list[P]:
    """Return the spec of each leaf of `params`. ConfigError if the trees differ."""
    is_none = lambda a: a is None  # noqa: E731
    spread = lambda spec, part: jax.tree.map(lambda _: P() if spec is None else spec, part)  # noqa: E731
    try:
        return jax.tree.leaves(jax.tree.map(spread, sharding, params, is_leaf=is_none))
    except ValueError as error:
        given, expected = (jax.tree.structure(tree, is_leaf=is_none) for tree in (sharding, params))
        raise ConfigError(
            f"sharding is not a tree of PartitionSpecs like the parameters: it is {given}, they "
            f"are {expected}. Give each parameter a PartitionSpec over tp; one, or None, may stand "
            "for a subtree."
        ) from error


def _check_spec(name: str, shape: tuple[int, ...], spec: Any) -> None:
    """Raise ConfigError if a parameter of this shape cannot have this spec, for any axis sizes."""
    if not isinstance(spec, P):
        what = f"sharding of {name} is {spec!r}; it must be a jax.sharding.PartitionSpec"
        raise ConfigError(f"{what}, such as P(None, 'tp').")
    names, num_dims = layout.sharded_over(spec), sum(map(bool, spec))
    if not {*names} <= {*mesh_axes.SHARD_AXES} or len({*names}) < len(names) or num_dims > 1:
        raise ConfigError(
            f"sharding of {name} is {spec}; it may have only {' and '.join(mesh_axes.SHARD_AXES)}, "
            "in one dim: ppctl places the other axes. Use a spec such as P(None, 'tp')."
        )
    if len(spec) > len(shape):
        what = f"sharding of {name} is {spec}, with {len(spec)} dims"
        raise ConfigError(f"{what}, but the parameter has the shape {shape}.")


@lru_cache(64)
def _divided(divide: Callable[[StageAxes], DividedStack], axes: StageAxes) -> DividedStack:
    """Return divide(axes), memoized: other caches have the functions as keys, by identity."""
    divided = divide(axes)
    if divided.parts is None or not axes.vocab_parts:
        return divided
    embed, head = over_ranks(divided.parts)
    return replace(divided, embed=embed, head=head)


def partition_for(
    partition: str | Sequence[int], num_layers: int, schedule: Schedule, costs: CostsOf
) -> Partition:
    """Return the layers of each stage. ConfigError for an unknown partition."""
    if isinstance(partition, str) and partition not in ("uniform", "balanced"):
        known = "uniform, balanced, or the layers of each stage"
        raise ConfigError(f"partition={partition} is not one of {known}.")
    if partition == "uniform":
        return uniform(num_layers, schedule.num_stages)
    if partition == "balanced":
        return costs().balanced(schedule.rank_of)
    return explicit(num_layers, schedule.num_stages, partition)


def check_groups(
    groups: Sequence[GroupModel],
    stack: Stack,
    step: ScheduledStep,
    partition: Partition,
    execution: Execution,
) -> None:
    """Raise ConfigError as `check_tasks`, or if values cannot move between unequal ranks."""
    for group in groups:
        check_tasks(stack, step, partition, group.model, execution)
    # 1. gradients of leaves of embedding and head that two ranks share
    ends = {step.schedule.rank_of[0], step.schedule.rank_of[-1]}
    holders = [group for group in groups if ends & {*group.ranks}]
    if len(holders) > 1 and jax.process_count() > 1 and any(groups[0].model.outer.shared):
        raise ConfigError(
            "Embedding and head share parameters (model.tied), but the first and the last rank "
            f"have other sizes, and {jax.process_count()} processes cannot move their gradients. "
            f"Use ends of equal sizes in {setting('mesh.ranks')}, one process, or model.tied=false."
        )
    # 2. rows of activations
    rows = {}
    for _, layout_of, model in groups:
        sizes, axes = layout_of.of_rank.sizes, model.axes
        parts = sizes.num_devices // sizes.pp * axes.row_parts // axes.tp
        rows[axes.tp] = prod(model.x.shape[:-1]) * parts
    is_by_xla = any(group.model.auto for group in groups)
    if len(rows) > 1 and (is_by_xla or not groups[0].model.axes.sequence_parallel):
        why = "XLA divides this model over it (sharding)"
        remedy = "the same tp on all ranks"
        if not is_by_xla:
            off = setting("executor.sequence_parallel", "false")
            why = f"with {off} its devices hold summands of the same rows"
            remedy += f", or {setting('executor.sequence_parallel', 'true')}"
        sizes = ", ".join(map(str, rows))
        raise ConfigError(f"The ranks have tp of {sizes}, but {why}. Use {remedy}.")
    if len({*rows.values()}) > 1:
        each = " and ".join(f"{number} rows with tp={tp}" for tp, number in rows.items())
        raise ConfigError(
            f"The ranks of {setting('mesh.ranks', 'unequal sizes')} pad the tokens of a microbatch "
            f"to {each}. Use sequences of a multiple of {lcm(*rows)} tokens, or the same tp on all "
            "ranks."
        )


def check_fused(step: ScheduledStep, partition: Partition, execution: Execution) -> None:
    """Raise ConfigError if executor.fuse is set, but layers are scanned or no tasks can fuse."""
    if not step.fuses:
        return
    fuse, name = setting("executor.fuse", execution.fuse), step.schedule.name
    largest = max(map(len, partition))
    if largest > execution.unroll:
        raise ConfigError(
            f"{fuse} interleaves the layers of two tasks, which must be unrolled, but a stage "
            f"has {largest} layers, and {setting('executor.unroll', execution.unroll)} scans more "
            f"than {execution.unroll}. Use {setting('executor.unroll', largest)}."
        )
    if step.num_fused == 0:
        number, families = with_pairs(step.schedule, step.costs)
        remedies = [f"schedule={family}" for family in families]
        if number is not None:
            remedies.insert(0, setting("schedule.num_microbatches", number))
        raise ConfigError(
            f"{fuse} runs a forward and a backward as one program, but schedule={name} of "
            f"{step.schedule.num_microbatches} microbatches has no adjacent pair that can start "
            f"together. Use {' or '.join([setting('executor.fuse', 'none'), *remedies])}."
        )


def check_tasks(
    stack: Stack, step: ScheduledStep, partition: Partition, model: Model, execution: Execution
) -> None:
    """Raise ConfigError if tasks cannot be fused, or the backward of a layer cannot be split."""
    check_fused(step, partition, execution)
    stages = {task.stage for rank in step.schedule.ranks for task in rank if task.kind == "I"}
    for s in sorted(stages) if execution.engine.is_pipelined else ():
        held = partition[s]
        if not held:
            continue
        try:
            for l in held:
                model.traced(
                    lambda l=l: model.stage.programs.layers[0 if stack.are_alike else l].split
                )
        except ConfigError as error:
            which = f"layer {held[0]}" if len(held) == 1 else f"layers {held[0]}-{held[-1]}"
            raise ConfigError(f"stage {s} ({which}): {error}") from error
        if stack.are_alike:
            return  # all stages run the same layer
