"""The record of a schedule family, the terms of closed forms, and checks of sizes and knobs.

Facts that any schedule shows (split backward, placement) are read from a small generated sample.
`tests/schedule/test_formulas.py` compares every formula with the simulator. A formula is None
outside its domain: other ratios of F, I and W, an unsupported latency, too few microbatches.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import MOST_TASKS, Schedule
from ppctl.schedule.tick_table import why_not

SAMPLE_SIZE = (4, 8)  # ranks and microbatches of samples; every family supports them
WARMUP_HOPS = (1.0, 1.5, 2.0)  # values of warmup_hops that searches try
SMALL_HOP = 0.3  # largest transfer / min(F, B) in the domain of 1F1B's formulas

KnobValues = Mapping[str, float]


@dataclass(frozen=True)
class FormulaInputs:
    """Inputs of closed forms: sizes, costs (F, I, W and a transfer c, in seconds) and all knobs."""

    p: int  # number of ranks
    m: int  # number of microbatches
    costs: Costs
    num_chunks: int = 1
    num_waves: int = 1
    warmup_hops: float = 2.0

    @property
    def fiw(self) -> tuple[float, float, float]:
        costs = self.costs
        return costs.seconds("F", 0, 1), costs.seconds("I", 0, 1), costs.seconds("W", 0, 1)

    @property
    def work_s(self) -> float:
        return sum(self.fiw)

    @property
    def warmup(self) -> int:
        """Return the number of rank 0's warm-up forwards with one chunk: floor(h(p-1))."""
        return floor_hops(self.warmup_hops, self.p - 1)

    @property
    def is_free(self) -> bool:
        """Return whether transfers cost nothing."""
        return self.costs.transfer_s == 0

    @property
    def is_equal(self) -> bool:
        """Return whether F = I = W and transfers cost nothing."""
        f, i, w = self.fiw
        return self.is_free and f == i == w

    @property
    def has_small_hop(self) -> bool:
        f, i, w = self.fiw
        return self.costs.transfer_s <= SMALL_HOP * min(f, i + w)


Formula = Callable[[FormulaInputs], float | None]


def only_if(
    holds: Callable[[FormulaInputs], bool], formula: Callable[[FormulaInputs], float]
) -> Formula:
    """Return `formula` restricted to its domain: it returns None where `holds` is false."""
    return lambda s: formula(s) if holds(s) else None


def fill_and_drain_s(s: FormulaInputs) -> float:
    """Return the bubble of filling and draining the pipeline, in seconds: (p-1)(F+B+2c)."""
    return (s.p - 1) * (s.work_s + 2 * s.costs.transfer_s)


def looped_bubble_s(s: FormulaInputs) -> float:
    """Return the bubble with V looped chunks a rank, in seconds: (p-1)(F+B)/V."""
    return (s.p - 1) * s.work_s / s.num_chunks


def zero_bubble_s(s: FormulaInputs) -> float:
    """Return the bubble if weight gradients fill gaps, in seconds: (p-1) max(F+I-W, F, I)/V."""
    f, i, w = s.fiw
    return (s.p - 1) * max(f + i - w, f, i) / s.num_chunks


def forward_trip_s(s: FormulaInputs) -> float:
    """Return the seconds until the first forward reaches the last rank: (p-1)F."""
    return (s.p - 1) * s.fiw[0]


def peak_of_1f1b(s: FormulaInputs) -> float:
    """Return the peak activations of 1F1B: min(m, p)."""
    return min(s.m, s.p)


def require_multiple_of_ranks(name: str, num_microbatches: int, num_ranks: int) -> None:
    """Raise ScheduleError unless num_microbatches is a multiple of num_ranks."""
    if num_microbatches % num_ranks:
        what = f"num_microbatches={num_microbatches} is not a multiple of num_ranks={num_ranks}"
        use = f"Use a multiple of {num_ranks} that divides the batch, or schedule=1f1b."
        raise ScheduleError(f"{what} ({name}). {use}")


def floor_hops(warmup_hops: float, hops: int) -> int:
    """Return floor(warmup_hops * hops), exact for decimals.

    >>> floor_hops(1.2, 5)
    6
    """
    return math.floor(warmup_hops * hops + 1e-9)


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
        """Raise ScheduleError for sizes below 1, too many tasks, or warmup_hops outside [1, 2]."""
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, **knobs}
        hops = sizes.pop("warmup_hops", 1)
        for what, value in sizes.items():
            if not isinstance(value, Integral):
                raise ScheduleError(f"{what}={value!r} is not a whole number ({self.name}).")
            if value < 1:
                use = f"Use {what}=1 or more."
                raise ScheduleError(f"{what}={value} is below 1 ({self.name}). {use}")
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
        if not 1 <= hops <= 2:
            raise ScheduleError(
                f"warmup_hops={hops} is outside [1, 2] ({self.name}). "
                "Use 1 for the fewest activations, 2 to hide the latency of transfers."
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
