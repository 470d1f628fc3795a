"""CPU seconds and seconds from a command to its first result: `make bench-start`

Each row is a fresh process, the rows in turn, the median of several rounds. "kept" means with the
compiled programs of an earlier run; the cache is a temporary directory, so the user's stays as it
is. Reads /proc, so it needs Linux. `--rows WORD` selects rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from typing import NamedTuple

PPCTL = ("-m", "ppctl.cli")
TINY = (*PPCTL, "train", "recipes=tiny")
UNKEPT = "run.compilation_cache=null"
FIRST_STEP = "step  1/"  # begins the line of a run's first step
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Row(NamedTuple):
    """A command, in words for the table and as arguments of Python."""

    name: str
    words: tuple[str, ...]
    until: str | None = None  # beginning of the line that ends the measurement; None: the exit


class Seconds(NamedTuple):
    cpu: float  # user and system
    wall: float


ROWS = (
    Row("`import jax`", ("-c", "import jax")),
    Row("imports of `ppctl train`", ("-c", "import ppctl.cli.commands.train")),
    Row("`ppctl --help`", (*PPCTL, "--help")),
    Row("`ppctl plan recipes=tiny`", (*PPCTL, "plan", "recipes=tiny")),
    Row("`ppctl train recipes=tiny`, to step 1, programs kept", TINY, FIRST_STEP),
    Row("the same, nothing kept", (*TINY, UNKEPT), FIRST_STEP),
    Row("`ppctl verify`, programs kept", (*PPCTL, "verify")),
    Row("the same, nothing kept", (*PPCTL, "verify", UNKEPT)),
)


def measured(row: Row, cache: str) -> Seconds:
    """Run a row's command in an empty directory; return its seconds. Exits if it fails.

    cache: directory of the user's caches, for all rows.
    """
    # 1. the environment of a user, with byte code kept
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"XDG_CACHE_HOME": cache, "PYTHONUNBUFFERED": "1"}
    # 2. the command, and the line that ends the measurement
    began, seconds = time.perf_counter(), None
    words = [sys.executable, *row.words]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        tempfile.TemporaryDirectory() as empty,
        subprocess.Popen(words, cwd=empty, env=env, **how) as process,
    ):
        assert process.stdout is not None, "a pipe"
        lines = list[str]()
        for line in process.stdout:
            lines.append(line)
            if row.until is not None and line.startswith(row.until) and seconds is None:
                seconds = Seconds(cpu_s(process.pid), time.perf_counter() - began)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    # 3. its seconds
    if process.returncode or (row.until is not None and seconds is None):
        sys.exit(f"{' '.join(words)} ended with {process.returncode}:\n{''.join(lines)}")
    whole = Seconds(usage.ru_utime + usage.ru_stime, time.perf_counter() - began)
    return whole if seconds is None else seconds


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a running process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S  # utime and stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="only rows whose name has this text")
    request = parser.parse_args()
    rows = [row for row in ROWS if request.rows in row.name]
    seconds: dict[Row, list[Seconds]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix="ppctl-start-") as cache:
        for row in rows:  # fills the caches of programs and of byte code
            measured(row, cache)
        for number in range(request.rounds):
            print(f"round {number + 1}/{request.rounds}", file=sys.stderr)
            for row in rows:
                seconds[row].append(measured(row, cache))
    jax, python = version("jax"), platform.python_version()
    print(f"{request.rounds} rounds, jax {jax}, Python {python}, {os.cpu_count()} cores\n")
    print("| command | CPU s, median (least to most) | s, median |\n|---|---|---|")
    for row in rows:
        cpu, wall = zip(*seconds[row], strict=True)
        spread = f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"
        print(f"| {row.name} | {spread} | {statistics.median(wall):.2f} |")


if __name__ == "__main__":
    main()
