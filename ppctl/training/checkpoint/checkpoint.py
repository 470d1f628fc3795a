"""Writing of a run's checkpoints: `<directory>/<step>/state` (arrays), `meta/data.json` (settings).

Orbax writes and reads them. This folder adds checksums and a one-line message for each failure.

All processes of a run must call each method. An error of one process is raised in all.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from ppctl.errors import CheckpointError, PpctlError, SaveError
from ppctl.reports.foreign_files import check_place
from ppctl.reports.terminal_output import write_remedy
from ppctl.training.checkpoint import orbax_io, stored_checkpoints
from ppctl.training.checkpoint.manifest import Manifest, array_types, digest, to_json

T = TypeVar("T", bound=PpctlError)


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints that a run saves below `directory`; a context manager. stored: its reader.

    A commit is a rename, so `kill -9` leaves every finished checkpoint intact, and the next save
    removes the interrupted one.

    directory: shared by all processes. keep: number of newest checkpoints that a save keeps.
    keep_every: also keep the checkpoints whose step is a multiple of this; None: no others. gather:
    gathers a text of each process. saved: called with the step of each finished save.
    CheckpointError if `directory` cannot be written; ConfigError if Orbax would misread its path.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int,
        keep_every: int | None = None,
        gather: stored_checkpoints.Gather = stored_checkpoints.of_one_process,
        saved: Callable[[int], None] | None = None,
    ):
        self.stored = stored_checkpoints.StoredCheckpoints(directory, gather)
        self.directory = self.stored.directory
        check_place(self.directory, "run.dir", saves=True)
        self._keep, self._keep_every, self._gather, self._saved = keep, keep_every, gather, saved
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._pending: tuple[int, Any] | None = None  # step and Orbax's response of a save
        self._is_opened = False  # whether a save of this start was opened again
        failed = _error(CheckpointError, f"Checkpoints cannot be written to {self.directory}")
        with stored_checkpoints.raised_together(self._gather, failed):
            self.directory.mkdir(parents=True, exist_ok=True)
            probe(self.directory)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Save a state if all its numbers are finite; return whether they are.

        Writes in the background until `wait`, `close` or the next save; the caller may donate the
        state's buffers at once. The step last saved or restored is not written again.

        SaveError if this save or the previous one failed. CheckpointError if `directory` holds this
        step or a newer one of another run: Orbax keeps only the newest steps, so it would remove
        the new checkpoint.
        """
        self.wait()
        if step == self.stored.current:
            return True
        newer = [other for other in self.stored.steps() if other >= step]
        if newer:
            held = f"{self.directory} already holds {stored_checkpoints.listed(newer)}"
            what = f"Step {step} cannot be saved: {held} of another run"
            raise CheckpointError(f"{what}. Use another run.dir, or move these checkpoints away.")
        state = jax.tree.map(orbax_io.saveable, state)
        digested = digest(state)
        if not digested.is_finite:
            return False
        # Copy meta: it is written in the background, when the caller may have changed its mapping.
        manifest = Manifest(step, array_types(state), digested.checksums, dict(meta))
        items = {"state": state, "meta": to_json(manifest)}
        with stored_checkpoints.raised_together(self._gather, partial(self._not_saved, step)):
            # before Orbax: if its write fails, its threads delay exit for minutes
            probe(self.directory)
        with stored_checkpoints.raised_together(self._gather, partial(self._not_saved, step)):
            checkpointer = self._checkpointer = self._checkpointer or self._opened()
            self._pending = step, checkpointer.save_checkpointables_async(step, items, force=True)
            orbax_io.wait_for_exchanges()
        self.stored.current = step
        self.stored.moved.discard(step)
        return True

    def set_aside(self, step: int, kind: str = "damaged") -> str:
        """Rename the checkpoint of `step` to `<step>.<kind>[.<n>]`; return the new name."""
        name, path = aside_name(self.directory, f"{step}.{kind}"), self.directory / str(step)
        stays = f"Checkpoint {path} is {kind} and cannot be moved away"
        away = "Move it away, or use another run.dir."
        with stored_checkpoints.raised_together(self._gather, _error(CheckpointError, stays, away)):
            if jax.process_index() == 0:
                path.rename(self.directory / name)
        self.stored.moved.add(step)
        if self.stored.current == step:
            self.stored.current = None
        self._shut()  # Orbax's list of steps is out of date
        return name

    def go_back(self, step: int) -> list[str]:
        """Set aside the checkpoints after `step`; return their new names, the newest first.

        Raises CheckpointError as `set_aside`.
        """
        later = [each for each in reversed(self.stored.steps()) if each > step]
        where = f"The checkpoints after step {step} in {self.directory}"
        failed = _error(CheckpointError, f"{where} cannot be moved away")
        with stored_checkpoints.raised_together(self._gather, failed):
            if jax.process_index() == 0:
                for mark in self.directory.glob(".went-back-to-*"):
                    mark.unlink()
        names = [self.set_aside(each, f"after-{step}") for each in later]
        with stored_checkpoints.raised_together(self._gather, failed):
            if jax.process_index() == 0:
                self.stored.mark(step).touch()  # last: a killed start goes back again
        return names

    def poll(self) -> None:
        """Raise SaveError if the save under way has failed; does not wait for its end."""
        if self._pending is None or self._checkpointer is None:
            return
        if not any(self._gather("busy" if self._checkpointer.is_saving_in_progress() else "")):
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way has finished. SaveError if it failed."""
        if self._pending is None or self._checkpointer is None:
            return
        (step, response), self._pending = self._pending, None
        with stored_checkpoints.raised_together(self._gather, partial(self._not_saved, step)):
            try:
                response.result()  # also stops the response's thread
            finally:
                # Orbax raises a failure once in each thread: raise it here, not in `close`
                self._checkpointer.wait()
        self._open_once(step)
        if self._saved is not None:
            self._saved(step)

    def _open_once(self, step: int) -> None:
        """Raise SaveError if the arrays of this start's first checkpoint cannot be opened."""
        path, is_first, self._is_opened = self.directory / str(step), not self._is_opened, True
        what = f"Checkpoint {path} was written, but cannot be opened"
        if is_first:
            failed = _error(SaveError, what, "Use another run.dir.")
            with stored_checkpoints.raised_together(self._gather, failed):
                # only the process that wrote it: others may see the files of a shared disk later
                if jax.process_index() == 0 and step in self.stored.steps():
                    orbax_io.described(path, self.stored.reading)

    def close(self) -> None:
        """Wait for the save under way, then stop Orbax's threads. SaveError if the save failed."""
        try:
            self.wait()
        finally:
            self._shut()

    def _opened(self) -> ocp.training.Checkpointer:
        """Open Orbax's writer, which removes the remains of interrupted saves; return it."""
        policies: Any = ocp.training.preservation_policies
        kept = [policies.LatestN(self._keep)]
        if self._keep_every is not None:
            kept.append(policies.EveryNSteps(self._keep_every))
        return ocp.training.Checkpointer(
            str(self.directory),
            context=orbax_io.context(alone=False),
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )

    def _shut(self) -> None:
        if self._checkpointer is not None:
            with contextlib.suppress(Exception):  # a failed save: `wait` has raised it
                self._checkpointer.close()
            self._checkpointer = None

    def _not_saved(self, step: int, reason: str) -> SaveError:
        """Close the writer; return the error of a failed save."""
        self._pending = self.stored.current = None
        self._shut()
        latest, kept = self.stored.latest(), "no checkpoint is finished"
        if latest is not None:
            kept = f"step {latest} is the newest finished one"
        what = f"Checkpoint {self.directory / str(step)} could not be written: {reason}"
        return SaveError(f"{what}; {kept}. {write_remedy(reason)}")


def probe(directory: Path) -> None:
    """Raise OSError if no directory can be created in `directory`."""
    os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=directory))


def _error(kind: type[T], what: str, remedy: str | None = None) -> Callable[[str], T]:
    """Return a function that makes the error of a failure, given its reason."""
    return lambda reason: kind(f"{what}: {reason}. {remedy or write_remedy(reason)}")


def aside_name(directory: Path, name: str, suffix: str = "") -> str:
    """Return NAME[.N]SUFFIX, a name that `directory` does not have yet; N: 2, 3, ..."""
    names = (f"{name}{number}{suffix}" for number in ("", *(f".{n}" for n in range(2, 1000))))
    return next(name for name in names if not (directory / name).exists())
