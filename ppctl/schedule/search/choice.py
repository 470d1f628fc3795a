"""The answer of `schedule=auto`: what was chosen, from what, and how far it is from the bound."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl.schedule.ir import Schedule

NO_GAP = 1e-9  # relative: rounding
GIB = 2**30


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule under the cap. `label` says which: a family with its knobs, and what was done to it."""

    label: str
    schedule: Schedule
    length_s: float  # makespan, or period where that is what counts
    is_published: bool  # a family as it stands


@dataclass(frozen=True)
class Choice:
    """The answer: `best` of `candidates` (ascending, one for each length), none above `cap` activations or limit_bytes.

    One of the two caps is None. lower_bound_s: no order of these tasks on any placement that was tried is shorter under
    the cap. by_period: the period counts, not the makespan.
    """

    best: FoundSchedule
    candidates: tuple[FoundSchedule, ...]
    cap: float | None
    lower_bound_s: float
    num_published: int  # families compared, each knob counted
    num_blocks: tuple[int, int]  # building blocks squeezed, and how many there are within the cap
    by_period: bool
    limit_bytes: float | None = None
    held_bytes: int | None = None  # by the fullest rank of the best, where bytes are capped

    @property
    def cap_text(self) -> str:
        """The cap in words, and what the best holds where that is bytes."""
        if self.limit_bytes is None or self.held_bytes is None:
            return f"{self.cap:.5g} activations"
        return f"{self.limit_bytes / GIB:.5g} GiB ({self.held_bytes / GIB:.5g} GiB held)"

    @property
    def gap_fraction(self) -> float:
        """The share of the best's length that lies above the lower bound, 0..1."""
        return 1 - self.lower_bound_s / self.best.length_s

    @property
    def is_proven(self) -> bool:
        """Return whether nothing on these placements can be shorter."""
        return self.gap_fraction <= NO_GAP

    @property
    def summary(self) -> str:
        """Return a line: the choice, its distance from the bound, its gain on the best family."""
        length = "period" if self.by_period else "step"
        gap = "no shorter one is possible" if self.is_proven else f"{self.gap_fraction:.1%} above the bound"
        published = self.best_published
        if published is None:
            gain = "no published one fits"
        elif published == self.best:
            gain = "a published one"
        else:
            more = published.length_s / self.best.length_s - 1
            gain = f"the {length} of {published.label}, the best published, is {more:.1%} longer"
        return f"{self.best.label}, at most {self.cap_text} a rank: {gap}; {gain}"

    @property
    def best_published(self) -> FoundSchedule | None:
        """The best family as it stands, or None where none fits."""
        return next((candidate for candidate in self.candidates if candidate.is_published), None)
