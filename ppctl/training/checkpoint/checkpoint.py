"""The checkpoints of a run, one directory a step: `<directory>/<step>/state` (arrays) and `meta/data.json` (settings).

Orbax writes and reads them. This file adds what a user meets: one line for each failure, and the certainty that what is
restored is what was saved: Orbax stores no checksum, and casts an array of another dtype without a word.

A run of several processes calls every method in all of them. What a method raises, it raises in all of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ppctl.errors import CheckpointError, DamagedError, SaveError
from ppctl.reports.run_files import checkpoint_steps
from ppctl.training.checkpoint.checksum import digest
from ppctl.training.checkpoint.manifest import Sealed, described, differences, seal, unseal

# Of the machine as it is now, not of the files: reading may succeed another time.
PASSING = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)
PASSING_TEXTS = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "Permission denied", "Too many open files", "ut of memory")


class Checkpoints:
    """The checkpoints below `directory`, of which a save leaves the newest `keep`; use it as a context manager.

    Args:
        directory: Created if it is not there; may be relative. Every process of a run gives the same, shared one.
        keep: Checkpoints kept, at least 1. None opens for reading only: nothing is created or removed, so that a
            reader never takes away what a running job is writing.
        timeout_s: How long a save may take. Where one of several processes fails, the others wait for it that long.
        gather: The text of each process, given to all of them. One process hears itself.

    Raises:
        CheckpointError: `directory` cannot be written.

    A commit is a rename, so `kill -9` leaves every finished checkpoint as it was; what it interrupted is removed by
    the next save. What is not as it was saved, truncated, flipped or missing, is a DamagedError when it is read.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int | None,
        timeout_s: int = 300,
        gather: Callable[[str], list[str]] = lambda text: [text],
    ):
        self.directory = Path(directory).absolute()  # Orbax refuses relative paths
        self._keep, self._timeout_s, self._gather = keep, timeout_s, gather
        self._writing, self._reading = _contexts(timeout_s)
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._pending: tuple[int, Any] | None = None  # step and Orbax's response of the save under way
        self._current: int | None = None  # the step whose state this object last saved or restored
        self._aside: set[int] = set()  # a shared directory may list for a while what another process has renamed
        _quieten()
        if keep is None:
            return
        error = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._probe()
        except OSError as failure:
            error = failure
        reason = self._told(error)
        if reason is not None:
            raise CheckpointError(
                f"Checkpoints cannot be written to {self.directory}: {reason}. Use another run.dir, "
                "or make this one writable."
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> tuple[int, ...]:
        """The steps of the finished checkpoints, ascending."""
        # Orbax's own list also holds the step whose save is still under way.
        return tuple(step for step in checkpoint_steps(self.directory) if step not in self._aside)

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint, or None."""
        return max(self.steps(), default=None)

    def damaged(self) -> tuple[str, ...]:
        """The names of what `set_aside` has left here."""
        return tuple(sorted(path.name for path in self.directory.glob("*.damaged*"))) if self.directory.is_dir() else ()

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Whether the state is one to go back to; False, with nothing written, if a number of it is not finite.

        The writing goes on behind it, and is finished after `wait`, `close` or the next save.

        Args:
            step: Finished training steps. Saving the step that this object last saved or restored writes nothing: its
                state is on disk, or on its way.
            state: Pytree of jax arrays of any sharding. Their buffers may be donated as soon as this returns.
            meta: Plain JSON. Errors of `restore` quote its "config".

        Raises:
            SaveError: The save before this one failed, or this one could not start.
            CheckpointError: `directory` holds this step or a newer one from another run (`LatestN` would drop the new
                one, and a resume would pick the old).
        """
        assert self._keep is not None, "not open for saving"
        self.wait()
        if step == self._current:
            return True
        newer = [other for other in self.steps() if other >= step]
        if newer:
            raise CheckpointError(
                f"Step {step} cannot be saved: {self.directory} holds {_listed(newer)}, not older, of another run. "
                "Use another run.dir, or move them away."
            )
        state = jax.tree.map(_array, state)
        found = digest(state)
        if not found.is_finite:
            return False
        # Written in the background: the caller's mapping may have changed by then.
        items = {"state": state, "meta": seal(Sealed(step, described(state), found.checksums, dict(meta)))}
        with self._saving(step):
            self._probe()  # where Orbax cannot make its directory, its threads hold up the process's exit for minutes
        with self._saving(step):
            checkpointer = self._checkpointer = self._checkpointer or self._opened()
            self._pending = step, checkpointer.save_checkpointables_async(step, items, force=True)
        self._current = step
        self._aside.discard(step)
        return True

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON saved with `step`. CheckpointError if there is none, DamagedError if it cannot be read."""
        return self._sealed(step).meta

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state saved at `step`, in the structure and on the devices that `abstract_state` names.

        Args:
            abstract_state: Pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
            DamagedError: Files are unreadable, or the state is not the one that was saved.
            CheckpointError: No such checkpoint, or arrays that are missing, not wanted, or of another shape or dtype.
        """
        sealed = self._sealed(step)
        found = differences(sealed.arrays, described(abstract_state))
        if found:
            others = f" (the first of {len(found)} leaves that differ)" if len(found) > 1 else ""
            config = json.dumps(sealed.meta.get("config", sealed.meta), separators=(",", ":"))
            raise CheckpointError(
                f"Checkpoint {self._path(step)} does not fit: {found[0]}{others}. Set run.resume=never and another "
                f"run.dir, or restore the settings it was trained with: {config}."
            )
        state = self._load(step, {"state": abstract_state})["state"]
        checksums = digest(state).checksums
        wrong = [name for name in checksums if checksums[name] != sealed.checksums[name]]
        if wrong:
            others = f" (the first of {len(wrong)})" if len(wrong) > 1 else ""
            raise self._damaged(step, f"{wrong[0]} does not have the checksum it was saved with{others}")
        self._current = step
        return state

    def restore_params(self, step: int, device: Any) -> Any:
        """Return the parameters saved at `step` on one device, in the structure in which they were saved.

        Raises:
            DamagedError, CheckpointError: As `restore`.
        """
        sealed = self._sealed(step)
        try:
            with self._reading:
                found = ocp.checkpointables_metadata(str(self._path(step))).metadata["state"]["params"]
        except Exception as error:  # Orbax has none of its own for files that it cannot read
            raise self._damaged(step, "the description of its arrays is not what was saved") from error
        sharding = jax.sharding.SingleDeviceSharding(device)
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), found)
        self._reading.pytree.loading.partial_load = True
        state = self._load(step, {"state": {"params": wanted}})["state"]
        checksums = digest(state).checksums
        wrong = [name for name in checksums if checksums[name] != sealed.checksums[name]]
        if wrong:
            raise self._damaged(step, f"{wrong[0]} does not have the checksum it was saved with")
        return state["params"]

    def set_aside(self, step: int) -> str:
        """The new name of what was the checkpoint of `step`, which is none from now on; the first process moves it."""
        assert self._keep is not None, "not open for saving"
        tried = (f"{step}.damaged{suffix}" for suffix in ("", *(f".{n}" for n in range(2, 1000))))
        name = next(name for name in tried if not (self.directory / name).exists())
        error = None
        if jax.process_index() == 0:
            try:
                (self.directory / str(step)).rename(self.directory / name)
            except OSError as failure:
                error = failure
        reason = self._told(error)
        if reason is not None:
            raise CheckpointError(
                f"Checkpoint {self.directory / str(step)} is damaged and cannot be moved away: {reason}. "
                "Move it away, or use another run.dir."
            ) from error
        self._aside.add(step)
        self._current = None if self._current == step else self._current
        self._shut()  # Orbax's list of steps is out of date
        return name

    def poll(self) -> None:
        """Nothing, at once. SaveError if the save under way has failed by now."""
        if self._pending is None or self._checkpointer is None:
            return
        if not any(self._gather("busy" if self._checkpointer.is_saving_in_progress() else "")):
            self.wait()

    def wait(self) -> None:
        """Nothing, once the save under way is finished. SaveError if it failed."""
        if self._pending is None or self._checkpointer is None:
            return
        (step, response), self._pending = self._pending, None
        with self._saving(step):
            try:
                response.result()  # also ends the response's thread
            finally:
                self._checkpointer.wait()  # reports a failure once to each thread: hear it here, not in `close`

    def close(self) -> None:
        """Nothing, once the save under way is finished and Orbax's threads are gone. SaveError if it failed."""
        try:
            self.wait()
        finally:
            self._shut()

    def _opened(self) -> ocp.training.Checkpointer:
        """Orbax's writer, which has removed what interrupted saves left. It keeps a list of the steps that it found."""
        assert self._keep is not None
        return ocp.training.Checkpointer(
            str(self.directory),
            context=self._writing,
            preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),  # pyright: ignore[reportArgumentType] Orbax's types disagree
            cleanup_tmp_directories=True,
        )

    def _shut(self) -> None:
        if self._checkpointer is not None:
            with contextlib.suppress(Exception):  # only of a save that failed, which `wait` has told
                self._checkpointer.close()
            self._checkpointer = None

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """SaveError in all processes if the body fails in one; the next save then starts with a new writer."""
        error = None
        try:
            yield
        except Exception as failure:
            error = failure
        reason = self._told(error)
        if reason is not None:
            self._pending = self._current = None
            self._shut()
            raise self._not_saved(step, reason) from error

    def _told(self, error: BaseException | None) -> str | None:
        """What went wrong, in the words of one process to which it did; the same in all. None where nothing did."""
        late = f"not finished after run.checkpoint.timeout_s={self._timeout_s}"
        here = ""
        if error is not None:
            is_late = isinstance(error, TimeoutError) or "imeout waiting at barrier" in str(_cause(error))
            here = late if is_late else _reason(error)
        found = self._gather(here)
        told = {process: reason for process, reason in enumerate(found) if reason}
        if not told:
            return None
        process = min(
            told, key=lambda process: (told[process] == late, process)
        )  # a process is late for another's fault
        return told[process] if len(found) == 1 else f"{told[process]} (process {process})"

    def _probe(self) -> None:
        """Nothing, or OSError when no directory can be made here."""
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=self.directory))

    def _sealed(self, step: int) -> Sealed:
        record, error = self._load(step, {"meta": None})["meta"], None
        try:
            return unseal(record, step)
        except ValueError as failure:  # in every process: all read the same file
            error = failure
        raise self._damaged(step, _reason(error)) from error

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        path, error = self._path(step), None
        try:
            with self._reading:
                loaded = ocp.load_checkpointables(str(path), items)
        except Exception as failure:
            loaded, error = {}, failure
        reason = self._told(error)
        if reason is None:
            return loaded
        if any(self._gather("passing" if error is not None and _is_passing(error) else "")):
            raise CheckpointError(f"Checkpoint {path} cannot be read: {reason}. Start again once it can.") from error
        raise self._damaged(step, reason) from error

    def _path(self, step: int) -> Path:
        """Where `step` is stored. CheckpointError if it is not."""
        steps = self.steps()
        if step not in steps:
            held = f"it holds {_listed(steps)}. Use one of them" if steps else "it holds none. Use another run.dir"
            raise CheckpointError(
                f"No checkpoint of step {step} in {self.directory}: {held}, or run.resume=auto to take what is there."
            )
        return self.directory / str(step)

    def _damaged(self, step: int, reason: str) -> DamagedError:
        older = [other for other in self.steps() if other < step]
        resume = f"resume from step {older[-1]}" if older else "start from the beginning"
        what = f"Checkpoint {self.directory / str(step)} cannot be read: {reason}"
        return DamagedError(step, what, f"Move it away to {resume}.")

    def _not_saved(self, step: int, reason: str) -> SaveError:
        latest = self.latest()
        kept = "no checkpoint is finished" if latest is None else f"step {latest} is the newest finished one"
        return SaveError(
            f"Checkpoint {self.directory / str(step)} could not be written: {reason}; {kept}. "
            "Free or extend the disk, or use another run.dir."
        )


