"""The process group of one training run: settings are equal, and no process hangs.

If a process fails, it prints an error with its number, and the others exit, too. If it is killed or
lost, JAX's coordination service reports it after run.heartbeat_s.
"""

import json
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from ppctl import errors
from ppctl.config import Mesh as MeshSettings, Run
from ppctl.executors.device_mesh import all_devices
from ppctl.launch import join_processes as distributed, xla_stderr
from ppctl.reports.recorded_settings import setting_names, setting_value
from ppctl.training.run.heartbeat import Heartbeat
from ppctl.training.run.run_environment import writing

# settings that may differ between processes
LOCAL = ("run.process_id", "run.coordinator", "run.compilation_cache", "data.cache_dir")
# error texts of collectives and of the service after another process has gone
LOST_CONTACT = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|socket closed|broken pipe|heartbeat|coordination"
    r"|another task|barrier|UNAVAILABLE|DEADLINE_EXCEEDED",
    re.IGNORECASE,
)


@contextmanager
def process_group(run: Run, mesh: MeshSettings, settings: Mapping[str, Any]) -> Iterator[Heartbeat]:
    """Join the process group of a run, after JAX's start, and yield this process's heartbeat.

    First compares all recorded settings and versions. If they differ, process 0 raises AgreedError
    and the others ElsewhereError. An error of the body gets the process's number, and makes the
    other processes exit.
    """
    if run.distributed == "off":
        yield Heartbeat()
        return
    all_devices()  # raises ConfigError without devices
    process, count = jax.process_index(), jax.process_count()
    heartbeat = Heartbeat(process=process)
    try:
        # 1. compare, and start the heartbeat
        versions = {f"the version of {name}": version(name) for name in ("ppctl", "jax")}
        names = (name for name in setting_names(settings) if name not in LOCAL)
        compare({name: setting_value(settings, name) for name in names} | versions)
        if jax.default_backend() == "cpu" and mesh.num_devices % count:
            raise _of_all(
                f"mesh={mesh.text} has {mesh.num_devices} devices, which {count} processes cannot "
                f"share evenly. Use a mesh of {count}, {2 * count}, ... devices, or another number "
                "of processes."
            )
        how = {"process": process, "num_processes": count, "slow_after_s": run.slow_after_s}
        heartbeat = Heartbeat(_shared_directory(Path(run.dir)), say=_say, **how)
        heartbeat.start()
        yield heartbeat
        distributed.gather("")  # waits until all are done
        heartbeat.stop()
        distributed.gather("")
    # 2. errors that all processes raise at the same point
    except (errors.AgreedError, errors.ElsewhereError, errors.CheckpointError) as error:
        heartbeat.stop()
        distributed.leave()  # waits for all: a lost contact would hide the reason
        _clear(heartbeat)
        if process == 0 or not isinstance(error, errors.CheckpointError):
            raise
        elsewhere = errors.ElsewhereError()
        elsewhere.exit_code = error.exit_code
        raise elsewhere from error
    # 3. errors of only this process
    except Exception as error:
        raise _with_process_number(error, run, heartbeat) from error
    distributed.leave()
    _clear(heartbeat)


def _clear(heartbeat: Heartbeat) -> None:
    if heartbeat.directory is not None and heartbeat.process == 0:
        shutil.rmtree(heartbeat.directory, ignore_errors=True)


def _say(text: str) -> None:
    print(f"ppctl: {text}", file=sys.stderr, flush=True)


def compare(facts: Mapping[str, Any]) -> None:
    """Compare the facts of all processes; if they differ, raise an error in each.

    AgreedError on process 0, which prints it, and ElsewhereError on the others.
    """
    if not distributed.is_joined():
        return
    first, *others = (json.loads(text) for text in distributed.gather(json.dumps(dict(facts))))
    for process, theirs in enumerate(others, 1):
        for key in [*first, *theirs]:
            both = (json.dumps(each[key]) if key in each else "not set" for each in (first, theirs))
            expected, actual = both
            if expected != actual:
                what = f"{key} is {expected} on process 0 and {actual} on process {process}"
                raise _of_all(f"{what}. All processes need the same settings, data and versions.")


def raise_together(error: errors.PpctlError | None, failed: Sequence[bool]) -> None:
    """Raise the error of the first failed process, if any; other processes raise ElsewhereError.

    error: this process's error, or None. failed: a flag for each process.
    """
    if not any(failed):
        return
    if not distributed.is_joined():
        assert error is not None
        raise error
    first = failed.index(True)
    text = f"process {first}: {distributed.gather(str(error or ''))[first]}"
    is_mine = first == jax.process_index()
    agreed = errors.AgreedError(text) if is_mine else errors.ElsewhereError(text)
    agreed.kind = agreed.kind if error is None else error.kind
    raise agreed from error


def _of_all(message: str) -> errors.PpctlError:
    """Return an error for all processes to raise: process 0 prints it, the others exit silently."""
    return errors.AgreedError(message) if distributed.is_lead() else errors.ElsewhereError()


def _shared_directory(run_dir: Path) -> Path:
    """Create and return an empty run.dir/processes. PpctlError if not all processes share it."""
    directory = run_dir / "processes"
    problem, token = "", uuid.uuid4().hex
    if distributed.is_lead():
        try:
            with writing(run_dir):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
                (directory / token).touch()
        except errors.ConfigError as error:
            problem = str(error)
    problem, token = json.loads(distributed.gather(json.dumps([problem, token]))[0])
    if problem:
        raise _of_all(problem)
    seen = distributed.gather(str((directory / token).exists()))
    missing = [str(process) for process, each in enumerate(seen) if each != "True"]
    if missing:
        what = f"run.dir={run_dir} is not the same directory on process 0 and on"
        use = "Use a directory that all processes share."
        raise _of_all(f"{what} {', '.join(missing)}. {use}")
    if distributed.is_lead():
        (directory / token).unlink()
    return directory


def _with_process_number(error: Exception, run: Run, heartbeat: Heartbeat) -> Exception:
    """Record the error for the other processes; return it with this process's number."""
    if (reason := lost_contact(error)) is not None:
        what = f"lost contact with another process while {heartbeat.text} ({reason})"
        xla_stderr.tell_lost(what)
        time.sleep(run.heartbeat_s + 5)  # JAX's service may end this process first, with a reason
        return errors.LostError(f"process {heartbeat.process}: {what}.")
    if not isinstance(error, errors.PpctlError):
        text = f"{type(error).__name__}: {errors.one_line(error)}"
        heartbeat.fail(text)
        return RuntimeError(f"process {heartbeat.process}: {text}")
    # an error that all processes raise, such as non-finite numbers, is printed once
    is_printed = heartbeat.fail(errors.one_line(error)) or heartbeat.process == 0
    text = f"process {heartbeat.process}: {error}"
    numbered = errors.PpctlError(text) if is_printed else errors.ElsewhereError()
    numbered.exit_code, numbered.kind = error.exit_code, error.kind
    return numbered


def lost_contact(error: BaseException) -> str | None:
    """Return the reason of an error caused by the loss of another process, else None."""
    link = error if distributed.is_joined() else None
    while link is not None:
        if not isinstance(link, errors.PpctlError) and LOST_CONTACT.search(str(link)):
            return errors.one_line(link)[:150].rstrip(".")
        link = link.__cause__
    return None
