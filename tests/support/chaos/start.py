"""One start of a run or a sweep: its processes, its output, and the state of each run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from support.chaos.layouts import WORDS
from support.chaos.left import Left, Violation, newest

COMMAND = (
    "the command"  # the typed command: the only process, or the one that has started the others
)
MARK = "PPCTL_CHAOS"  # in the environment of every process of a start
PLAIN_ENV = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("JAX_", "PPCTL_", "XLA_"))
}
RESTART = re.compile(r"ppctl: restart \d+ of \d+, from (?:the start|the checkpoint of step (\d+))")


class Victim(NamedTuple):
    """A process that may be killed."""

    name: str  # COMMAND, "process 0", "job", "process 0 of a job"
    run: str | None  # run of the process; None: all runs
    pid: int


@dataclass
class Chain:
    """A run or a sweep of one layout, gone on with until it is at its end, and then another."""

    layout: str
    words: Sequence[str]
    num_steps: int
    directory: Path  # directory of only this chain
    wanted: dict[str, Left] = field(
        default_factory=dict
    )  # results of each run without interruption
    duration_s: float = 0.0  # seconds of an uninterrupted start
    number: int = 0  # number of the current run or sweep
    resumes: int = 0
    finished: int = 0  # finished runs; each job of a sweep counts

    @property
    def run_dir(self) -> Path:
        return self.directory / f"run-{self.number}"

    @property
    def runs(self) -> dict[str, Path]:
        """The directory of each run, by the names of a sweep's jobs; "": the only run."""
        return {name: self.run_dir / name for name in self.wanted or ("",)}

    @property
    def is_sweep(self) -> bool:
        return "-m" in self.words

    @property
    def is_side_by_side(self) -> bool:
        return any(word.startswith("hydra.launcher.jobs=") for word in self.words)

    @property
    def is_restarted(self) -> bool:
        """Whether a run whose process is killed goes on by itself."""
        return any(word.startswith("launch.max_restarts=") for word in self.words)

    @property
    def is_launched(self) -> bool:
        """Whether a run has several processes."""
        return any(word.startswith("launch.processes=") for word in self.words)


