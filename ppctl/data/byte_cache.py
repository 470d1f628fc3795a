"""Many text files as one memory-mapped array of bytes, written once and kept."""

from __future__ import annotations

import codecs
import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ppctl.errors import DataError

SEPARATOR = b"\0"  # after each file; a file that holds one is not text
CHUNK_BYTES = 1 << 20
DIGEST_BYTES = hashlib.sha256().digest_size


def cached_bytes(name: str, files: Sequence[Path], salt: str, cache_dir: str) -> tuple[np.ndarray, str]:
    """The text among `files`, in their order, as one uint8 array, and its sha256.

    The cache file is named after `salt` and the files' paths, sizes and modification times, so a stale one is never
    met; it ends with its own sha256, so a damaged one is written again. Files without UTF-8 text are passed over.
    Raises DataError when a file cannot be read or the cache cannot be written.
    """
    path = Path(cache_dir).expanduser() / f"{name}-{_key(files, salt)}.bytes"
    found = _open(path)
    if found is None:
        _write(path, files)
        found = _open(path)
    if found is None:
        raise DataError(f"The text cache {path} does not read back as it was written. Use another data.cache_dir.")
    return found


def _key(files: Sequence[Path], salt: str) -> str:
    sha = hashlib.sha256(salt.encode())
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise _unreadable(file, error) from error
        sha.update(b"%s\0%d\0%d\0" % (os.fsencode(file), stat.st_size, stat.st_mtime_ns))
    return sha.hexdigest()[:16]


def _open(path: Path) -> tuple[np.ndarray, str] | None:
    try:
        if path.stat().st_size < DIGEST_BYTES:
            return None
        everything = np.asarray(np.memmap(path, np.uint8, "r"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, "read", error) from error
    text, kept = everything[:-DIGEST_BYTES], everything[-DIGEST_BYTES:].tobytes()
    return (text, kept.hex()) if hashlib.sha256(text.data).digest() == kept else None


def _write(path: Path, files: Sequence[Path]) -> None:
    # Written beside and renamed: a reader, or a second writer, meets a whole file or none. Not by tempfile, whose files
    # only their owner may read: a cache directory may be shared.
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
    sha = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as out:
            for chunk in _text(files):
                sha.update(chunk)
                out.write(chunk)
            out.write(sha.digest())
        temporary.replace(path)
    except OSError as error:
        raise _unusable(path, "written", error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _text(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        try:
            if is_text(file):
                yield from _chunks(file)
                yield SEPARATOR
        except OSError as error:
            raise _unreadable(file, error) from error


def is_text(file: Path) -> bool:
    """Return whether the file holds UTF-8 text: at least one byte, none of them zero."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(file):
            if SEPARATOR in chunk:
                return False
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return file.stat().st_size > 0


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def _unusable(path: Path, done: str, error: OSError) -> DataError:
    return DataError(
        f"The text cache {path} cannot be {done} ({error.strerror}). "
        "Use data.cache_dir=<a directory that you may write, with space left>."
    )


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file} cannot be read ({error.strerror}). Make it readable, or use another data.path.")
