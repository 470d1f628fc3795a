"""The result of `ppctl tune`, printed and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from ppctl import config as settings
from ppctl.config import Auto, Balanced, Config, Explicit
from ppctl.config.schedule_from_config import label
from ppctl.planner.candidate import Candidate
from ppctl.planner.job_script import Hosts
from ppctl.planner.memory import DeviceLimit
from ppctl.planner.plan_terminal import show_stages
from ppctl.planner.prediction import StagePart
from ppctl.planner.recipe import command_of
from ppctl.planner.search import Found
from ppctl.planner.searched_schedule import SearchedSchedule, words_of
from ppctl.planner.token_budget import TokenBudget
from ppctl.reports.terminal import OutputConsole, show_json, show_table, size_text
from ppctl.schedule.partition.partition import LETTERS, layout_text


@dataclass(frozen=True)
class RoomierLayout:
    """A layout that fits with a larger run.memory_fraction only."""

    candidate: Candidate
    request: Config
    limit: DeviceLimit
    speedup: float | None  # over the best that fits without, as predicted; None where none does

    @property
    def text(self) -> str:
        """The layout and what it gains, in a line."""
        found, limit = self.candidate, self.limit
        schedule = "" if found.mesh.pp == 1 else f" {_schedule_text(self.request)}"
        layout = f"mesh={self.request.mesh.text}{schedule}, {found.num_microbatches} microbatches, remat={found.remat}"
        gain = "it fits" if self.speedup is None else f"{self.speedup - 1:.0%} faster"
        held = f"{found.time.total_s:.4g} s, {size_text(found.total_bytes)} of {size_text(limit.size_bytes)}"
        return f"with {limit.source}: {layout}: {gain} ({held})."


@dataclass(frozen=True)
class VocabularyGain:
    """A layout with embedding and head on all ranks, and the same with both whole; None where that cannot be."""

    divided: Candidate
    whole: Candidate | None

    def text(self, which: str, limit: DeviceLimit | None) -> str:
        """What it gains, in a line; which: of the layouts."""
        about = f"embedding and head on all ranks of {which}"
        if self.whole is None:
            return f"{about}: with both whole there is no such layout."
        saved_s, saved_bytes = self.saved_s, self.saved_bytes
        step = "shorter" if saved_s >= 0 else "longer"
        memory = "less" if saved_bytes >= 0 else "more"
        fits = limit is None or self.whole.total_bytes <= limit.size_bytes
        return (
            f"{about}: its step is {abs(saved_s):.4g} s ({abs(saved_s) / self.whole.time.total_s:.1%}) {step} than "
            f"that of the same layout with both whole ({layout_text(self.whole.partition)}), and takes "
            f"{size_text(abs(saved_bytes))} {memory} memory{'' if fits else ', which would not fit'}."
        )

    @property
    def saved_s(self) -> float:
        """The seconds by which the step is shorter."""
        assert self.whole is not None, "there is something to compare with"
        return self.whole.time.total_s - self.divided.time.total_s

    @property
    def saved_bytes(self) -> int:
        """The bytes that the fullest device has less."""
        assert self.whole is not None, "there is something to compare with"
        return self.whole.total_bytes - self.divided.total_bytes


@dataclass(frozen=True)
class Tuned:
    """The layouts found, with what they were found for."""

    found: Found
    measured_s: tuple[float, ...]  # of the best ones, as far as they were run; `found.best` is in this order
    search_s: float
    devices: str
    limit: DeviceLimit | None  # the memory of a device
    batch_tokens: int | None  # of a step; None where the data are no text
    step_flops: float  # of the model, nothing recomputed
    peak_flops: float | None  # of all devices
    recipe: str | None  # the file
    roomier: RoomierLayout | None = None
    token_budget: TokenBudget | None = None  # of tune.tokens, with the first layout
    hosts: Hosts | None = None  # of tune.launch
    job_script: str | None = None  # the file
    job_command: str | None = None  # that starts it
    gain: VocabularyGain | None = None  # of the first layout with schedule.vocab=parallel
    searched: tuple[SearchedSchedule, ...] | None = None  # None: tune.schedules has no auto


def show_tuned(tuned: Tuned, configs: Sequence[Config], *, as_json: bool) -> None:
    """Print the layouts, best first; `configs` are their requests."""
    found = tuned.found
    if as_json:
        show_json(_document(tuned, configs))
        return
    console = OutputConsole()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    limit = tuned.limit
    limit_text = "" if limit is None else f" of {size_text(limit.size_bytes)} each ({limit.source})"
    say(
        f"{found.num_layouts:,} layouts for {tuned.devices}{limit_text}: {found.num_too_large:,} too large, "
        f"{found.num_simulated:,} simulated in {tuned.search_s:.1f} s"
    )
    if not found.best:
        smallest = found.smallest
        least = "" if smallest is None else f": the smallest needs {size_text(smallest.total_bytes)} a device"
        say(f"none fits{least}. Use more devices (tune.devices), or a smaller model.")
        if tuned.roomier is not None:
            say(tuned.roomier.text)
        return
    before = ("", "mesh", "schedule", "microbatches", "remat", "stages", "step s")
    head = (*before, *_columns(tuned), "bubble ideal", "bubble predicted", "recomputed", "per-step overhead", "memory")
    rows = [_row(tuned, i, config) for i, config in enumerate(configs)]
    show_table(console, "the fastest, as counted for the hardware", head, rows)
    if any(isinstance(config.partition, Explicit) for config in configs):
        say(f"stages as partition.layers takes them: {LETTERS}")
    show_stages(console, _stages(found.best[0]), configs[0].mesh.submesh_text)
    say(_about_pipelines(tuned, configs[0]))
    about_divisions = _about_divisions(tuned)
    if about_divisions is not None:
        say(about_divisions)
    if tuned.gain is not None:
        which = (
            "the first" if tuned.gain.divided == found.best[0] else f"layout {found.best.index(tuned.gain.divided) + 1}"
        )
        say(tuned.gain.text(which, limit) + _best_with_whole_vocabulary(tuned))
    if tuned.searched == ():
        say("schedule=auto: none of these layouts has a pipeline.")
    for searched in tuned.searched or ():
        say(searched.text)
    if tuned.roomier is not None:
        say(tuned.roomier.text)
    if tuned.token_budget is not None:
        say(f"tokens, with the first: {tuned.token_budget.text}.")
    if tuned.recipe is not None:
        say(f"the first is a recipe now, {tuned.recipe}: {command_of(Path(tuned.recipe))}")
    if tuned.job_script is not None:
        say(f"its job script is {tuned.job_script}: {tuned.job_command}")


def _stages(candidate: Candidate) -> list[StagePart]:
    """Return the stages of a layout, devices numbered as the mesh has them."""
    dp, pp, *inner = candidate.mesh
    starts, inside = accumulate(candidate.partition, initial=0), prod(inner)
    submeshes = [tuple((d * pp + r) * inside + i for d in range(dp) for i in range(inside)) for r in range(pp)]
    each = zip(starts, candidate.partition, candidate.rank_of, candidate.stage_s, strict=False)
    return [StagePart(start, size, rank, submeshes[rank], *seconds) for start, size, rank, seconds in each]


def _columns(tuned: Tuned) -> list[str]:
    return [
        *(["measured s"] if tuned.measured_s else []),
        *(["tok/s"] if tuned.batch_tokens is not None else []),
        *(["MFU"] if tuned.peak_flops is not None else []),
    ]


def _row(tuned: Tuned, i: int, config: Config) -> list[str]:
    candidate = tuned.found.best[i]
    time, is_alone = candidate.time, candidate.mesh.pp == 1
    measured_s = tuned.measured_s[i] if i < len(tuned.measured_s) else None
    step_s = measured_s if tuned.measured_s else time.total_s
    more = []
    if tuned.measured_s:
        more.append("" if step_s is None else f"{step_s:.4g}")
    if tuned.batch_tokens is not None:
        more.append("" if step_s is None else f"{tuned.batch_tokens / step_s:,.0f}")
    if tuned.peak_flops is not None:
        more.append("" if step_s is None else f"{tuned.step_flops / step_s / tuned.peak_flops:.1%}")
    stages = "even" if not isinstance(config.partition, Explicit) else layout_text(candidate.partition)
    return [
        str(i + 1),
        config.mesh.text,
        "none" if is_alone else _schedule_text(config),
        str(candidate.num_microbatches),
        candidate.remat,
        stages,
        f"{time.total_s:.4g}",
        *more,
        *("" if is_alone or each is None else f"{each:.1%}" for each in (candidate.ideal_bubble, candidate.bubble)),
        f"{candidate.recomputed_fraction:.1%}",
        f"{time.overhead_s / time.total_s:.1%}",
        size_text(candidate.total_bytes),
    ]


def _schedule_text(config: Config) -> str:
    """Return the schedule, its knobs, and where the vocabulary is divided."""
    vocab = config.schedule.vocab
    return label(config.schedule) + ("" if vocab == settings.Schedule().vocab else f", vocab={vocab}")


def _about_pipelines(tuned: Tuned, best: Config) -> str:
    """Return a line: how the best layout compares with the best one that has no pipeline."""
    first, alone = tuned.found.best[0], tuned.found.without_pipeline
    if first.mesh.pp == 1:
        rival = next((c for c in tuned.found.best if c.mesh.pp > 1), None)
        slower = "" if rival is None else f"; the best pipeline takes {_times(tuned, rival):.2f} times as long"
        return f"no pipeline is needed: mesh={best.mesh.text} (pp=1) is fastest{slower}."
    if alone is None:
        return "without a pipeline (mesh.pp=1) nothing fits."
    alone = next((c for c in tuned.found.best if c.mesh.pp == 1), alone)
    mesh = settings.Mesh(*alone.mesh).text
    return (
        f"without a pipeline the best is mesh={mesh}, {alone.num_microbatches} microbatches, "
        f"remat={alone.remat}: {_times(tuned, alone):.2f} times as long."
    )


def _about_divisions(tuned: Tuned) -> str | None:
    """Return a line: what dividing stages over tp and cp buys and costs; None where there was no choice.

    It compares the best layout with the best of the other kind.
    """
    first = tuned.found.best[0]
    is_divided = first.mesh.divides_stages
    otherwise = not is_divided
    if otherwise not in tuned.found.by_division:
        return None
    other = tuned.found.by_division[otherwise]
    if other is None:
        return f"{'without' if is_divided else 'with'} tp and cp nothing fits."
    slower = f"{words_of(other)}: {_times(tuned, other):.2f} times as long"
    if not is_divided:
        sent = f"its devices send to each other inside stages for {other.sent_share:.1%} of it"
        return f"no stage is divided: with tp or cp the best is {slower}; {sent}."
    axes = " ".join(f"{name}={size}" for name, size in (("tp", first.mesh.tp), ("cp", first.mesh.cp)) if size > 1)
    shares = {
        "bubble": [each.bubble or 0.0 for each in (other, first)],
        "recomputed": [each.recomputed_fraction for each in (other, first)],
        "per-step overhead": [each.time.overhead_s / each.time.total_s for each in (other, first)],
    }
    compared = [f"{name} {there:.1%} ({here:.1%} here)" for name, (there, here) in shares.items()]
    compared.append(f"memory {size_text(other.total_bytes)} ({size_text(first.total_bytes)} here)")
    return (
        f"{axes}: devices of a stage send to each other for {first.sent_share:.1%} of the step. Without, the best is "
        f"{slower}, with {', '.join(compared)}."
    )


def _best_with_whole_vocabulary(tuned: Tuned) -> str:
    """Return a sentence: how the best layout with embedding and head whole compares with the first, which divides them.

    Nothing where the first has them whole, or nothing else was searched.
    """
    other = tuned.found.with_whole_vocabulary
    return (
        ""
        if other is None
        else f" With both whole the best is {words_of(other)}: {_times(tuned, other):.2f} times as long."
    )


def _times(tuned: Tuned, other: Candidate) -> float:
    """Return how many times as long as the first another layout takes: as measured, where both were."""
    first = tuned.found.best[0]
    measured_s = dict(zip(tuned.found.best, tuned.measured_s, strict=False))
    if other in measured_s:
        return measured_s[other] / measured_s[first]
    return other.time.total_s / first.time.total_s


def _document(tuned: Tuned, configs: Sequence[Config]) -> dict[str, Any]:
    found = tuned.found
    best = [
        _plain(candidate)
        | {"schedule": _schedule_text(config), "overrides": _overrides(config), "measured_s": measured}
        for candidate, config, measured in zip(
            found.best, configs, [*tuned.measured_s, *[None] * (len(configs) - len(tuned.measured_s))], strict=True
        )
    ]
    limit, roomier, gain = tuned.limit, tuned.roomier, tuned.gain
    apart = ("found", "limit", "roomier", "gain", "searched")
    return {name: value for name, value in asdict(tuned).items() if name not in apart} | {
        "limit_bytes": None if limit is None else limit.size_bytes,
        "limit_source": None if limit is None else limit.source,
        "limit_fraction": None if limit is None else limit.fraction,
        "with_more_memory": None if roomier is None else _roomier(roomier),
        "best": best,
        "with_whole_vocabulary": None if found.with_whole_vocabulary is None else _plain(found.with_whole_vocabulary),
        "gain_of_divided_vocabulary": None if gain is None else _gain(gain),
        "searched_schedules": None if tuned.searched is None else [*map(_searched, tuned.searched)],
        "with_stages_divided_otherwise": next(map(_plain, filter(None, found.by_division.values())), None),
        "without_pipeline": None if found.without_pipeline is None else _plain(found.without_pipeline),
        "num_layouts": found.num_layouts,
        "num_too_large": found.num_too_large,
        "num_simulated": found.num_simulated,
        "smallest_bytes": None if found.smallest is None else found.smallest.total_bytes,
    }


def _gain(gain: VocabularyGain) -> dict[str, Any]:
    divided, whole = gain.divided, gain.whole
    found: dict[str, Any] = {"divided": _plain(divided), "whole": None if whole is None else _plain(whole)}
    if whole is not None:
        saved = gain.saved_s / whole.time.total_s
        found |= {"saved_s": gain.saved_s, "saved_fraction": saved, "saved_bytes": gain.saved_bytes}
    return found


def _searched(searched: SearchedSchedule) -> dict[str, Any]:
    found, choice = searched.found, searched.choice
    document: dict[str, Any] = {"layout": _plain(searched.layout), "found": None, "why_not": searched.why_not}
    if found is not None and choice is not None:
        document |= {"found": _plain(found), "auto": choice.summary, "gap_fraction": choice.gap_fraction}
        document |= {"saved_s": searched.saved_s, "saved_fraction": searched.saved_fraction}
    return document


def _roomier(found: RoomierLayout) -> dict[str, Any]:
    return _plain(found.candidate) | {
        "memory_fraction": found.limit.fraction,
        "limit_bytes": found.limit.size_bytes,
        "speedup": found.speedup,
        "schedule": _schedule_text(found.request),
        "overrides": [*_overrides(found.request), f"run.memory_fraction={found.limit.fraction}"],
    }


def _plain(candidate: Candidate) -> dict[str, Any]:
    apart = ("ideal_bubble", "bubble", "sent_fraction")
    found = {name: value for name, value in asdict(candidate).items() if name not in apart}
    return found | {
        "step_time_s": candidate.time.total_s,
        "sent_fraction": candidate.sent_share,
        "ideal_bubble_fraction": candidate.ideal_bubble,
        "predicted_bubble_fraction": candidate.bubble,
        "total_bytes": candidate.total_bytes,
    }


def _overrides(config: Config) -> list[str]:
    """Return the overrides that one types after `ppctl train` for this layout."""
    schedule = config.schedule
    overrides = [
        f"mesh={config.mesh.text}",
        f"schedule={schedule.name}",
        f"schedule.num_microbatches={schedule.num_microbatches}",
    ]
    if "num_chunks" in (knobs := schedule.knobs()):
        overrides.append(f"schedule.num_chunks={knobs['num_chunks']}")
    if schedule.vocab != settings.Schedule().vocab:
        overrides.append(f"schedule.vocab={schedule.vocab}")
    if isinstance(schedule, Auto):
        overrides.append(f"schedule.max_memory_gib={schedule.max_memory_gib}")
        overrides.append(f"schedule.max_chunks={schedule.max_chunks}")
    overrides.append(f"executor.remat={config.executor.remat}")
    if isinstance(config.partition, Balanced):
        overrides.append("partition=balanced")
    if isinstance(config.partition, Explicit):
        overrides += ["partition=explicit", f"partition.layers=[{','.join(map(str, config.partition.layers))}]"]
    return overrides
