"""One row, measured by a new process: CPU seconds, peak memory and size of the program."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.scaling.rows import Row


@dataclass(frozen=True)
class Measured:
    """The costs of a row. Seconds are of all threads and child processes, user and system."""

    start_s: float  # CPU seconds of imports and of composing the settings
    plan_s: float  # CPU seconds of `ppctl plan` after its start, without compiling
    step_s: float | None  # predicted seconds of a train step
    compile_s: float | None  # CPU seconds to trace, lower and compile the step; None: not compiled
    wall_s: float  # seconds of the row by the clock
    num_programs: int | None  # compiled programs of a step
    num_instructions: int | None  # HLO instructions of the compiled programs
    lowered_bytes: int | None  # bytes of StableHLO text given to the compiler
    table_bytes: int | None  # part of the program that grows with ranks and microbatches: its ticks
    host_bytes: int  # peak memory of the process


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children, such as ptxas."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_bytes() -> int:
    """Return the peak memory of this process; ru_maxrss would include its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def measure(row: Row) -> Measured:
    """Return the costs of a row, measured in this process: a fresh one for comparable numbers."""
    # 1. start: imports belong to it
    began, wall = cpu_s(), time.perf_counter()
    from ppctl.cli.compose import compose
    from ppctl.planner.make_plan import predicted
    from ppctl.training.pipeline.job import assemble

    config = compose(list(row.overrides))
    started = cpu_s()

    # 2. plan, or trace, lower and compile
    job = assemble(config, only_planned=True)
    compiled: dict[str, Any] = dict.fromkeys(
        ("step_s", "compile_s", "num_programs", "num_instructions", "lowered_bytes", "table_bytes")
    )
    if not row.compiles:
        compiled["step_s"] = predicted(job).step_time_s
        plan_s = cpu_s() - started
    else:
        plan_s, before = cpu_s() - started, cpu_s()
        programs = job.pipe.engine.programs().programs
        for program in programs:
            assert program.lowered
            assert program.compiled
        ticks = job.pipe.ticks
        compiled |= {
            "compile_s": cpu_s() - before,
            "num_programs": len(programs),
            "num_instructions": sum(program.hlo.count(" = ") for program in programs),
            "lowered_bytes": sum(len(program.text("stablehlo")) for program in programs),
            "table_bytes": None if ticks is None else 4 * sum(map(len, sum(ticks.table, ()))),
        }
    seconds = {"start_s": started - began, "plan_s": plan_s, "wall_s": time.perf_counter() - wall}
    return Measured(**seconds, **compiled, host_bytes=peak_bytes())


def as_text(row: Row) -> str:
    """Return a row as JSON; `row_of` reads it.

    >>> row = Row("ranks", "405B", "h100", 4, 1, 8, compiles=True, settings=("run.seed=1",))
    >>> row_of(as_text(row)) == row
    True
    """
    return json.dumps(asdict(row))


def row_of(text: str) -> Row:
    """Return the row of `as_text`."""
    fields = json.loads(text)
    return Row(**fields | {"settings": tuple(fields["settings"])})


def measured_apart(row: Row) -> Measured | str:
    """Return `measure(row)` of a new process, or the last line of its error."""
    tests = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling.measure", as_text(row)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Measured(**json.loads(lines[-1]))


def add_result(file: Path, row: Row, found: Measured) -> None:
    """Append a row's costs to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"row": row.name, **asdict(found)}) + "\n")


def read_results(file: Path, rows: Sequence[Row]) -> dict[Row, Measured]:
    """Return the costs of the rows that a file of `add_result` has, in the order of `rows`."""
    found: dict[str, Measured] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        fields = json.loads(line)
        name = fields.pop("row")
        found[name] = Measured(**fields)
    return {row: found[row.name] for row in rows if row.name in found}


if __name__ == "__main__":
    print(json.dumps(asdict(measure(row_of(sys.argv[1])))))
