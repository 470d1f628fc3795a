"""Documents as token ids, memory-mapped, written once and kept.

A directory holds ids.npy (the ids of all documents, each followed by the tokenizer's end), ends.npy
(the end of each document), is_learned.npy (unless all ids are learned) and record.json (their
digests). It is made under another name and renamed: a reader meets all of it or nothing. A writer
keeps each finished block of documents in a file, so that the next one goes on after it when the
first was killed. One process writes, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppctl.data.document_files import Broken, Source, unreadable
from ppctl.data.token_encoding import Block, blocks_of, encoded
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
    """Hold the lock of a directory. OSErrors become a DataError; an exception removes its files.

    An interrupted or killed writer leaves the finished blocks.
    """
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
                except Exception:
                    _remove(path.with_suffix(".parts"), path.with_suffix(".tmp"))
                    raise
                finally:
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


class Part(NamedTuple):
    """A finished block: as Tokens, ends counted from its first id, and where the next begins."""

    ids: np.ndarray
    ends: np.ndarray
    is_learned: np.ndarray  # empty: all are
    num_documents: int  # broken ones included
    ends_document: bool
    num_skipped: int
    first_skipped: str


def _write(path: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write the documents of files, after the finished blocks of an earlier writer."""
    parts = path.with_suffix(".parts")
    parts.mkdir(exist_ok=True)
    # 1. the finished blocks
    number, num_done, is_new = 0, 0, True
    while (part := _read_part(parts / f"{number}.block")) is not None:
        number, num_done, is_new = number + 1, num_done + part.num_documents, part.ends_document
    # 2. the others
    for block in blocks_of(source, num_done, is_new=is_new):
        part = _encoded_part(block, source, tokenizer)
        _write_part(parts / f"{number}.block", part)
        number += 1
    # 3. all of them as one
    made = path.with_suffix(".tmp")
    _remove(made, path)
    made.mkdir()
    _join([parts / f"{index}.block" for index in range(number)], made, tokenizer.dtype)
    made.replace(path)
    _remove(parts)


def _write_part(path: Path, part: Part) -> None:
    """Write a block: a line with the sha256 of the rest, a line of JSON, then the arrays."""
    arrays = part.ids, part.ends, part.is_learned
    kinds = {"dtypes": [a.dtype.name for a in arrays], "lengths": [len(a) for a in arrays]}
    header = json.dumps(kinds | {"rest": part[3:]}).encode()
    text = b"\n".join([header, b"".join(array.tobytes() for array in arrays)])
    beside = path.with_suffix(".tmp")
    beside.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    beside.replace(path)


def _read_part(path: Path) -> Part | None:
    """Return a finished block; None where it does not exist or is damaged."""
    try:
        checksum, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if hashlib.sha256(text).hexdigest().encode() != checksum:
        return None
    line, _, content = text.partition(b"\n")
    header = json.loads(line)
    arrays, start = [], 0
    for dtype, length in zip(header["dtypes"], header["lengths"], strict=True):
        arrays.append(np.frombuffer(content, dtype, length, start))
        start += arrays[-1].nbytes
    return Part(*arrays, *header["rest"])


def _encoded_part(block: Block, source: Source, tokenizer: Tokenizer) -> Part:
    ids: list[np.ndarray] = [np.empty(0, tokenizer.dtype)]
    learned: list[np.ndarray] = [np.empty(0, bool)]
    ends: list[int] = []
    skipped: list[str] = []
    num_ids, has_prompts = 0, False
    for piece in encoded(block, source, tokenizer):
        if isinstance(piece, Broken):
            skipped.append(f"{piece.place} {piece.reason}")
            continue
        ids.append(piece.ids.astype(tokenizer.dtype))
        some = piece.is_learned
        learned.append(np.ones(len(piece.ids), bool) if some is None else some)
        has_prompts = has_prompts or some is not None
        num_ids += len(piece.ids)
        ends += [num_ids] if piece.is_end else []
    is_learned = np.concatenate(learned) if has_prompts else np.empty(0, bool)
    counts = len(block.documents), block.ends_document, len(skipped), skipped[0] if skipped else ""
    return Part(np.concatenate(ids), np.asarray(ends, np.int64), is_learned, *counts)


def _join(files: Sequence[Path], made: Path, dtype: np.dtype) -> None:
    """Write the arrays of all blocks one after the other, and their record."""

    def parts() -> Iterator[Part]:
        for file in files:
            part = _read_part(file)
            assert part is not None, f"{file} was whole"
            yield part

    # 1. sizes
    num_ids, num_ends, skipped, first, has_prompts = 0, 0, 0, "", False
    for part in parts():
        num_ids, num_ends = num_ids + len(part.ids), num_ends + len(part.ends)
        skipped, first = skipped + part.num_skipped, first or part.first_skipped
        has_prompts = has_prompts or bool(len(part.is_learned))
    sizes = {"ids": (dtype, num_ids), "ends": (np.dtype(np.int64), num_ends)}
    sizes |= {"is_learned": (np.dtype(bool), num_ids)} if has_prompts else {}
    # 2. arrays
    arrays = {
        name: np.lib.format.open_memmap(made / f"{name}.npy", "w+", kind, (size,))
        for name, (kind, size) in sizes.items()
    }
    at_id, at_end = 0, 0
    for part in parts():
        here = slice(at_id, at_id + len(part.ids))
        arrays["ids"][here] = part.ids
        arrays["ends"][at_end : at_end + len(part.ends)] = part.ends + at_id
        if has_prompts:
            arrays["is_learned"][here] = part.is_learned if len(part.is_learned) else True
        at_id, at_end = here.stop, at_end + len(part.ends)
    # 3. record
    digests = {name: digest(np.asarray(array)) for name, array in arrays.items()}
    (made / RECORD).write_text(json.dumps({"digests": digests, "skipped": skipped, "first": first}))
