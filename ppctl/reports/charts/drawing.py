"""A schedule with its timeline, its name and its bounds, which every format draws; the same as numbers, too."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ppctl.schedule.bounds import makespan_bound_s, peak_activations_bound, period_bound_s
from ppctl.schedule.ir import ALL_KINDS, Kind, Schedule
from ppctl.schedule.search.choice import GIB, Choice, FoundSchedule
from ppctl.schedule.simulate import Timeline
from ppctl.schedule.text import task_names

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input-gradient backward",
    "W": "weight-gradient backward",
    "E": "embedding, a part",
    "S": "logits and their sums, a part",
    "T": "gradients of logits, a part",
    "G": "gradient of the embedding, a part",
}


@dataclass(frozen=True)
class Drawing:
    """One schedule and its times. `label` tells it from others; no other order of its tasks beats the bounds."""

    label: str
    timeline: Timeline
    lower_bound_s: float
    period_bound_s: float
    peak_bounds: tuple[float, ...]  # for each rank, of any order with this period
    advice: str | None = None  # what speaks against it at these costs
    choice: Choice | None = None  # what schedule=auto chose it from

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds that occur, in the order of ALL_KINDS."""
        present = {task.kind for task in self.timeline.start_s}
        return tuple(kind for kind in ALL_KINDS if kind in present)

    @cached_property
    def labelled_s(self) -> float:
        """Return the seconds of the shortest task, those apart that take less than a quarter of their kind's median.

        A chart labels tasks with what fits in these: kind and microbatch, the kind alone, or nothing, all kinds alike.
        """
        lasts = defaultdict(list)
        for task, start_s in self.timeline.start_s.items():
            if self.timeline.end_s[task] > start_s:
                lasts[task.kind].append(self.timeline.end_s[task] - start_s)
        least = {kind: statistics.median(seconds) / 4 for kind, seconds in lasts.items()}
        return min(s for kind, seconds in lasts.items() for s in seconds if s >= least[kind])

    @property
    def longest_label(self) -> int:
        """Return the letters of the longest label of a task, as in F31."""
        return 1 + len(str(self.schedule.num_microbatches - 1))

    @property
    def title(self) -> str:
        """Return name and size in words."""
        schedule = self.schedule
        ranks = f"{schedule.num_ranks} rank" + "s" * (schedule.num_ranks != 1)
        return f"{self.label}: {ranks}, {schedule.num_microbatches} microbatch" + "es" * (
            schedule.num_microbatches != 1
        )

    @property
    def verdict(self) -> str:
        """Return makespan, bound, period, bubble and memory in one line."""
        timeline = self.timeline
        return (
            f"makespan {number_text(timeline.makespan_s)} s (at least {number_text(self.lower_bound_s)} s), "
            f"period {number_text(timeline.period_s)} s, bubble {timeline.bubble_fraction:.1%}, "
            f"peak {number_text(max(timeline.peak_activations))} activations{_bytes_text(timeline)}"
        )


def drawing_of_timeline(label: str, timeline: Timeline) -> Drawing:
    """Return the drawing of a timeline, with what bounds its schedule at its costs."""
    schedule, costs = timeline.schedule, timeline.costs
    bounds = makespan_bound_s(schedule, costs), period_bound_s(schedule, costs)
    return Drawing(label, timeline, *bounds, peak_activations_bound(schedule, costs, timeline.period_s))


@dataclass(frozen=True)
class Row:
    """One schedule in a table of several. None: not known, or no formula for these sizes and costs."""

    schedule: str
    label: str
    makespan_s: float
    makespan_formula_s: float | None
    lower_bound_s: float
    period_s: float
    period_lower_bound_s: float
    bubble_fraction: float
    peak_activations: float  # of the rank that holds most
    peak_activations_formula: float | None
    peak_activations_lower_bound: float | None
    notes: list[str]


