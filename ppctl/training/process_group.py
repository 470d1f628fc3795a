"""The process group of one training run: its processes compare their settings, and none leaves another hanging.

A process that fails says so with its number, and the others follow it. One that is gone without a word (killed, or its
machine lost) is named by JAX's coordination service after run.heartbeat_s.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from ppctl.config import Config
from ppctl.errors import AgreedError, CheckpointError, ConfigError, ElsewhereError, LostError, PpctlError
from ppctl.executors.mesh import all_devices
from ppctl.launch import distributed, xla_stderr
from ppctl.training.heartbeat import Heartbeat
from ppctl.training.loop import writing

# settings that may differ between processes
LOCAL = ("run.process_id", "run.coordinator", "run.compilation_cache", "data.cache_dir", "costs.cache_dir")
LOST_CONTACT = re.compile(  # in errors of collectives, and of the service, where the other side is gone
    r"gloo|nccl|connection (reset|closed|refused)|socket closed|broken pipe|heartbeat|coordination|another task|barrier"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED",
    re.IGNORECASE,
)


@contextmanager
def process_group(config: Config) -> Iterator[Heartbeat]:
    """Join the process group of a run, and yield this process's heartbeat while the body trains; JAX has been started.

    Settings and versions are compared first: AgreedError on process 0, ElsewhereError on the others where they differ.
    An error of the body gets the process's number, and lets the others leave.
    """
    if config.run.distributed == "off":
        yield Heartbeat()
        return
    all_devices()  # a ConfigError where there are none
    process, count = jax.process_index(), jax.process_count()
    heartbeat = Heartbeat(process=process)
    try:
        compare(settings(config) | {f"the version of {name}": version(name) for name in ("ppctl", "jax")})
        _check_divisible(config, count)
        directory, slow_after_s = _shared_directory(config), config.run.slow_after_s
        heartbeat = Heartbeat(directory, process=process, num_processes=count, slow_after_s=slow_after_s, say=_say)
        heartbeat.start()
        yield heartbeat
        distributed.gather("")  # until all are done
        heartbeat.stop()
        distributed.gather("")
    except (AgreedError, ElsewhereError, CheckpointError) as error:  # which all processes raise at the same point
        heartbeat.stop()
        distributed.leave()  # all do: none must lose contact before it could say why
        _clear(heartbeat)
        if process == 0 or not isinstance(error, CheckpointError):
            raise
        elsewhere = ElsewhereError()
        elsewhere.exit_code = error.exit_code
        raise elsewhere from error
    except Exception as error:
        raise _with_process_number(error, config, heartbeat) from error
    distributed.leave()
    _clear(heartbeat)


def _clear(heartbeat: Heartbeat) -> None:
    if heartbeat.directory is not None and heartbeat.process == 0:
        shutil.rmtree(heartbeat.directory, ignore_errors=True)


def _say(text: str) -> None:
    print(f"ppctl: {text}", file=sys.stderr, flush=True)


def compare(facts: Mapping[str, Any]) -> None:
    """Check that all processes hold the same facts (JSON values); alone, nothing is compared.

    Where they do not, AgreedError on process 0 and ElsewhereError on the others.
    """
    if not distributed.is_joined():
        return
    first, *others = (json.loads(text) for text in distributed.gather(json.dumps(dict(facts))))
    for process, theirs in enumerate(others, 1):
        for key in [*first, *theirs]:
            expected, actual = (json.dumps(each[key]) if key in each else "not set" for each in (first, theirs))
            if expected != actual:
                if not distributed.is_lead():
                    raise ElsewhereError
                raise AgreedError(
                    f"{key} is {expected} on process 0 and {actual} on process {process}. All processes need the same "
                    "settings, data and versions."
                )


def settings(config: Config) -> dict[str, Any]:
    """Return every setting that all processes must share, by its key."""
    found: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            elif prefix + key not in LOCAL:
                found[prefix + key] = value

    walk(asdict(config), "")
    return found


def _check_divisible(config: Config, count: int) -> None:
    if jax.default_backend() == "cpu" and config.mesh.num_devices % count:
        raise _of_all(
            f"mesh={config.mesh.text} has {config.mesh.num_devices} devices, which {count} processes cannot share "
            f"evenly. Use a mesh of {count}, {2 * count}, ... devices, or another number of processes."
        )


def _of_all(message: str) -> PpctlError:
    """Return the error that every process finds alike: process 0 gives the message, the others leave."""
    return AgreedError(message) if distributed.is_lead() else ElsewhereError()


def _shared_directory(config: Config) -> Path:
    """Return `processes` below run.dir, empty. ConfigError if some process does not see what process 0 writes there."""
    directory = Path(config.run.dir) / "processes"
    problem, token = "", uuid.uuid4().hex
    if distributed.is_lead():
        try:
            with writing(Path(config.run.dir)):
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
                (directory / token).touch()
        except ConfigError as error:
            problem = str(error)
    problem, token = json.loads(distributed.gather(json.dumps([problem, token]))[0])
    if problem:
        raise _of_all(problem)
    missing = [str(p) for p, seen in enumerate(distributed.gather(str((directory / token).exists()))) if seen != "True"]
    if missing:
        raise _of_all(
            f"run.dir={config.run.dir} is not the same directory on process 0 and on {', '.join(missing)}. Use a "
            "directory that all processes share."
        )
    if distributed.is_lead():
        (directory / token).unlink()
    return directory


def _with_process_number(error: Exception, config: Config, heartbeat: Heartbeat) -> Exception:
    """Return the error with the process's number, after the heartbeat has let the others know."""
    reason = _lost_contact(error)
    if reason is not None:
        what = f"lost contact with another process while {heartbeat.text} ({reason})"
        xla_stderr.tell_lost(what)
        time.sleep(config.run.heartbeat_s + 5)  # by then the service names it and ends this process, or another failed
        return LostError(f"process {heartbeat.process}: {what}.")
    if not isinstance(error, PpctlError):
        heartbeat.fail(f"{type(error).__name__}: {one_line(error)}")
        return RuntimeError(f"process {heartbeat.process}: {type(error).__name__}: {one_line(error)}")
    is_first = heartbeat.fail(
        one_line(error)
    )  # what all find alike, such as numbers that are not finite, is printed once
    is_printed = is_first or heartbeat.process == 0
    numbered = PpctlError(f"process {heartbeat.process}: {error}") if is_printed else ElsewhereError()
    numbered.exit_code, numbered.kind = error.exit_code, error.kind
    return numbered


def _lost_contact(error: BaseException) -> str | None:
    """Return the reason, if an error comes of another process being gone, else None."""
    link: BaseException | None = error
    while link is not None:
        text = str(link)
        if not isinstance(link, PpctlError) and LOST_CONTACT.search(text):
            return one_line(link)[:150].rstrip(".")
        link = link.__cause__
    return None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
