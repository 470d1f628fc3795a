"""The fastest layouts of a model on so many devices.

Mesh, schedule, stages a rank, partition, microbatches and remat are searched together (`planner.search`), at costs
counted for the hardware; what is found is predicted as `ppctl plan` does (`planner.predict`), and tune.measure runs the
best ones here. Model, data, batch, executor and optimizer are those of the request; the rest is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config import Config, Mpmd, Spmd
from ppctl.errors import ConfigError
from ppctl.executors.mesh import all_devices
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.executors.stage.flops import relative_costs
from ppctl.model.stack import Stack, init
from ppctl.model.trainable import trained_share
from ppctl.planner.advise import LARGEST_RATIO
from ppctl.planner.as_planned import Planned, as_planned
from ppctl.planner.candidate import Candidate
from ppctl.planner.device_models import device_models, models_by_parts
from ppctl.planner.job_script import hosts_for
from ppctl.planner.memory import GIB, DeviceLimit, device_limit
from ppctl.planner.search import Found, LayoutSearch, rank
from ppctl.planner.searched_schedule import SearchedSchedule
from ppctl.planner.space import PREFERRED, Space
from ppctl.planner.step_runs import run_steps
from ppctl.planner.step_time import machine_of
from ppctl.planner.token_budget import check_tokens, token_budget
from ppctl.planner.tune_auto import AUTO, with_searched
from ppctl.planner.tune_terminal import RoomierLayout, Tuned, VocabularyGain
from ppctl.schedule.families.registry import BASELINE, FAMILIES, ON_RING, build
from ppctl.schedule.remat import Remat
from ppctl.schedule.vocabulary import with_vocabulary
from ppctl.training.execution import Execution
from ppctl.training.gpu_memory import check_memory_fraction
from ppctl.training.job import (
    DEFAULT_DTYPE,
    assemble,
    batch_shapes,
    make_optimizer,
    open_data,
    stack_for,
)
from ppctl.training.known_hardware import mfu_peak_flops, resolved
from ppctl.training.optim import clipped
from ppctl.training.request import divided_stack, with_vocabulary_of
from ppctl.training.start import start_jax
from ppctl.training.train_step import init_state

SLACK = 1.02  # room that a search gets over what there is: its estimates are that near, where stages are alike


def tune_layouts(config: Config) -> tuple[Tuned, list[Config]]:
    """Return the layouts found, best first, and the request of each. ConfigError for what cannot be."""
    _check(config)
    num_devices = config.tune.devices or config.mesh.num_devices
    start = replace(config, mesh=settings.Mesh(dp=num_devices if config.tune.measure else 1))
    dtype_name = config.run.dtype or DEFAULT_DTYPE
    start_jax(start, dtype_name)
    device = all_devices()[0]
    check_memory_fraction(config, device, only_planned=True)
    hardware = resolved(config.hardware, device.device_kind)
    if config.tune.measure and hardware.name != resolved(settings.AutoHardware(), device.device_kind).name:
        raise ConfigError(
            f"tune.measure={config.tune.measure} runs steps on what is here ({device.device_kind}), but "
            f"hardware={hardware.name}. Use tune.measure=0, or hardware=auto."
        )
    launch = config.tune.launch
    hosts = None if launch is None else hosts_for(launch, hardware, num_devices)
    dtype = jnp.dtype(dtype_name)
    data = open_data(config)
    stack = stack_for(hardware, config, data, dtype, device)
    optimizer = clipped(make_optimizer(config)[0], config.optim.clip_norm)
    state = jax.eval_shape(lambda: init_state(init(stack, config.run.seed), optimizer, stack.trainable))
    batch = batch_shapes(data)
    example = {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}
    machine = machine_of(config, device.device_kind, dtype_name)
    models = device_models(config, stack, state, batch, dtype, machine.host_devices or num_devices)
    vocab = _vocab(config, stack, batch)
    recompute = Remat.of(config.executor.remat).recomputes
    space = Space(
        num_devices,
        stack.num_layers,
        data.batch_size,
        example_bytes=tree_bytes(example),
        in_ticks=config.executor.IN_TICKS,
        gather=config.executor.gather if isinstance(config.executor, Spmd | Mpmd) else "step",
        families=tuple(name for name in config.tune.schedules or () if name != AUTO) or PREFERRED,
        remats=tuple(config.tune.remat or config.tune.REMAT),
        max_chunks=config.tune.max_chunks,
        layer_costs=None if stack.are_alike else relative_costs(stack, batch, dtype, recompute=recompute).layers,
        trained=trained_share(state["params"]["layers"], stack.trains("layers")),
        divisions=tuple(
            (tp, cp) for tp, cp in models if tp in (config.tune.tp or [tp]) and cp in (config.tune.cp or [cp])
        ),
        vocab=vocab,
    )
    limit = _limit(config, num_devices, device)
    if limit is None and AUTO in (config.tune.schedules or ()):
        raise ConfigError(
            f"tune.schedules: {AUTO} is searched for the memory of a device, which is not known of {hardware.name}. "
            "Use tune.memory_gib."
        )
    tokens = None if data.vocab_size is None else data.batch_size * example["inputs"].shape[1]
    check_tokens("tune.tokens", config.tune.tokens, tokens)
    began = time.perf_counter()
    search = LayoutSearch(space, models, machine, models_by_parts(config, stack, state, batch, dtype, models))
    found, configs, roomier, gain, searched = planned(config, stack, search, limit)
    search_s = time.perf_counter() - began
    found, configs, measured_s = _measured(found, configs, config.tune.measure)
    peak = mfu_peak_flops(hardware, device.device_kind, dtype_name)
    step_s = measured_s[0] if measured_s else found.best[0].time.total_s if found.best else None
    budget = token_budget(config.tune.tokens, tokens, step_s, num_devices, hardware)
    flops = data.batch_size * models[1, 1].work.flops(stack.num_layers)
    devices = f"{num_devices} x {hardware.name}"
    peak = peak and peak * num_devices
    tuned = Tuned(found, measured_s, search_s, devices, limit, tokens, flops, peak, None, roomier, budget, hosts)
    return replace(tuned, gain=gain, searched=searched), configs


def _check(config: Config) -> None:
    name = config.executor.name
    if not config.executor.IS_PIPELINED:
        raise ConfigError("executor=reference has one layout, on one device. Use executor=spmd or executor=mpmd.")
    if isinstance(config.executor, Spmd) and config.executor.idle != "skip":
        raise ConfigError(
            f"executor.idle={config.executor.idle} computes in idle ticks too, which `ppctl tune` does not predict. "
            "Leave it out; `ppctl plan executor.idle=compute` predicts one layout."
        )
    if config.schedule.vocab == "parallel":
        raise ConfigError(
            "schedule.vocab=parallel is of one schedule, and `ppctl tune` chooses schedules. Leave it out: it is found "
            "where it wins, and alone with tune.vocab=[parallel]."
        )
    if config.costs.name != "analytic":
        raise ConfigError(
            f"costs={config.costs.name} times the pieces of one layout, and `ppctl tune` looks at thousands. Use "
            "tune.measure=K, which runs the best K."
        )
    runs = ON_RING if config.executor.IN_TICKS else tuple(FAMILIES)
    for family in config.tune.schedules or ():
        if family not in (*runs, AUTO):
            raise ConfigError(
                f"tune.schedules: {family} is none that executor={name} runs ({', '.join(runs)}, {AUTO})."
            )


def _vocab(config: Config, stack: Stack, batch: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    """Return the settings of schedule.vocab to choose from. ConfigError where tune.vocab has one that cannot be."""
    executor, asked = config.executor, config.tune.vocab
    assert isinstance(executor, Spmd | Mpmd), "others have one layout"
    execution = Execution(executor.name, Remat.NONE, executor.unroll, "skip", executor.gather, False)
    divided = with_vocabulary(build(BASELINE, 2, 1))
    try:  # what a run would say
        divided_stack(stack, with_vocabulary_of(divided, execution), batch)
    except ConfigError:
        if asked is not None and "parallel" in asked:
            raise
        return ("whole",)
    return tuple(asked or settings.Schedule.VOCAB)


def _limit(config: Config, num_devices: int, device: Any) -> DeviceLimit | None:
    """Return the memory of a device: tune.memory_gib, or that which `ppctl plan` takes."""
    if config.tune.memory_gib is not None:
        return DeviceLimit(round(config.tune.memory_gib * GIB), f"tune.memory_gib={config.tune.memory_gib:g}")
    return device_limit(replace(config, mesh=settings.Mesh(dp=num_devices)), device)


def planned(
    config: Config, stack: Stack, search: LayoutSearch, limit: DeviceLimit | None
) -> tuple[Found, list[Config], RoomierLayout | None, VocabularyGain | None, tuple[SearchedSchedule, ...] | None]:
    """Return the layouts that a search finds, fastest first, with the request of each, predicted as by `ppctl plan`;
    a faster one that needs more of the GPUs' memory; what the best gains by dividing the vocabulary; and what
    schedule=auto finds for the best, where it was asked.

    stack: the model as the hardware runs it. A search estimates layouts without building them. So it gets a little
    more room than there is, layouts that do not fit as they are planned are left out, and where none is left it gets as
    much less room as it had estimated too little.
    """
    limit_bytes = None if limit is None else limit.size_bytes
    predicted = partial(as_planned, config, stack)
    fits = lambda row: limit_bytes is None or row[0].total_bytes <= limit_bytes  # noqa: E731
    room = None if limit_bytes is None else limit_bytes * SLACK
    while True:
        found = search.improved(search.run(config.tune.best, room_bytes=room))
        rows = [predicted(candidate) for candidate in found.best]
        if limit_bytes is None or not rows or any(map(fits, rows)):
            break
        room = _less_room(limit_bytes, zip(rows, found.best, strict=True))
    smallest = None if found.smallest is None else predicted(found.smallest)
    too_large = [row for row in rows if not fits(row)]
    rows = sorted(filter(fits, rows or filter(None, [smallest])), key=lambda row: rank(row[0]))
    searched: tuple[SearchedSchedule, ...] | None = None
    if limit_bytes is not None and AUTO in (config.tune.schedules or ()):
        more, searched = with_searched(config, stack, rows, limit_bytes)
        rows = sorted([*rows, *more], key=lambda row: rank(row[0]))
    found = replace(found, best=tuple(row for row, _ in rows))
    roomier = _roomier(found, config, stack, search, limit, too_large)

    def first(of: Callable[[Found], Candidate | None]) -> Candidate | None:
        """Return the best layout of a kind, one that fits as it is planned."""
        before = of(found)
        while before is not None:
            row = predicted(before)
            if limit_bytes is None or fits(row):
                return row[0]
            before = of(search.run(1, room_bytes=_less_room(limit_bytes, [(row, before)])))
        return None

    is_divided = bool(found.best) and found.best[0].vocab == "parallel"
    others = [each for each in found.by_division if found.best and each != found.best[0].mesh.divides_stages]
    found = replace(
        found,
        without_pipeline=first(lambda found: found.without_pipeline),
        with_whole_vocabulary=first(lambda found: found.with_whole_vocabulary) if is_divided else None,
        by_division={each: first(lambda found, each=each: found.by_division[each]) for each in others},
        smallest=None if smallest is None else smallest[0],
    )
    gain = _gain(config, stack, search, found)
    if is_divided and gain is not None and gain.whole is not None and fits((gain.whole, config)):
        others = filter(None, (found.with_whole_vocabulary, gain.whole))  # the partition of the second is improved
        found = replace(found, with_whole_vocabulary=min(others, key=rank))
    return found, [request for _, request in rows], roomier, gain, searched


def _gain(config: Config, stack: Stack, search: LayoutSearch, found: Found) -> VocabularyGain | None:
    """Return what the first layout with schedule.vocab=parallel gains over itself with embedding and head whole."""
    divided = next((each for each in found.best if each.vocab == "parallel" and each.family != AUTO), None)
    if divided is None:
        return None
    whole = search.with_whole_vocabulary(divided)
    return VocabularyGain(divided, None if whole is None else as_planned(config, stack, whole)[0])


def _less_room(limit_bytes: int, too_little: Iterable[tuple[Planned, Candidate]]) -> float:
    """Return the room for a search that estimated layouts, the second of each pair, too small."""
    return limit_bytes / SLACK / min(row.total_bytes / before.total_bytes for (row, _), before in too_little)


def _roomier(
    found: Found,
    config: Config,
    stack: Stack,
    search: LayoutSearch,
    limit: DeviceLimit | None,
    too_large: Sequence[Planned],
) -> RoomierLayout | None:
    """Return the fastest layout that only a larger run.memory_fraction has room for; None where none gains enough.

    It is among those that the search refused for their memory alone, or that were `too_large` as planned.
    """
    most = None if limit is None else limit.most
    if most is None:
        return None
    config = replace(config, run=replace(config.run, memory_fraction=most.fraction))
    fits = lambda row: row[0].total_bytes <= most.size_bytes  # noqa: E731
    rows = [(row, replace(request, run=config.run)) for row, request in too_large]
    room = most.size_bytes * SLACK
    while (candidate := search.with_room(found, room)) is not None:
        rows.append(as_planned(config, stack, candidate))
        if fits(rows[-1]):
            break
        room = _less_room(most.size_bytes, [(rows[-1], candidate)])
    row, request = min(filter(fits, rows), key=lambda each: rank(each[0]), default=(None, config))
    first_s = found.best[0].time.total_s if found.best else None
    if row is None or (first_s is not None and row.time.total_s > LARGEST_RATIO * first_s):
        return None
    return RoomierLayout(row, request, most, None if first_s is None else first_s / row.time.total_s)


def _measured(found: Found, configs: list[Config], count: int) -> tuple[Found, list[Config], tuple[float, ...]]:
    """Return the same with the first `count` in the order of their measured step times, and these seconds."""
    measured = [(_step_s(config), i) for i, config in enumerate(configs[:count])]
    order = [i for _, i in sorted(measured)] + list(range(len(measured), len(configs)))
    best = tuple(found.best[i] for i in order)
    return replace(found, best=best), [configs[i] for i in order], tuple(s for s, _ in sorted(measured))


def _step_s(config: Config) -> float:
    return run_steps(assemble(config)).wall_s
