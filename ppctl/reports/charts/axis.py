"""Axes of figures: which range one shows, where its ticks stand and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ppctl.reports.charts.lines import NUM_STEPS, nice_step

LOG_FROM = 100.0  # greatest over least value from which on an axis is logarithmic
LEAST = 1e-100  # on a logarithmic axis
MOST_DECADES = 6  # with a tick each
MOST_DECIMALS = 4  # of a tick; smaller ones are written with an exponent


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high one."""
        place = math.log if self.is_log else float
        return (place(value) - place(self.low)) / (place(self.high) - place(self.low))

    def text(self, value: float) -> str:
        """A tick as people read it."""
        if self.is_log:
            return f"{value:g}"
        return short(value, self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(value) or 1.0, self.high)


def value_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """An axis that begins and ends at a tick and holds all values, of which there is at least one.

    It is logarithmic where they are above LEAST and span LOG_FROM, unless it begins at zero.
    """
    low, high = min(values), max(values)
    if not from_zero and low > LEAST and high >= LOG_FROM * low:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
        every = math.ceil((last - first) / MOST_DECADES)
        ticks = tuple(10.0**power for power in range(first, last + every, every))
        return Axis(ticks[0], ticks[-1], ticks, is_log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, or as good as one
        room = 0.1 * abs(high) or 1.0
        low, high = low - (0.0 if from_zero else room), high + room
    step = nice_step(high - low, NUM_STEPS)
    numbers = range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    ticks = tuple(number * step for number in numbers)
    return Axis(ticks[0], ticks[-1], ticks)


def step_axis(low: float, high: float) -> Axis:
    """An axis of training steps from one to another; ticks are whole steps."""
    if high <= low:
        return Axis(low - 1, low + 1, (low,))
    step = max(1.0, nice_step(high - low, NUM_STEPS))
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Axis(low, high, tuple(number * step for number in numbers))


def short(value: float, step: float, largest: float) -> str:
    """A number in as many digits as tell it from the next one, a step away, on an axis up to `largest`.

    >>> short(1500, 500, 2000), short(20000, 5000, 30000), short(0.25, 0.05, 0.5), short(2e-6, 1e-6, 5e-6)
    ('1,500', '20k', '0.25', '2e-06')
    """
    if value == 0:
        return "0"
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * size), (1.0, "")
    )
    decimals = max(0, math.ceil(-math.log10(step / size) - 1e-9))
    if decimals > MOST_DECIMALS or abs(value) >= 1e15:
        return f"{value:g}"
    return f"{value / size:,.{decimals}f}{unit}"
