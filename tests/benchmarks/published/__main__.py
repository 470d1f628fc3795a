"""Predict published steps and compare: python tests/benchmarks/published [FILE [--json]] [--fit].

Without a file: the rows of docs/published.json, whose tables and picture are written into
docs/published.md (`make bench-published`). --fit: print the constants, fitted again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[0] = str(TESTS)  # the package, not the names of its files

from benchmarks.published.compare import as_json, compare, expressible  # noqa: E402
from benchmarks.published.fit import fit  # noqa: E402
from benchmarks.published.rows import read_rows  # noqa: E402
from benchmarks.published.show import DATA, show, write_page  # noqa: E402
from ppctl.errors import ConfigError  # noqa: E402
from ppctl.reports.terminal_output import show_json  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/published", description=__doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, help="JSON rows, as docs/published.md describes them"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    try:
        rows = read_rows(options.file or DATA)
    except ConfigError as error:
        parser.error(str(error))
    if options.fit:
        half = [each for each in expressible(rows) if each[0].is_fitted and each[0].published_s()]
        print(len(half), "rows:", fit(half))
        return
    compared = compare(rows)
    if options.file is None:
        write_page(compared)
    if options.json:
        show_json(as_json(compared))
    else:
        show(compared)


if __name__ == "__main__":
    main()
