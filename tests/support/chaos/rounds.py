"""Rounds of kill -9: start a run or a sweep or go on with it, kill some of its processes, check all
else.

A killed command takes all its processes with it, and the same command goes on. A killed process
ends its run, and the command with it, unless that is a sweep, whose other jobs go on, or a launcher
that starts the run again.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from support.chaos.layouts import AFTER_S, EVERY, LAYOUTS, MOMENTS, NUM_STEPS
from support.chaos.left import (
    Violation,
    check_files,
    check_kept,
    check_same,
    check_sweep,
    left,
    newest,
    records,
    steps,
)
from support.chaos.start import COMMAND, RESTART, Chain, Start, Victim, check_resumed, started

END_S = 60  # until all processes of a run have ended after one was killed
FINISH_S = 1200  # seconds for a start without further kills
CACHE = "cache"  # directory of compiled programs
MOST_KILLS = 4  # in one start that goes on after a kill


class Round(NamedTuple):
    """One start of a layout, and when to kill which of its processes; None: any."""

    layout: str
    moment: str | None  # one of PHASES
    victim: str | None  # COMMAND, "process 0", "process 1", "job", ...
    kills: int | None = 1  # kills, if the start continues after one; None: up to MOST_KILLS


class Killed(NamedTuple):
    """One kill."""

    layout: str
    victim: str
    phase: str
    seconds: float  # until all processes of the run, or of the command, had ended


@dataclass
class Seen:
    """The files when a start began, and the runs that a kill has ended since."""

    newest: dict[str, int]  # checkpoint of each run
    finished: dict[str, dict[str, bytes]]  # records of the runs that were at their end
    lost: set[str]  # runs that one of their processes took with it
    ending: set[str]  # those of them that may have been at their end


def chaos(
    rounds: Iterable[Round],
    kills: int,
    chance: random.Random,
    directory: Path,
    num_steps: int = NUM_STEPS,
    until_s: float = float("inf"),
) -> tuple[list[Killed], list[Chain]]:
    """Return the first `kills` kills, or those until then, and the runs, each at its end after
    them.

    Violation at the first thing that is wrong. until_s: as time.monotonic().
    """
    cache, turns = directory / CACHE, iter(rounds)
    chains: dict[str, Chain] = {}
    done: list[Killed] = []
    while len(done) < kills and time.monotonic() < until_s:
        turn = next(turns)
        if turn.layout not in chains:
            chains[turn.layout] = undisturbed(turn.layout, num_steps, directory)
        # compiled programs are kept from start to start, which halves the cost of a start, but where
        # the kill is to come while they are made
        env = {} if turn.moment == "compiling" else cached(cache)
        kills_of_start = one_start(chains[turn.layout], turn, chance, env)
        if not kills_of_start:
            print(f"{len(done)} {turn.layout}: finished, bit for bit", flush=True)
        for killed in kills_of_start:
            done.append(killed)
            what = f"{killed.victim} killed {killed.phase}, all ended after {killed.seconds:.1f} s"
            print(f"{len(done)} {turn.layout}: {what}", flush=True)
    for chain in chains.values():
        finish(chain, cached(cache))
    return done, list(chains.values())


def random_rounds(chance: random.Random, layouts: Sequence[str]) -> Iterator[Round]:
    """Yield rounds of the layouts in turn, without an end."""
    return (Round(layout, chance.choice(MOMENTS), None, None) for layout in cycle(layouts))


def one_start(
    chain: Chain, turn: Round, chance: random.Random, env: dict[str, str]
) -> list[Killed]:
    """Return the kills of one start, after which all was as it has to be: none where it came to its
    end before.
    """
    done: list[Killed] = []
    with started(chain, env) as start:
        seen = look(chain)
        before = dict(seen.newest)
        for _ in range(turn.kills or chance.randint(1, MOST_KILLS)):
            if not wait(start, turn.moment, before, chance):
                break
            killed = kill(start, turn, seen, chance)
            done += [killed] if killed else []
            if start.popen.poll() is not None:
                break
            before = {run: newest(run_dir) for run, run_dir in chain.runs.items()}
        if done and (done[-1].victim == COMMAND or not (chain.is_sweep or chain.is_restarted)):
            check_killed(start, done[-1].victim, seen)
        else:
            start.end(FINISH_S)
            check_ended(start, seen)
    return done


def finish(chain: Chain, env: dict[str, str]) -> None:
    """Bring a run or sweep to its end, without a kill."""
    with started(chain, env) as start:
        seen = look(chain)
        start.end(FINISH_S)
        check_ended(start, seen)


def look(chain: Chain) -> Seen:
    found = {run: newest(run_dir) for run, run_dir in chain.runs.items()}
    ended = [run for run, step in found.items() if step == chain.num_steps]
    return Seen(found, {run: records(chain.runs[run]) for run in ended}, set(), set())


def wait(start: Start, moment: str | None, before: dict[str, int], chance: random.Random) -> bool:
    """Return whether the moment came before the end of the start."""
    reached: Callable[[], bool] = lambda: any(start.phase(run) == moment for run in start.active())
    after_s = chance.uniform(0, AFTER_S[moment]) if moment else 0
    if moment is None or (moment == "joining" and not start.chain.is_launched):
        # where nothing is compiled, a start takes about half as long
        deadline = time.monotonic() + chance.uniform(0, start.chain.duration_s / 2)
        reached = lambda: time.monotonic() >= deadline
    elif moment == "saving":  # again: so that there is one to lose, and each round gets further

        def reached() -> bool:
            runs = start.chain.runs
            further = [run for run in start.active() if newest(runs[run]) > before[run]]
            return any(start.phase(run) == moment for run in further)

    limit = time.monotonic() + FINISH_S
    while not reached():
        if start.popen.poll() is not None:
            return False
        if time.monotonic() > limit:
            raise Violation(f"no end after {FINISH_S} s")
        time.sleep(0.02)
    time.sleep(after_s)
    return start.popen.poll() is None


def kill(start: Start, turn: Round, seen: Seen, chance: random.Random) -> Killed | None:
    """Return the kill of one process, once all that it takes with it has ended; None: it had ended
    itself.
    """
    chain, active = start.chain, start.active()
    timely = [run for run in active if start.phase(run) == turn.moment] or active
    run = chance.choice(timely) if timely else None
    victims = [each for each in start.victims(run) if turn.victim in (None, each.name)]
    if not victims:
        return None
    victim = chance.choice(victims)
    phase = start.phase(run)
    before = {name: steps(run_dir) for name, run_dir in chain.runs.items()}
    pids = (
        start.processes()
        if victim.name == COMMAND or victim.run is None
        else start.of_run(victim.run)
    )
    printed = 0 if victim.run is None else len(start.printed_by(victim.run))
    if victim.pid not in pids:
        return None
    start.kill(victim)
    is_last = victim.name == COMMAND or not (chain.is_sweep or chain.is_restarted)
    seconds = (
        start.end(END_S) if is_last else start.wait_gone(_taken_by(victim, chain, pids), END_S)
    )
    for name, run_dir in chain.runs.items():
        check_kept(run_dir, before[name])
    if not is_last:
        check_goes_on(start, victim, phase, printed, seen)
    return Killed(turn.layout, victim.name, phase, seconds)


def _taken_by(victim: Victim, chain: Chain, pids: dict[int, list[str]]) -> list[int]:
    """Return the processes that end with one: all of its run, but the launcher that starts it
    again.
    """
    launcher = (
        [pid for pid, words in pids.items() if _is_launcher(words)] if victim.name != "job" else []
    )
    return [pid for pid in pids if not (chain.is_restarted and pid in launcher)]


def _is_launcher(words: Sequence[str]) -> bool:
    return (
        any(word.startswith("launch.max_restarts=") for word in words)
        and "launch.max_restarts=0" not in words
    )


def check_goes_on(start: Start, victim: Victim, phase: str, printed: int, seen: Seen) -> None:
    """Raise Violation unless a run is started again whose process was killed. The other jobs of a
    sweep go on.
    """
    assert victim.run is not None
    if not start.chain.is_restarted or victim.name == "job":
        seen.lost.add(victim.run)
        seen.ending |= {victim.run} if phase == "ending" else set()
        return
    process, limit = victim.name.removesuffix(" of a job"), time.monotonic() + END_S
    while start.popen.poll() is None and phase != "ending":
        later = start.printed_by(victim.run)[printed:]
        if RESTART.search(later):
            if f"{process} of " not in later:
                raise Violation(f"{victim.name} was killed, and nobody says so")
            return
        if time.monotonic() > limit:
            raise Violation(
                f"{victim.name} was killed {phase}, and {END_S} s later nothing is started again"
            )
        time.sleep(0.05)


def check_killed(start: Start, victim: str, seen: Seen) -> None:
    """Raise Violation unless a command that has ended, killed or with the process that was, left
    all in order.
    """
    chain, printed = start.chain, start.printed()
    is_finished = all(newest(run_dir) == chain.num_steps for run_dir in chain.runs.values())
    if start.popen.returncode == 0 and not is_finished:
        raise Violation(
            f"exit code 0 after steps {[sorted(steps(run_dir)) for run_dir in chain.runs.values()]}"
        )
    if victim != COMMAND and not is_finished and f"{victim} of " not in printed:
        raise Violation(f"{victim} was killed, and nobody says so")
    check_runs(start, seen)


def check_ended(start: Start, seen: Seen) -> None:
    """Raise Violation unless a start came to its end, all of it but the jobs of a sweep that have
    been killed.

    A finished run equals the uninterrupted one. A finished chain is forgotten: the next start
    begins another.
    """
    chain, code = start.chain, start.popen.returncode
    allowed = {1} if seen.lost - seen.ending else {0, 1} if seen.lost else {0}
    if code not in allowed:
        raise Violation(
            f"exit code {code}, not {' or '.join(map(str, sorted(allowed)))}; killed: "
            f"{sorted(seen.lost)}"
        )
    check_runs(start, seen)
    for run, run_dir in chain.runs.items():
        if run not in seen.lost or code == 0:
            check_same(run, left(run_dir, chain.num_steps), chain.wanted[run])
    if code == 0:
        if chain.is_sweep:
            check_sweep(chain.run_dir, chain.wanted)
        chain.finished += len(chain.runs)
        shutil.rmtree(chain.run_dir)
        chain.number += 1


def check_runs(start: Start, seen: Seen) -> None:
    """Raise Violation unless each run went on as it had to, and its files are whole."""
    chain = start.chain
    for run, run_dir in chain.runs.items():
        chain.resumes += check_resumed(start, run, seen.newest[run])
        check_files(run_dir)
        if run in seen.finished and chain.is_sweep and records(run_dir) != seen.finished[run]:
            raise Violation(f"{run} was finished, and was done again")
    logs = [start.printed(), *(start.printed_by(run) for run in chain.runs)]
    if any("Traceback" in log for log in logs):
        raise Violation("a traceback:\n" + "\n".join(log for log in logs if "Traceback" in log))


def undisturbed(layout: str, num_steps: int, directory: Path) -> Chain:
    """Return a chain with the results and the duration of an uninterrupted start."""
    chain = Chain(layout, LAYOUTS[layout].split(), num_steps, directory / layout.replace(" ", "_"))
    chain.directory.mkdir(parents=True)
    with started(chain, cached(directory / CACHE)) as start:
        chain.duration_s = start.end(FINISH_S)
        if start.popen.returncode != 0:
            raise Violation(f"exit code {start.popen.returncode} of a start that nobody killed")
        names = (
            [path.parent.name for path in chain.run_dir.glob("*/config.yaml")]
            if chain.is_sweep
            else [""]
        )
        chain.wanted = {name: left(chain.run_dir / name, num_steps) for name in sorted(names)}
        if chain.is_sweep and len(names) != len(
            json.loads((chain.run_dir / "sweep.json").read_text())
        ):
            raise Violation(f"a sweep of {names}")
    for name, found in chain.wanted.items():
        last = {int(path.name) for path in (chain.run_dir / name / "checkpoints").iterdir()}
        if len(found.results) != num_steps or max(last) != num_steps or num_steps % EVERY:
            raise Violation(
                f"{layout}: {len(found.results)} records of {num_steps} steps, checkpoints {last}"
            )
    shutil.rmtree(chain.run_dir)
    chain.number += 1
    print(f"{layout}: {chain.duration_s:.0f} s for {num_steps} steps", flush=True)
    return chain


def cached(directory: Path) -> dict[str, str]:
    """Return an environment that keeps every compiled program in this directory."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