def _contexts(timeout_s: int) -> tuple[ocp.Context, ocp.Context]:
    """Orbax settings to write and to read, with `meta` as a JSON file: left alone, Orbax takes it for arrays.

    Each process reads by itself: otherwise one that meets a damaged file leaves the others waiting for minutes.
    """
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    writing, reading = ocp.Context(), ocp.Context()
    writing.checkpointables.registry = reading.checkpointables.registry = registry
    writing.asynchronous.timeout_secs = timeout_s
    if jax.process_count() > 1:
        reading.multiprocessing.primary_host = jax.process_index()
        reading.multiprocessing.active_processes = {jax.process_index()}
    return writing, reading


def _is_passing(error: BaseException) -> bool:
    """Whether reading failed for want of rights or room, which says nothing of the files."""
    cause = _cause(error)
    if isinstance(cause, OSError) and cause.errno in PASSING:
        return True
    return isinstance(cause, MemoryError) or any(text in str(cause) for text in PASSING_TEXTS)


def _cause(error: BaseException) -> BaseException:
    """Orbax hides the error that says what went wrong behind one about handlers, as its cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _array(leaf: Any) -> jax.Array | np.ndarray:
    """The leaf, with a numpy scalar, which Orbax refuses, as an array of its dtype."""
    assert isinstance(leaf, jax.Array | np.ndarray | np.generic), f"a state holds arrays only, not {type(leaf)}"
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    error = _cause(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else text  # else in quotes
    text = " ".join(text.split(" [tensorstore_spec=")[0].split())  # the file's whole layout, of no use to a reader
    text = text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"  # what failed comes first or last
    return text.rstrip(".") or type(error).__name__


def _quieten() -> None:
    """Keeps off the terminal what Orbax prints besides raising: each failure reaches the caller as CheckpointError."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_tensorstore)
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)  # of a file that is missing
    if getattr(sys.unraisablehook, "func", None) is not _unless_straggler:
        sys.unraisablehook = functools.partial(_unless_straggler, sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


# When one array fails to load, Orbax raises that and closes its event loop while it still reads the others. Those end
# in asyncio's log, or as exceptions in threads that nobody can catch.
def _not_of_tensorstore(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "[tensorstore_spec=" in str(record.exc_info[1]))


def _unless_straggler(hook: Callable[[Any], Any], unraisable: Any) -> None:
    code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
    of_orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
    if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)
