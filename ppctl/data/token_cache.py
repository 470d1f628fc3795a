"""Documents as token ids in one memory-mapped file, written once and kept.

A file holds the ids of all documents one behind the other, each with the tokenizer's end behind it; where the documents
end; which tokens are learned, where not all are; and a record of these, as JSON. It is written beside and renamed, so
that a reader meets a whole one or none, whenever a writer is killed; the next one goes on where it ended. Of several
processes that want the same one, the first writes and the others wait for it.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ppctl.data.documents import Broken, Source, unreadable
from ppctl.data.encoding import Block, blocks_of, encoded
from ppctl.data.tokenizer import Tokenizer
from ppctl.data.windows import digest
from ppctl.errors import DataError

VERSION = 1  # of the file; part of its name
MARK = b"ppctl ids"  # ends a file
ALIGNMENT = 8


class Tokens(NamedTuple):
    """Documents as ids: document i is ids[ends[i - 1] : ends[i]], of which the last ends it."""

    ids: np.ndarray  # memory-mapped
    ends: np.ndarray  # int64
    is_learned: np.ndarray | None  # of each id; None: all are
    content: str  # sha256 of the ids, and of what is learned
    num_skipped: int
    first_skipped: str  # where, and why


def cached_tokens(name: str, source: Source, tokenizer: Tokenizer, salt: str, cache_dir: str) -> Tokens:
    """Return the documents of files as ids, from the cache or written to it.

    The file is named after the files' paths, sizes and modification times and all that decides the ids, so a stale one
    is never met; one that is damaged is written again. DataError for what is broken in the files, unless it is skipped,
    for a file that cannot be read, and a cache that cannot be written.
    """
    path = Path(cache_dir).expanduser() / f"{name}-{_key(source, tokenizer, salt)}.tokens"
    found = _open(path)
    while found is None:
        with _writing(path) as out:
            if out is not None:
                _write(out, path, source, tokenizer)
        found = _open(path)
        if found is None and out is not None:
            raise DataError(f"The token cache {path} does not read back as it was written. Use another data.cache_dir.")
    return found


def _key(source: Source, tokenizer: Tokenizer, salt: str) -> str:
    decides = [VERSION, tokenizer.fingerprint, tokenizer.template and asdict(tokenizer.template), salt]
    decides += [asdict(source.fields), source.skips_broken]
    sha = hashlib.sha256(json.dumps(decides).encode())
    for file in source.files:
        try:
            stat = file.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        sha.update(b"%s\0%d\0%d\0%d\0" % (os.fsencode(file), stat.st_size, stat.st_mtime_ns, file in source.unnamed))
    return sha.hexdigest()[:16]


# --- reading ---------------------------------------------------------------------------------------------------------


def _open(path: Path) -> Tokens | None:
    """Return what a file holds, None where there is none or it is not all that was written."""
    try:
        if not path.stat().st_size:
            return None
        everything = np.asarray(np.memmap(path, np.uint8, "r"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, "read", error) from error
    record = _record(everything)
    if record is None:
        return None
    arrays, start = {}, 0
    for name, dtype, length in record["arrays"]:
        size = np.dtype(dtype).itemsize * length
        arrays[name] = everything[start : start + size].view(dtype)
        if digest(arrays[name]) != record["digests"][name]:
            return None
        start += size + -size % ALIGNMENT
    return Tokens(
        arrays["ids"], arrays["ends"], arrays.get("is_learned"), record["content"], record["skipped"], record["first"]
    )


def _record(everything: np.ndarray) -> Mapping[str, Any] | None:
    """Return the record at the end of a file, None where it is not all there."""
    tail = everything[-(len(MARK) + 8) :].tobytes()
    size = int.from_bytes(tail[:8], "little")
    if tail[8:] != MARK or size + len(tail) > len(everything):
        return None
    try:
        record = json.loads(everything[-(len(tail) + size) : -len(tail)].tobytes())
    except ValueError:
        return None
    held = sum(-(-np.dtype(dtype).itemsize * length // ALIGNMENT) * ALIGNMENT for _, dtype, length in record["arrays"])
    return record if held + size + len(tail) == len(everything) else None


def _unusable(path: Path, done: str, error: OSError) -> DataError:
    return DataError(
        f"The token cache {path} cannot be {done} ({error.strerror}). "
        "Use data.cache_dir=<a directory that you may write, with space left>."
    )


# --- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _writing(path: Path) -> Iterator[IO[bytes] | None]:
    """Yield a file to write, which is `path` when the body is done; None where another process has just written it.

    The file beside it is locked while it is written: who finds it unlocked finds what a killed writer left. It stays
    where the body is interrupted, and is removed where it fails. Not by tempfile, whose files only their owner may
    read: a cache directory may be shared.
    """
    beside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = beside.open("ab")
    except OSError as error:
        raise _unusable(path, "written", error) from error
    with out:
        with suppress(OSError):  # a file system without locks: each writes, and the same
            fcntl.flock(out, fcntl.LOCK_EX)
        if not _is_still(out, beside):
            yield None
            return
        try:
            if _open(path) is not None:  # written between a look at it and the lock
                yield None
                return
            yield out
            out.flush()
            os.fsync(out.fileno())
            _remove(_parts(path))
            beside.replace(path)
        except Exception as error:
            if _is_still(out, beside):
                _remove((beside, *_parts(path)))
            if isinstance(error, OSError):
                raise _unusable(path, "written", error) from error
            raise


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()


def _is_still(out: IO[bytes], path: Path) -> bool:
    """Return whether a path is still the file that was opened by it."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), path.stat())
    except FileNotFoundError:
        return False


