"""Processes that live and end together, with their output forwarded line by line.

Independent of training: a group is a list of commands. No process outlives this one.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, NamedTuple, TextIO

ALIVE_FD = "PPCTL_ALIVE_FD"  # variable: descriptor of a pipe that closes when the starter is gone
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEFT = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a regular end
CRASH_GRACE_S = 5.0  # seconds for the other children after a crash: to print a cause; they may hang
EXIT_GRACE_S = 60.0  # seconds for the other children after an exit: to finish a checkpoint
DRAIN_S = 2.0  # seconds for output still in the pipes of ended processes


class Child(NamedTuple):
    command: Sequence[str]
    env: Mapping[str, str] = {}  # variables to set on top of this process's environment


class Exit(NamedTuple):
    child: int
    code: int  # exit code; -N: killed by signal N


class Stop(NamedTuple):
    number: int  # number of a signal to this process; SIGPIPE: its output has no reader


Events = queue.SimpleQueue[Exit | Stop]


class Ending(NamedTuple):
    code: int  # exit code as in a shell: 128 + n after signal n
    is_stopped: bool  # a signal to this process ended the group
    cause: str | None  # the process that ended the group, and its end; None: a regular end
    is_lead_killed: bool = False  # whether a signal killed child 0, which could not report it


@contextmanager
def stop_requests() -> Iterator[Events]:
    """Yield the queue of a group's events. In the body, SIGINT and SIGTERM only become events."""
    events: Events = queue.SimpleQueue()

    def handle(number: int, _frame: FrameType | None) -> None:
        events.put(Stop(number))

    with handling(STOP_SIGNALS, handle):
        yield events


@contextmanager
def handling(
    numbers: Collection[int], handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle these signals with `handle` in the body."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_group(
    children: Sequence[Child],
    events: Events,
    *,
    crash_grace_s: float = CRASH_GRACE_S,
    exit_grace_s: float = EXIT_GRACE_S,
    symptoms: Collection[int] = (),
    raw_lead: bool = False,
) -> Ending:
    """Run a group; return its ending when all children have ended.

    The first stop request is passed on as SIGTERM; a second one kills. exit_grace_s seconds after a
    regular end of a child, or crash_grace_s after a crash, the others are killed. A single child
    keeps this process's stdout and stderr. symptoms: exit codes of children that end because of
    another. raw_lead: child 0's stdout is forwarded unchanged; the others' stdout goes to stderr.
    """
    # 1. the state of the group
    processes, lock = list[subprocess.Popen[bytes]](), threading.Lock()  # lock: for output
    pumps: list[threading.Thread] = []
    ended: dict[int, int] = {}  # child: exit code, in order of ending
    killed: set[int] = set()
    stop: int | None = None
    deadline_s = threading.TIMEOUT_MAX
    alive, held = os.pipe()  # never written: `alive` reads end of file when this process is gone
    try:
        # 2. start
        for index, child in enumerate(children):
            pipe = subprocess.PIPE if len(children) > 1 else None
            processes.append(process := start(child, alive, stdout=pipe, stderr=pipe))
            streams = _streams(index, process, raw_lead=raw_lead)
            pumps += [in_thread(_forward, *stream, lock, events) for stream in streams]
            in_thread(_report, index, process, events)
        # 3. watch
        while len(ended) < len(processes):
            event = _next(events, deadline_s)
            running = [index for index in range(len(processes)) if index not in ended]
            if isinstance(event, Exit):
                ended[event.child] = event.code
                grace_s = exit_grace_s if event.code in LEFT else crash_grace_s
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            elif event is not None and stop is None and event.number != signal.SIGPIPE:
                stop = event.number
                for index in running:
                    processes[index].terminate()
            else:  # deadline, second stop request, or no reader of the output
                stop = event.number if event is not None and stop is None else stop
                killed.update(running)
                for index in running:
                    processes[index].kill()
                deadline_s = threading.TIMEOUT_MAX
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(alive)
        os.close(held)
        until_s = time.monotonic() + DRAIN_S
        for pump in pumps:
            pump.join(max(0.0, until_s - time.monotonic()))
    return _ending(ended, killed, stop, symptoms)._replace(is_lead_killed=ended[0] < 0)


