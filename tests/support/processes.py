"""Processes of one run, started as a user or a cluster starts them."""

import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

from support.environment import BY_USER

TINY = (
    "model=mlp model.num_layers=4 model.d_model=8 data=regression data.batch_size=8 data.num_rows=1024 "
    "data.num_features=5 data.num_targets=3 schedule=gpipe schedule.num_microbatches=2 run.platform=cpu "
    "run.dtype=float64 run.eval_every=null run.checkpoint.every=null run.trackers=[] run.log_every=1 "
    # the learning rate does not depend on where the run is to end
    "optim.warmup_steps=0 optim.min_lr_fraction=1"
)
WORDS = TINY.split()
PATIENCE_S = 240  # seconds that a test waits on a busy machine


class Process:
    """One of the processes of a run; `lines` grows as it prints."""

    def __init__(self, words, program=("-m", "ppctl.cli"), env=()):
        self.lines = []
        self.popen = subprocess.Popen(
            [sys.executable, *program, "train", *WORDS, *words],
            env=BY_USER | {"PYTHONUNBUFFERED": "1"} | dict(env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.popen.stdout.readline, ""))
        )
        self._reader.start()

    def wait_for(self, pattern):
        """Wait until a line matches; fail if the process ends first."""
        while not any(re.match(pattern, line) for line in self.lines):
            assert self.popen.poll() is None, "".join(self.lines)
            time.sleep(0.01)

    def end(self, timeout_s=PATIENCE_S):
        """Wait; return the exit code."""
        code = self.popen.wait(timeout_s)
        self._reader.join()
        self.popen.stdout.close()
        return code


@contextmanager
def processes(count, run_dir, *words, of=None, programs=None):
    """Start `count` processes of one run; of: further words, programs: other programs than ppctl's,
    by process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    joined = [
        f"run.dir={run_dir}",
        "run.distributed=explicit",
        f"run.coordinator=127.0.0.1:{port}",
        *words,
    ]
    started = []
    try:
        for i in range(count):
            own = [f"run.num_processes={count}", f"run.process_id={i}", *(of or {}).get(i, ())]
            program = ("-c", programs[i]) if programs and i in programs else ("-m", "ppctl.cli")
            started.append(Process([*joined, *own], program))
        yield started
    finally:
        for process in started:
            process.popen.kill()
        for process in started:
            process.end()
