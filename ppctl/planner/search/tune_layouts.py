"""The fastest layouts of a model on so many devices.

Mesh, schedule, stages a rank, partition, microbatches and remat are searched together
(`layout_search`), at costs counted for the hardware. The fastest layouts are predicted as by `ppctl
plan` (`predict_step`) until enough of them fit, and tune.measure runs the best ones here. Model,
data, batch, executor and optimizer are those of the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from ppctl import config as settings
from ppctl.config import Config, Explicit, Mpmd, Spmd, Uniform
from ppctl.config.schedule_from_config import named
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.executors.model_shapes import tree_bytes
from ppctl.executors.stage.jaxpr_flops import relative_costs
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack, init
from ppctl.model.trainable_parameters import trained_share
from ppctl.planner.cost.predict_step import predict_job, target_devices
from ppctl.planner.cost.target_devices import Target
from ppctl.planner.rehearsal.timed_runs import run_steps
from ppctl.planner.search.device_models import DividedModels
from ppctl.planner.search.job_script import hosts_for
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.layout_search import Found, LayoutSearch, rank, uncollected
from ppctl.planner.search.layout_space import PREFERRED, Space
from ppctl.planner.search.token_budget import check_tokens, token_budget
from ppctl.planner.show.tune_terminal import Tuned
from ppctl.schedule.families.registry import BASELINE, FAMILIES, ON_RING, build
from ppctl.schedule.mesh_axes import STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.schedule.vocabulary_parallel import with_vocabulary
from ppctl.training.pipeline.execution import Execution
from ppctl.training.pipeline.jax_start import check_memory_fraction, start_jax
from ppctl.training.pipeline.job import (
    DEFAULT_DTYPE,
    assemble,
    batch_shapes,
    make_optimizer,
    open_data,
    stack_for,
)
from ppctl.training.pipeline.known_hardware import planned_for, resolved
from ppctl.training.pipeline.optimizers import clipped, init_state
from ppctl.training.pipeline.pipeline_request import divided_stack, with_vocabulary_of

Planned = tuple[Candidate, Config]  # a layout predicted as by `ppctl plan`, and its request
T = TypeVar("T")  # a request


def tune_layouts(config: Config) -> tuple[Tuned, list[Config]]:
    """Return the layouts found, best first, and their requests. ConfigError for a bad request."""
    # 1. the hardware, and the memory of a device
    _check(config)
    tune, num_devices = config.tune, config.tune.devices or config.mesh.num_devices
    dtype = config.run.dtype or DEFAULT_DTYPE
    is_away = config.plan.topology is not None
    start_jax(config.run, dtype, num_devices if tune.measure else 1, is_away=is_away)
    device = all_devices()[0]
    there = planned_for(config.hardware, device.device_kind, config.plan.topology)
    check_memory_fraction(config.run.memory_fraction, device, there)
    target = target_devices(config, device, num_devices, dtype)
    if tune.measure:
        _check_attached(target, tune.measure)
    hosts = None if tune.launch is None else hosts_for(tune.launch, target.hardware, num_devices)
    limit = target.limit

    # 2. the model and the search
    data = open_data(config)
    batch = batch_shapes(data)
    tokens = None if data.vocab_size is None else data.batch_size * batch["inputs"].shape[1]
    check_tokens("plan.tokens", config.plan.tokens, tokens)
    stack = stack_for(target.hardware, config, data, jnp.dtype(dtype), device)
    room_bytes = inf if limit is None else limit.size_bytes
    optimizer = clipped(make_optimizer(config)[0], config.optim.clip_norm)
    search = search_of(config, optimizer, stack, batch, target, room_bytes)
    began = time.perf_counter()
    found, configs = planned(config, stack, search)
    search_s = time.perf_counter() - began

    # 3. steps of the best
    found, configs, measured_s = _measured(found, configs, tune.measure)
    step_s = measured_s[0] if measured_s else found.best[0].time.total_s if found.best else None
    tuned = Tuned(
        found,
        measured_s,
        search_s,
        f"{num_devices} x {target.hardware.name}",
        limit,
        batch_tokens=tokens,
        step_flops=data.batch_size * search.models(MeshSizes()).work.flops(stack.num_layers),
        peak_flops=target.peak_flops,
        token_budget=token_budget(config.plan.tokens, tokens, step_s, num_devices, target.hardware),
        hosts=hosts,
    )
    return tuned, configs


def _check_attached(target: Target, measure: int) -> None:
    """Raise ConfigError where tune.measure would run on other hardware than the request's."""
    if target.hardware.name != resolved(settings.AutoHardware(), target.kind).name:
        raise ConfigError(
            f"tune.measure={measure} runs steps on the devices of this machine ({target.kind}), "
            f"but hardware={target.hardware.name}. Use tune.measure=0, or hardware=auto."
        )


