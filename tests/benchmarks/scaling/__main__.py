"""Plan and compile for 8 to 16,384 described devices: python tests/benchmarks/scaling [--only TEXT].

Each row runs in its own process, one at a time. Results go to a file of JSON lines; rows that it
has are not measured again, so an interrupted run continues. At the end the tables and the picture
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

from benchmarks.scaling.measure import Measured, measured_apart  # noqa: E402
from benchmarks.scaling.rows import Row, compiled_rows, planned_rows  # noqa: E402
from benchmarks.scaling.show import show, write_page  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/scaling", description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("runs/scaling.jsonl"))
    parser.add_argument("--only", help="rows whose name has this text; writes no page")
    options = parser.parse_args()
    rows = [*planned_rows(), *compiled_rows()]
    chosen = [row for row in rows if options.only is None or options.only in row.name]
    options.file.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.file, rows)
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
        with options.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row.name, **asdict(found)}) + "\n")
        print(f"{row.name}: {json.dumps(asdict(found))}", file=sys.stderr, flush=True)
    show(done)
    if options.only is None and not failed:
        write_page(done)
    return int(failed > 0)


def read(file: Path, rows: list[Row]) -> dict[Row, Measured]:
    """Return the rows of a file of results, by request."""
    found: dict[str, Measured] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        fields = json.loads(line)
        found[fields.pop("row")] = Measured(**fields)
    return {row: found[row.name] for row in rows if row.name in found}


if __name__ == "__main__":
    sys.exit(main())
