"""The fastest layouts of a model on a number of devices: searched by bounds, then planned.

`layout_search` yields layouts, fastest first. Each is predicted as by `ppctl plan`, until enough
of them fit.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ppctl import config as settings
from ppctl.config import Config, Mpmd, Spmd, Uniform
from ppctl.config.groups.layout_settings import Explicit
from ppctl.config.schedule_from_config import named
from ppctl.data.dataset import DataSet
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.executors.model_shapes import tree_bytes
from ppctl.executors.stage.jaxpr_flops import relative_costs
from ppctl.executors.work.planned_step import Microbatch, PlannedLayout, Step
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack
from ppctl.model.trainable_parameters import trained_share
from ppctl.planner.cost.predict_step import PipelinePlan, predict_job
from ppctl.planner.cost.target_devices import DeviceLimit, Target
from ppctl.planner.cost.token_budget import TokenBudget, check_tokens, token_budget
from ppctl.planner.rehearsal.timed_runs import run_steps
from ppctl.planner.search import layout_search
from ppctl.planner.search.device_models import DeviceModels, device_models, example, stage_divisions
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.layout_space import PREFERRED, Space
from ppctl.planner.search.tuned_files import Hosts, hosts_for
from ppctl.schedule.families.registry import FAMILIES, ON_RING
from ppctl.schedule.mesh_axes import STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline import known_hardware
from ppctl.training.pipeline.jax_start import check_memory_fraction, start_jax
from ppctl.training.pipeline.job import DEFAULT_DTYPE, assemble, batch_shapes, open_data, stack_for
from ppctl.training.pipeline.layer_optimizers import one_layer_of, update_flops
from ppctl.training.pipeline.mfu import model_flops
from ppctl.training.pipeline.optimizers import clipped, make_optimizer, state_shapes
from ppctl.training.pipeline.pipeline_request import divided_stack

Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Row:
    """A layout with its prediction, and the request that builds it."""

    layout: Candidate
    plan: PipelinePlan
    request: Any  # the job, or the arguments of `ppctl.pipeline`
    measured_s: float | None = None  # seconds of a measured step; None: not measured

    @property
    def step_s(self) -> float:
        assert self.plan.step_s is not None, "unknown hardware is not tuned for"
        return self.plan.step_s

    @property
    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the fullest device, by part."""
        return max(self.plan.memory, key=lambda of_rank: sum(of_rank.values()))

    @property
    def total_bytes(self) -> int:
        return max(self.plan.total_bytes)


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first, and the numbers of layouts searched."""

    best: tuple[Row, ...]
    without_pipeline: Row | None  # best layout with pp=1
    num_layouts: int  # layouts searched: mesh x microbatches x remat x schedule
    num_too_large: int  # layouts without room for state and one microbatch
    num_simulated: int
    smallest_bytes: int | None  # lower bound of every layout's bytes; None if a layout fits
    that_divide: tuple[int, int] | None  # batch size and number of devices, see `Space`
    ended_by: str | None = None  # reason of an early end; None: the search is complete


@dataclass(frozen=True)
class Tuned:
    """The layouts found, with the request's devices, data and limits."""

    found: Found
    model: str
    dtype: str  # compute dtype
    batch_size: int  # examples a step
    seq_len: int | None  # tokens an example; None: the data are not text
    search_s: float
    devices: str
    limit: DeviceLimit | None  # memory of a device
    batch_tokens: int | None  # tokens a step; None: the data are not text
    step_flops: int | None  # FLOPs of the model, as in `Prediction`; None: no layout fits
    peak_flops: float | None  # peak FLOP/s of all devices together
    recipe: str | None = None  # path of the recipe
    token_budget: TokenBudget | None = None  # cost of plan.tokens with the first layout
    hosts: Hosts | None = None  # hosts for tune.launch
    job_script: str | None = None  # path of the job script
    job_command: str | None = None  # command that starts the job script


