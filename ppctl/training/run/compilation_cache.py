"""Compiled programs kept from start to start by JAX's cache: a step is compiled once a machine."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import jax

from ppctl.config.config_dirs import user_cache_dir
from ppctl.errors import ConfigError

MOST_BYTES = 2**31  # bytes of one machine's programs; the oldest go first
WORTH_S = 0.05  # least seconds of compiling of a program that is kept
CHECKED = ".checked"  # file, touched when all entries older than it were found whole
ZLIB = b"\x78"  # first byte of entries that JAX compresses with zlib, where zstd is not installed
HIT, MISSED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


def keep_compiled(place: str | None) -> str | None:
    """Let JAX keep compiled programs; return a note if it cannot.

    place: run.compilation_cache; auto leaves JAX_COMPILATION_CACHE_DIR as it is. Programs are
    machine code, so each machine has a directory. ConfigError if a requested directory cannot be
    written.
    """
    jax.config.update("jax_enable_compilation_cache", place is not None)
    if place is None or (place == "auto" and "JAX_COMPILATION_CACHE_DIR" in os.environ):
        return None
    top = user_cache_dir() / "compiled" if place == "auto" else Path(place).expanduser()
    directory = top / _machine()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tidy(directory)
    except OSError as error:
        problem = f"compiled programs cannot be kept in {directory}: {error.strerror}. "
        if place != "auto":
            remedy = "Use run.compilation_cache=null, or another directory."
            raise ConfigError(f"run.compilation_cache={place}: {problem}{remedy}") from error
        return f"{problem}Use run.compilation_cache=DIR, or null"
    # two processes may write an entry at once; a reader of half of it compiles
    torn = "Error reading persistent compilation cache entry"
    warnings.filterwarnings("ignore", torn, UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_S)
    return None


@contextmanager
def counted_programs() -> Iterator[Counter[str]]:
    """Yield the body's counts of programs "kept" from an earlier start and "compiled" despite it.

    Without a cache both stay 0.
    """
    counts = Counter[str]()
    names = {HIT: "kept", MISSED: "compiled"}

    def hear(event: str, **_: object) -> None:
        if event in names:
            counts[names[event]] += 1

    jax.monitoring.register_event_listener(hear)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(hear)


def _machine() -> str:
    """Return a name for processor and compiler: machines of one name run the same programs."""
    text = f"{platform.system()} {platform.machine()} {platform.processor()} {version('jaxlib')}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if re.match(r"(flags|Features)\s*:", line)), "")
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _tidy(directory: Path) -> None:
    """Remove unfinished entries of killed processes, and the oldest if there are too many."""
    checked, began_s = directory / CHECKED, time.time()
    since_s = checked.stat().st_mtime if checked.exists() else 0.0
    left, entries = MOST_BYTES, list[tuple[float, int, Path]]()
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # another process tidies too
            info = path.stat()
            if path.name != CHECKED and not (info.st_mtime >= since_s and _is_torn(path)):
                entries.append((info.st_mtime, info.st_size, path))
    for _, size, path in sorted(entries, reverse=True):
        left -= size
        if left < 0:
            path.unlink(missing_ok=True)
    checked.touch()
    os.utime(checked, (began_s, began_s))


def _is_torn(path: Path) -> bool:
    """Remove an entry if it is not whole; return whether it was not."""
    content = path.read_bytes()
    try:
        is_whole = bool(content) and (content[:1] != ZLIB or bool(zlib.decompress(content)))
    except zlib.error:
        is_whole = False
    if not is_whole:
        path.unlink(missing_ok=True)
    return not is_whole
