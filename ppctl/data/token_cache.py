"""Documents as token ids, memory-mapped, written once and kept.

A directory holds ids.bin (the ids of all documents, each followed by the tokenizer's end), ends.bin
(the end of each document), is_learned.bin (unless all ids are learned) and record.json (their types
and digests). It is made under another name and renamed: a reader meets all of it or nothing. One
process writes, the others wait for it, and one of them begins anew if it is killed.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppctl.data.document_files import Broken, Source, unreadable
from ppctl.data.token_encoding import encoded
from ppctl.data.token_file import open_bin
from ppctl.data.token_windows import digest
from ppctl.data.tokenizer import Tokenizer
from ppctl.errors import DataError

VERSION = 3  # of the files; part of the directory's name
RECORD = "record.json"


class Tokens(NamedTuple):
    """Documents as ids: document i is ids[ends[i - 1] : ends[i]], and its last id ends it."""

    ids: np.ndarray  # memory-mapped
    ends: np.ndarray  # int64
    is_learned: np.ndarray | None  # of each id; None: all are
    content: str  # digests of the arrays
    num_skipped: int
    first_skipped: str  # place and reason


def cached_tokens(
    name: str, source: Source, tokenizer: Tokenizer, salt: str, cache_dir: str
) -> Tokens:
    """Return the documents of files as ids, from the cache or written to it.

    The directory is named after the files' paths, sizes and modification times and all that decides
    the ids, so a stale one is never met; a damaged one is written again. DataError for a broken
    document, unless it is skipped, an unreadable file, and a cache that cannot be written.
    """
    path = Path(cache_dir).expanduser() / f"{name}-{_key(source, tokenizer, salt)}.tokens"
    tokens = _read(path)
    if tokens is None:
        with _locked(path):
            tokens = _read(path)  # another process may have written it meanwhile
            if tokens is None:
                _write(path, source, tokenizer)
                tokens = _read(path)
    if tokens is None:
        raise DataError(
            f"The token cache {path} does not read back as written. Use another data.cache_dir."
        )
    return tokens


def _key(source: Source, tokenizer: Tokenizer, salt: str) -> str:
    template = tokenizer.template and asdict(tokenizer.template)
    reading = asdict(source.fields), source.skips_broken
    decides = [VERSION, tokenizer.fingerprint, template, salt, *reading]
    sha = hashlib.sha256(json.dumps(decides).encode())
    for file in source.files:
        try:
            stat = file.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        facts = os.fsencode(file), stat.st_size, stat.st_mtime_ns, file in source.unnamed
        sha.update(b"%s\0%d\0%d\0%d\0" % facts)
    return sha.hexdigest()[:16]


def _read(path: Path) -> Tokens | None:
    """Return the tokens in a directory; None where it does not exist or is damaged."""
    try:
        record = json.loads((path / RECORD).read_text())
        dtypes, digests = record["dtypes"], record["digests"]
        arrays = {name: open_bin(path / f"{name}.bin", dtypes[name]) for name in dtypes}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, "read", error) from error
    except ValueError:
        return None
    if any(digest(array) != digests[name] for name, array in arrays.items()):
        return None
    content, learned = " ".join(digests.values()), arrays.get("is_learned")
    skipped = record["skipped"], record["first"]
    return Tokens(arrays["ids"], arrays["ends"], learned, content, *skipped)


def _unusable(path: Path, done: str, error: OSError) -> DataError:
    return DataError(
        f"The token cache {path} cannot be {done} ({error.strerror}). "
        "Use data.cache_dir=<a directory that you may write, with space left>."
    )


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a directory, and leave no unfinished files. OSErrors become a DataError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("ab") as lock:
            with suppress(OSError):  # no locks in this file system: each process writes
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)
    except OSError as error:
        raise _unusable(path, "written", error) from error


def _write(path: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write the documents of files under another name, then rename the directory."""
    made = path.with_suffix(".tmp")
    for directory in (made, path):
        shutil.rmtree(directory, ignore_errors=True)
    made.mkdir()
    skipped: list[str] = []
    dtypes = {"ids": tokenizer.dtype.str, "ends": "<i8", "is_learned": "|b1"}
    places = {name: made / f"{name}.bin" for name in dtypes}
    with ExitStack() as stack:
        files = {name: stack.enter_context(place.open("wb")) for name, place in places.items()}

        def append(name: str, values: Any) -> None:
            files[name].write(np.asarray(values, dtypes[name]).tobytes())

        # 1. arrays
        num_ids, has_prompts = 0, False
        for piece in encoded(source, tokenizer):
            if isinstance(piece, Broken):
                skipped.append(f"{piece.place} {piece.reason}")
                continue
            is_learned, number = piece.is_learned, len(piece.ids)
            num_ids += number
            append("ids", piece.ids)
            append("is_learned", np.ones(number) if is_learned is None else is_learned)
            append("ends", [num_ids] if piece.is_end else [])
            has_prompts = has_prompts or is_learned is not None
    # 2. record
    if not has_prompts:
        places["is_learned"].unlink()
        del dtypes["is_learned"]
    digests = {name: digest(open_bin(places[name], dtype)) for name, dtype in dtypes.items()}
    record = {"dtypes": dtypes, "digests": digests}
    record |= {"skipped": len(skipped), "first": skipped[0] if skipped else ""}
    (made / RECORD).write_text(json.dumps(record))
    made.replace(path)
