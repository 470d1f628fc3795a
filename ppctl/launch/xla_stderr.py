"""Filter the output of XLA's C++ code in a run of several processes: drop chatter, shorten errors.

XLA's code bypasses Python's streams. If another process is lost, XLA ends this one with a dozen
lines and a stack trace. So its output goes through a child process, which runs this file as a
program and briefly outlives this process. Standard library only.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

LOST = "ppctl-lost: "  # prefix of the line to the child from `tell_lost`
LOG_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([\w.]+):\d+\] ?(.*)")
# names of XLA's source files that log about the connection of processes
SERVICE = re.compile(r"coordination_service|preemption|^client\.|distributed_runtime|rpc")
GLOO = re.compile(r"\[Gloo\]|connected peer ranks is")  # parts of lines that threads interleave
REST = re.compile(  # further lines of the service's messages
    r"\s*$|\d+$|RPC:|Additional GRPC|:[A-Z_]+:|The tasks|/job:|=== Source Location|external/|\. "
    r"This is only expected"
)
GONE = re.compile(r"tasks are unhealthy[^:]*:\s*([\s\S]*?)\s*The tasks have crashed")


def divert(process: int | str) -> None:
    """Send output that bypasses Python's stdout and stderr to a child that runs `readable`."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    command = [sys.executable, "-S", "-E", __file__, str(process)]  # ends after this process
    subprocess.Popen(command, stdin=read, stdout=2, start_new_session=True)
    os.close(read)
    for name, number in (("stdout", 1), ("stderr", 2)):
        how = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        setattr(sys, name, os.fdopen(os.dup(number), "w", **how))
        os.dup2(write, number)
    os.close(write)


def tell_lost(what: str) -> None:
    """Send `what` to the child, which prints it if XLA ends this process after losing another."""
    os.write(2, f"{LOST}{what}\n".encode(errors="backslashreplace"))


def readable(lines: Iterable[str], process: str) -> Iterator[str]:
    r"""Yield the lines for users, without XLA's chatter; a loss of contact becomes one line.

    >>> list(readable(["[Gloo] Rank 1\n", "0 ... connected peer ranks is : 1\n", "hello\n"], "1"))
    ['hello\n']
    """
    lost, last_words, is_dropped = "", "", False
    for line in lines:
        entry = LOG_LINE.match(line)
        if line.startswith(LOST):
            lost = line.removeprefix(LOST).strip()
        elif last_words:
            last_words += line  # all lines after a fatal one continue it
        elif entry and entry[1] == "F" and SERVICE.search(entry[2]):
            last_words = line
        elif entry or GLOO.search(line):
            is_dropped = entry is None or SERVICE.search(entry[2]) is not None
            is_dropped = is_dropped or (process != "0" and entry is not None and entry[1] in "IW")
            if not is_dropped:
                yield line
        elif not (is_dropped and REST.match(line)):
            is_dropped = False
            yield line
    if last_words:
        yield f"ppctl: process {process}: {lost or 'lost contact'}; {_cause(last_words)}.\n"


def _cause(last_words: str) -> str:
    gone = GONE.search(last_words)
    if gone is not None:
        tasks = {*map(int, re.findall(r"(?:^|task:)(\d+)\b", gone[1], re.MULTILINE))}
        numbers = ", ".join(map(str, sorted(tasks)))
        return f"process{'es' if len(tasks) > 1 else ''} {numbers} stopped responding"
    if re.search("Socket closed|onnection (refused|reset)", last_words):
        return "process 0, which all others need, has ended"
    return " ".join(last_words.split("*** Check failure")[0].split("absl::Status:")[-1].split())


if __name__ == "__main__":
    # libraries may print bytes that are not UTF-8
    printed, out = (
        os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace")
        for number, mode in ((0, "r"), (1, "w"))
    )
    for shown in readable(printed, sys.argv[1]):
        out.write(shown)
        out.flush()
