"""The record of a schedule family: a generator, and the facts that tables, formulas, searches and config follow from.

Whatever a schedule itself shows (is its backward split, how is it placed) is derived from one that the generator makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.formulas import Formula, FormulaInputs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.ticks import runs_in_fb_ticks, runs_on_ring

SAMPLE_SIZE = (4, 8)  # ranks and microbatches of the schedule that speaks for its family: every family serves them
WARMUP_HOPS = (1.0, 1.5, 2.0)  # that searches try

KnobValues = Mapping[str, float]


def default_knobs(max_chunks: int) -> Sequence[KnobValues]:
    """Return the default knobs alone."""
    return [{}]


def each_num_chunks(max_chunks: int) -> Sequence[KnobValues]:
    """Return every number of chunks from 2 to the most.

    >>> each_num_chunks(3)
    [{'num_chunks': 2}, {'num_chunks': 3}]
    """
    return [{"num_chunks": v} for v in range(2, max_chunks + 1)]


def nothing_against(schedule: Schedule, costs: Costs) -> str | None:
    """Return no advice."""
    return None


@dataclass(frozen=True)
class Family:
    """One schedule family. `generate(num_ranks, num_microbatches, **knobs)` makes its schedules.

    published: year and month of the paper; tables list families in this order. bubble_s, peak: the closed forms of the
    generator's docstring, None where they do not hold. advise: what speaks against a schedule at given costs, in a
    line, or None. searched_knobs: the knobs that searches try, of so many chunks a rank at most. also_called: names in
    papers and other tools, which a wrong name is compared with.
    """

    name: str
    generate: Callable[..., Schedule]
    published: str
    bubble_s: Formula
    peak: Formula
    advise: Callable[[Schedule, Costs], str | None] = nothing_against
    searched_knobs: Callable[[int], Sequence[KnobValues]] = default_knobs
    also_called: tuple[str, ...] = ()

    @cached_property
    def knobs(self) -> dict[str, Any]:
        """The settings of a user, with their defaults: the keyword arguments of the generator."""
        parameters = inspect.signature(self.generate).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}

    def knobs_for(self, num_chunks: int) -> dict[str, int]:
        """Return the knobs that give so many chunks a rank, where the number can be set."""
        return {"num_chunks": num_chunks} if "num_chunks" in self.knobs else {}

    @cached_property
    def sample(self) -> Schedule:
        """A small schedule with the default knobs."""
        return self.generate(*SAMPLE_SIZE)

    @property
    def num_chunks(self) -> int:
        """Stages a rank, with the default knobs."""
        return self.sample.num_chunks

    @cached_property
    def is_split(self) -> bool:
        """Return whether any backward is split into I and W."""
        return self.sample.is_split

    @cached_property
    def runs_on_ring(self) -> bool:
        """Return whether executor=spmd can run it."""
        return runs_on_ring(self.sample)

    @cached_property
    def runs_forward_backward(self) -> bool:
        """Return whether executor=spmd runs it in forward-backward ticks: looped placement and whole backwards."""
        return runs_in_fb_ticks(self.sample)

    def makespan_s(self, num_ranks: int, num_microbatches: int, costs: Costs, **knobs: Any) -> float | None:
        """Return the seconds by the closed form for stages of equal cost, or None where it does not hold."""
        if any(isinstance(value, tuple) for value in vars(costs).values()):
            return None
        inputs = FormulaInputs(num_ranks, num_microbatches, costs, **knobs)
        bubble_s = self.bubble_s(inputs)
        return None if bubble_s is None else inputs.m * inputs.work_s + bubble_s

    def peak_activations(self, num_ranks: int, num_microbatches: int, **knobs: Any) -> float | None:
        """Return the activations of the rank that holds most by the closed form, or None where it does not hold."""
        return self.peak(FormulaInputs(num_ranks, num_microbatches, Costs(), **knobs))
