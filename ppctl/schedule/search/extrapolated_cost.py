"""The cost of schedules too long to simulate each, from shorter ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_TASKS = 500_000  # of one simulation and one chunk a rank, about a second


def along(
    numbers: Sequence[int], values: Sequence[Mapping[str, float]], wanted: float
) -> dict[str, Any]:
    """Return the values at one or two numbers of microbatches, extrapolated linearly to `wanted`.

    >>> along([2, 4], [{"a": 1.0}, {"a": 2.0}], 8)
    {'a': 4.0}
    """
    if len(numbers) == 1:
        return dict(values[0])
    share, (first, last) = (wanted - numbers[0]) / (numbers[1] - numbers[0]), values
    return {name: first[name] + share * (last[name] - first[name]) for name in first}
