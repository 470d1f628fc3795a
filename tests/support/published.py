"""The tables and the picture of docs/published.md: `make bench-published`. --fit: print the constants, fitted again.

They are fitted on the half of the rows that `is_fitted` names: the mean of errors, as logarithms, of at most MOST each,
is least, by steps along each constant in turn.
"""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from math import log
from pathlib import Path

from ppctl.planner.published.compare import Compared, compare, expressible
from ppctl.planner.published.constants import FITTED, Constants, is_fitted
from ppctl.planner.published.request import Request
from ppctl.planner.published.rows import Row, read_rows
from ppctl.planner.published.show import page_tables, picture, show
from ppctl.planner.published.step import chosen

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE, PICTURE = (ROOT / "docs" / name for name in ("published.json", "published.md", "images/published.svg"))
BEGIN, END = "<!-- made by make bench-published -->\n", "<!-- to here -->"
START, STEPS, MOST = Constants(0.85, 0.85, 0.9, 0.5), (0.04, 0.02, 0.01), 0.5
NETWORK = 5  # so many times as large are the steps of the shares of networks


def page_with(page: str, tables: str) -> str:
    """Return the page with these tables between its marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}{tables}{rest[rest.index(END) :]}"


def tables_of(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def loss(rows: list[tuple[Row, list[Request]]], constants: Constants) -> float:
    """Return the mean error of rows as a logarithm, of at most MOST each."""
    ratios = [chosen(requests, constants)[1].total_s / (row.published_s() or 1.0) for row, requests in rows]
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
                    while 0 < value <= 1 and (found := loss(rows, replace(best, **{name: value}))) < least - 1e-6:
                        best, least, moves = replace(best, **{name: value}), found, True
                        value = round(value + sign * size, 3)
    return best


def write(compared: list[Compared]) -> None:
    """Write the page's tables and its picture."""
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), page_tables(compared)), encoding="utf-8")
    PICTURE.write_bytes(re.sub(rb"[ \t]+\n", b"\n", picture(compared)))


def main() -> None:
    rows = read_rows(DATA)
    if "--fit" in sys.argv[1:]:
        half = [each for each in expressible(rows) if is_fitted(each[0].id) and each[0].published_s()]
        print(len(half), "rows:", fit(half))
        return
    compared = compare(rows)
    write(compared)
    show(compared, FITTED)


if __name__ == "__main__":
    main()
