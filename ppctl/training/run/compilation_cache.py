"""JAX's cache of compiled programs: each machine compiles a step once, not at every start."""

import hashlib
import os
import platform
import re
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import jax

from ppctl.config.config_dirs import user_cache_dir
from ppctl.errors import ConfigError

MOST_BYTES = 2**31  # bytes of one machine's programs; the oldest are removed first
WORTH_S = 0.05  # seconds; programs that compile faster are not kept


def keep_compiled(place: str | None) -> str | None:
    """Set JAX's cache of compiled programs; return a note if its directory cannot be written.

    Programs are machine code, so each kind of machine has a separate directory.

    Args:
        place: run.compilation_cache: a directory, auto (JAX_COMPILATION_CACHE_DIR if set, else the
            user's cache directory), or None for no cache.

    Raises:
        ConfigError: A requested directory cannot be written.
    """
    jax.config.update("jax_enable_compilation_cache", place is not None)
    if place is None or (place == "auto" and "JAX_COMPILATION_CACHE_DIR" in os.environ):
        return None
    top = user_cache_dir() / "compiled" if place == "auto" else Path(place).expanduser()
    directory = machine_directory(top)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        drop_oldest(directory)
    except OSError as error:
        problem = f"compiled programs cannot be kept in {directory}: {error.strerror}. "
        if place != "auto":
            remedy = "Use run.compilation_cache=null, or another directory."
            raise ConfigError(f"run.compilation_cache={place}: {problem}{remedy}") from error
        return f"{problem}Use run.compilation_cache=DIR, or null"
    # no warning: an entry that another process is still writing cannot be read, so JAX compiles
    torn = "Error reading persistent compilation cache entry"
    warnings.filterwarnings("ignore", torn, UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_S)
    return None


def machine_directory(top: Path) -> Path:
    """Return the directory in `top` for processor and compiler; equal machines share programs."""
    text = f"{platform.system()} {platform.machine()} {platform.processor()} {version('jaxlib')}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if re.match(r"(flags|Features)\s*:", line)), "")
    return top / f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def drop_oldest(directory: Path) -> None:
    """Remove the oldest entries, so that at most MOST_BYTES remain."""
    left, entries = MOST_BYTES, list[tuple[float, int, Path]]()
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # another process removes entries, too
            info = path.stat()
            entries.append((info.st_mtime, info.st_size, path))
    for _, size, path in sorted(entries, reverse=True):
        left -= size
        if left < 0:
            path.unlink(missing_ok=True)
