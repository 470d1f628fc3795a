"""The schedule that a config requests. Loads no JAX."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ppctl import config as settings
from ppctl.config.groups.model_settings import AnyModel
from ppctl.config.groups.schedule_settings import Eager1F1B, Hanayo
from ppctl.config.groups.transformer_sizes import TARGETS
from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule
from ppctl.schedule.placement_costs import CostsOf
from ppctl.schedule.remat import Remat
from ppctl.schedule.schedule_text import from_csv
from ppctl.schedule.scheduled_step import ScheduledStep, scheduled_step
from ppctl.schedule.search.auto_choice import GIB, Choice
from ppctl.schedule.search.auto_search import choose
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.vocabulary_parallel import with_vocabulary
from ppctl.user_files import path_of, read_text

_PLAIN, _WITH_CHUNKS = (settings.Schedule, Eager1F1B), (settings.Chunked, Hanayo)
CLASSES: tuple[type[settings.Schedule], ...] = (*_PLAIN, *_WITH_CHUNKS, settings.Interleaved)


class Requested(NamedTuple):
    """A schedule, its label (name and knobs), and for schedule=auto the candidates."""

    schedule: Schedule
    label: str
    choice: Choice | None = None


class Planned(NamedTuple):
    """A requested schedule as its executor runs it."""

    step: ScheduledStep
    label: str
    choice: Choice | None = None  # candidates of schedule=auto


def schedule_of(
    request: settings.Schedule,
    num_ranks: int,
    costs: Costs | CostsOf,
    *,
    most_chunks: int | None = None,
    makespan_s: Callable[[Schedule], float] | None = None,
    rank_bytes: Callable[[Schedule], int] | None = None,
    in_lockstep: bool = False,
) -> Requested:
    """Return the schedule that `request` names. ScheduleError or ConfigError if it is impossible.

    Args:
        costs: costs of tasks, for schedule=auto and schedule.vocab=parallel.
        most_chunks: for schedule=auto: maximum stages per rank that the layers allow.
        makespan_s, rank_bytes: for schedule=auto: functions of a schedule, see `choose`.
        in_lockstep: whether all ranks run each tick together. No rank then waits for another's part
            of the vocabulary, so no extra microbatches are in flight.
    """
    # 1. the schedule, with the whole vocabulary on its first and last stage
    choice = None
    if isinstance(request, settings.Csv):
        schedule, text = read_valid(Path(request.path)), Path(request.path).name
        _check_size(request, schedule, num_ranks)
    elif isinstance(request, settings.Auto):
        limit_bytes = None if request.max_memory_gib is None else request.max_memory_gib * GIB
        choice = choose(
            num_ranks,
            request.num_microbatches,
            costs,
            request.max_activations,
            limit_bytes=limit_bytes,
            max_chunks=min(request.max_chunks, most_chunks or request.max_chunks),
            makespan_s=makespan_s,
            rank_bytes=rank_bytes,
        )
        schedule, text = choice.best.schedule, f"auto: {choice.best.label}"
    else:
        schedule = build(request.name, num_ranks, request.num_microbatches, **request.knobs())
        text = _knobs_text(request)
    # 2. the vocabulary divided over the ranks
    if request.vocab != "whole":
        # delay: extra microbatches in flight; None: chosen by simulation. schedule=auto has met its
        # memory cap without extra ones, so it gets 0.
        delay = 0 if in_lockstep or isinstance(request, settings.Auto) else None
        placed = costs if isinstance(costs, Costs) else costs(schedule.rank_of).costs
        schedule = with_vocabulary(schedule, delay, placed)
    return Requested(schedule, text + _vocab_text(request), choice)


def pipeline_of(
    schedule: settings.Schedule,
    executor: settings.Reference,
    num_ranks: int,
    num_layers: int,
    trained: float = 1.0,
    costs_of: CostsOf | None = None,
    in_ticks_bytes: Callable[[Ticks], int] | None = None,
) -> Planned:
    """Return a run's schedule as its executor runs it. ScheduleError or ConfigError if impossible.

    Args:
        trained: share of the layers' weights that are trained.
        costs_of: for schedule=auto: costs of a model's stages on any placement; None: equal costs.
        in_ticks_bytes: for schedule=auto in lockstep, if memory is capped in bytes: function from
            ticks to the bytes of a rank.
    """
    # 1. functions from a schedule to its makespan and bytes in lockstep
    remat, in_ticks = Remat.of(executor.remat), executor.ENGINE.in_ticks
    costs = task_costs(remat, trained)

    def lower(found: Schedule) -> Ticks:
        lowered = scheduled_step(found, executor.ENGINE, remat, trained).ticks
        assert lowered is not None, "called only in lockstep"
        return lowered

    def makespan_s(found: Schedule) -> float:
        return lower(found).makespan_s(costs if costs_of is None else costs_of(found.rank_of).costs)

    def rank_bytes(found: Schedule) -> int:
        assert in_ticks_bytes is not None, "called only with in_ticks_bytes"
        return in_ticks_bytes(lower(found))

    # 2. the schedule, and its ticks
    found = schedule_of(
        schedule,
        num_ranks,
        costs_of or costs,
        most_chunks=max(1, num_layers // num_ranks),
        makespan_s=makespan_s if in_ticks else None,
        rank_bytes=None if in_ticks_bytes is None else rank_bytes,
        in_lockstep=in_ticks,
    )
    step = scheduled_step(found.schedule, executor.ENGINE, remat, trained)
    return Planned(step, found.label, found.choice)


def trained_share(model: AnyModel, optim: settings.Optim) -> float:
    """Return the share of the layers' weights that are trained; 1 for custom models.

    >>> optim = settings.AdamW(train="lora", lora_rank=4, lora_targets=["q"])
    >>> trained_share(settings.Transformer(d_model=64), optim)
    0.0103092783505154...
    """
    if optim.train != "lora" or not isinstance(model, settings.Transformer):
        return 1.0
    targets = optim.lora_targets or TARGETS
    adapted = (each for each in model.linear_maps if each.target in targets)
    adapters = optim.lora_rank * sum(each.num_in + each.num_out for each in adapted)
    return adapters / (adapters + model.num_weights)


def named(family: str, num_microbatches: int, num_chunks: int) -> settings.Schedule:
    """Return the request for a family with default knobs, and num_chunks if it has that knob."""
    knobs: dict[str, Any] = FAMILIES[family].knobs_for(num_chunks)
    return settings_of_family(family)(name=family, num_microbatches=num_microbatches, **knobs)


def settings_of_family(family: str) -> type[settings.Schedule]:
    """Return the settings class of a family.

    Of the classes whose knobs all belong to the family, it is the one with the most knobs.

    >>> settings_of_family("looped_bfs").__name__
    'Chunked'
    """
    fitting = [cls for cls in CLASSES if cls().knobs().keys() <= FAMILIES[family].knobs.keys()]
    return max(fitting, key=lambda cls: len(cls().knobs()))


def settled(
    request: settings.Schedule, mesh: settings.Mesh, *, is_free: bool
) -> tuple[settings.Schedule, settings.Mesh]:
    """Return a request and its mesh, with missing sizes of schedule=csv taken from the file.

    is_free: whether the number of ranks is not stated, and is taken from the file too.
    """
    if not isinstance(request, settings.Csv) or not (is_free or request.num_microbatches == 0):
        return request, mesh
    found = read_valid(Path(request.path))
    number = request.num_microbatches or found.num_microbatches
    ranks = found.num_ranks if is_free else mesh.pp
    return replace(request, num_microbatches=number), replace(mesh, pp=ranks)


def read(path: str | Path) -> Schedule:
    """Return the schedule in a CSV file. Each line lists the tasks of a rank in program order.

    The task 2F0 is the forward of stage 2 and microbatch 0. B is a whole backward; I and W are its
    two parts, the gradients of inputs and of weights. A stage is on the first rank that names it.
    PyTorch's pipelining reads and writes the same text. ConfigError if the file is unreadable,
    ScheduleError if the schedule is invalid.
    """
    path = path_of("path", path)
    try:
        return from_csv(read_text(path), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def read_valid(path: Path) -> Schedule:
    """Return `read(path)`. Its ScheduleError has one line and points to `ppctl schedule check`."""
    try:
        return read(path)
    except ScheduleError as error:
        fault = str(error).partition("\n")[0]
        raise ScheduleError(f"{fault} `ppctl schedule check {path}` shows where.") from None


def label(schedule: settings.Schedule) -> str:
    """Return a schedule's name, with num_chunks and all other knobs that are not at their defaults.

    >>> label(settings.Interleaved(num_chunks=4, vocab="parallel"))
    'interleaved (num_chunks=4), vocab=parallel'
    """
    return _knobs_text(schedule) + _vocab_text(schedule)


def _vocab_text(schedule: settings.Schedule) -> str:
    return "" if schedule.vocab == "whole" else f", vocab={schedule.vocab}"


def _knobs_text(schedule: settings.Schedule) -> str:
    default = type(schedule)().knobs()
    knobs = schedule.knobs().items()
    shown = [f"{k}={value}" for k, value in knobs if k == "num_chunks" or value != default[k]]
    return schedule.name + (f" ({', '.join(shown)})" if shown else "")


def _check_size(request: settings.Csv, schedule: Schedule, num_ranks: int) -> None:
    if schedule.num_ranks != num_ranks:
        raise ConfigError(
            f"mesh.pp={num_ranks}, but {request.path} has {schedule.num_ranks} ranks (a line "
            f"each). Use mesh.pp={schedule.num_ranks}."
        )
    key, number = "schedule.num_microbatches", schedule.num_microbatches
    if number != request.num_microbatches:
        raise ConfigError(
            f"{key}={request.num_microbatches}, but {request.path} has {number}. Use "
            f"{key}={number}, or leave it out."
        )
