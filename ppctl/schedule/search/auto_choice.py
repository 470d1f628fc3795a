"""The answer of `schedule=auto`: the choice, its alternatives, and its distance from the bound."""

from dataclasses import dataclass

from ppctl.schedule.ir import Schedule

NO_GAP = 1e-9  # relative: rounding
GIB = 2**30


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule under the cap. `label`: a family with its knobs, and what was done to it."""

    label: str
    schedule: Schedule
    length_s: float  # makespan
    is_published: bool  # an unchanged family


@dataclass(frozen=True)
class Choice:
    """The answer: `best` of `candidates` (ascending, one for each length).

    Of cap (activations) and limit_bytes one is None. lower_bound_s: no order of these tasks on any
    placement that was tried is shorter under the cap.
    """

    best: FoundSchedule
    candidates: tuple[FoundSchedule, ...]
    cap: float | None
    lower_bound_s: float
    num_published: int  # families compared, each knob counted
    num_blocks: tuple[int, int]  # building blocks squeezed, and all within the cap
    limit_bytes: float | None = None
    held_bytes: int | None = None  # by the best's fullest rank, if bytes are capped

    @property
    def cap_text(self) -> str:
        """Return the cap in words, and the bytes that the best holds if they are capped."""
        if self.limit_bytes is None or self.held_bytes is None:
            return f"{self.cap:.5g} activations"
        return f"{self.limit_bytes / GIB:.5g} GiB ({self.held_bytes / GIB:.5g} GiB held)"

    @property
    def gap_fraction(self) -> float:
        """Return the share of the best's length above the lower bound, 0..1."""
        return 1 - self.lower_bound_s / self.best.length_s

    @property
    def is_proven(self) -> bool:
        """Return whether nothing on these placements can be shorter."""
        return self.gap_fraction <= NO_GAP

    @property
    def summary(self) -> str:
        """Return a line: the choice, its distance from the bound, its gain on the best family."""
        gap = f"{self.gap_fraction:.1%} above the bound"
        if self.is_proven:
            gap = "no shorter one is possible"
        published = self.best_published
        if published is None:
            gain = "no published one fits"
        elif published == self.best:
            gain = "a published one"
        else:
            more = published.length_s / self.best.length_s - 1
            gain = f"the step of {published.label}, the best published, is {more:.1%} longer"
        return f"{self.best.label}, at most {self.cap_text} a rank: {gap}; {gain}"

    @property
    def best_published(self) -> FoundSchedule | None:
        """Return the best unchanged family, or None if none fits."""
        return next((candidate for candidate in self.candidates if candidate.is_published), None)