class Progress(NamedTuple):
    """How much of the files is written: whole blocks, behind which a writer goes on after one that was killed."""

    num_documents: int = 0  # read, broken ones too
    is_new: bool = True  # whether what comes behind begins a document
    num_ids: int = 0
    num_ends: int = 0
    has_prompts: bool = False
    skipped: int = 0
    first: str = ""
    digests: tuple[str, ...] = ()  # sha256 of the ids, of where documents end, and of what is learned


def _write(out: IO[bytes], path: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write the documents of files, going on where a writer that was killed has ended.

    Ids go out as they come. Where documents end, and what is learned, waits in files beside; a line of a third one
    says after each block how much of all is whole.
    """
    with ExitStack() as stack:
        ends, learned, lines = (stack.enter_context(part.open("a+b")) for part in _parts(path))
        done = _resumed(out, ends, learned, lines, tokenizer)
        hashes = [_hashed(file) for file in (out, ends, learned)]
        for block in blocks_of(source, done.num_documents, is_new=done.is_new):
            done = _write_block(block, done, hashes, (out, ends, learned), source, tokenizer)
            lines.write(json.dumps(done).encode() + b"\n")
            lines.flush()
        arrays = [("ids", tokenizer.dtype.name, done.num_ids), ("ends", "int64", done.num_ends)]
        _copy(ends, out)
        if done.has_prompts:
            arrays.append(("is_learned", "bool", done.num_ids))
            _copy(learned, out)
    _pad(out)
    out.flush()
    content = hashes[0].hexdigest() + (f" {hashes[2].hexdigest()}" if done.has_prompts else "")
    record = {"arrays": arrays, "content": content, "skipped": done.skipped, "first": done.first}
    text = json.dumps(record | {"digests": _digests(Path(out.name), arrays)}).encode()
    out.write(text + len(text).to_bytes(8, "little") + MARK)


def _parts(path: Path) -> tuple[Path, ...]:
    """Return the files beside one that is written: where documents end, what is learned, and how far it is."""
    return tuple(path.with_suffix(f".{name}") for name in ("ends", "learned", "progress"))


def _write_block(
    block: Block, done: Progress, hashes: Sequence[Any], files: Sequence[IO[bytes]], source: Source, by: Tokenizer
) -> Progress:
    """Write a block, and return how much is written then. files: of ids, of where documents end, of what is learned."""
    of_ends, num_ids, has_prompts, skipped, first = array.array("q"), done.num_ids, *done[4:7]
    for piece in encoded(block, source, by):
        if isinstance(piece, Broken):
            skipped, first = skipped + 1, first or f"{piece.place} {piece.reason}"
            continue
        ids = piece.ids.astype(by.dtype)
        are_learned = np.ones(len(ids), bool) if piece.is_learned is None else piece.is_learned
        has_prompts = has_prompts or piece.is_learned is not None
        for i, values in ((0, ids), (2, are_learned)):
            files[i].write(values.data)
            hashes[i].update(values.data)
        num_ids += len(ids)
        if piece.is_end:
            of_ends.append(num_ids)
    files[1].write(of_ends.tobytes())
    hashes[1].update(of_ends.tobytes())
    for file in files:
        file.flush()
    number, digests = done.num_documents + len(block.documents), tuple(sha.hexdigest() for sha in hashes)
    num_ends = done.num_ends + len(of_ends)
    return Progress(number, block.ends_document, num_ids, num_ends, has_prompts, skipped, first, digests)


def _resumed(out: IO[bytes], ends: IO[bytes], learned: IO[bytes], lines: IO[bytes], tokenizer: Tokenizer) -> Progress:
    """Return how much of the files is whole, and cut off what is behind it; of damaged files nothing is."""
    done, end = Progress(), 0
    lines.seek(0)
    for line in iter(lines.readline, b""):
        with suppress(ValueError, TypeError):  # half of a line
            done, end = Progress(*json.loads(line)), lines.tell()
    lines.truncate(end)
    done = done._replace(digests=tuple(done.digests))
    sizes = done.num_ids * tokenizer.dtype.itemsize, 8 * done.num_ends, done.num_ids
    files = out, ends, learned
    if all(os.fstat(file.fileno()).st_size >= size for file, size in zip(files, sizes, strict=True)):
        for file, size in zip(files, sizes, strict=True):
            file.truncate(size)
    if tuple(_hashed(file).hexdigest() for file in files) != done.digests:
        done = Progress()
        for file in (*files, lines):
            file.truncate(0)
    for file in (*files, lines):
        file.seek(0, os.SEEK_END)
    return done


def _hashed(file: IO[bytes]) -> Any:
    """Return the sha256 of all that a file holds."""
    sha = hashlib.sha256()
    with Path(file.name).open("rb") as whole:
        while chunk := whole.read(1 << 20):
            sha.update(chunk)
    return sha


def _copy(part: IO[bytes], out: IO[bytes]) -> None:
    """Write all of a part behind what is there."""
    _pad(out)
    part.seek(0)
    while chunk := part.read(1 << 20):
        out.write(chunk)


def _pad(out: IO[bytes]) -> None:
    out.write(bytes(-out.tell() % ALIGNMENT))


def _digests(path: Path, arrays: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    found, start = {}, 0
    for name, dtype, length in arrays:
        whole = np.memmap(path, dtype, "r", start, (length,)) if length else np.empty(0, dtype)
        found[name] = digest(np.asarray(whole))
        size = np.dtype(dtype).itemsize * length
        start += size + -size % ALIGNMENT
    return found
