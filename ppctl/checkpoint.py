"""The checkpoints of a run, one directory a step: `<directory>/<step>/state` (arrays) and `meta/data.json` (settings).

Orbax writes and reads them. This file adds what a user meets: one line for each failure, and a check that the stored
leaves are the wanted ones, because Orbax casts a leaf of another dtype without a word.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ppctl.errors import CheckpointError


class Checkpoints:
    """The checkpoints below `directory`, of which a save leaves the newest `keep`; use it as a context manager.

    Args:
        directory: Created if it is not there; may be relative. Every process of a run gives the same, shared one.
        keep: Checkpoints kept, at least 1. None opens for reading only: nothing is created or removed, so that a
            reader never takes away what a running job is writing.

    Raises:
        CheckpointError: `directory` cannot be written.

    A commit is a rename, so `kill -9` leaves every finished checkpoint as it was; what it interrupted is removed by
    the next save. Truncated files are an error. A flipped bit in an array is not noticed: Orbax stores no checksum.
    """

    def __init__(self, directory: Path | str, *, keep: int | None):
        self.directory = Path(directory).absolute()  # Orbax refuses relative paths
        self._context = _context()
        self._checkpointer: ocp.training.Checkpointer | None = None
        self._pending: tuple[int, Any] | None = None  # step and Orbax's response of the save under way
        self._current: int | None = None  # the step whose state this object last saved or restored
        _quieten()
        if keep is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._probe()
            self._checkpointer = ocp.training.Checkpointer(
                str(self.directory),
                context=self._context,
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType] Orbax's types disagree
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written to {self.directory}: {_reason(error)}. Use another run.dir, "
                "or make this one writable."
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> tuple[int, ...]:
        """The steps of the finished checkpoints, ascending."""
        if not self.directory.is_dir():
            return ()
        # Orbax's own list also holds the step whose save is still under way.
        return tuple(sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal()))

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Nothing; the writing goes on behind it, and is finished after `wait`, `close` or the next save.

        Args:
            step: Finished training steps. Saving the step that this object last saved or restored writes nothing: its
                state is on disk, or on its way.
            state: Pytree of jax arrays of any sharding. Their buffers may be donated as soon as this returns.
            meta: Plain JSON. Errors of `restore` quote its "config".

        Raises:
            CheckpointError: The save before this one failed, this one could not start, or `directory` holds this step
                or a newer one from another run (`LatestN` would drop the new one, and a resume would pick the old).
        """
        assert self._checkpointer is not None, "not open for saving"
        self.wait()
        if step == self._current:
            return
        newer = [other for other in self.steps() if other >= step]
        if newer:
            raise CheckpointError(
                f"Step {step} cannot be saved: {self.directory} holds {_listed(newer)}, not older, of another run. "
                "Use another run.dir, or move them away."
            )
        items = {
            "state": jax.tree.map(_array, state),
            # Written in the background: the caller's mapping may have changed by then.
            "meta": json.loads(json.dumps(dict(meta), allow_nan=False)),
        }
        try:
            self._probe()  # where Orbax cannot make its directory, its threads hold up the process's exit for minutes
            self._pending = step, self._checkpointer.save_checkpointables_async(step, items, force=True)
        except Exception as error:
            raise self._not_saved(step, error) from error
        self._current = step

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON saved with `step`. CheckpointError if there is none or it cannot be read."""
        return self._load(step, {"meta": None})["meta"]

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state saved at `step`, in the structure and on the devices that `abstract_state` names.

        Args:
            abstract_state: Pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Raises:
            CheckpointError: No such checkpoint, unreadable files, or leaves that are missing, not wanted, or of
                another shape or dtype.
        """
        self._check_fits(step, abstract_state)
        state = self._load(step, {"state": abstract_state})["state"]
        self._current = step
        return state

    def wait(self) -> None:
        """Nothing, once the save under way is finished. CheckpointError if it failed."""
        if self._pending is None or self._checkpointer is None:
            return
        (step, response), self._pending = self._pending, None
        try:
            try:
                response.result()  # also ends the response's thread
            finally:
                self._checkpointer.wait()  # reports a failure once to each thread: hear it here, not in `close`
        except Exception as error:
            self._current = None
            raise self._not_saved(step, error) from error

    def close(self) -> None:
        """Nothing, once the save under way is finished and Orbax's threads are gone. CheckpointError if it failed."""
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                with contextlib.suppress(Exception):  # only of a save that failed, which `wait` has told
                    self._checkpointer.close()
                self._checkpointer = None

    def _probe(self) -> None:
        """Nothing, or OSError when no directory can be made here."""
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=self.directory))

    def _check_fits(self, step: int, abstract_state: Any) -> None:
        """Nothing, or CheckpointError naming the first stored leaf that is not as wanted."""
        path = self._path(step)
        try:
            with self._context:
                described = ocp.checkpointables_metadata(str(path)).metadata
        except Exception as error:
            raise self._unreadable(step, _reason(error)) from error
        if "state" not in described or described["state"] is None:  # Orbax raises nothing here when files are damaged
            raise self._unreadable(step, "the description of its arrays is damaged or missing")
        differences = _differences(_leaves(described["state"]), _leaves(abstract_state))
        if differences:
            others = f" (the first of {len(differences)} leaves that differ)" if len(differences) > 1 else ""
            meta = self.meta(step)
            config = json.dumps(meta.get("config", meta), separators=(",", ":"))
            raise CheckpointError(
                f"Checkpoint {path} does not fit: {differences[0]}{others}. Set run.resume=never and another run.dir, "
                f"or restore the settings it was trained with: {config}."
            )

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        path = str(self._path(step))
        try:
            with self._context:
                return ocp.load_checkpointables(path, items)
        except Exception as error:
            raise self._unreadable(step, _reason(error)) from error

    def _path(self, step: int) -> Path:
        """Where `step` is stored. CheckpointError if it is not."""
        steps = self.steps()
        if step not in steps:
            held = f"it holds {_listed(steps)}. Use one of them" if steps else "it holds none. Use another run.dir"
            raise CheckpointError(
                f"No checkpoint of step {step} in {self.directory}: {held}, or run.resume=auto to take what is there."
            )
        return self.directory / str(step)

    def _unreadable(self, step: int, reason: str) -> CheckpointError:
        older = [other for other in self.steps() if other < step]
        resume = f"resume from step {older[-1]}" if older else "start from the beginning"
        return CheckpointError(
            f"Checkpoint {self.directory / str(step)} cannot be read: {reason}. Move it away to {resume}."
        )

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        latest = self.latest()
        kept = "no checkpoint is finished" if latest is None else f"step {latest} is the newest finished one"
        return CheckpointError(
            f"Checkpoint {self.directory / str(step)} could not be written: {_reason(error)}; {kept}. "
            "Free or extend the disk, or use another run.dir."
        )


