"""Compiled programs kept from start to start, by JAX's own cache: the same step is compiled once on a machine."""

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

from ppctl.config import Config
from ppctl.config.files import user_cache_dir
from ppctl.errors import ConfigError

MOST_BYTES = 2**31  # of one machine's programs; the oldest go first
WORTH_S = 0.05  # of compiling: what takes less is not kept
CHECKED = ".checked"  # a file, touched when all entries older than it were found whole
ZLIB = b"\x78"  # JAX compresses entries with zstd where that is installed, and with zlib else
HIT, MISSED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


def keep_compiled(config: Config) -> str | None:
    """Let JAX keep compiled programs as run.compilation_cache says; return a note where it cannot, or None.

    A directory that is the user's own by JAX_COMPILATION_CACHE_DIR stays, unless another one is named. Programs are
    machine code, so that machines which share a home have each a directory in it.

    Raises:
        ConfigError: The directory that was named cannot be written.
    """
    asked = config.run.compilation_cache
    jax.config.update("jax_enable_compilation_cache", asked is not None)
    if asked is None or (asked == "auto" and "JAX_COMPILATION_CACHE_DIR" in os.environ):
        return None
    top = user_cache_dir() / "compiled" if asked == "auto" else Path(asked).expanduser()
    directory = top / _machine()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tidy(directory)
    except OSError as error:
        problem = f"compiled programs cannot be kept in {directory}: {error.strerror}. Use run.compilation_cache="
        if asked != "auto":
            raise ConfigError(f"run.compilation_cache={asked}: {problem}null, or another directory.") from error
        return f"{problem}DIR, or null"
    # two processes may write an entry at the same time; who reads half of it compiles
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry", UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_S)
    return None


@contextmanager
def counted_programs() -> Iterator[Counter[str]]:
    """Yield how many programs of the body were "kept" from an earlier start, and how many "compiled" though looked for.

    Where nothing is kept both stay 0.
    """
    found = Counter[str]()
    names = {HIT: "kept", MISSED: "compiled"}

    def hear(event: str, **_: object) -> None:
        if event in names:
            found[names[event]] += 1

    jax.monitoring.register_event_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(hear)


def _machine() -> str:
    """Return a name for what decides whether a machine can run another's programs: its processor, and the compiler."""
    text = f"{platform.system()} {platform.machine()} {platform.processor()} {version('jaxlib')}"
    with suppress(OSError):
        features = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        text += "" if features is None else features[0]
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _tidy(directory: Path) -> None:
    """Remove entries that a killed process left unfinished, and the oldest where there are too many."""
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
    """Return whether an entry is not whole; then it is removed."""
    content = path.read_bytes()
    try:
        is_whole = content[:1] != ZLIB or bool(zlib.decompress(content))
    except zlib.error:
        is_whole = False
    if not (content and is_whole):
        path.unlink(missing_ok=True)
        return True
    return False
