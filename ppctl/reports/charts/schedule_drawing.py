"""A schedule with its timeline, label and bounds, for charts of every format and for JSON."""

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ppctl.reports.terminal_output import seconds_text
from ppctl.schedule.ir import ALL_KINDS, Kind, Schedule
from ppctl.schedule.lower_bounds import makespan_bound_s, peak_activations_bound, period_bound_s
from ppctl.schedule.search.auto_choice import GIB, Choice
from ppctl.schedule.simulator import Timeline

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
    """A schedule, its times and its bounds."""

    label: str  # distinguishes the drawing from others
    timeline: Timeline
    choice: Choice | None = None  # result of the search of schedule=auto

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def lower_bound_s(self) -> float:
        """Return a lower bound of the makespan in seconds, for any order of the tasks."""
        return makespan_bound_s(self.schedule, self.timeline.costs)

    @cached_property
    def peak_bounds(self) -> tuple[float, ...]:
        """Return a lower bound of each rank's peak activations.

        It holds for any order of the tasks with the same period, the step time without a barrier.
        """
        costs, period_s = self.timeline.costs, self.timeline.period_s
        return peak_activations_bound(self.schedule, costs, period_s)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the schedule's tasks, in the order of ALL_KINDS."""
        present = {task.kind for task in self.timeline.start_s}
        return tuple(kind for kind in ALL_KINDS if kind in present)

    @cached_property
    def labelled_s(self) -> float:
        """Return the seconds of the shortest task that lasts at least 1/4 of its kind's median.

        The longest label that fits into these seconds is used for all tasks: kind and microbatch,
        kind, or nothing.
        """
        lasts = defaultdict(list)
        for task, start_s in self.timeline.start_s.items():
            if self.timeline.end_s[task] > start_s:
                lasts[task.kind].append(self.timeline.end_s[task] - start_s)
        least = {kind: statistics.median(seconds) / 4 for kind, seconds in lasts.items()}
        return min(s for kind, seconds in lasts.items() for s in seconds if s >= least[kind])

    @property
    def longest_label(self) -> int:
        """Return the number of characters of the longest task label, such as F31."""
        return 1 + len(str(self.schedule.num_microbatches - 1))

    @property
    def title(self) -> str:
        return title_of(self.label, self.schedule)

    @property
    def verdict(self) -> str:
        """Return makespan, its bound, period, bubble and memory in one line."""
        timeline = self.timeline
        seconds = timeline.makespan_s, self.lower_bound_s, timeline.period_s
        makespan, least, period = (seconds_text(each, seconds[0], 5) for each in seconds)
        peak, most_bytes = number_text(max(timeline.peak_activations)), max(timeline.peak_bytes)
        size = f" of {number_text(most_bytes / GIB)} GiB" if most_bytes else ""
        return (
            f"makespan {makespan} (at least {least}), period {period}, bubble "
            f"{timeline.bubble_fraction:.1%}, peak {peak} activations{size}"
        )


def title_of(label: str, schedule: Schedule) -> str:
    """Return a label with the numbers of ranks and microbatches."""
    num_ranks, number = schedule.num_ranks, schedule.num_microbatches
    ranks = f"{num_ranks} rank" + "s" * (num_ranks != 1)
    return f"{label}: {ranks}, {number} microbatch" + "es" * (number != 1)


def table_row(
    drawing: Drawing, makespan_formula_s: float | None = None, peak_formula: float | None = None
) -> dict[str, Any]:
    """Return the table row of a drawing, by column.

    makespan_formula_s, peak_formula: results of the closed forms of the schedule's
    family; None: no closed form.
    """
    timeline = drawing.timeline
    return {
        "schedule": drawing.schedule.name,
        "label": drawing.label,
        "makespan_s": timeline.makespan_s,
        "makespan_formula_s": makespan_formula_s,
        "lower_bound_s": drawing.lower_bound_s,
        "period_s": timeline.period_s,
        "period_lower_bound_s": period_bound_s(drawing.schedule, timeline.costs),
        "bubble_fraction": timeline.bubble_fraction,
        "peak_activations": max(timeline.peak_activations),
        "peak_activations_formula": peak_formula,
        "peak_activations_lower_bound": max(drawing.peak_bounds),
        "notes": reasons(drawing),
    }


def reasons(drawing: Drawing) -> list[str]:
    """Return lines on the choice of schedule=auto; [] without one."""
    if (choice := drawing.choice) is None:
        return []
    tried, within = choice.num_blocks
    blocks = f" and {tried} of {within} V-shaped building blocks" if within else ""
    least = seconds_text(choice.lower_bound_s, digits=5)
    tried_text = f"tried: {choice.num_published} published schedules{blocks}; on their placements"
    return [choice.summary, f"{tried_text} none is below {least}"]


def number_text(value: float) -> str:
    """Return a number with up to five digits, without trailing zeros.

    >>> number_text(28.5), number_text(0.1 + 0.2), number_text(3000)
    ('28.5', '0.3', '3000')
    """
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.4g}"


def drawing_document(drawing: Drawing) -> dict[str, Any]:
    """Return the drawing as a JSON document; tasks and times by rank, units as in `Timeline`."""
    timeline, schedule = drawing.timeline, drawing.schedule
    return {
        "schedule": schedule.name,
        **picked(drawing, "label", "lower_bound_s"),
        "period_lower_bound_s": period_bound_s(drawing.schedule, timeline.costs),
        **picked(schedule, "num_ranks", "num_microbatches", "num_chunks", "rank_of"),
        "costs": asdict(timeline.costs),
        **picked(timeline, "makespan_s", "period_s", "peak_activations", "peak_bytes"),
        "auto": None if drawing.choice is None else _chosen(drawing.choice),
        "bubble_fraction": timeline.bubble_fractions,
        "peak_activations_lower_bound": drawing.peak_bounds,
        "ranks": [list(map(str, tasks)) for tasks in schedule.ranks],
        "start_s": [[timeline.start_s[task] for task in tasks] for tasks in schedule.ranks],
        "end_s": [[timeline.end_s[task] for task in tasks] for tasks in schedule.ranks],
    }


def picked(record: object, *names: str) -> dict[str, Any]:
    """Return the attributes of these names, by name."""
    return {name: getattr(record, name) for name in names}


def _chosen(choice: Choice) -> dict[str, Any]:
    """Return the result of the search of schedule=auto as JSON numbers."""
    tried, within = choice.num_blocks
    candidates = [picked(c, "label", "length_s", "is_published") for c in choice.candidates]
    return {
        "max_activations": choice.cap,
        "max_bytes": choice.limit_bytes,
        **picked(choice, "held_bytes", "lower_bound_s", "gap_fraction", "num_published"),
        "num_building_blocks": tried,
        "num_building_blocks_within_cap": within,
        "candidates": candidates,
    }
