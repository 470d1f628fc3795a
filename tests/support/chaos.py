"""kill -9 at random moments of training runs, again and again: `make chaos`, half an hour.

Each round starts a run or goes on with it, kills one of its processes at random and looks at what is left: nothing runs
on, no finished checkpoint is lost, and a run that got to its end is bit for bit the one that nobody killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

END_S = 60  # until all processes of a run have ended after one was killed
FINISH_S = 600  # of a run that nobody kills
KEEP, EVERY, NUM_STEPS = 3, 3, 48  # a save takes longer than three steps: one is always under way
WORDS = (
    "train model=mlp model.d_model=16 data=regression data.batch_size=8 data.num_rows=1024 data.num_features=5 "
    "data.num_targets=3 schedule.num_microbatches=2 run.platform=cpu run.eval_every=null run.tensorboard=false "
    f"run.log_every=1 run.checkpoint.every={EVERY} run.checkpoint.keep={KEEP}"
).split()
LAYOUTS = {  # by the number of processes; mpmd: two
    "one": "mesh=1x2 schedule=gpipe model.num_layers=2",
    "two": "mesh=1x2 schedule=zb_h1 model.num_layers=2 launch.processes=2 launch.crash_grace_s=2",
    "mpmd": "mesh=1x2 schedule=1f1b executor=mpmd model.num_layers=2 launch.processes=2 launch.crash_grace_s=2",
    "four": "mesh=2x2 schedule=gpipe model.num_layers=2 launch.processes=4 launch.crash_grace_s=2",
}
TURNS = (*LAYOUTS, "one", "two", "mpmd", "two")  # four processes cost the most
PHASES = ("starting", "joining", "restoring", "compiling", "stepping", "saving", "ending")
MOMENTS = (None, None, None, "saving", "saving", "joining", "compiling", "stepping", "ending")
COMMAND = "the command"  # that was typed: the only process, or the one that has started the others
AFTER_S = {
    "compiling": 2.0,
    "joining": 1.5,
    "stepping": 1.0,
    "saving": 0.3,
    "ending": 0.5,
}  # at most, from when the moment was seen
MARK = "PPCTL_CHAOS"  # in the environment of every process of a run
PLAIN_ENV = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "PPCTL_", "XLA_"))}


class Violation(Exception):
    """What must not be was seen."""


class Round(NamedTuple):
    """One start of a run of the layout, and when to kill which of its processes; None: any."""

    layout: str
    moment: str | None  # one of PHASES
    victim: str | None  # COMMAND, "process 0", "process 1", ...


class Killed(NamedTuple):
    """One round that ended in a kill."""

    victim: str
    phase: str
    seconds: float  # until all processes of the run had ended


@dataclass
class Chain:
    """A run of one layout, gone on with until it is at its end, and then another."""

    layout: str
    words: Sequence[str]
    num_steps: int
    directory: Path  # of this chain alone
    wanted: Any = None  # what an uninterrupted run leaves
    duration_s: float = 0.0  # of an uninterrupted run
    number: int = 0  # of the run that is under way
    resumes: int = 0
    finished: int = 0

    @property
    def is_launched(self) -> bool:
        """Whether it has several processes."""
        return any(word.startswith("launch.processes=") for word in self.words)

    @property
    def run_dir(self) -> Path:
        return self.directory / f"run-{self.number}"


@dataclass
class Start:
    """One start of a run, under way."""

    chain: Chain
    env: dict[str, str]
    began: float = field(default_factory=time.time)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.output = self.chain.directory / "output"
        words = [*WORDS, *self.chain.words, f"run.num_steps={self.chain.num_steps}", f"run.dir={self.chain.run_dir}"]
        with self.output.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "ppctl.cli", *words],
                env=PLAIN_ENV | self.env | {MARK: self.mark, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def processes(self) -> dict[int, list[str]]:
        """The words of every living process of this start, by its id."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    if f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                        found[int(path.name)] = (path / "cmdline").read_bytes().decode().split("\0")
                except OSError:  # it has ended, or is another user's
                    continue
        return found

    def phase(self) -> str:
        """What the first process of the run is at."""
        chain, said = self.chain, self.said()
        checkpoints = chain.run_dir / "checkpoints"
        if (checkpoints / str(chain.num_steps)).exists() or f"step {chain.num_steps}/" in said:
            return "ending"
        if "compiled in" in said:
            return "saving" if any(checkpoints.glob("*tmp*")) else "stepping"
        if "compiling" in said:
            return "compiling"
        if not chain.is_launched:
            return "starting"
        if _born(chain.run_dir / "processes") > self.began:
            return "restoring"
        return "joining" if self._listens() else "starting"

    def _listens(self) -> bool:
        """Whether the process that the others join is there to be joined."""
        found = [word for words in self.processes().values() for word in words if word.startswith("run.coordinator=")]
        if not found:
            return False
        try:
            with socket.create_connection(("127.0.0.1", int(found[0].rpartition(":")[2])), timeout=1):
                return True
        except OSError:
            return False

    def end(self, timeout_s: float) -> float:
        """Seconds until no process is left. Violation if some is left after timeout_s."""
        began = time.monotonic()
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Violation(f"the command goes on after {timeout_s:.0f} s: {self.processes()}") from None
        while left := self.processes():
            if time.monotonic() - began > timeout_s:
                raise Violation(f"{timeout_s:.0f} s later these go on: {left}")
            time.sleep(0.05)
        return time.monotonic() - began

    def close(self) -> None:
        """Nothing; kills what is left."""
        self.popen.kill()
        for pid in self.processes():
            _kill(pid)
        self.popen.wait()


