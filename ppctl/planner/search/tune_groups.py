"""`ppctl tune tune.groups=unequal`: the fastest stages on submeshes of unequal sizes.

Next to them the fastest of equal ranks, found in the same way: both are 1F1B with the layers cut
freely, so their ratio is the gain of unequal ranks alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import jax.numpy as jnp

from ppctl.config import AutoHardware, Config, Hardware, Mesh, Mpmd, Tune, Uniform, check
from ppctl.config.groups.layout_settings import Explicit
from ppctl.config.groups.schedule_settings import OF_UNEQUAL
from ppctl.config.schedule_from_config import named
from ppctl.data.dataset import DataSet
from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import tree_bytes
from ppctl.planner.cost.predict_step import PipelinePlan, hardware_named, predict_job
from ppctl.planner.search.layout_search import SearchEnded, SearchProgress
from ppctl.planner.search.layout_space import divisors
from ppctl.planner.search.submesh_costs import Chips, Option, SubmeshCosts, by_axes
from ppctl.planner.search.tune_layouts import layer_costs, model_of, stage_models, target_of
from ppctl.planner.search.unequal_groups import Stages, fastest_stages
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.job import assemble, batch_shapes, open_data

TRIES = 4  # maximum number of searches, each with less memory if `ppctl plan` predicts more


@dataclass(frozen=True)
class GroupLayout:
    """Stages on submeshes, with their microbatches and remat."""

    stages: Stages
    num_microbatches: int
    remat: Remat

    @property
    def seconds(self) -> float:
        return self.stages.seconds

    @property
    def ranks(self) -> tuple[MeshSizes, ...]:
        return tuple(stage.submesh.label.sizes for stage in self.stages.stages)

    @property
    def chips(self) -> tuple[str, ...]:
        """Return the hardware of each rank."""
        return tuple(stage.submesh.label.chip for stage in self.stages.stages)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(stage.end_layer - stage.first_layer for stage in self.stages.stages)


@dataclass(frozen=True)
class PlannedGroups:
    """A layout with the prediction of `ppctl plan`, and its request."""

    layout: GroupLayout
    plan: PipelinePlan
    request: Config

    @property
    def step_s(self) -> float:
        assert self.plan.step_s is not None, "unknown hardware is not tuned for"
        return self.plan.step_s


@dataclass(frozen=True)
class TunedGroups:
    """The fastest layouts of equal and of any ranks. None: none fits, or the search ended early."""

    equal: PlannedGroups | None
    unequal: PlannedGroups | None
    devices: str
    num_devices: int
    search_s: float
    ended_by: str | None = None  # reason of an early end


def tune_groups(config: Config, progress: SearchProgress) -> TunedGroups:
    """Return the fastest layouts of equal and of any ranks. ConfigError for a bad request.

    A layout that `ppctl plan` predicts to need more memory than the search counts is searched again
    with less room.
    """
    # 1. the submeshes and their costs
    check_groups(config)
    data, began = open_data(config), time.perf_counter()
    costs, ended_by = costs_of(config, data), None
    progress.began_s = time.monotonic()

    def watch() -> None:
        if progress.early_end is not None:
            raise SearchEnded

    def fastest(
        costs: SubmeshCosts, below: float, *, equal: bool, idle: bool
    ) -> PlannedGroups | None:
        for _ in range(TRIES):
            layout = fastest_groups(costs, config.tune, watch, below, equal=equal, idle=idle)
            if layout is None:
                return None
            planned = _planned(config, layout)
            if (share := _filled(planned.plan)) <= 1.0:
                return planned
            costs = replace(costs, room=costs.room / share * 0.995)
        return None

    # 2. the fastest, as planned
    equal = unequal = None
    try:
        for idle in (False, True):  # devices are idle only if no layout has all
            equal = fastest(costs, inf, equal=True, idle=idle)
            # equal ranks are ranks of any sizes, too
            below = inf if equal is None else equal.layout.seconds
            unequal = fastest(costs, below, equal=False, idle=idle)
            found = [each for each in (equal, unequal) if each is not None]
            if found:
                unequal = min(found, key=lambda each: each.step_s)
                break
    except SearchEnded:
        ended_by = progress.early_end
    chips = " and ".join(f"{each.number} x {each.name}" for each in costs.chips)
    seconds = time.perf_counter() - began
    return TunedGroups(equal, unequal, chips, costs.num_devices, seconds, ended_by)


def check_groups(config: Config) -> None:
    """Raise ConfigError for a request that has no unequal ranks."""
    for stated, use, is_wrong in (
        (f"executor={config.executor.name}", "executor=mpmd", config.executor.name != "mpmd"),
        (f"mesh.order={config.mesh.order}", "auto", config.mesh.order != "auto"),
        (f"plan.topology={config.plan.topology}", "null, and hardware", config.plan.topology),
    ):
        if is_wrong:
            what = "tune.groups=unequal gives ranks meshes of unequal sizes, device by device"
            raise ConfigError(f"{what}, which {stated} does not allow. Use {use}.")
    if config.tune.cluster and isinstance(config.hardware, Hardware):
        raise ConfigError(
            f"hardware={config.hardware.name} and tune.cluster both state the chips. Leave out "
            "hardware."
        )


def of_one_kind(config: Config) -> Config | None:
    """Return the request with a cluster as tune.devices and hardware; None: chips differ."""
    cluster = config.tune.cluster
    if len({each.hardware for each in cluster}) > 1:
        return None
    if not cluster:
        return config
    number = sum(_number(each.hosts, each.hardware) for each in cluster)
    tune = replace(config.tune, devices=number, cluster=[])
    return replace(config, tune=tune, hardware=hardware_named(cluster[0].hardware))


def _number(hosts: int, name: str) -> int:
    hardware = hardware_named(name)
    number = hardware.host_devices if isinstance(hardware, Hardware) else None
    if number is None:
        raise ConfigError(
            f"tune.cluster: hardware={name} states no devices of a host. Use hardware with a "
            "network, or tune.devices."
        )
    return hosts * number


def costs_of(config: Config, data: DataSet) -> SubmeshCosts:
    """Return the costs of submeshes for a request with executor=mpmd."""
    executor, batch, one = config.executor, batch_shapes(data), of_one_kind(config)
    assert isinstance(executor, Mpmd), "see `check_groups`"
    if one is not None:
        kinds = [(one.hardware, one.tune.devices or one.mesh.num_devices)]
    else:
        each = ((group.hosts, group.hardware) for group in config.tune.cluster)
        kinds = [(hardware_named(name), _number(hosts, name)) for hosts, name in each]
    targets = [target_of(config, *kind) for kind in kinds]
    models = [model_of(config, target, data) for target in targets]
    chips = list[Chips]()
    for target, (stack, optimizer) in zip(targets, models, strict=True):
        host = target.machine.host_devices or target.number
        whole = replace(target, number=-(-target.number // host) * host)  # partly filled hosts too
        divided = stage_models(executor, config.tune, optimizer, stack, batch, whole)
        room = inf if target.limit is None else target.limit.size_bytes
        speeds = target.machine, room, target.number, target.adds_products
        chips.append(Chips(target.hardware.name, *speeds, *divided))
    size, (stack, _) = data.batch_size, models[0]
    costs = layer_costs(executor, stack, batch, jnp.dtype(targets[0].dtype))
    sizes = stack.num_layers, size, tree_bytes(batch) // size
    return SubmeshCosts(*sizes, tuple(chips), executor.gather, executor.unroll, costs)


def _filled(plan: PipelinePlan) -> float:
    """Return the share of a device's memory that the fullest rank needs; 0: no limit."""
    pairs = zip(plan.total_bytes, plan.limits, strict=True)
    return max((n / limit.size_bytes for n, limit in pairs if limit), default=0.0)