def search_of(
    config: Config,
    optimizer: optax.GradientTransformation,
    stack: Stack,
    batch: Mapping[str, Any],
    target: Target,
    room_bytes: float,
) -> LayoutSearch:
    """Return the search of the layouts to choose from; batch: shapes.

    Of `config` it takes executor and tune.
    """
    # 1. the model, and how it may be divided
    executor, tune, machine, dtype = config.executor, config.tune, target.machine, target.dtype
    assert isinstance(executor, Spmd | Mpmd), "others have one layout"
    params = lambda: init(stack, config.run.seed)  # noqa: E731
    state = jax.eval_shape(lambda: init_state(params(), optimizer, stack.options.trainable))
    context = executor.context if isinstance(executor, Mpmd) else "gather"
    axes = StageAxes(sequence_parallel=executor.sequence_parallel, context=context)
    models = DividedModels(stack, state, batch, jnp.dtype(dtype), axes)
    requested = {name: getattr(tune, name) for name in STAGE_AXES}
    of_host = machine.host_devices or target.number
    divisions = models.divisions(requested, target.number, of_host)

    # 2. the layouts
    batch_size, layer_costs = batch["inputs"].shape[0], None
    if not stack.are_alike:
        recompute = Remat.of(executor.remat).recomputes
        layer_costs = relative_costs(stack, batch, jnp.dtype(dtype), recompute=recompute).layers
    space = Space(
        target.number,
        stack.num_layers,
        batch_size,
        example_bytes=tree_bytes(batch) // batch_size,
        engine=executor.ENGINE,
        gather=executor.gather,
        unroll=executor.unroll,
        adds=target.adds_products,
        families=tuple(tune.schedules or PREFERRED),
        remats=tuple(tune.remat or tune.REMAT),
        max_chunks=tune.max_chunks,
        layer_costs=layer_costs,
        trained=trained_share(state["params"]["layers"], stack.trains("layers")),
        divisions=tuple(divisions),
        vocab=_vocab(config, stack, batch),
    )
    return LayoutSearch(space, models, machine, room_bytes)


def _check(config: Config) -> None:
    if not config.executor.ENGINE.is_pipelined:
        raise ConfigError(
            "executor=reference has one layout, on one device. Use executor=spmd or executor=mpmd."
        )
    if config.schedule.vocab == "parallel":
        raise ConfigError(
            "schedule.vocab=parallel is of one schedule, and `ppctl tune` chooses schedules. "
            "Leave it out: it is found where it wins, and alone with tune.vocab=[parallel]."
        )
    runs = ON_RING if config.executor.ENGINE.in_ticks else FAMILIES
    for family in config.tune.schedules or ():
        if family not in runs:
            raise ConfigError(
                f"tune.schedules: executor={config.executor.name} cannot run schedule {family}, "
                f"only {', '.join(runs)}."
            )


