"""The four constants, fitted again on the half of the rows that `Row.is_fitted` names.

The mean of errors, as logarithms, of at most MOST each, is least, by steps along each constant in
turn.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import log

from benchmarks.published.constants import Constants
from benchmarks.published.request import Request
from benchmarks.published.rows import Row
from benchmarks.published.step import chosen

START, STEPS, MOST = Constants(0.85, 0.85, 0.9, 0.5), (0.04, 0.02, 0.01), 0.5
NETWORK = 5  # factor of the steps for the shares of networks


def loss(rows: list[tuple[Row, list[Request]]], constants: Constants) -> float:
    """Return the mean error of rows as a logarithm, of at most MOST each."""
    ratios = [
        chosen(requests, constants)[1].total_s / (row.published_s() or 1.0)
        for row, requests in rows
    ]
    return sum(min(MOST, abs(log(ratio))) for ratio in ratios) / len(ratios)


def fit(rows: list[tuple[Row, list[Request]]]) -> Constants:
    """Return the constants with the least loss on these rows."""
    best, least = START, loss(rows, START)
    for step in STEPS:
        moves = True
        while moves:
            moves = False
            for name in asdict(best):
                size = step * (NETWORK if name.endswith("share") else 1)
                for sign in (1, -1):
                    value = round(getattr(best, name) + sign * size, 3)
                    while (
                        0 < value <= 1
                        and (found := loss(rows, replace(best, **{name: value}))) < least - 1e-6
                    ):
                        best, least, moves = replace(best, **{name: value}), found, True
                        value = round(value + sign * size, 3)
    return best
