"""Watch a long run of the tiny recipe: does memory grow, do files stay open, is a record missing?
`make soak`

It evaluates, saves and writes for TensorBoard as it goes. Further words are overrides, as in
`long_run.py --steps 5000 executor=mpmd launch.processes=2`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

WORDS = [
    "train",
    "recipes=tiny",
    "run.log_every=1000",
    "run.eval_every=50",
    "run.checkpoint.every=50",
]
# left out of the slopes: the threads of the first 100 saves spread over the arenas
WARMUP_STEPS = 5000
EVERY_S = 0.5  # between samples
MOST_BYTES_A_STEP = 30.0  # a float that is kept of every step takes 32
MOST_BYTES_A_SAVE = 60_000.0  # tensorstore leaks 30,000 (docs/limits.md)
MIB = 1 << 20
MOST_MORE_FILES = (
    2  # in the median of the last quarter of the samples, compared with that of the first
)


class Sample(NamedTuple):
    """One look at a process."""

    step: int  # finished steps of the run
    memory_bytes: int  # resident
    files: int  # open file descriptors
    threads: int


def watch(popen: subprocess.Popen[Any], run_dir: Path) -> dict[str, list[Sample]]:
    """Return the samples of every process of a run, by its name, once the run has ended."""
    samples: dict[str, list[Sample]] = {}
    while popen.poll() is None:
        step = last_step(run_dir / "metrics.jsonl")
        for name, pid in processes(popen.pid):
            try:
                samples.setdefault(name, []).append(look(pid, step))
            except (OSError, KeyError):  # it has just ended
                continue
        time.sleep(EVERY_S)
    return samples


def processes(pid: int) -> Iterator[tuple[str, int]]:
    """Yield name and id of a command's process and of those that it has started and that train."""
    yield "the command", pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        try:
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        except OSError:
            continue
        yield from (
            (word.replace("run.process_id=", "process "), child)
            for word in words
            if "run.process_id=" in word
        )


def look(pid: int, step: int) -> Sample:
    """Return a sample of a process. OSError or KeyError where it has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    status = {words[0]: words[1] for words in lines if len(words) > 1}
    return Sample(
        step,
        1024 * int(status["VmRSS:"]),
        len(os.listdir(f"/proc/{pid}/fd")),
        int(status["Threads:"]),
    )


def last_step(path: Path) -> int:
    """Return the step of the last whole line of metrics.jsonl, 0 without a line."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else 0


def slope(samples: Sequence[Sample]) -> float:
    """Return the bytes of resident memory that a step adds, by least squares.

    >>> slope([Sample(step, 1000 + 7 * step, 0, 0) for step in range(5)])
    7.0
    """
    fit = statistics.linear_regression(
        [sample.step for sample in samples], [sample.memory_bytes for sample in samples]
    )
    return fit.slope


def faults(samples: dict[str, list[Sample]], run_dir: Path, num_steps: int) -> Iterator[str]:
    """Yield faults; print the resources of each process meanwhile."""
    found = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    print(f"metrics.jsonl: {len(found)} lines, steps {found[0]} to {found[-1]}")
    if found != list(range(1, num_steps + 1)):
        missing = sorted(set(range(1, num_steps + 1)) - set(found))
        yield f"metrics.jsonl has {len(found)} lines of {num_steps} steps; missing: {missing[:5]}"
    saving = yaml.safe_load((run_dir / "config.yaml").read_text())["run"]["checkpoint"]
    saves_a_step = 1 / saving["every"] if saving["enabled"] and saving["every"] else 0.0
    most_bytes = MOST_BYTES_A_STEP + MOST_BYTES_A_SAVE * saves_a_step
    for name, every in samples.items():
        later = [sample for sample in every if WARMUP_STEPS <= sample.step < num_steps]
        quarter = len(later) // 4
        if not quarter:
            yield f"{name}: {len(later)} samples after step {WARMUP_STEPS} are too few to tell"
            continue
        grows = slope(later)
        first, last = later[:quarter], later[-quarter:]
        files = [statistics.median(each.files for each in part) for part in (first, last)]
        mib = [statistics.fmean(each.memory_bytes for each in part) / MIB for part in (first, last)]
        most = max(later, key=lambda each: each.memory_bytes)
        print(
            f"{name}: {grows:+.1f} bytes a step after step {later[0].step} ({len(later)} "
            f"samples, mean of first and last quarter {mib[0]:.1f} and {mib[1]:.1f} MiB, most "
            f"{most.memory_bytes / MIB:.1f} MiB); open files {files[0]:.0f} and {files[1]:.0f}, "
            f"most {max(each.files for each in later)}; threads {later[0].threads} and "
            f"{later[-1].threads}"
        )
        if grows > most_bytes:
            yield (
                f"{name}: resident memory grows by {grows:.0f} bytes a step (at most "
                f"{most_bytes:.0f})"
            )
        if files[1] > files[0] + MOST_MORE_FILES:
            yield (
                f"{name}: open files grow from {files[0]:.0f} to {files[1]:.0f} (at most "
                f"{MOST_MORE_FILES} more)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="A long run of the tiny recipe, watched.")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--samples", type=Path, help="write every sample there, as CSV")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # and end its processes
    with tempfile.TemporaryDirectory(prefix="ppctl-long-") as directory:
        run_dir = Path(directory) / "run"
        words = [*WORDS, f"run.num_steps={args.steps}", f"run.dir={run_dir}", *args.overrides]
        began_s = time.monotonic()
        popen = subprocess.Popen(
            [sys.executable, "-m", "ppctl.cli", *words], stdin=subprocess.DEVNULL
        )
        try:
            samples = watch(popen, run_dir)
        finally:
            popen.kill()
            popen.wait()
        if args.samples is not None:
            rows = [
                f"{name},{','.join(map(str, each))}\n"
                for name, every in samples.items()
                for each in every
            ]
            args.samples.write_text("process,step,memory_bytes,files,threads\n" + "".join(rows))
        names = ", ".join(
            f"{name} {version(name)}" for name in ("jax", "orbax-checkpoint", "tensorboardX")
        )
        print(
            f"{args.steps} steps in {time.monotonic() - began_s:.0f} s; Python "
            f"{platform.python_version()}, {names}"
        )
        if popen.returncode != 0:
            print(f"FAULT: exit code {popen.returncode}", file=sys.stderr)
            return 1
        found = list(faults(samples, run_dir, args.steps))
    for text in found:
        print(f"FAULT: {text}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
