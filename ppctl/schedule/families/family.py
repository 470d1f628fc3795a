"""The record of a schedule family: a generator, and facts for tables, searches and config.

Facts that any schedule shows (split backward, placement) are read from a small generated sample.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.formulas import Formula, FormulaInputs, require_at_least
from ppctl.schedule.ir import MOST_TASKS, Schedule
from ppctl.schedule.tick_table import why_not

SAMPLE_SIZE = (4, 8)  # ranks and microbatches of samples; every family supports them
WARMUP_HOPS = (1.0, 1.5, 2.0)  # values of warmup_hops that searches try

KnobValues = Mapping[str, float]


def each_num_chunks(max_chunks: int) -> Sequence[KnobValues]:
    """Return the knobs with each number of chunks from 2 to max_chunks.

    >>> each_num_chunks(3)
    [{'num_chunks': 2}, {'num_chunks': 3}]
    """
    return [{"num_chunks": v} for v in range(2, max_chunks + 1)]


@dataclass(frozen=True)
class Family:
    """A schedule family. `generate(num_ranks, num_microbatches, **knobs)` makes its schedules.

    published: year and month of the paper, which sort the tables. bubble_s, peak: the closed forms
    in the generator's docstring; None outside their domain. searched_knobs: function from the
    maximum number of chunks on a rank to the knobs that searches try. also_called: names in papers
    and other tools, for the message about an unknown family.
    """

    name: str
    generate: Callable[..., Schedule]
    published: str
    bubble_s: Formula
    peak: Formula
    searched_knobs: Callable[[int], Sequence[KnobValues]] = lambda max_chunks: [{}]
    also_called: tuple[str, ...] = ()

    @cached_property
    def knobs(self) -> dict[str, Any]:
        """Return the user's settings with their defaults: the generator's keyword arguments."""
        parameters = inspect.signature(self.generate).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    def knobs_for(self, num_chunks: int) -> dict[str, int]:
        """Return the knobs for num_chunks chunks a rank; {} if the family has no such knob."""
        return {"num_chunks": num_chunks} if "num_chunks" in self.knobs else {}

    @cached_property
    def sample(self) -> Schedule:
        """Return a small schedule with the default knobs."""
        return self.generate(*SAMPLE_SIZE)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks (stages) on each rank, with the default knobs."""
        return self.sample.num_chunks

    @cached_property
    def is_split(self) -> bool:
        """Return whether any backward is split into I and W."""
        return self.sample.is_split

    @cached_property
    def runs_on_ring(self) -> bool:
        """Return whether executor=spmd can run the family's schedules."""
        return why_not(self.sample) is None

    def check_size(self, num_ranks: int, num_microbatches: int, **knobs: float) -> None:
        """Raise ScheduleError for sizes below 1, or more than MOST_TASKS tasks."""
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
        for what, value in sizes.items():
            if not isinstance(value, Integral):
                raise ScheduleError(f"{what}={value!r} is not a whole number ({self.name}).")
            require_at_least(self.name, what, value, 1)
        chunks = knobs.get("num_chunks") or 2 * knobs.get("num_waves", 0) or self.num_chunks
        of_stage = 3 if self.is_split else 2
        number = of_stage * num_ranks * chunks * num_microbatches
        if number > MOST_TASKS:
            raise ScheduleError(
                f"{num_ranks} ranks, {chunks} stages each, {num_microbatches} microbatches: "
                f"{of_stage}*{num_ranks}*{chunks}*{num_microbatches} = {number:,} tasks are more "
                f"than the {MOST_TASKS:,} that ppctl lays out ({self.name}). Use fewer ranks, "
                "stages or microbatches."
            )

    def makespan_s(
        self, num_ranks: int, num_microbatches: int, costs: Costs, **knobs: Any
    ) -> float | None:
        """Return the closed-form makespan of equal stages in seconds; None outside its domain."""
        if any(isinstance(value, tuple) for value in vars(costs).values()):
            return None
        inputs = FormulaInputs(num_ranks, num_microbatches, costs, **knobs)
        bubble_s = self.bubble_s(inputs)
        return None if bubble_s is None else inputs.m * inputs.work_s + bubble_s

    def peak_activations(self, num_ranks: int, num_microbatches: int, **knobs: Any) -> float | None:
        """Return the closed-form peak activations of the fullest rank; None outside its domain."""
        return self.peak(FormulaInputs(num_ranks, num_microbatches, Costs(), **knobs))
