"""Checkpoints of a run: `<directory>/<step>/state` (arrays) and `meta/data.json` (settings).

Orbax writes and reads them. This file adds checksums and a one-line message for each failure.

All processes of a run must call each method. An error of one process is raised in all.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from ppctl.errors import CheckpointError, DamagedError, SaveError
from ppctl.reports.foreign_files import check_place
from ppctl.reports.run_files import checkpoint_steps
from ppctl.reports.terminal_output import write_remedy
from ppctl.training.checkpoint import orbax_io
from ppctl.training.checkpoint.manifest import (
    Manifest,
    array_types,
    differences,
    digest,
    from_json,
    to_json,
)
from ppctl.training.checkpoint.orbax_io import error_reason

T = TypeVar("T")
SAVE_TIMEOUT_S = 300  # seconds, enough for terabytes; others wait this long for a failed process


class Checkpoints:
    """The checkpoints below `directory`; a context manager.

    A commit is a rename, so `kill -9` leaves every finished checkpoint intact, and the next save
    removes the interrupted one. Reading truncated, flipped or missing data raises DamagedError.

    Args:
        directory: Directory of the checkpoints, shared by all processes.
        keep: Number of newest checkpoints that a save keeps. None opens for reading only, safe
            while another job writes: nothing is created or removed.
        keep_every: Also keep the checkpoints whose step is a multiple of this; None: no others.
        gather: Takes a text of this process; returns those of all processes, in process order.
        saved: Called with the step of each finished save.

    Raises:
        CheckpointError: `directory` cannot be written.
        ConfigError: Orbax would misread the path of `directory`.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int | None,
        keep_every: int | None = None,
        gather: Callable[[str], list[str]] = lambda text: [text],
        saved: Callable[[int], None] = lambda step: None,
    ):
        self.directory = Path(directory).absolute()  # Orbax refuses relative paths
        check_place(self.directory, "run.dir", saves=keep is not None)
        self._keep, self._keep_every, self._gather = keep, keep_every, gather
        self._saved = saved
        self._writing, self._reading = orbax_io.contexts(SAVE_TIMEOUT_S)
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._pending: tuple[int, Any] | None = None  # step and Orbax's response of a save
        self._current: int | None = None  # the step whose state was last saved or restored
        self._is_opened = False  # whether a save of this start was opened again
        self._aside = set[int]()  # steps set aside: a shared file system may still list them
        orbax_io.silence_orbax()
        if keep is None:
            return
        cannot = f"Checkpoints cannot be written to {self.directory}"
        with self._together(lambda why: CheckpointError(f"{cannot}: {why}. {write_remedy(why)}")):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._probe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the finished checkpoints, ascending."""
        # Orbax's list also holds the step whose save is still under way.
        return tuple(step for step in checkpoint_steps(self.directory) if step not in self._aside)

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Save a state if all its numbers are finite; return whether they are.

        Writes in the background until `wait`, `close` or the next save; the caller may donate the
        state's buffers at once. The step last saved or restored is not written again.

        Raises:
            SaveError: This save or the previous one failed.
            CheckpointError: `directory` holds this step or a newer one of another run: Orbax keeps
                only the newest steps, so it would remove the new checkpoint.
        """
        assert self._keep is not None, "not open for saving"
        self.wait()
        if step == self._current:
            return True
        newer = [other for other in self.steps() if other >= step]
        if newer:
            raise CheckpointError(
                f"Step {step} cannot be saved: {self.directory} already holds {_listed(newer)} of "
                "another run. Use another run.dir, or move these checkpoints away."
            )
        state = jax.tree.map(orbax_io.saveable, state)
        digested = digest(state)
        if not digested.is_finite:
            return False
        # Copy meta: it is written in the background, when the caller may have changed its mapping.
        manifest = Manifest(step, array_types(state), digested.checksums, dict(meta))
        items = {"state": state, "meta": to_json(manifest)}
        with self._together(partial(self._not_saved, step)):
            self._probe()  # before Orbax: if its write fails, its threads delay exit for minutes
        with self._together(partial(self._not_saved, step)):
            checkpointer = self._checkpointer = self._checkpointer or self._opened()
            self._pending = step, checkpointer.save_checkpointables_async(step, items, force=True)
            orbax_io.wait_for_exchanges()
        self._current = step
        self._aside.discard(step)
        return True

    def meta(self, step: int) -> dict[str, Any]:
        """Return the JSON saved with `step`. CheckpointError if missing, DamagedError if faulty."""
        return self._manifest(step).meta

    def unlike(self, step: int, abstract_state: Any) -> list[str]:
        """Return a phrase for each array whose saved dtype or shape differs from the wanted one."""
        return differences(self._manifest(step).arrays, array_types(abstract_state))

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Return the state saved at `step`, in the structure and shardings of `abstract_state`.

        Args:
            step: Step of a finished checkpoint.
            abstract_state: `jax.ShapeDtypeStruct`s with shardings, on any mesh. Call `unlike`
                first: Orbax casts to another dtype silently.

        Raises:
            DamagedError: Files are unreadable, or a checksum differs.
            CheckpointError: There is no such checkpoint.
        """
        manifest = self._manifest(step)
        state = self._load(step, {"state": abstract_state})["state"]
        self._check(step, manifest, state)
        self._current = step
        return state

    def param_types(self, step: int) -> dict[str, str]:
        """Return dtype and shape of each parameter saved at `step`, by name. Raises as `meta`."""
        arrays, prefix = self._manifest(step).arrays, "params/"
        return {name[len(prefix) :]: arrays[name] for name in arrays if name.startswith(prefix)}

    def restore_params(self, step: int, place: Any) -> Any:
        """Return the parameters saved at `step`, in their saved structure. Raises as `restore`.

        place: a device, or `jax.ShapeDtypeStruct`s with shardings.
        """
        manifest = self._manifest(step)
        try:
            stored = orbax_io.described(self._path(step), self._reading)["params"]
        except Exception as error:  # Orbax has no error class for unreadable files
            what = "the description of its arrays is damaged"
            raise self._damaged(step, what) from error
        wanted = place
        if isinstance(place, jax.Device):
            sharding = jax.sharding.SingleDeviceSharding(place)
            wanted = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), stored
            )
        self._reading.pytree.loading.partial_load = True
        state = self._load(step, {"state": {"params": wanted}})["state"]
        self._check(step, manifest, state)
        return state["params"]

    def aside(self, kind: str) -> tuple[str, ...]:
        """Return the names of the checkpoints that `set_aside` has renamed as `kind`."""
        return tuple(sorted(path.name for path in self.directory.glob(f"*.{kind}*")))

    def set_aside(self, step: int, kind: str = "damaged") -> str:
        """Rename the checkpoint of `step` to `<step>.<kind>[.<n>]`; return the new name."""
        assert self._keep is not None, "not open for saving"
        name = aside_name(self.directory, f"{step}.{kind}")
        stays = f"Checkpoint {self.directory / str(step)} is {kind} and cannot be moved away"
        away = "Move it away, or use another run.dir."
        with self._together(lambda why: CheckpointError(f"{stays}: {why}. {away}")):
            if jax.process_index() == 0:
                (self.directory / str(step)).rename(self.directory / name)
        self._aside.add(step)
        self._current = None if self._current == step else self._current
        self._shut()  # Orbax's list of steps is out of date
        return name

    def went_back(self, step: int) -> bool:
        """Return whether `step` is the last one that the run went back to."""
        return bool(self._gather("yes" if self._mark(step).exists() else "")[0])  # by process 0

    def _mark(self, step: int) -> Path:
        return self.directory / f".went-back-to-{step}"

    def go_back(self, step: int) -> list[str]:
        """Set aside the checkpoints after `step`; return their new names, the newest first.

        Raises CheckpointError as `set_aside`.
        """
        later = [each for each in reversed(self.steps()) if each > step]
        cannot = f"The checkpoints after step {step} in {self.directory} cannot be moved away"
        failed = lambda why: CheckpointError(f"{cannot}: {why}. {write_remedy(why)}")  # noqa: E731
        with self._together(failed):
            if jax.process_index() == 0:
                for mark in self.directory.glob(".went-back-to-*"):
                    mark.unlink()
        names = [self.set_aside(each, f"after-{step}") for each in later]
        with self._together(failed):
            if jax.process_index() == 0:
                self._mark(step).touch()  # last: a killed start goes back again
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
        with self._together(partial(self._not_saved, step)):
            try:
                response.result()  # also stops the response's thread
            finally:
                # Orbax raises a failure once in each thread: raise it here, not in `close`
                self._checkpointer.wait()
        self._open_once(step)
        self._saved(step)

    def _open_once(self, step: int) -> None:
        """Raise SaveError if the arrays of this start's first checkpoint cannot be opened."""
        path, is_first, self._is_opened = self.directory / str(step), not self._is_opened, True
        failed = lambda why: SaveError(  # noqa: E731
            f"Checkpoint {path} was written, but cannot be opened: {why}. Use another run.dir."
        )
        if is_first:
            with self._together(failed):
                # only the process that wrote it: others may see the files of a shared disk later
                if jax.process_index() == 0 and step in self.steps():
                    orbax_io.described(path, self._reading)

    def close(self) -> None:
        """Wait for the save under way, then stop Orbax's threads. SaveError if the save failed."""
        try:
            self.wait()
        finally:
            self._shut()

    def _opened(self) -> ocp.training.Checkpointer:
        """Open Orbax's writer, which removes the remains of interrupted saves; return it."""
        assert self._keep is not None
        policies: Any = ocp.training.preservation_policies
        kept = [policies.LatestN(self._keep)]
        if self._keep_every is not None:
            kept.append(policies.EveryNSteps(self._keep_every))
        return ocp.training.Checkpointer(
            str(self.directory),
            context=self._writing,
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )

    def _shut(self) -> None:
        if self._checkpointer is not None:
            with contextlib.suppress(Exception):  # a failed save: `wait` has raised it
                self._checkpointer.close()
            self._checkpointer = None

    @contextlib.contextmanager
    def _together(self, failed: Callable[[str], Exception]) -> Iterator[None]:
        """Raise failed(reason) in all processes if the body fails in one."""
        error, reason, late = None, "", f"not finished after {SAVE_TIMEOUT_S} s"
        try:
            yield
        except Exception as failure:
            error = failure
            reason = late if orbax_io.is_timeout(error) else error_reason(error)
        reasons = self._gather(reason)
        # a time-out comes last: it follows from another process's failure
        failures = sorted((why == late, number) for number, why in enumerate(reasons) if why)
        if failures:
            _, number = failures[0]
            process = f" (process {number})" if len(reasons) > 1 else ""
            raise failed(f"{reasons[number]}{process}") from error

    def _probe(self) -> None:
        """Raise OSError if no directory can be created in `directory`."""
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=self.directory))

    def _manifest(self, step: int) -> Manifest:
        record = self._load(step, {"meta": None})["meta"]
        try:
            return from_json(record, step)
        except ValueError as error:  # raised in every process: all read the same file
            raise self._damaged(step, error_reason(error)) from error

    def _check(self, step: int, manifest: Manifest, state: Any) -> None:
        """Raise DamagedError if the checksum of a restored array differs from the saved one."""
        checksums = digest(state).checksums
        wrong = [name for name in checksums if checksums[name] != manifest.checksums[name]]
        if wrong:
            others = f" (the first of {len(wrong)})" if len(wrong) > 1 else ""
            what = f"{wrong[0]} does not have the checksum it was saved with{others}"
            raise self._damaged(step, what)

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        path = self._path(step)

        def failed(reason: str) -> Exception:
            if orbax_io.PASSING.search(reason):
                what = f"Checkpoint {path} cannot be read: {reason}"
                return CheckpointError(f"{what}. Start again once it can.")
            if step not in self.steps():
                what = f"Checkpoint {path} was removed while it was read, by a run that saves"
                return CheckpointError(f"{what}. Name a newer one, or raise run.checkpoint.keep.")
            return self._damaged(step, reason)

        with self._together(failed), self._reading:
            return ocp.load_checkpointables(str(path), items)

    def _path(self, step: int) -> Path:
        """Return the directory of `step`. CheckpointError if there is no such checkpoint."""
        steps = self.steps()
        if step not in steps:
            listed = f"it holds {_listed(steps)}. Use one of them"
            held = listed if steps else "it holds none. Use another run.dir"
            raise CheckpointError(
                f"No checkpoint of step {step} in {self.directory}: {held}, or run.resume=auto "
                "to take the newest one, if any."
            )
        return self.directory / str(step)

    def _damaged(self, step: int, reason: str) -> DamagedError:
        older = [other for other in self.steps() if other < step]
        resume = f"resume from step {older[-1]}" if older else "start from the beginning"
        what = f"Checkpoint {self.directory / str(step)} cannot be read: {reason}"
        return DamagedError(step, what, f"Move it away to {resume}.")

    def _not_saved(self, step: int, reason: str) -> SaveError:
        """Close the writer; return the error of a failed save."""
        self._pending = self._current = None
        self._shut()
        latest, kept = self.latest(), "no checkpoint is finished"
        if latest is not None:
            kept = f"step {latest} is the newest finished one"
        return SaveError(
            f"Checkpoint {self.directory / str(step)} could not be written: {reason}; {kept}. "
            f"{write_remedy(reason)}"
        )


def read_newest(newest: Callable[[], int], read: Callable[[int], T]) -> T:
    """Return read(step) of the newest checkpoint; repeat if a save has replaced it meanwhile.

    newest: returns the step of the newest checkpoint. Raises as `newest` and `read`.
    """
    step = newest()
    while True:
        try:
            return read(step)
        except CheckpointError:
            before, step = step, newest()
            if step == before:
                raise


def aside_name(directory: Path, name: str, suffix: str = "") -> str:
    """Return NAME[.N]SUFFIX, a name that `directory` does not have yet; N: 2, 3, ..."""
    names = (f"{name}{number}{suffix}" for number in ("", *(f".{n}" for n in range(2, 1000))))
    return next(name for name in names if not (directory / name).exists())


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