def start(
    child: Child, alive: int, *, stdout: IO[bytes] | int | None, stderr: IO[bytes] | int | None
) -> subprocess.Popen[bytes]:
    """Start a process in a separate session: Ctrl-C on a terminal reaches only this process.

    alive: the read end of a pipe without writes; the process exits when the other end closes.
    """
    return subprocess.Popen(
        child.command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **child.env, ALIVE_FD: str(alive)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=(alive,),
        start_new_session=True,
    )


def in_thread(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _report(index: int, process: subprocess.Popen[bytes], events: Events) -> None:
    events.put(Exit(index, process.wait()))


def _next(events: Events, deadline_s: float) -> Exit | Stop | None:
    """Return the next event, or None at the deadline."""
    remaining_s = min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
    with suppress(queue.Empty):
        return events.get(timeout=max(0.0, remaining_s))
    return None


def _ending(
    ended: dict[int, int], killed: set[int], stop: int | None, symptoms: Collection[int]
) -> Ending:
    """Return the group's ending from the exit codes of all children, in order of ending.

    >>> _ending({0: 75, 2: -9, 1: -9}, killed={1}, stop=None, symptoms={75}).cause
    'process 2 of 3 was killed by SIGKILL; process 1 had to be killed'
    """
    failed = {child: code for child, code in ended.items() if child not in killed and code != 0}
    symptoms = {-signal.SIGABRT, *symptoms}
    causes = [child for child, code in failed.items() if code not in symptoms] or [*failed]
    child = causes[0] if causes else None
    left = f"{_named(sorted(killed))} had to be killed" if killed else None
    code = 0 if child is None else shell_code(failed[child])
    if stop is not None and (code in LEFT[1:] or (child is None and killed)):
        return Ending(128 + stop, True, left)
    if child is not None:
        cause = f"process {child} of {len(ended)} {how(failed[child])}"
        return Ending(code, stop is not None, cause + (f"; {left}" if left else ""))
    if left:
        return Ending(1, False, f"{_named(sorted(ended.keys() - killed))} finished, but {left}")
    return Ending(0, stop is not None, None)


def shell_code(code: int) -> int:
    """Return the shell's exit code for an exit code of Popen: 128 + n after signal n."""
    return code if code >= 0 else 128 - code


def how(code: int) -> str:
    """Return how a process with Popen's exit code ended, in words.

    >>> how(-9), how(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    names = {member.value: member.name for member in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _named(children: Sequence[int]) -> str:
    """Return the numbers of children in words.

    >>> _named([2]), _named([0, 1, 3])
    ('process 2', 'processes 0, 1 and 3')
    """
    *before, last = map(str, children)
    return f"processes {', '.join(before)} and {last}" if before else f"process {last}"


def _streams(
    child: int, process: subprocess.Popen[bytes], *, raw_lead: bool
) -> Iterator[tuple[IO[bytes], TextIO, bytes]]:
    """Yield each pipe of a child, its destination, and the prefix of its lines."""
    if process.stdout is not None:
        is_raw, is_other = raw_lead and child == 0, raw_lead and child != 0
        out = sys.stderr if is_other else sys.stdout
        yield process.stdout, out, b"" if is_raw else b"[%d] " % child
    if process.stderr is not None:
        yield process.stderr, sys.stderr, b"[%d] " % child


def _forward(
    pipe: IO[bytes], out: TextIO, prefix: bytes, lock: threading.Lock, events: Events
) -> None:
    """Forward a child's output in whole lines, until the child ends or the reader is gone."""
    with pipe:
        for line in pipe:
            try:
                with lock:
                    out.flush()
                    out.buffer.write(prefix + line.removesuffix(b"\n") + b"\n")
                    out.buffer.flush()
            except OSError:  # the reader has gone
                events.put(Stop(signal.SIGPIPE))
                return


# --- in the child -------------------------------------------------------------------------------


def end_with_starter() -> None:
    """End this process when the process that started it is gone, killed or not."""
    alive = os.environ.pop(ALIVE_FD, None)
    if alive is not None:
        in_thread(_end_when_closed, int(alive))


def _end_when_closed(alive: int) -> None:
    os.read(alive, 1)
    os._exit(128 + signal.SIGKILL)