def _vocab(
    config: Config, stack: Stack, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[str, ...]:
    """Return choices of schedule.vocab. ConfigError for an impossible one in tune.vocab."""
    executor, requested = config.executor, config.tune.vocab
    assert isinstance(executor, Spmd | Mpmd), "others have one layout"
    execution = Execution(executor.name, Remat.NONE, executor.unroll, executor.gather, False)
    divided = with_vocabulary(build(BASELINE, 2, 1))
    try:  # what a run would say
        divided_stack(stack, with_vocabulary_of(divided, execution), batch)
    except ConfigError:
        if requested is not None and "parallel" in requested:
            raise
        return ("whole",)
    return tuple(requested or settings.Schedule.VOCAB)


def planned(config: Config, stack: Stack, search: LayoutSearch) -> tuple[Found, list[Config]]:
    """Return a search's layouts, predicted as by `ppctl plan`, and their requests, fastest first.

    stack: the model as the hardware runs it.
    """
    return predicted_layouts(search, cache(partial(as_planned, config, stack)), config.tune.best)


def predicted_layouts(
    search: LayoutSearch, predicted: Callable[[Candidate], tuple[Candidate, T]], best: int
) -> tuple[Found, list[T]]:
    """Return a search's layouts as predicted, and the requests of the `best` first that fit."""
    with uncollected():
        rows = _fitting(search.fastest(), search, predicted, best)
        alone = next((row for row in rows if row[0].mesh.pp == 1), None)
        if alone is None:
            faster = search.fastest(with_pipeline=False)
            alone = next(iter(_fitting(faster, search, predicted, 1)), None)
        smallest = None if rows else _smallest(search, predicted)
    found = Found(
        tuple(row for row, _ in rows),
        None if alone is None else alone[0],
        len(search.layouts),
        search.num_too_large,
        search.num_simulated,
        smallest,
    )
    return found, [request for _, request in rows]


def _fitting(
    candidates: Iterator[Candidate],
    search: LayoutSearch,
    predicted: Callable[[Candidate], tuple[Candidate, T]],
    number: int,
) -> list[tuple[Candidate, T]]:
    """Return the first layouts that fit as planned, with better partitions, fastest first."""
    rows = list[tuple[Candidate, T]]()
    for candidate in candidates:
        for partitioned in dict.fromkeys((search.improved(candidate), candidate)):
            row = predicted(partitioned)
            if row[0].total_bytes <= search.room_bytes:
                rows.append(row)
                break
        if len(rows) == number:
            break
    return sorted(rows, key=lambda row: rank(row[0]))


def _smallest(
    search: LayoutSearch, predicted: Callable[[Candidate], tuple[Candidate, Any]]
) -> Candidate | None:
    """Return the layout that needs the fewest bytes as planned, None where none is possible."""
    best: Candidate | None = None
    for candidate in search.smallest():
        if best is not None and candidate.least_bytes >= best.total_bytes:
            break
        row, _ = predicted(candidate)
        best = row if best is None or row.total_bytes < best.total_bytes else best
    return best


def as_planned(config: Config, stack: Stack, candidate: Candidate) -> Planned:
    """Return a layout with the prediction of `ppctl plan` in place of the search's estimates."""
    # 1. its request
    sizes = list(candidate.partition)
    is_uniform = sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    schedule = named(candidate.family, candidate.num_microbatches, candidate.num_chunks)
    request = replace(
        config,
        mesh=settings.Mesh(**candidate.mesh.by_axis, order=config.mesh.order),
        schedule=replace(schedule, vocab=candidate.vocab),
        partition=Uniform() if is_uniform else Explicit(layers=sizes),
        executor=replace(config.executor, remat=str(candidate.remat)),
        tune=settings.Tune(),
    )
    settings.check(request)

    # 2. its prediction
    job = assemble(request, on_one_device=True, only_planned=True)
    found = predict_job(replace(job, counted_stack=stack))
    assert found.time is not None, "unknown hardware is not tuned for"
    memory = max(found.memory, key=lambda of_rank: sum(of_rank.values()))
    bubbles = {"ideal_bubble": found.ideal_bubble, "bubble": found.bubble}
    return replace(candidate, time=found.time, memory=memory, **bubbles), request


def _measured(
    found: Found, configs: list[Config], count: int
) -> tuple[Found, list[Config], tuple[float, ...]]:
    """Return the first `count` ordered by measured step time, and these seconds."""
    measured = [(run_steps(assemble(config)).wall_s, i) for i, config in enumerate(configs[:count])]
    order = [i for _, i in sorted(measured)] + list(range(len(measured), len(configs)))
    found = replace(found, best=tuple(found.best[i] for i in order))
    return found, [configs[i] for i in order], tuple(s for s, _ in sorted(measured))