@contextmanager
def started(chain: Chain, env: dict[str, str]) -> Iterator[Start]:
    start = Start(chain, env)
    try:
        yield start
    except Violation as violation:
        raise Violation(f"{chain.layout}: {violation}\nThe run had printed:\n{start.said()}") from violation
    finally:
        start.close()


def chaos(
    rounds: Iterable[Round], kills: int, chance: random.Random, directory: Path, num_steps: int = NUM_STEPS
) -> list[Killed]:
    """The first `kills` kills, with every run at its end after them. Violation at the first thing that is wrong."""
    cache, turns = directory / "cache", iter(rounds)
    chains: dict[str, Chain] = {}
    done: list[Killed] = []
    while len(done) < kills:
        turn = next(turns)
        if turn.layout not in chains:
            chains[turn.layout] = _undisturbed(turn.layout, num_steps, directory)
        # compiled programs are kept from start to start, which halves what a start costs, but where the kill is to come
        # while they are made
        env = {} if turn.moment == "compiling" else _cached(cache)
        killed = one_round(chains[turn.layout], turn, chance, env)
        done += [killed] if killed else []
        what = "finished, bit for bit"
        if killed:
            what = f"{killed.victim} killed {killed.phase}, all ended after {killed.seconds:.1f} s"
        print(f"{len(done)} {turn.layout}: {what}", flush=True)
    for chain in chains.values():
        with started(chain, _cached(cache)) as start:
            start.end(FINISH_S)
            _check_finished(start)
    _print_summary(done, list(chains.values()))
    return done


def random_rounds(chance: random.Random, layouts: Sequence[str]) -> Iterator[Round]:
    """Rounds of the layouts in turn, without an end."""
    return (Round(layout, chance.choice(MOMENTS), None) for layout in itertools.cycle(layouts))


def one_round(chain: Chain, turn: Round, chance: random.Random, env: dict[str, str]) -> Killed | None:
    """How one start of the run was killed, None if it came to its end before, which was as it had to be."""
    newest = max(_steps(chain.run_dir), default=0)
    with started(chain, env) as start:
        if not _waited(start, turn.moment, newest, chance):
            start.end(END_S)
            _check_finished(start)
            return None
        victims = _victims(start)
        victim = turn.victim or chance.choice(sorted(victims))
        phase, before = start.phase(), _steps(chain.run_dir)
        _kill(victims[victim])
        seconds = start.end(END_S)
        _check_killed(start, victim, before, newest)
    return Killed(victim, phase, seconds)


def _waited(start: Start, moment: str | None, newest: int, chance: random.Random) -> bool:
    """Whether the moment came before the end of the run."""
    reached: Callable[[], bool] = lambda: start.phase() == moment  # noqa: E731
    after_s = chance.uniform(0, AFTER_S[moment]) if moment else 0
    if moment is None or (moment == "joining" and not start.chain.is_launched):
        # where nothing is compiled, a start takes about half as long
        deadline = time.monotonic() + chance.uniform(0, start.chain.duration_s / 2)
        reached = lambda: time.monotonic() >= deadline  # noqa: E731
    elif moment == "saving":  # again: so that there is one to lose, and each round gets further
        reached = lambda: max(_steps(start.chain.run_dir), default=0) > newest and start.phase() == moment  # noqa: E731
    limit = time.monotonic() + FINISH_S
    while not reached():
        if start.popen.poll() is not None:
            return False
        if time.monotonic() > limit:
            raise Violation(f"no end after {FINISH_S} s")
        time.sleep(0.02)
    time.sleep(after_s)
    return start.popen.poll() is None


def _victims(start: Start) -> dict[str, int]:
    """The process id of every one that may be killed."""
    found = {COMMAND: start.popen.pid}
    for pid, words in start.processes().items():
        numbers = [word.rpartition("=")[2] for word in words if word.startswith("run.process_id=")]
        found |= {f"process {number}": pid for number in numbers}
    return found