@dataclass
class Start:
    """One start, under way."""

    chain: Chain
    env: dict[str, str]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        chain = self.chain
        self.output = chain.directory / "output"
        self.logged = {name: _size(run_dir / "output.log") for name, run_dir in chain.runs.items()}
        words = [
            *WORDS,
            *chain.words,
            f"run.num_steps={chain.num_steps}",
            f"run.dir={chain.run_dir}",
        ]
        with self.output.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "ppctl.cli", *words],
                env=PLAIN_ENV | self.env | {MARK: self.mark, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    # --- processes -------------------------------------------------------------------------------

    def processes(self) -> dict[int, list[str]]:
        """Return the words of every living process of this start, by its id."""
        found = {}
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    if f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes().split(
                        b"\0"
                    ):
                        found[int(path.name)] = (path / "cmdline").read_bytes().decode().split("\0")
                except OSError:  # it has ended, or is another user's
                    continue
        return found

    def of_run(self, run: str) -> dict[int, list[str]]:
        """Return the processes that have been started for a run, without the command itself."""
        wanted = str(self.chain.runs[run])
        found = {}
        for pid, words in self.processes().items():
            places = [
                word.removeprefix("run.dir=").strip("'\"")
                for word in words
                if word.startswith("run.dir=")
            ]
            if pid != self.popen.pid and "ppctl.cli" in words and places[-1:] == [wanted]:
                found[pid] = words
        return found

    def active(self) -> list[str]:
        """Return the runs that are under way."""
        return (
            [run for run in self.chain.runs if self.of_run(run)]
            if self.chain.is_sweep
            else list(self.chain.runs)
        )

    def victims(self, run: str | None) -> list[Victim]:
        """Return the processes that may be killed: the command, and those of a run."""
        found = [Victim(COMMAND, None, self.popen.pid)]
        of_job = " of a job" if self.chain.is_sweep else ""
        for pid, words in self.of_run(run).items() if run is not None else ():
            numbers = [
                word.rpartition("=")[2] for word in words if word.startswith("run.process_id=")
            ]
            is_own = bool(numbers) or "launch.max_restarts=0" in words
            name = f"process {numbers[0] if numbers else 0}{of_job}" if is_own else "job"
            found.append(Victim(name, run, pid))
        return sorted(found)

    def kill(self, victim: Victim) -> None:
        _kill(victim.pid)

    def wait_gone(self, pids: Collection[int], timeout_s: float) -> float:
        """Return the seconds until these processes have ended. Violation if some have not after
        timeout_s.
        """
        began = time.monotonic()
        while left := {pid: words for pid, words in self.processes().items() if pid in pids}:
            if time.monotonic() - began > timeout_s:
                raise Violation(f"{timeout_s:.0f} s later these go on: {left}")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self, timeout_s: float) -> float:
        """Return the seconds until no process is left. Violation if some is left after timeout_s."""
        began = time.monotonic()
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Violation(
                f"the command goes on after {timeout_s:.0f} s: {self.processes()}"
            ) from None
        while left := self.processes():
            if time.monotonic() - began > timeout_s:
                raise Violation(f"{timeout_s:.0f} s later these go on: {left}")
            time.sleep(0.05)
        return time.monotonic() - began

    def close(self) -> None:
        """Kill the remaining processes."""
        self.popen.kill()
        for pid in self.processes():
            _kill(pid)
        self.popen.wait()

    # --- its output ------------------------------------------------------------------------------

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def printed_by(self, run: str) -> str:
        """Return what this start has printed of a run, its launcher's lines too."""
        chain = self.chain
        if not chain.is_sweep:
            return self.printed()
        run_dir = chain.runs[run]
        if chain.is_side_by_side:
            log = run_dir / "output.log"
            return (
                log.read_bytes()[self.logged[run] :].decode(errors="replace")
                if log.exists()
                else ""
            )
        found, is_own = [], False
        for line in self.printed().splitlines(keepends=True):
            if re.match(r"ppctl: job \d+: ", line):
                is_own = line.rstrip("\n").endswith(f"in {run_dir}")
            if is_own:
                found.append(line)
        return "".join(found)

    # --- what its runs are at --------------------------------------------------------------------

    def phase(self, run: str | None) -> str:
        """Return the state of the first process of a run; None: no run has started."""
        if run is None:
            return "between jobs"
        chain, run_dir = self.chain, self.chain.runs[run]
        printed = RESTART.split(self.printed_by(run))[-1]
        checkpoints = run_dir / "checkpoints"
        if (checkpoints / str(chain.num_steps)).exists() or f"step {chain.num_steps}/" in printed:
            return "ending"
        if "compiled in" in printed:
            return "saving" if any(checkpoints.glob("*tmp*")) else "stepping"
        if "compiling" in printed:
            return "compiling"
        processes = self.of_run(run)
        joining = {
            pid: words for pid, words in processes.items() if _values(words, "run.coordinator=")
        }
        if not joining:
            return "starting"
        if _born(run_dir / "processes") > min(map(_began, joining)):
            return "restoring"
        return (
            "joining"
            if _listens(_values(next(iter(joining.values())), "run.coordinator=")[0])
            else "starting"
        )


@contextmanager
def started(chain: Chain, env: dict[str, str]) -> Iterator[Start]:
    start = Start(chain, env)
    try:
        yield start
    except Violation as violation:
        raise Violation(
            f"{chain.layout}: {violation}\nThe start had printed:\n{start.printed()}"
        ) from violation
    finally:
        start.close()


def check_resumed(start: Start, run: str, before: int) -> int:
    """Return how often a run has resumed in this start. Violation unless from the newest checkpoint.

    before: the newest checkpoint when this start began; after it, where the launcher announces
    a restart.
    """
    printed = start.printed_by(run)
    claims = [before, *(int(match[1] or 0) for match in RESTART.finditer(printed))]
    parts = RESTART.sub("\0", printed).split("\0")
    resumes = 0
    for claim, part in zip(claims, parts, strict=True):
        lines = re.findall(r"run       .*, (from the start|resuming after step \d+)", part)
        wanted = f"resuming after step {claim}" if claim else "from the start"
        if lines and lines != [wanted]:
            raise Violation(f"{wanted} expected, not {lines}")
        resumes += bool(lines) and bool(claim)
    if claims != sorted(claims) or claims[-1] > newest(start.chain.runs[run]):
        raise Violation(f"starts went on from steps {claims}")
    return resumes


def _values(words: Sequence[str], prefix: str) -> list[str]:
    return [word.removeprefix(prefix) for word in words if word.startswith(prefix)]


def _listens(coordinator: str) -> bool:
    """Return whether the process that the others join is there to be joined."""
    try:
        with socket.create_connection(
            ("127.0.0.1", int(coordinator.rpartition(":")[2])), timeout=1
        ):
            return True
    except OSError:
        return False


def _began(pid: int) -> float:
    """Return when a process began, as time.time(); now if it has ended."""
    now, clock = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return now
    return now - clock + ticks / os.sysconf("SC_CLK_TCK")


def _born(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
