"""From the schedule that a config asks for to the schedule itself. Loads no jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ppctl import config as settings
from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule
from ppctl.schedule.remat import Remat
from ppctl.schedule.search.auto import choose
from ppctl.schedule.search.choice import GIB, Choice
from ppctl.schedule.search.ledger import CostsOf
from ppctl.schedule.text import from_csv
from ppctl.schedule.ticks import Ticks, ticks
from ppctl.schedule.vocabulary import with_vocabulary

# the settings of a family are the class that has just its knobs
CLASSES: tuple[type[settings.Schedule], ...] = (
    settings.Schedule,
    settings.Eager1F1B,
    settings.Chunked,
    settings.Interleaved,
    settings.Gis,
    settings.Hanayo,
)


@dataclass(frozen=True)
class Requested:
    """A schedule, the label that tells it from others, and for schedule=auto the candidates."""

    schedule: Schedule
    label: str
    choice: Choice | None = None


@dataclass(frozen=True)
class Pipeline:
    """A schedule as an executor runs it, and the relative costs of its tasks."""

    schedule: Schedule
    label: str
    ticks: Ticks | None  # of executor=spmd
    costs: Costs
    choice: Choice | None = None  # of schedule=auto


def schedule_of(
    request: settings.Schedule,
    num_ranks: int,
    costs: Costs | CostsOf,
    most_chunks: int | None = None,
    makespan_s: Callable[[Schedule], float] | None = None,
    rank_bytes: Callable[[Schedule], int] | None = None,
    *,
    in_lockstep: bool = False,
) -> Requested:
    """Return the schedule that `request` names. ScheduleError or ConfigError where it is impossible.

    costs matter to schedule=auto and schedule.vocab=parallel; most_chunks (stages a rank that the model has layers
    for), makespan_s and rank_bytes (see `choose`) to the first alone. in_lockstep: ranks run ticks together, so that
    none waits for the others' parts of the vocabulary, and no more microbatches need be in flight; nor are they where
    what ranks hold is capped.
    """
    found = _with_whole_vocabulary(request, num_ranks, costs, most_chunks, makespan_s, rank_bytes)
    if request.vocab == "whole":
        return found
    delay = 0 if in_lockstep or isinstance(request, settings.Auto) else None
    placed = costs if isinstance(costs, Costs) else costs(found.schedule.rank_of).costs
    divided = with_vocabulary(found.schedule, delay, placed)
    return replace(found, schedule=divided, label=f"{found.label}, vocab=parallel")


def _with_whole_vocabulary(
    request: settings.Schedule,
    num_ranks: int,
    costs: Costs | CostsOf,
    most_chunks: int | None,
    makespan_s: Callable[[Schedule], float] | None,
    rank_bytes: Callable[[Schedule], int] | None,
) -> Requested:
    if isinstance(request, settings.Csv):
        schedule = read_valid(Path(request.path))
        _check_size(request, schedule, num_ranks)
        return Requested(schedule, Path(request.path).name)
    if isinstance(request, settings.Auto):
        choice = choose(
            num_ranks,
            request.num_microbatches,
            costs,
            request.max_activations,
            limit_bytes=None if request.max_memory_gib is None else request.max_memory_gib * GIB,
            max_chunks=min(request.max_chunks, most_chunks or request.max_chunks),
            may_split=request.split_backward,
            by_period=request.objective == "period",
            makespan_s=makespan_s,
            rank_bytes=rank_bytes,
        )
        return Requested(choice.best.schedule, f"auto: {choice.best.label}", choice)
    schedule = build(request.name, num_ranks, request.num_microbatches, **request.knobs())
    return Requested(schedule, label(request))


def pipeline_of(
    schedule: settings.Schedule,
    executor: settings.Reference,
    num_ranks: int,
    num_layers: int,
    trained: float = 1.0,
    costs_of: CostsOf | None = None,
    in_ticks_bytes: Callable[[Ticks], int] | None = None,
) -> Pipeline:
    """Return the schedule of a run, as its executor runs it. ScheduleError or ConfigError where it is impossible.

    trained: the share of the layers' weights that are trained. For schedule=auto, costs_of: what a model's stages cost
    on any placement (None: all the same); in_ticks_bytes: what a rank holds in lockstep, where bytes are capped.
    """
    costs, in_ticks = task_costs(executor.remat, trained), executor.IN_TICKS

    @lru_cache(2)
    def lower(found: Schedule) -> Ticks:
        return ticks(found, costs, Remat.of(executor.remat))

    def in_lockstep_s(found: Schedule) -> float:
        return lower(found).makespan_s(costs if costs_of is None else costs_of(found.rank_of).costs)

    makespan_s = in_lockstep_s if in_ticks else None

    def rank_bytes(found: Schedule) -> int:
        assert in_ticks_bytes is not None, "asked where it is there"
        return in_ticks_bytes(lower(found))

    most_chunks = max(1, num_layers // num_ranks)
    how = makespan_s, None if in_ticks_bytes is None else rank_bytes
    found = schedule_of(schedule, num_ranks, costs_of or costs, most_chunks, *how, in_lockstep=in_ticks)
    return Pipeline(found.schedule, found.label, lower(found.schedule) if in_ticks else None, costs, found.choice)


def trained_share(model: settings.Transformer | settings.MLP | settings.CustomModel, optim: settings.Optim) -> float:
    """Return the share of the layers' weights that are trained, as `ppctl.model.trainable` counts it of parameters.

    1 for a model of the user's own, whose parameters are not known here.

    >>> trained_share(settings.Transformer(d_model=64), settings.AdamW(train="lora", lora_rank=4, lora_targets=["q"]))
    0.0103092783505154...
    """
    if optim.train != "lora" or not isinstance(model, settings.Transformer):
        return 1.0
    maps, rank = model.linear_maps, optim.lora_rank
    targets = maps if optim.lora_targets is None else optim.lora_targets
    adapters = sum(rank * sum(maps[name]) for name in targets)
    return adapters / (adapters + sum(a * b for a, b in maps.values()))


def named(family: str, num_microbatches: int, num_chunks: int) -> settings.Schedule:
    """Return the request for a family with its usual knobs; num_chunks counts where the family has that knob.

    >>> named("interleaved", 8, 4)
    Interleaved(name='interleaved', num_microbatches=8, vocab='whole', num_chunks=4, warmup_hops=2.0, group_size=None)
    """
    knobs: dict[str, Any] = FAMILIES[family].knobs_for(num_chunks)
    return settings_of_family(family)(name=family, num_microbatches=num_microbatches, **knobs)


def settings_of_family(family: str) -> type[settings.Schedule]:
    """Return the class that holds the settings of a family.

    >>> settings_of_family("looped_bfs").__name__
    'Chunked'
    """
    return next(cls for cls in CLASSES if cls().knobs().keys() == FAMILIES[family].knobs.keys())


def settled(request: settings.Schedule) -> settings.Schedule:
    """Return `request` with the number of microbatches that a CSV file has; others as they are."""
    if isinstance(request, settings.Csv) and request.num_microbatches == 0:
        return replace(request, num_microbatches=read_valid(Path(request.path)).num_microbatches)
    return request


def read(path: Path) -> Schedule:
    """Return the schedule in a CSV file. ConfigError if it cannot be read, ScheduleError if it is not valid."""
    try:
        return from_csv(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {reason}.") from None


def read_valid(path: Path) -> Schedule:
    """Return the same as `read`, its error in one line: `ppctl schedule check` draws the fault."""
    try:
        return read(path)
    except ScheduleError as error:
        raise ScheduleError(f"{str(error).partition(chr(10))[0]} `ppctl schedule check {path}` shows where.") from None


def label(schedule: settings.Schedule) -> str:
    """Return name and knobs: the number of chunks, and all that differ from their defaults.

    >>> label(settings.Interleaved(num_chunks=4))
    'interleaved (num_chunks=4)'
    """
    default = type(schedule)(name=schedule.name).knobs()
    shown = [
        f"{key}={value}"
        for key, value in schedule.knobs().items()
        if value is not None and (key == "num_chunks" or value != default[key])
    ]
    return schedule.name + (f" ({', '.join(shown)})" if shown else "")


def _check_size(request: settings.Csv, schedule: Schedule, num_ranks: int) -> None:
    if schedule.num_ranks != num_ranks:
        raise ConfigError(
            f"mesh.pp={num_ranks}, but {request.path} has {schedule.num_ranks} ranks (a line each). "
            f"Use mesh.pp={schedule.num_ranks}."
        )
    if schedule.num_microbatches != request.num_microbatches:
        raise ConfigError(
            f"schedule.num_microbatches={request.num_microbatches}, but {request.path} has "
            f"{schedule.num_microbatches}. "
            f"Use schedule.num_microbatches={schedule.num_microbatches}, or leave it out."
        )