def tune_layouts(config: Config, progress: layout_search.SearchProgress | None = None) -> Tuned:
    """Return the layouts found, best first. ConfigError for a bad request.

    progress: prints the search's progress, and may end it early.
    """
    # 1. the hardware, and the memory of a device
    _check(config.executor, config.schedule.vocab, config.tune.schedules)
    tune, num_devices = config.tune, config.tune.devices or config.mesh.num_devices
    target = target_of(config, config.hardware, num_devices)
    dtype = target.dtype
    if tune.measure:
        _check_attached(target, tune.measure)
    hosts = None if tune.launch is None else hosts_for(tune.launch, target.hardware, num_devices)

    # 2. the model and the search
    data = open_data(config)
    batch = batch_shapes(data)
    tokens = None if data.vocab_size is None else data.batch_size * batch["inputs"].shape[1]
    check_tokens("plan.tokens", config.plan.tokens, tokens)
    stack, optimizer = model_of(config, target, data)
    search = search_of(config.executor, tune, optimizer, stack, batch, target)
    began = time.perf_counter()
    found = planned_layouts(search, partial(as_planned, config, stack), tune.best, progress)
    search_s = time.perf_counter() - began

    # 3. measure the best
    found = replace(found, best=_measured(found.best, tune.measure))
    first = found.best[0] if found.best else None
    step_s = None if first is None else first.measured_s or first.step_s
    seq_len = None if tokens is None else tokens // data.batch_size
    return Tuned(
        found,
        *(config.model.name, dtype, data.batch_size, seq_len),
        search_s,
        f"{num_devices} x {target.hardware.name}",
        target.limit,
        batch_tokens=tokens,
        step_flops=None if first is None else model_flops(first.request).full,
        peak_flops=target.peak_flops,
        token_budget=token_budget(config.plan.tokens, tokens, step_s, num_devices, target.hardware),
        hosts=hosts,
    )


def target_of(
    config: Config, hardware: settings.Hardware | settings.AutoHardware, num_devices: int
) -> Target:
    """Start JAX; return the target devices of a search."""
    topology, number = config.plan.topology, num_devices if config.tune.measure else 1
    start_jax(config.run, config.run.dtype or DEFAULT_DTYPE, number, is_away=topology is not None)
    device, fraction = all_devices()[0], config.run.memory_fraction
    dtype = config.run.dtype or known_hardware.default_dtype(hardware, device, topology)
    there = known_hardware.planned_for(hardware, device.device_kind, topology)
    check_memory_fraction(fraction, device, there)
    how = config.plan, config.mesh.order, config.executor.xla_flags, fraction
    return Target(hardware, device, num_devices, dtype, *how)


def model_of(
    config: Config, target: Target, data: DataSet
) -> tuple[Stack, optax.GradientTransformation]:
    """Return the model with the kernels of the target devices, and its optimizer."""
    with_kernels = known_hardware.described_device(target.hardware) or target.device
    stack = stack_for(config, data, jnp.dtype(target.dtype), with_kernels)
    stack = stack.counted(config.costs.expert_imbalance)
    optimizer, _ = make_optimizer(config.optim, config.run.num_steps, stack)
    optimizer = clipped(optimizer, config.optim.clip_norm)
    if config.optim.ema is not None:  # this state has the bytes of the average
        optimizer = optax.chain(optimizer, optax.ema(config.optim.ema))
    return stack, optimizer


def _check_attached(target: Target, measure: int) -> None:
    """Raise ConfigError if the attached devices differ from the hardware to tune for."""
    if target.hardware.name != known_hardware.resolved(settings.AutoHardware(), target.kind).name:
        raise ConfigError(
            f"tune.measure={measure} runs steps on the devices of this machine ({target.kind}), "
            f"but hardware={target.hardware.name}. Use tune.measure=0, or hardware=auto."
        )


