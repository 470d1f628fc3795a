"""`ppctl train launch.processes=4`: local processes of one run, started again after a crash. Loads no JAX.

The processes are `ppctl train` with the same overrides; each learns its number and where to meet the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.config import Config
from ppctl.config.launch import not_launched
from ppctl.errors import ConfigError, LostError, NonFiniteError, error_document
from ppctl.launch.supervise import LEFT, Child, Ending, run_group, stop_requests
from ppctl.reports.run_files import checkpoint_steps, last_record

HOST = "127.0.0.1"
STARTED_WITH = "PPCTL_STARTED_WITH"  # tells each process the words that the launcher was started with, as JSON
ERROR_FILE = "PPCTL_ERROR_FILE"  # names the file in which a process leaves its error for `--json`
# A restart would meet these again: done or stopped, a request that is refused, numbers that are not finite.
FINAL = (*LEFT, ConfigError.exit_code, NonFiniteError.exit_code)
KILLED = 128  # and the number of the signal
EXPLAINED_BY_CHILD = (ConfigError.exit_code, NonFiniteError.exit_code)  # in one line that needs no other


def launch(config: Config, words: Sequence[str], started_with: Sequence[str], *, as_json: bool) -> int:
    """Run the processes; return the exit code of the one that ended the run, 130 or 143 after a request to stop.

    LostError's where a process was killed, as of every run that loses one.

    words: the command line without the program's name, as the user typed it: command, options and overrides.
    started_with: those of them that a run stores, which resume it.
    """
    settings, run_dir = config.launch, Path(config.run.dir)
    groups = device_groups(config, os.environ)
    found = newest_checkpoint(run_dir)
    env = {STARTED_WITH: json.dumps([*started_with])}
    errors, why = tempfile.TemporaryDirectory(), ""

    def start(restart: int) -> Ending:
        nonlocal why
        began_s = time.time()
        for left in Path(errors.name).iterdir():
            left.unlink()  # of the start before
        started = children(config, words, groups, is_own=restart > 0 and found is None)
        ending = run_group(
            [
                child._replace(env={**child.env, **env, ERROR_FILE: os.path.join(errors.name, str(index))})
                for index, child in enumerate(started)
            ],
            events,
            crash_grace_s=settings.crash_grace_s,
            exit_grace_s=settings.exit_grace_s,
            symptoms=(LostError.exit_code,),
            raw_lead=as_json,
        )
        if ending.cause is not None and ending.code not in EXPLAINED_BY_CHILD:
            step = last_step(run_dir, since_s=began_s)
            why = ending.cause + ("" if step is None else f" (last step logged: {step})")
            _say(why)
        return ending

    with errors, stop_requests() as events:
        code = with_restarts(start, settings.max_restarts, lambda: newest_checkpoint(run_dir), _say)
        code = LostError.exit_code if code > KILLED and code not in LEFT else code
        if as_json and code and (document := error_of(Path(errors.name), code, why)) is not None:
            print(json.dumps(document), flush=True)
    return code


def error_of(directory: Path, code: int, why: str) -> dict[str, Any] | None:
    """Return the error that ended the run, of those that its processes left in a directory; None where there is none.

    code: which the launcher ends with. why: who ended the run and how; stands in where a process was killed.
    """
    left = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime)
    found = [json.loads(file.read_bytes()) for file in left]
    found.sort(key=lambda each: each["error"]["kind"] == LostError.kind)  # who only noticed another's end
    if found:
        return found[0]
    return error_document(LostError.kind, f"{why}.") if code == LostError.exit_code else None


def with_restarts(
    start: Callable[[int], Ending],
    max_restarts: int,
    newest: Callable[[], int | None],
    say: Callable[[str], None],
) -> int:
    """Start at most 1 + max_restarts times, only after a crash again; return the exit code of the last start.

    newest: the step of the newest checkpoint, which the next start goes on from.
    """
    before = newest()
    ending = start(0)
    for restart in range(1, max_restarts + 1):
        if ending.is_stopped or ending.code in FINAL:
            return ending.code
        step = newest()
        where = "from the start" if step is None else f"from the checkpoint of step {step}"
        progress = "; the last start saved nothing" if step == before else ""
        say(f"restart {restart} of {max_restarts}, {where}{progress}")
        before = step
        ending = start(restart)
    if max_restarts and not ending.is_stopped and ending.code not in FINAL:
        say(f"no restart is left (launch.max_restarts={max_restarts})")
    return ending.code


def children(config: Config, words: Sequence[str], groups: Sequence[str | None], *, is_own: bool) -> list[Child]:
    """Return the processes of one start.

    is_own: the checkpoints in run.dir, if there are any, are this launch's. run.resume=never, which keeps a run from
    going on with another's, then no longer keeps it from its own.
    """
    command = [sys.executable, "-m", "ppctl.cli", *words, *not_launched()]
    if is_own and config.run.resume == "never":
        command.append("run.resume=auto")
    number = config.launch.processes
    if number == 1:
        return [Child(command)]
    meet = ["run.distributed=explicit", f"run.coordinator={HOST}:{_free_port()}", f"run.num_processes={number}"]
    return [
        Child([*command, *meet, f"run.process_id={index}"], {} if group is None else {"CUDA_VISIBLE_DEVICES": group})
        for index, group in enumerate(groups)
    ]


def device_groups(config: Config, environ: Mapping[str, str]) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each process: equal runs of this process's devices; None: it is left as it is.

    Which devices there are is not known here, only how many the mesh has; where there are no GPUs nobody reads it.
    """
    number, num_devices = config.launch.processes, config.mesh.num_devices
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    # an empty list, or one that starts with -1, hides all GPUs
    if (
        config.run.platform == "cpu"
        or number == 1
        or (visible is not None and visible.split(",")[0].strip() in ("", "-1"))
    ):
        return [None] * number
    devices = [str(i) for i in range(num_devices)] if visible is None else [name.strip() for name in visible.split(",")]
    if len(devices) < num_devices:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible} names {len(devices)} devices, but mesh={config.mesh.text} has "
            f"{num_devices} to share among launch.processes={number}. Name {num_devices}, or use run.platform=cpu or a "
            "smaller mesh."
        )
    each = num_devices // number
    return [",".join(devices[i * each : (i + 1) * each]) for i in range(number)]


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step that a run in run_dir goes on from; as `Checkpoints.latest`, which needs JAX."""
    return max(checkpoint_steps(run_dir / "checkpoints"), default=None)


def last_step(run_dir: Path, *, since_s: float) -> int | None:
    """Return the last step in metrics.jsonl if that was written to since then."""
    record = last_record(run_dir, since_s=since_s)
    return None if record is None else record["step"]


def _free_port() -> int:
    """Return a port that nobody listens on now. Another process may take it first: the start then fails and says so."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _say(text: str) -> None:
    print(f"ppctl: {text}.", file=sys.stderr, flush=True)
