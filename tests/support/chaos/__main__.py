"""kill -9 at random moments of runs, sweeps and the launcher's restarts, again and again: `make
chaos`.

After every kill nothing runs on that should not, no finished checkpoint is lost, and what got to
its end is bit for bit what nobody killed. At the first violation it stops, and keeps the directory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from support.chaos.layouts import LAYOUTS, PHASES, TURNS
from support.chaos.left import Violation
from support.chaos.rounds import Killed, chaos, random_rounds
from support.chaos.start import Chain


def print_summary(done: Sequence[Killed], chains: Sequence[Chain]) -> None:
    """Print the kills by layout, phase and victim, and what came of the runs."""
    phases = [phase for phase in PHASES if any(killed.phase == phase for killed in done)]
    by_layout = Counter((killed.layout, killed.phase) for killed in done)
    width = max(map(len, (*LAYOUTS, "layout")))
    print(f"{'layout':<{width}}  " + "  ".join(phases) + "  all")
    for layout in [layout for layout in LAYOUTS if any(killed.layout == layout for killed in done)]:
        counts = [by_layout[layout, phase] for phase in phases]
        cells = [f"{count:>{len(phase)}}" for count, phase in zip(counts, phases, strict=True)]
        print(f"{layout:<{width}}  " + "  ".join(cells) + f"  {sum(counts):>3}")
    totals = [f"{sum(killed.phase == phase for killed in done):>{len(phase)}}" for phase in phases]
    print(f"{'all':<{width}}  " + "  ".join(totals) + f"  {len(done):>3}")
    victims = Counter(killed.victim for killed in done)
    print("killed: " + ", ".join(f"{victim} {count}" for victim, count in sorted(victims.items())))
    print(
        f"{sum(chain.resumes for chain in chains)} resumes; "
        f"{sum(chain.finished for chain in chains)} runs came to their end, each bit for bit "
        "what the uninterrupted one is"
    )
    if done:
        seconds = [killed.seconds for killed in done]
        print(
            f"all had ended {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s "
            "(worst) after the kill"
        )


@contextmanager
def loaded() -> Iterator[None]:
    """Run all processes on one core, with a process that never waits."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 at random moments of runs and sweeps.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="after which no other start is begun"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--layout", choices=list(LAYOUTS), action="append", help="may be given several times"
    )
    parser.add_argument(
        "--loaded", action="store_true", help="all processes on one core, beside a busy loop"
    )
    args = parser.parse_args()
    chance = random.Random(args.seed)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # and end its processes
    directory = Path(tempfile.mkdtemp(prefix="ppctl-chaos-"))
    until_s = time.monotonic() + 60 * args.minutes
    try:
        rounds = random_rounds(chance, args.layout or TURNS)
        with loaded() if args.loaded else nullcontext():
            print_summary(*chaos(rounds, args.kills, chance, directory, until_s=until_s))
    except Violation as violation:
        print(f"VIOLATION, seed {args.seed}, all is in {directory}: {violation}", file=sys.stderr)
        return 1
    except (
        BaseException
    ):  # stopped: its kills so far are counted above, and nothing is to be studied
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
