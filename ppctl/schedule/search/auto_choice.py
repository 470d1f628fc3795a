"""The result of `schedule=auto`: the choice, its alternatives, and its gap to the bound."""

from dataclasses import dataclass

from ppctl.schedule.ir import Schedule

NO_GAP = 1e-9  # largest relative gap of a schedule that is proven shortest; rounding error
GIB = 2**30


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule under the cap."""

    label: str  # family with its knobs, or a building block; then its changes, such as "greedy"
    schedule: Schedule
    length_s: float  # makespan in seconds
    is_published: bool  # whether it is an unchanged schedule of a family


@dataclass(frozen=True)
class Choice:
    """The result of the search. The cap is either `cap` or `limit_bytes`; the other is None."""

    best: FoundSchedule
    candidates: tuple[FoundSchedule, ...]  # shortest first, one for each length
    cap: float | None  # activations a rank
    lower_bound_s: float  # least seconds of any order under the cap, on the placements tried
    num_published: int  # published schedules compared: each family with each choice of knobs
    num_blocks: tuple[int, int]  # building blocks: number squeezed, number near or below the cap
    limit_bytes: float | None = None  # bytes a rank
    held_bytes: int | None = None  # bytes of best's fullest rank; None without limit_bytes

    @property
    def cap_text(self) -> str:
        """Return the cap as text; a cap in bytes is followed by the bytes that `best` holds."""
        if self.limit_bytes is None or self.held_bytes is None:
            return f"{self.cap:.5g} activations"
        return f"{self.limit_bytes / GIB:.5g} GiB ({self.held_bytes / GIB:.5g} GiB held)"

    @property
    def gap_fraction(self) -> float:
        """Return the share of best.length_s that lies above the lower bound, 0..1."""
        return 1 - self.lower_bound_s / self.best.length_s

    @property
    def is_proven(self) -> bool:
        """Return whether no schedule on these placements can be shorter."""
        return self.gap_fraction <= NO_GAP

    @property
    def summary(self) -> str:
        """Return one line: the choice, its gap to the bound, its gain over the best family."""
        gap = f"{self.gap_fraction:.1%} above the bound"
        if self.is_proven:
            gap = "no shorter schedule is possible"
        published = self.best_published
        if published is None:
            gain = "no published schedule fits"
        elif published == self.best:
            gain = "a published schedule"
        else:
            more = published.length_s / self.best.length_s - 1
            gain = f"the step of {published.label}, the best published, is {more:.1%} longer"
        return f"{self.best.label}, at most {self.cap_text} a rank: {gap}; {gain}"

    @property
    def best_published(self) -> FoundSchedule | None:
        """Return the shortest unchanged family; None if no family fits."""
        return next((candidate for candidate in self.candidates if candidate.is_published), None)