def _context() -> ocp.Context:
    """Orbax settings that store `meta` as a JSON file; left alone, Orbax takes the dict for a tree of arrays."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


def _array(leaf: Any) -> jax.Array | np.ndarray:
    """The leaf, with a numpy scalar, which Orbax refuses, as an array of its dtype."""
    assert isinstance(leaf, jax.Array | np.ndarray | np.generic), f"a state holds arrays only, not {type(leaf)}"
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _leaves(tree: Any) -> dict[str, str]:
    """Dtype and shape by name of each array of a state or of Orbax's description of one.

    >>> _leaves({"w": jax.ShapeDtypeStruct((2, 3), "float32")})
    {'w': 'float32[2,3]'}
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # stored as the integers behind the key
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves[name] = f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
    return leaves


def _differences(stored: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """One phrase for each leaf that is not stored as wanted.

    >>> _differences({"w": "float32[2,3]"}, {"w": "float32[4,3]"})
    ['w is stored as float32[2,3], wanted float32[4,3]']
    """
    phrases = []
    for name in sorted({*stored, *wanted}):
        is_stored = f"stored as {stored[name]}" if name in stored else "not stored"
        is_wanted = f"wanted {wanted[name]}" if name in wanted else "not wanted"
        if name not in stored or name not in wanted or stored[name] != wanted[name]:
            phrases.append(f"{name} is {is_stored}, {is_wanted}")
    return phrases


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _reason(error: BaseException) -> str:
    """What went wrong, in one line: Orbax hides the error that says it behind one about handlers, as its cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split(" [tensorstore_spec=")[0].split())  # the file's whole layout, of no use to a reader
    text = text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"  # what failed comes first or last
    return text.rstrip(".") or type(error).__name__


def _quieten() -> None:
    """Keeps off the terminal what Orbax prints besides raising: each failure reaches the caller as CheckpointError."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_tensorstore)
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