def _check_killed(start: Start, victim: str, before: set[int], newest: int) -> None:
    chain, said, after = start.chain, start.said(), _steps(start.chain.run_dir)
    is_finished = chain.num_steps in after
    if start.popen.returncode == 0 and not is_finished:
        raise Violation(f"exit code 0 after steps {sorted(after)} of {chain.num_steps}")
    if victim != COMMAND and not is_finished and f"{victim} of " not in said:
        raise Violation(f"{victim} was killed, and nobody says so")
    kept = set(sorted(before | after)[-KEEP:]) & before
    if kept - after:
        raise Violation(f"finished checkpoints are lost: {sorted(kept - after)} of {sorted(before)}")
    _check_resumed(start, newest)
    _check_files(chain)
    if "Traceback" in said:
        raise Violation("a traceback")


def _check_resumed(start: Start, newest: int) -> None:
    """That the start, if it came so far, has gone on from the newest checkpoint, and counts as a resume."""
    if not (lines := re.findall(r"run       .*, (.*)", start.said())):
        return
    if lines != [wanted := f"resuming after step {newest}" if newest else "from the start"]:
        raise Violation(f"{wanted} expected, not {lines}")
    start.chain.resumes += bool(newest)


def _check_files(chain: Chain) -> None:
    """That each checkpoint has its record, and every step up to the newest one its line; none is torn."""
    steps = _steps(chain.run_dir)
    for step in sorted(steps)[-KEEP:]:  # an older one may have been killed while it was removed
        if _sealed(chain.run_dir, step)["step"] != step:
            raise Violation(f"checkpoint {step} is of another step")
    if damaged := list((chain.run_dir / "checkpoints").glob("*.damaged*")):
        raise Violation(f"a checkpoint was found damaged: {damaged}")
    path = chain.run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        raise Violation(f"the last line of metrics.jsonl is torn: {text[-200:]}")
    found = [json.loads(line)["step"] for line in text.splitlines()]
    if found != list(range(1, len(found) + 1)) or len(found) < max(steps, default=0):
        raise Violation(f"metrics.jsonl has steps {found}, checkpoints {sorted(steps)}")


def _check_finished(start: Start) -> None:
    """That the run is at its end, and is the one that nobody interrupted; the next one is another."""
    chain = start.chain
    if start.popen.returncode != 0:
        raise Violation(f"exit code {start.popen.returncode} of a start that nobody killed")
    _check_files(chain)
    found = _left(chain)
    if found != chain.wanted:
        differ = [pair for pair in zip(chain.wanted[0], found[0], strict=False) if pair[0] != pair[1]]
        raise Violation(f"not the uninterrupted run; records that differ: {differ[:3]}, checksums: {found[1]}")
    chain.finished += 1
    shutil.rmtree(chain.run_dir)
    chain.number += 1


def _undisturbed(layout: str, num_steps: int, directory: Path) -> Chain:
    """The chain, of which it is known now what an uninterrupted run leaves and how long it takes."""
    chain = Chain(layout, LAYOUTS[layout].split(), num_steps, directory / layout)
    chain.directory.mkdir(parents=True)
    with started(chain, {}) as start:
        chain.duration_s = start.end(FINISH_S)
        if start.popen.returncode == 0:
            chain.wanted = _left(chain)
        _check_finished(start)
    if len(chain.wanted[0]) != num_steps:
        raise Violation(f"{layout}: {len(chain.wanted[0])} records of {num_steps} steps")
    chain.finished = 0
    print(f"{layout}: {chain.duration_s:.0f} s for {num_steps} steps", flush=True)
    return chain


def _left(chain: Chain) -> tuple[list, dict[str, str]]:
    """(step, loss, gradient norm and learning rate of every step; checksums of the last checkpoint)."""
    records = map(json.loads, (chain.run_dir / "metrics.jsonl").read_text().splitlines())
    results = [[record[key] for key in ("step", "loss", "grad_norm", "lr")] for record in records]
    return results, _sealed(chain.run_dir, chain.num_steps)["checksums"]


def _sealed(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / str(step) / "meta" / "data.json").read_text())


def _steps(run_dir: Path) -> set[int]:
    """The steps of the finished checkpoints."""
    directory = run_dir / "checkpoints"
    return {int(path.name) for path in directory.iterdir() if path.name.isdecimal()} if directory.is_dir() else set()


def _born(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _cached(directory: Path) -> dict[str, str]:
    """The environment in which every compiled program is kept there."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def _print_summary(done: Sequence[Killed], chains: Sequence[Chain]) -> None:
    phases, seconds = Counter(killed.phase for killed in done), [killed.seconds for killed in done]
    print(f"{len(done)} kills: " + ", ".join(f"{phases[phase]} {phase}" for phase in PHASES))
    print(
        f"{sum(chain.resumes for chain in chains)} resumes; {sum(chain.finished for chain in chains)} runs came to "
        "their end, each bit for bit what the uninterrupted one is"
    )
    print(f"all had ended {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (worst) after the kill")


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 at random moments of training runs.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append", help="may be given several times")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and leave no process behind
    with tempfile.TemporaryDirectory(prefix="ppctl-chaos-") as directory:
        try:
            chaos(random_rounds(chance, args.layout or TURNS), args.kills, chance, Path(directory))
        except Violation as violation:
            print(f"VIOLATION, seed {args.seed}: {violation}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
