"""What `schedule=auto` finds for a layout of `ppctl tune`, in words."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl import config as settings
from ppctl.planner.candidate import Candidate
from ppctl.schedule.search.choice import NO_GAP, Choice


@dataclass(frozen=True)
class SearchedSchedule:
    """What schedule=auto finds for a layout of a family: the layout with it and its choice, or why there is none."""

    layout: Candidate
    best: Candidate  # of the layouts of families, which it is compared with
    found: Candidate | None = None
    choice: Choice | None = None
    why_not: str | None = None

    @property
    def text(self) -> str:
        """The step, what it gains, and how near it is to the bound, in a line."""
        layout = self.layout
        about = (
            f"schedule=auto, mesh={settings.Mesh(*layout.mesh).text}, {layout.num_microbatches} microbatches, "
            f"remat={layout.remat}"
        )
        if self.found is None or self.choice is None:
            return f"{about}: {self.why_not}"
        step = f"{self.found.time.total_s:.4g} s"
        best = f"the best layout of a family ({words_of(self.best)})"
        gain = (
            f"{self.saved_s:.4g} s ({self.saved_fraction:.1%}) shorter than" if self.is_shorter else "no shorter than"
        )
        order = " With embedding and head whole its order is" if self.found.vocab == "parallel" else " It is"
        return f"{about}: {step}, {gain} {best}.{order} {self.choice.summary}."

    @property
    def saved_s(self) -> float:
        """The seconds by which the step is shorter."""
        assert self.found is not None, "there is something to compare"
        return self.best.time.total_s - self.found.time.total_s

    @property
    def saved_fraction(self) -> float:
        """The share, of the step of the best layout of a family."""
        return self.saved_s / self.best.time.total_s

    @property
    def is_shorter(self) -> bool:
        return self.saved_fraction > NO_GAP


def words_of(layout: Candidate) -> str:
    """Return mesh, schedule, microbatches and remat of a layout."""
    schedule = "" if layout.mesh.pp == 1 else f" {layout.family}"
    mesh = settings.Mesh(*layout.mesh).text
    return f"mesh={mesh}{schedule}, {layout.num_microbatches} microbatches, remat={layout.remat}"