def stage_models(
    executor: settings.Reference,
    tune: settings.Tune,
    optimizer: optax.GradientTransformation,
    stack: Stack,
    batch: Shapes,
    target: Target,
) -> tuple[DeviceModels, tuple[MeshSizes, ...]]:
    """Return the model of one device by division of a stage, and the divisions within `tune`."""
    assert isinstance(executor, Spmd | Mpmd), "other executors have one layout"
    state = state_shapes(stack, optimizer)
    context = executor.context if isinstance(executor, Mpmd) else "gather"
    axes = StageAxes(sequence_parallel=executor.sequence_parallel, context=context)
    flops = 0 if stack.options.network else update_flops(optimizer, one_layer_of(stack))
    models = device_models(stack, state, batch, jnp.dtype(target.dtype), axes, flops)
    requested = {name: getattr(tune, name) for name in STAGE_AXES}
    x = jax.eval_shape(stack.outer[0], state["params"]["embed_head"], example(batch)["inputs"])
    num_devices = target.number, target.machine.host_devices or target.number
    return models, tuple(stage_divisions(models, stack, x, axes, requested, *num_devices))


def layer_costs(
    executor: settings.Reference, stack: Stack, batch: Shapes, dtype: jnp.dtype
) -> tuple[float, ...] | None:
    """Return the cost of each layer relative to their mean; None: all equal."""
    if stack.are_alike:
        return None
    recompute = Remat.of(executor.remat).recomputes
    return relative_costs(stack, batch, dtype, recompute=recompute).layers


