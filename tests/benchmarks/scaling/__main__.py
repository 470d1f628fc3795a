"""Plan and compile for 8 to 16,384 described devices: python tests/benchmarks/scaling [--only TEXT].

A new process measures each row, one row at a time. Results go to a file of JSON lines. Rows in the
file are not measured again, so an interrupted run continues. At the end the tables and the picture
of docs/benchmarks.md are written (`make bench-scale`). --only: rows whose name has the text.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[0] = str(TESTS)  # the package, not the names of its files

from benchmarks.scaling.measure import add_result, measured_apart, read_results  # noqa: E402
from benchmarks.scaling.rows import compiled_rows, planned_rows  # noqa: E402
from benchmarks.scaling.show import show, write_page  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/scaling", description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("runs/scaling.jsonl"))
    parser.add_argument("--only", help="rows whose name has this text; writes no page")
    options = parser.parse_args()
    rows = [*planned_rows(), *compiled_rows()]
    chosen = [row for row in rows if options.only is None or options.only in row.name]
    options.file.parent.mkdir(parents=True, exist_ok=True)
    done = read_results(options.file, rows)
    failed = 0
    for row in chosen:
        if row in done:
            continue
        found = measured_apart(row)
        if isinstance(found, str):
            failed += 1
            print(f"{row.name}: {found}", file=sys.stderr, flush=True)
            continue
        done[row] = found
        add_result(options.file, row, found)
        print(f"{row.name}: {json.dumps(asdict(found))}", file=sys.stderr, flush=True)
    show(done)
    if options.only is None and not failed:
        write_page(done)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