def _planned(config: Config, layout: GroupLayout) -> PlannedGroups:
    """Return a layout with the prediction of `ppctl plan`."""
    # 1. the chips of a cluster
    hardware = config.hardware
    if config.tune.cluster:
        one = len({*layout.chips}) == 1
        names = [*layout.chips]
        hardware = hardware_named(names[0]) if one else AutoHardware(ranks=names)

    # 2. the request
    counts = layout.layers
    is_even = counts == tuple(sorted(counts, reverse=True)) and counts[0] - counts[-1] <= 1
    request = replace(
        config,
        mesh=Mesh.of(layout.ranks),
        hardware=hardware,
        schedule=named(OF_UNEQUAL, layout.num_microbatches, 1),
        partition=Uniform() if is_even else Explicit(layers=[*counts]),
        executor=replace(config.executor, remat=str(layout.remat)),
        tune=Tune(),
    )
    check(request)
    job = assemble(request, on_one_device=True, only_planned=True)
    return PlannedGroups(layout, predict_job(job), request)


def fastest_groups(
    costs: SubmeshCosts,
    tune: Tune,
    watch: Callable[[], None],
    below: float,
    *,
    equal: bool,
    idle: bool,
) -> GroupLayout | None:
    """Return the fastest layout; None: none fits and takes less than `below` seconds a step.

    watch: called often; may raise to end the search. equal: ranks have equal sizes. idle: as in
    `fastest_stages`.
    """
    # 1. the submeshes for each number of microbatches and remat
    remats = [Remat.of(each) for each in tune.remat or tune.REMAT]
    cps = sorted({each.cp for chips in costs.chips for each in chips.divisions})
    sizes, sets = (costs.num_layers, costs.num_devices), list[tuple[float, Remat, list[Option]]]()
    numbers = [n for n in divisors(costs.batch_size) if n in (tune.microbatches or [n])]
    for number, remat, cp in product(numbers, remats, cps):
        watch()
        options = costs.options(number, remat, cp)
        for each in by_axes(options) if equal else [options] * bool(options):
            sets.append((min(one.least_s(*sizes) for one in each), remat, each))

    # 2. the fastest of each, most promising first
    best, best_s = None, below
    for least_s, remat, options in sorted(sets, key=lambda each: each[0]):
        watch()
        if costs.layer_costs is None and least_s >= best_s:
            break
        stages = fastest_stages(
            *sizes, [costs.submesh(each) for each in options], best_s, idle=idle
        )
        if stages is not None:
            best, best_s = GroupLayout(stages, options[0].number, remat), stages.seconds
    return best
