"""Documents as token ids, memory-mapped, written once and kept.

A directory holds ids.npy (the ids of all documents, each followed by the tokenizer's end), ends.npy
(the end of each document), is_learned.npy (unless all ids are learned) and record.json (their
digests). It is made under another name and renamed: a reader meets all of it or nothing. One
process writes, the others wait for it, and one of them begins anew if it is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ppctl.data.document_files import Broken, Source, unreadable
from ppctl.data.token_encoding import encoded
from ppctl.data.token_file import UNREADABLE, open_npy
from ppctl.data.token_windows import digest
from ppctl.data.tokenizer import Tokenizer
from ppctl.errors import DataError

VERSION = 2  # of the files; part of the directory's name
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
        arrays = {name: open_npy(path / f"{name}.npy") for name in record["digests"]}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, "read", error) from error
    except UNREADABLE:
        return None
    if any(digest(array) != record["digests"][name] for name, array in arrays.items()):
        return None
    content, learned = " ".join(record["digests"].values()), arrays.get("is_learned")
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
    lock = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with lock.open("ab") as file:
                with suppress(OSError):  # no locks in this file system: each process writes
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_still(file.fileno(), lock):
                    continue  # removed by its last owner
                try:
                    yield
                finally:
                    _remove(path.with_suffix(".tmp"))
                    lock.unlink(missing_ok=True)
                return
    except OSError as error:
        raise _unusable(path, "written", error) from error


def _is_still(opened: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(opened), path.stat())
    return False


def _remove(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _write(path: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write the documents of files under another name, then rename the directory."""
    made = path.with_suffix(".tmp")
    _remove(made, path)
    made.mkdir()
    skipped: list[str] = []
    dtypes = {"ids": tokenizer.dtype, "ends": np.dtype(np.int64), "is_learned": np.dtype(bool)}
    with ExitStack() as stack:
        files = {name: stack.enter_context((made / f"{name}.npy").open("wb")) for name in dtypes}
        counts = dict.fromkeys(files, 0)

        def append(name: str, values: Any) -> None:
            array = np.asarray(values, dtypes[name])
            files[name].write(array.tobytes())
            counts[name] += len(array)

        # 1. arrays, behind headers that leave room for the final shape
        _write_headers(files, dtypes, counts)
        has_prompts = False
        for piece in encoded(source, tokenizer):
            if isinstance(piece, Broken):
                skipped.append(f"{piece.place} {piece.reason}")
                continue
            is_learned = piece.is_learned
            append("ids", piece.ids)
            append("is_learned", np.ones(len(piece.ids)) if is_learned is None else is_learned)
            append("ends", [counts["ids"]] if piece.is_end else [])
            has_prompts = has_prompts or is_learned is not None
        _write_headers(files, dtypes, counts)
    # 2. record
    if not has_prompts:
        (made / "is_learned.npy").unlink()
    present = [name for name in dtypes if (made / f"{name}.npy").exists()]
    digests = {name: digest(open_npy(made / f"{name}.npy")) for name in present}
    record = {"digests": digests, "skipped": len(skipped), "first": skipped[0] if skipped else ""}
    (made / RECORD).write_text(json.dumps(record))
    made.replace(path)


def _write_headers(
    files: Mapping[str, IO[bytes]], dtypes: Mapping[str, np.dtype], counts: Mapping[str, int]
) -> None:
    """Write the .npy headers of flat arrays; numpy pads them to the same size for any length."""
    for name, file in files.items():
        file.seek(0)
        header = {"descr": dtypes[name].str, "fortran_order": False, "shape": (counts[name],)}
        np.lib.format.write_array_header_1_0(file, header)