def search_of(
    executor: settings.Reference,
    tune: settings.Tune,
    optimizer: optax.GradientTransformation,
    stack: Stack,
    batch: Shapes,
    target: Target,
) -> layout_search.LayoutSearch:
    """Return the search of a model's layouts within `tune`. batch: shapes of a global batch."""
    assert isinstance(executor, Spmd | Mpmd), "other executors have one layout"
    machine, dtype, limit = target.machine, jnp.dtype(target.dtype), target.limit
    models, divisions = stage_models(executor, tune, optimizer, stack, batch, target)

    def step_of(mesh: MeshSizes, microbatch: Microbatch, vocab_parts: int) -> Step:
        share = -(-stack.num_layers // mesh.pp)
        layout = PlannedLayout(mesh, share, share, vocab_parts)
        how = microbatch, machine, executor.gather, executor.unroll, target.adds_products
        work, params, _ = models(mesh.only(STAGE_AXES), vocab_parts)
        return Step(work, params, layout, *how)

    batch_size, state = batch["inputs"].shape[0], state_shapes(stack, optimizer)
    space = Space(
        target.number,
        stack.num_layers,
        batch_size,
        example_bytes=tree_bytes(batch) // batch_size,
        engine=executor.ENGINE,
        families=tuple(tune.schedules or PREFERRED),
        remats=tuple(tune.remat or tune.REMAT),
        max_chunks=tune.max_chunks,
        layer_costs=layer_costs(executor, stack, batch, dtype),
        trained=trained_share(state["params"]["layers"], stack.trains("layers")),
        divisions=divisions,
        vocab=_vocab(tune.vocab, stack, batch),
        numbers=None if tune.microbatches is None else tuple(tune.microbatches),
    )
    return layout_search.LayoutSearch(space, step_of, inf if limit is None else limit.size_bytes)


def _check(executor: settings.Reference, vocab: str, families: Sequence[str] | None) -> None:
    if not executor.ENGINE.is_pipelined:
        raise ConfigError(
            "executor=reference has one layout, on one device. Use executor=spmd or executor=mpmd."
        )
    if vocab == "parallel":
        raise ConfigError(
            "schedule.vocab=parallel belongs to one schedule, and `ppctl tune` chooses schedules. "
            "Leave it out to search both settings, or use tune.vocab=[parallel]."
        )
    runs = ON_RING if executor.ENGINE.in_ticks else FAMILIES
    for family in families or ():
        if family not in runs:
            raise ConfigError(
                f"tune.schedules: executor={executor.name} cannot run schedule {family}, "
                f"only {', '.join(runs)}."
            )


def _vocab(requested: Sequence[str] | None, stack: Stack, batch: Shapes) -> tuple[str, ...]:
    """Return the choices of schedule.vocab. ConfigError if a requested one is impossible."""
    try:  # same check as in a run
        divided_stack(stack, StageAxes(vocab_parts=2), batch)
    except ConfigError:
        if requested is not None and "parallel" in requested:
            raise
        return ("whole",)
    return tuple(requested or settings.Schedule.VOCAB)


def planned_layouts(
    search: layout_search.LayoutSearch,
    plan: Callable[[Candidate], Row],
    best: int,
    progress: layout_search.SearchProgress | None = None,
) -> Found:
    """Return the `best` fastest layouts that fit; fewer if `progress` ends the search early.

    plan: function that predicts a layout.
    """
    plan, rows, alone = cache(plan), list[Row](), None
    ended_by = None
    if progress is not None:
        progress.begin(search, rows, best)
    with layout_search.uncollected():
        try:
            _add_fitting(rows, search.fastest(), search, plan, best)
            rows.sort(key=lambda row: (row.step_s, row.total_bytes))
            alone = next((row for row in rows if row.layout.mesh.pp == 1), None)
            if alone is None:
                of_one = list[Row]()
                _add_fitting(of_one, search.fastest(with_pipeline=False), search, plan, 1)
                alone = next(iter(of_one), None)
        except layout_search.SearchEnded:
            ended_by = None if progress is None else progress.early_end
            rows.sort(key=lambda row: (row.step_s, row.total_bytes))
            if not rows and search.fastest_simulated is not None:
                row = plan(search.fastest_simulated)
                rows += [row] * (row.total_bytes <= search.room_bytes)
    counts = len(search.layouts), search.num_too_large, search.num_simulated
    least = None if rows else search.smallest_bytes
    return Found(tuple(rows), alone, *counts, least, search.space.that_divide, ended_by)


def _add_fitting(
    rows: list[Row],
    candidates: Iterator[Candidate],
    search: layout_search.LayoutSearch,
    plan: Callable[[Candidate], Row],
    number: int,
) -> None:
    """Add the first `number` layouts that fit, with the improved partition if this fits too."""
    for candidate in candidates:
        for partitioned in dict.fromkeys((search.improved(candidate), candidate)):
            row = plan(partitioned)
            if row.total_bytes <= search.room_bytes:
                rows.append(row)
                break
        if len(rows) == number:
            return


def as_planned(config: Config, stack: Stack, layout: Candidate) -> Row:
    """Return a layout with the prediction of `ppctl plan`. stack: has the hardware's kernels."""
    schedule = named(layout.family, layout.num_microbatches, layout.num_chunks)
    request = replace(
        config,
        mesh=settings.Mesh.of([layout.mesh] * layout.mesh.pp, config.mesh.order),
        schedule=replace(schedule, vocab=layout.vocab),
        partition=Uniform() if layout.is_even else Explicit(layers=[*layout.partition]),
        executor=replace(config.executor, remat=str(layout.remat)),
        tune=settings.Tune(),
    )
    settings.check(request)
    job = assemble(request, on_one_device=True, only_planned=True)
    return Row(layout, predict_job(replace(job, counted_stack=stack)), job)


def _measured(rows: Sequence[Row], count: int) -> tuple[Row, ...]:
    """Return the rows: the first `count` measured and sorted by step time, then the others."""
    times_s = (run_steps(assemble(row.request.config)).wall_s for row in rows[:count])
    ran = [replace(row, measured_s=s) for row, s in zip(rows, times_s, strict=False)]
    return (*sorted(ran, key=lambda row: row.measured_s or 0.0), *rows[count:])
