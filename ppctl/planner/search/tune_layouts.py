"""The fastest layouts of a model on so many devices.

Mesh, schedule, stages a rank, partition, microbatches and remat are searched together
(`layout_search`), at costs counted for the hardware. The layouts found are predicted as by `ppctl
plan` (`predict_step`), and tune.measure runs the best ones here. Model, data, batch, executor and
optimizer are those of the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import jax
import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config import Config, Explicit, Mpmd, Spmd, Uniform
from ppctl.config.schedule_from_config import named
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.executors.model_shapes import tree_bytes
from ppctl.executors.stage.jaxpr_flops import relative_costs
from ppctl.model.stack import Stack, init
from ppctl.model.trainable_parameters import trained_share
from ppctl.planner.cost.counted_costs import Machine
from ppctl.planner.cost.device_models import device_models, divisions
from ppctl.planner.cost.predict_step import predict_job
from ppctl.planner.cost.rank_memory import device_limit
from ppctl.planner.cost.step_time import machine_of
from ppctl.planner.rehearsal.timed_runs import run_steps
from ppctl.planner.search.job_script import hosts_for
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.layout_search import Found, LayoutSearch, rank
from ppctl.planner.search.layout_space import PREFERRED, Space
from ppctl.planner.search.token_budget import check_tokens, token_budget
from ppctl.planner.show.tune_terminal import Tuned
from ppctl.schedule.families.registry import BASELINE, FAMILIES, ON_RING, build
from ppctl.schedule.mesh_axes import MeshSizes
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
from ppctl.training.pipeline.known_hardware import resolved
from ppctl.training.pipeline.mfu import mfu_peak_flops
from ppctl.training.pipeline.optimizers import clipped, init_state
from ppctl.training.pipeline.pipeline_request import divided_stack, with_vocabulary_of

Planned = tuple[Candidate, Config]  # a layout predicted as by `ppctl plan`, and its request
Predict = Callable[[Candidate], Planned]
SLACK = 1.02  # room of a search over the limit: the error of its estimates if stages are alike


def tune_layouts(config: Config) -> tuple[Tuned, list[Config]]:
    """Return the layouts found, best first, and their requests. ConfigError for a bad request."""
    # 1. the hardware, and the memory of a device
    _check(config)
    tune, plan, num_devices = (
        config.tune,
        config.plan,
        config.tune.devices or config.mesh.num_devices,
    )
    dtype = config.run.dtype or DEFAULT_DTYPE
    start_jax(replace(config, mesh=settings.Mesh(dp=num_devices if tune.measure else 1)), dtype)
    device = all_devices()[0]
    check_memory_fraction(config, device, only_planned=True)
    hardware = _hardware(config, device)
    hosts = None if tune.launch is None else hosts_for(tune.launch, hardware, num_devices)
    limit = device_limit(replace(config, mesh=settings.Mesh(dp=num_devices)), device)

    # 2. the model and the search
    data = open_data(config)
    batch = batch_shapes(data)
    tokens = None if data.vocab_size is None else data.batch_size * batch["inputs"].shape[1]
    check_tokens("plan.tokens", plan.tokens, tokens)
    stack = stack_for(hardware, config, data, jnp.dtype(dtype), device)
    search = _search(config, stack, batch, machine_of(config, device.device_kind, dtype))
    began = time.perf_counter()
    limit_bytes = inf if limit is None else limit.size_bytes
    found, configs = planned(config, stack, search, limit_bytes)
    search_s = time.perf_counter() - began

    # 3. steps of the best
    found, configs, measured_s = _measured(found, configs, tune.measure)
    step_s = measured_s[0] if measured_s else found.best[0].time.total_s if found.best else None
    peak = mfu_peak_flops(hardware, device.device_kind, dtype)
    tuned = Tuned(
        found,
        measured_s,
        search_s,
        f"{num_devices} x {hardware.name}",
        limit,
        batch_tokens=tokens,
        step_flops=data.batch_size * search.models(MeshSizes()).work.flops(stack.num_layers),
        peak_flops=peak and peak * num_devices,
        token_budget=token_budget(plan.tokens, tokens, step_s, num_devices, hardware),
        hosts=hosts,
    )
    return tuned, configs


def _hardware(config: Config, device: Any) -> settings.Hardware:
    """Return the hardware searched for. ConfigError where tune.measure would run on another."""
    kind, measure = device.device_kind, config.tune.measure
    hardware = resolved(config.hardware, kind)
    if measure and hardware.name != resolved(settings.AutoHardware(), kind).name:
        raise ConfigError(
            f"tune.measure={measure} runs steps on the devices of this machine ({kind}), but "
            f"hardware={hardware.name}. Use tune.measure=0, or hardware=auto."
        )
    return hardware


def _search(
    config: Config, stack: Stack, batch: Mapping[str, Any], machine: Machine
) -> LayoutSearch:
    """Return the search of the layouts to choose from; batch: shapes."""
    dtype, of_host = jnp.dtype(config.run.dtype or DEFAULT_DTYPE), machine.host_devices
    optimizer = clipped(make_optimizer(config)[0], config.optim.clip_norm)
    params = lambda: init(stack, config.run.seed)  # noqa: E731
    state = jax.eval_shape(lambda: init_state(params(), optimizer, stack.trainable))
    models = device_models(config, stack, state, batch, dtype)
    of_host = of_host or config.tune.devices or config.mesh.num_devices
    sizes = divisions(config, stack, state["params"]["embed_head"], batch, of_host, models)
    space = _space(config, stack, state["params"]["layers"], batch, tuple(sizes))
    return LayoutSearch(space, models, machine)


def _space(
    config: Config, stack: Stack, layers: Any, batch: Mapping[str, Any], sizes: Sequence[MeshSizes]
) -> Space:
    """Return the layouts to choose from; layers: shapes of their parameters; sizes: of stages."""
    tune, batch_size, layer_costs = config.tune, batch["inputs"].shape[0], None
    if not stack.are_alike:
        dtype = jnp.dtype(config.run.dtype or DEFAULT_DTYPE)
        recompute = Remat.of(config.executor.remat).recomputes
        layer_costs = relative_costs(stack, batch, dtype, recompute=recompute).layers
    return Space(
        tune.devices or config.mesh.num_devices,
        stack.num_layers,
        batch_size,
        example_bytes=tree_bytes(batch) // batch_size,
        in_ticks=config.executor.IN_TICKS,
        gather=config.executor.gather if isinstance(config.executor, Spmd | Mpmd) else "step",
        families=tuple(tune.schedules or PREFERRED),
        remats=tuple(tune.remat or tune.REMAT),
        max_chunks=tune.max_chunks,
        layer_costs=layer_costs,
        trained=trained_share(layers, stack.trains("layers")),
        divisions=tuple(sizes),
        vocab=_vocab(config, stack, batch),
    )


def _check(config: Config) -> None:
    if not config.executor.IS_PIPELINED:
        raise ConfigError(
            "executor=reference has one layout, on one device. Use executor=spmd or executor=mpmd."
        )
    if config.schedule.vocab == "parallel":
        raise ConfigError(
            "schedule.vocab=parallel is of one schedule, and `ppctl tune` chooses schedules. "
            "Leave it out: it is found where it wins, and alone with tune.vocab=[parallel]."
        )
    runs = ON_RING if config.executor.IN_TICKS else FAMILIES
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


def planned(
    config: Config, stack: Stack, search: LayoutSearch, limit_bytes: float
) -> tuple[Found, list[Config]]:
    """Return a search's layouts, predicted as by `ppctl plan`, and their requests, fastest first.

    stack: the model as the hardware runs it.
    """
    predicted = partial(as_planned, config, stack)
    found, rows = _fitting(search, predicted, config.tune.best, limit_bytes, limit_bytes * SLACK)
    smallest = None if found.smallest is None else predicted(found.smallest)
    if not rows and smallest is not None and smallest[0].total_bytes <= limit_bytes:
        rows = [smallest]
    found = replace(
        found,
        best=tuple(row for row, _ in rows),
        without_pipeline=_without_pipeline(search, predicted, found, limit_bytes),
        smallest=None if smallest is None else smallest[0],
    )
    return found, [request for _, request in rows]


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
        executor=replace(config.executor, remat=candidate.remat),
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


def _fitting(
    search: LayoutSearch, predicted: Predict, keep: int, limit_bytes: float, room_bytes: float
) -> tuple[Found, list[Planned]]:
    """Return the result of a search, and its best layouts that fit as planned, fastest first.

    A search estimates layouts without building them. So it gets a little more room than the limit.
    If none of its layouts fits as planned, the next search gets less room by this one's error.
    """
    found = search.improved(search.run(keep, room_bytes=room_bytes))
    rows = [predicted(candidate) for candidate in found.best]
    fitting = [row for row in rows if row[0].total_bytes <= limit_bytes]
    if rows and not fitting:
        room_bytes = _less_room(limit_bytes, rows, found.best)
        return _fitting(search, predicted, keep, limit_bytes, room_bytes)
    return found, sorted(fitting, key=lambda row: rank(row[0]))


def _without_pipeline(
    search: LayoutSearch, predicted: Predict, found: Found, limit_bytes: float
) -> Candidate | None:
    """Return the fastest layout without a pipeline that fits as planned."""
    if found.without_pipeline is None:
        return None
    row = predicted(found.without_pipeline)
    if row[0].total_bytes <= limit_bytes:
        return row[0]
    less = search.run(1, room_bytes=_less_room(limit_bytes, [row], [found.without_pipeline]))
    return _without_pipeline(search, predicted, less, limit_bytes)


def _less_room(
    limit_bytes: float, rows: Sequence[Planned], estimates: Sequence[Candidate]
) -> float:
    """Return the room for a search whose estimates were less than the layouts need as planned."""
    pairs = zip(rows, estimates, strict=True)
    ratios = (row.total_bytes / estimate.total_bytes for (row, _), estimate in pairs)
    return limit_bytes / SLACK / min(ratios)


def _measured(
    found: Found, configs: list[Config], count: int
) -> tuple[Found, list[Config], tuple[float, ...]]:
    """Return the first `count` ordered by measured step time, and these seconds."""
    measured = [(run_steps(assemble(config)).wall_s, i) for i, config in enumerate(configs[:count])]
    order = [i for _, i in sorted(measured)] + list(range(len(measured), len(configs)))
    found = replace(found, best=tuple(found.best[i] for i in order))
    return found, [configs[i] for i in order], tuple(s for s, _ in sorted(measured))
