"""The checkpoints of a run, one directory a step: `<directory>/<step>/state` (arrays) and `meta/data.json` (settings).

Orbax writes and reads them. This file adds what a user meets: one line for each failure, and the certainty that what is
restored is what was saved: Orbax stores no checksum, and casts an array of another dtype without a word.

A run of several processes calls every method in all of them. What a method raises, it raises in all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ppctl.errors import CheckpointError, DamagedError, SaveError
from ppctl.reports.run_files import checkpoint_steps
from ppctl.training.checkpoint.checksum import digest
from ppctl.training.checkpoint.manifest import Manifest, array_types, differences, from_json, to_json
from ppctl.training.checkpoint.orbax_io import contexts, error_reason, is_passing, is_timeout, silence_orbax


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
        self._writing, self._reading = contexts(timeout_s)
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._pending: tuple[int, Any] | None = None  # step and Orbax's response of the save under way
        self._current: int | None = None  # the step whose state this object last saved or restored
        self._aside: set[int] = set()  # a shared directory may list for a while what another process has renamed
        silence_orbax()
        if keep is None:
            return
        error = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._probe()
        except OSError as failure:
            error = failure
        reason = self._shared_reason(error)
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
        """Return the steps of the finished checkpoints, ascending."""
        # Orbax's own list also holds the step whose save is still under way.
        return tuple(step for step in checkpoint_steps(self.directory) if step not in self._aside)

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint, or None."""
        return max(self.steps(), default=None)

    def damaged(self) -> tuple[str, ...]:
        """Return the names of the checkpoints that `set_aside` has moved away."""
        return tuple(sorted(path.name for path in self.directory.glob("*.damaged*"))) if self.directory.is_dir() else ()

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Save a state, and return whether all its numbers are finite; if one is not, nothing is written.

        The writing goes on in the background, and is finished after `wait`, `close` or the next save.

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
        digested = digest(state)
        if not digested.is_finite:
            return False
        # Written in the background: the caller's mapping may have changed by then.
        manifest = Manifest(step, array_types(state), digested.checksums, dict(meta))
        items = {"state": state, "meta": to_json(manifest)}
        with self._saving(step):
            self._probe()  # where Orbax cannot make its directory, its threads hold up the process's exit for minutes
        with self._saving(step):
            checkpointer = self._checkpointer = self._checkpointer or self._opened()
            self._pending = step, checkpointer.save_checkpointables_async(step, items, force=True)
        self._current = step
        self._aside.discard(step)
        return True

    def meta(self, step: int) -> dict[str, Any]:
        """Return the JSON saved with `step`. CheckpointError if there is none, DamagedError if it cannot be read."""
        return self._manifest(step).meta

    def unlike(self, step: int, abstract_state: Any) -> list[str]:
        """Return a phrase for each array that `step` does not hold as `abstract_state` names it. Raises as `meta`."""
        return differences(self._manifest(step).arrays, array_types(abstract_state))

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Return the state saved at `step`, in the structure and on the devices that `abstract_state` names.

        Args:
            abstract_state: Pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
            DamagedError: Files are unreadable, or the state is not the one that was saved.
            CheckpointError: No such checkpoint, or arrays that are missing, not wanted, or of another shape or dtype.
        """
        manifest = self._manifest(step)
        unlike = differences(manifest.arrays, array_types(abstract_state))
        if unlike:
            others = f" (the first of {len(unlike)} leaves that differ)" if len(unlike) > 1 else ""
            config = json.dumps(manifest.meta.get("config", manifest.meta), separators=(",", ":"))
            raise CheckpointError(
                f"Checkpoint {self._path(step)} does not fit: {unlike[0]}{others}. Set run.resume=never and another "
                f"run.dir, or restore the settings it was trained with: {config}."
            )
        state = self._load(step, {"state": abstract_state})["state"]
        self._check(step, manifest, state)
        self._current = step
        return state

    def param_types(self, step: int) -> dict[str, str]:
        """Return dtype and shape by name of the parameters saved at `step`. Raises as `meta`."""
        arrays, prefix = self._manifest(step).arrays, "params/"
        return {name.removeprefix(prefix): kind for name, kind in arrays.items() if name.startswith(prefix)}

    def restore_params(self, step: int, place: Any) -> Any:
        """Return the parameters saved at `step` on one device, in the structure in which they were saved.

        place: the device; or `jax.ShapeDtypeStruct`s with shardings, in that structure.


        Raises:
            DamagedError, CheckpointError: As `restore`.
        """
        manifest = self._manifest(step)
        try:
            with self._reading:
                stored = ocp.checkpointables_metadata(str(self._path(step))).metadata["state"]["params"]
        except Exception as error:  # Orbax has none of its own for files that it cannot read
            raise self._damaged(step, "the description of its arrays is not what was saved") from error
        wanted = place
        if isinstance(place, jax.Device):
            sharding = jax.sharding.SingleDeviceSharding(place)
            wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), stored)
        self._reading.pytree.loading.partial_load = True
        state = self._load(step, {"state": {"params": wanted}})["state"]
        self._check(step, manifest, state)
        return state["params"]

    def set_aside(self, step: int) -> str:
        """Rename the checkpoint of `step`, which is none from now on, and return its new name."""
        assert self._keep is not None, "not open for saving"
        names = (f"{step}.damaged{suffix}" for suffix in ("", *(f".{n}" for n in range(2, 1000))))
        name = next(name for name in names if not (self.directory / name).exists())
        error = None
        if jax.process_index() == 0:
            try:
                (self.directory / str(step)).rename(self.directory / name)
            except OSError as failure:
                error = failure
        reason = self._shared_reason(error)
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
        """Raise SaveError if the save under way has failed by now; does not wait for it."""
        if self._pending is None or self._checkpointer is None:
            return
        if not any(self._gather("busy" if self._checkpointer.is_saving_in_progress() else "")):
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is finished. SaveError if it failed."""
        if self._pending is None or self._checkpointer is None:
            return
        (step, response), self._pending = self._pending, None
        with self._saving(step):
            try:
                response.result()  # also ends the response's thread
            finally:
                self._checkpointer.wait()  # reports a failure once to each thread: hear it here, not in `close`

    def close(self) -> None:
        """Wait until the save under way is finished, and end Orbax's threads. SaveError if it failed."""
        try:
            self.wait()
        finally:
            self._shut()

    def _opened(self) -> ocp.training.Checkpointer:
        """Return Orbax's writer, which has removed what interrupted saves left, and lists the steps that it found."""
        assert self._keep is not None
        return ocp.training.Checkpointer(
            str(self.directory),
            context=self._writing,
            preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),  # pyright: ignore[reportArgumentType] Orbax's types disagree
            cleanup_tmp_directories=True,
        )

    def _shut(self) -> None:
        if self._checkpointer is not None:
            with contextlib.suppress(Exception):  # only of a save that failed, which `wait` has raised
                self._checkpointer.close()
            self._checkpointer = None

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Raise SaveError in all processes if the body fails in one; the next save then starts with a new writer."""
        error = None
        try:
            yield
        except Exception as failure:
            error = failure
        reason = self._shared_reason(error)
        if reason is not None:
            self._pending = self._current = None
            self._shut()
            raise self._not_saved(step, reason) from error

    def _shared_reason(self, error: BaseException | None) -> str | None:
        """Return the reason of one process's failure, the same in all; None where none failed. All must call it."""
        late = f"not finished after run.checkpoint.timeout_s={self._timeout_s}"
        own = "" if error is None else late if is_timeout(error) else error_reason(error)
        reasons = self._gather(own)
        failed = [process for process, reason in enumerate(reasons) if reason]
        if not failed:
            return None
        process = min(failed, key=lambda process: (reasons[process] == late, process))  # late for another's fault
        return reasons[process] if len(reasons) == 1 else f"{reasons[process]} (process {process})"

    def _probe(self) -> None:
        """Raise OSError when no directory can be made here."""
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=self.directory))

    def _manifest(self, step: int) -> Manifest:
        record, error = self._load(step, {"meta": None})["meta"], None
        try:
            return from_json(record, step)
        except ValueError as failure:  # in every process: all read the same file
            error = failure
        raise self._damaged(step, error_reason(error)) from error

    def _check(self, step: int, manifest: Manifest, state: Any) -> None:
        """Raise DamagedError where an array of a restored state is not the one that was saved."""
        checksums = digest(state).checksums
        wrong = [name for name in checksums if checksums[name] != manifest.checksums[name]]
        if wrong:
            others = f" (the first of {len(wrong)})" if len(wrong) > 1 else ""
            raise self._damaged(step, f"{wrong[0]} does not have the checksum it was saved with{others}")

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        path, error = self._path(step), None
        try:
            with self._reading:
                loaded = ocp.load_checkpointables(str(path), items)
        except Exception as failure:
            loaded, error = {}, failure
        reason = self._shared_reason(error)
        if reason is None:
            return loaded
        if any(self._gather("passing" if error is not None and is_passing(error) else "")):
            raise CheckpointError(f"Checkpoint {path} cannot be read: {reason}. Start again once it can.") from error
        raise self._damaged(step, reason) from error

    def _path(self, step: int) -> Path:
        """Return where `step` is stored. CheckpointError if it is not."""
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


def _array(leaf: Any) -> jax.Array | np.ndarray:
    """Return the leaf, with a numpy scalar, which Orbax refuses, as an array of its dtype."""
    assert isinstance(leaf, jax.Array | np.ndarray | np.generic), f"a state holds arrays only, not {type(leaf)}"
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
