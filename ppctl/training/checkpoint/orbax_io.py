"""Orbax for checkpoints: its settings, one-line errors, and no output on the terminal."""

import errno
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

# Temporary faults of the machine, not of the files: reading may succeed later.
_ERRNOS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
PASSING = re.compile(
    "PERMISSION_DENIED|RESOURCE_EXHAUSTED|ut of memory|imed out|not finished after|"
    + "|".join(map(os.strerror, _ERRNOS))
)
SAVE_TIMEOUT_S = 300  # seconds, enough for terabytes; others wait this long for a failed process


def context(*, alone: bool) -> ocp.Context:
    """Return an Orbax context with `meta` as a JSON file.

    alone: Whether each process acts separately, as for reading: in a joint read, a process that
    finds a damaged file would leave the others waiting.
    """
    made, registry = ocp.Context(), ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    made.checkpointables.registry = registry
    made.asynchronous.timeout_secs = SAVE_TIMEOUT_S
    if alone and jax.process_count() > 1:
        made.multiprocessing.primary_host = jax.process_index()
        made.multiprocessing.active_processes = {jax.process_index()}
    return made


def wait_for_exchanges() -> None:
    """Wait until Orbax's exchanges between processes have ended on all devices of this process.

    Orbax waits for one device only. XLA for CPUs orders this program after theirs, but not the
    programs of one local device, which might take their messages (`join_processes.simulate`).
    """
    if jax.process_count() > 1:
        mesh = Mesh(np.array(jax.local_devices()), ("local",))
        jax.block_until_ready(jax.jit(_zero, out_shardings=NamedSharding(mesh, PartitionSpec()))())


def _zero() -> jax.Array:
    return jnp.zeros(())


def described(path: Path, reading: ocp.Context) -> Any:
    """Return Orbax's description of the arrays of a checkpoint. ValueError if they are missing."""
    with reading:
        state = ocp.checkpointables_metadata(str(path)).metadata["state"]
    if state is None:
        raise ValueError("the description of its arrays is missing or damaged")
    return state


def error_reason(error: BaseException) -> str:
    """Return the cause of an error of Orbax or of the file system as one line."""
    error = _root_cause(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, KeyError) and error.args:  # str(error) would add quotes
        text = str(error.args[0])
    text = f"out of memory: {text}" if isinstance(error, MemoryError) else text
    text = " ".join(text.split(" [tensorstore_spec=")[0].split())  # drops the file's layout
    if len(text) > 300:  # characters; the cause comes first or last
        text = f"{text[:150]} ... {text[-150:]}"
    return text.rstrip(".") or type(error).__name__


def is_timeout(error: BaseException) -> bool:
    """Return whether Orbax timed out, in this process or at a barrier of all processes."""
    return isinstance(error, TimeoutError) or "imeout waiting at barrier" in str(_root_cause(error))


def _root_cause(error: BaseException) -> BaseException:
    """Return the root cause of an error: Orbax wraps it in an error about handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def silence_orbax() -> None:
    """Keep Orbax's output off the terminal: `Checkpoints` raises each failure instead."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_tensorstore)
    # Orbax leaves coroutines when a file is missing
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _unless_straggler:
        sys.unraisablehook = functools.partial(_unless_straggler, sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


# When one array fails to load, Orbax raises its error and closes the event loop, while reads of
# other arrays still run. Their errors reach asyncio's log, or threads where nobody can catch them.
def _not_of_tensorstore(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "tensorstore" in str(record.exc_info[1]).lower())


def _unless_straggler(hook: Callable[[Any], Any], unraisable: Any) -> None:
    code = getattr(unraisable.object, "cr_code", None)  # coroutines have this attribute
    of_orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
    if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


def saveable(leaf: Any) -> jax.Array | np.ndarray:
    """Return a leaf; a numpy scalar, which Orbax refuses, becomes an array of its dtype."""
    assert isinstance(leaf, jax.Array | np.ndarray | np.generic), (
        f"a state holds arrays only, not {type(leaf)}"
    )
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
