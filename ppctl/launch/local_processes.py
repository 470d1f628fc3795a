"""`ppctl train launch.processes=4`: local processes of one run, restarted after a crash.

Each process is `ppctl train` with the same overrides, its number and the address of process 0.
This file loads no JAX.
"""

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.config import Config, Mesh
from ppctl.config.groups.command_settings import not_launched
from ppctl.errors import ConfigError, LostError, NonFiniteError, error_document
from ppctl.launch.cluster_variables import without_proxy
from ppctl.launch.event_command import event_document, fault_of_call
from ppctl.launch.supervisor import LEFT, Child, Ending, run_group, stop_requests
from ppctl.reports.run_files import checkpoint_steps, last_record
from ppctl.reports.terminal_output import show_json

HOST = "127.0.0.1"
STARTED_WITH = "PPCTL_STARTED_WITH"  # variable: words of the launcher's command, as JSON
ERROR_FILE = "PPCTL_ERROR_FILE"  # variable: file for the error of a process
EXPLAINED = (ConfigError.exit_code, NonFiniteError.exit_code)  # a process explains these errors
FINAL = (*LEFT, *EXPLAINED)  # exit codes without a restart, which would end the same way
KILLED = 128  # base of exit codes: 128 + n for a process killed by signal n


def launch(
    config: Config, words: Sequence[str], started_with: Sequence[str], *, as_json: bool
) -> int:
    """Run the processes, restart them after a crash, and return the run's exit code.

    The code is 130 or 143 after a request to stop, and LostError's if a process was killed. words:
    the command line as typed, without the program's name. started_with: the words that the run
    stores for the command that resumes it. as_json: forward process 0's stdout unchanged.
    """
    # 1. prepare the inputs of all starts
    run, settings, run_dir = config.run, config.launch, Path(config.run.dir)
    groups = device_groups(settings.processes, config.mesh, run.platform, os.environ)
    is_fresh = newest_checkpoint(run_dir) is None and run.resume == "never"
    env = {STARTED_WITH: json.dumps([*started_with])}
    errors, why = tempfile.TemporaryDirectory(), ""

    # 2. define one start
    def start(restart: int) -> Ending:
        nonlocal why
        began_s = time.time()
        for earlier in Path(errors.name).iterdir():
            earlier.unlink()
        group = []
        for index, child in enumerate(children(words, groups, goes_on=restart > 0 and is_fresh)):
            file = os.path.join(errors.name, str(index))
            group.append(child._replace(env={**child.env, **env, ERROR_FILE: file}))
        ending = run_group(group, events, symptoms=(LostError.exit_code,), raw_lead=as_json)
        if ending.cause is not None and ending.code not in EXPLAINED:
            record = last_record(run_dir, since_s=began_s)
            why = ending.cause
            why += "" if record is None else f" (last step logged: {record['step']})"
            _say(why)
            if run.on_event is not None and ending.is_lead_killed:  # else process 0 has reported it
                document = event_document("lost", run_dir, reason=why)
                if (fault := fault_of_call(run.on_event, document)) is not None:
                    _say(f"run.on_event at lost: {fault}")
        return ending

    # 3. start, and restart after crashes
    with errors, stop_requests() as events:
        code = with_restarts(start, settings.max_restarts, lambda: newest_checkpoint(run_dir), _say)
        code = LostError.exit_code if code > KILLED and code not in LEFT else code
        document = error_of(Path(errors.name), code, why) if code else None
        if document is not None and not leave_error(document) and as_json:
            show_json(document)
    return code


def leave_error(document: Mapping[str, Any]) -> bool:
    """Write an error to the file that the starting process named; return whether it named one."""
    if ERROR_FILE not in os.environ:
        return False
    with suppress(OSError):  # such as a full disk
        Path(os.environ[ERROR_FILE]).write_text(json.dumps(document) + "\n")
    return True


def left_error(file: Path) -> dict[str, Any] | None:
    """Return the error that a process left in a file, if any."""
    with suppress(OSError, ValueError):
        return json.loads(file.read_bytes())
    return None


def error_of(directory: Path, code: int, why: str) -> dict[str, Any] | None:
    """Return the error that ended the run, among those that its processes left in a directory.

    why: which process ended the run and how; the message if a process was killed without an error.
    """
    files = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime)
    documents = [document for file in files if (document := left_error(file)) is not None]
    # LostErrors last: they only report that another process ended
    documents.sort(key=lambda each: each["error"]["kind"] == LostError.kind)
    if documents:
        return documents[0]
    return error_document(LostError.kind, f"{why}.") if code == LostError.exit_code else None


def with_restarts(
    start: Callable[[int], Ending],
    max_restarts: int,
    newest: Callable[[], int | None],
    say: Callable[[str], None],
) -> int:
    """Call `start`, and again after a crash, up to max_restarts times; return the last exit code.

    start: takes 0, then the number of the restart. newest: returns the step of the newest
    checkpoint, where the next start resumes. say: prints a note.
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


def children(words: Sequence[str], groups: Sequence[str | None], *, goes_on: bool) -> list[Child]:
    """Return the processes of one start, one per group of devices.

    words: as in `launch`. groups: as from `device_groups`. goes_on: resume from this launch's
    checkpoints even if run.resume=never.
    """
    command = [sys.executable, "-m", "ppctl.cli", *words, *not_launched()]
    if goes_on:
        command.append("run.resume=auto")
    number = len(groups)
    if number == 1:
        return [Child(command)]
    command += ["run.distributed=explicit", f"run.coordinator={HOST}:{_free_port()}"]
    command += [f"run.num_processes={number}"]
    envs = [{} if group is None else {"CUDA_VISIBLE_DEVICES": group} for group in groups]
    direct = without_proxy(HOST, os.environ)
    return [
        Child([*command, f"run.process_id={index}"], env | direct) for index, env in enumerate(envs)
    ]


def device_groups(
    number: int, mesh: Mesh, platform: str | None, environ: Mapping[str, str]
) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each process: equal shares of devices; None: unchanged.

    The share is counted from the mesh, without JAX. Without GPUs the variable has no effect.
    """
    num_devices = mesh.num_devices
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [*map(str, range(num_devices))]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
    is_hidden = visible is not None and names[0] in ("", "-1")  # hides all GPUs
    if platform == "cpu" or number == 1 or is_hidden:
        return [None] * number
    if len(names) < num_devices:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible} names {len(names)} devices, but "
            f"mesh={mesh.text} has {num_devices} to share among launch.processes={number}. "
            f"Name {num_devices}, or use run.platform=cpu or a smaller mesh."
        )
    each = num_devices // number
    return [",".join(names[i * each : (i + 1) * each]) for i in range(number)]


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step where a run in run_dir resumes, if any: `Checkpoints.latest` without JAX."""
    return max(checkpoint_steps(run_dir / "checkpoints"), default=None)


def _free_port() -> int:
    """Return a free port. If another process takes it first, the start fails with a message."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _say(text: str) -> None:
    print(f"ppctl: {text}.", file=sys.stderr, flush=True)