def row(drawing: Drawing, formula_s: float | None = None, peak_formula: float | None = None) -> Row:
    """Return the row of a drawing, with what its family's closed forms say."""
    timeline = drawing.timeline
    return Row(
        drawing.schedule.name,
        drawing.label,
        timeline.makespan_s,
        formula_s,
        drawing.lower_bound_s,
        timeline.period_s,
        drawing.period_bound_s,
        timeline.bubble_fraction,
        max(timeline.peak_activations),
        peak_formula,
        max(drawing.peak_bounds),
        reasons(drawing),
    )


def reasons(drawing: Drawing) -> list[str]:
    """Return lines on why this schedule: what schedule=auto chose it from, and what speaks against it."""
    lines = [] if drawing.advice is None else [drawing.advice]
    choice = drawing.choice
    if choice is None:
        return lines
    tried, within = choice.num_blocks
    blocks = f" and {tried} of {within} V-shaped building blocks" if within else ""
    gap = "at which it stands" if choice.is_proven else f"{choice.gap_fraction:.1%} below"
    period = " period" if choice.by_period else ""
    choices = [
        f"the shortest{period} with at most {choice.cap_text} a rank, of {choice.num_published} "
        f"published schedules{blocks}; on their placements none is below {number_text(choice.lower_bound_s)} s, {gap}"
    ]
    others = [c for c in choice.candidates[1:4] if c is not choice.best_published]
    if choice.best_published not in (None, choice.best):
        choices.append(f"best published one: {_named(choice.best_published)}")
    if others:
        choices.append(f"next: {'; '.join(map(_named, others))}")
    return choices + lines


def _named(candidate: FoundSchedule) -> str:
    return f"{candidate.label} {number_text(candidate.length_s)} s"


def _bytes_text(timeline: Timeline) -> str:
    """Return the most bytes of activations on a rank, to follow their number; "" where no sizes are known."""
    most = max(timeline.peak_bytes)
    return f" of {number_text(most / GIB)} GiB" if most else ""


def number_text(value: float) -> str:
    """Return a number with up to five digits and no zeros at its end.

    >>> number_text(28.5), number_text(0.1 + 0.2), number_text(3000)
    ('28.5', '0.3', '3000')
    """
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.4g}"


def drawing_document(drawing: Drawing) -> dict[str, Any]:
    """Return the drawing as numbers, for scripts. Lists run over ranks; activations are those of 1/p of the model."""
    timeline, schedule = drawing.timeline, drawing.schedule
    return {
        "schedule": schedule.name,
        "label": drawing.label,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": schedule.num_chunks,
        "costs": asdict(timeline.costs),
        "makespan_s": timeline.makespan_s,
        "period_s": timeline.period_s,
        "lower_bound_s": drawing.lower_bound_s,
        "period_lower_bound_s": drawing.period_bound_s,
        "advice": drawing.advice,
        "auto": None if drawing.choice is None else _chosen(drawing.choice),
        "bubble_fraction": timeline.bubble_fractions,
        "peak_activations": timeline.peak_activations,
        "peak_activations_lower_bound": drawing.peak_bounds,
        "peak_bytes": timeline.peak_bytes,
        "rank_of": schedule.rank_of,
        "ranks": [list(map(str, tasks)) for tasks in schedule.ranks],
        "tasks": [task_names(tasks, schedule.num_stages) for tasks in schedule.ranks],
        "start_s": [[timeline.start_s[task] for task in tasks] for tasks in schedule.ranks],
        "end_s": [[timeline.end_s[task] for task in tasks] for tasks in schedule.ranks],
    }


def _chosen(choice: Choice) -> dict[str, Any]:
    """Return what schedule=auto found, as numbers."""
    tried, within = choice.num_blocks
    return {
        "objective": "period" if choice.by_period else "makespan",
        "max_activations": choice.cap,
        "max_bytes": choice.limit_bytes,
        "held_bytes": choice.held_bytes,
        "lower_bound_s": choice.lower_bound_s,
        "gap_fraction": choice.gap_fraction,
        "num_published": choice.num_published,
        "num_building_blocks": tried,
        "num_building_blocks_within_cap": within,
        "candidates": [
            {"label": c.label, "length_s": c.length_s, "is_published": c.is_published} for c in choice.candidates
        ],
    }
