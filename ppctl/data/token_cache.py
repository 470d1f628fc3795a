"""Documents as token ids in one memory-mapped file, written once and kept.

A file holds the ids of all documents one behind the other, each with the tokenizer's end behind it; where the documents
end; which tokens are learned, where not all are; and a record of these, as JSON. It is written beside and renamed, so
that a reader meets a whole one or none, whenever a writer is killed. Of several processes that want the same one, the
first writes and the others wait for it.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from ppctl.data.chat import check_messages, render
from ppctl.data.documents import Broken, Document, Source, check_skipped, documents_of, unreadable
from ppctl.data.tokenizer import BYTES, Tokenizer
from ppctl.data.windows import digest
from ppctl.errors import DataError

VERSION = 1  # of the file; part of its name
MARK = b"ppctl ids"  # ends a file
ALIGNMENT = 8
CHARS_AT_ONCE = 1 << 22  # encoded together, on all cores


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

    The file beside it is locked while it is written: who finds it unlocked finds what a killed writer left, and writes
    over it. Not by tempfile, whose files only their owner may read: a cache directory may be shared.
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
            out.truncate(0)
            yield out
            out.flush()
            os.fsync(out.fileno())
            beside.replace(path)
        except OSError as error:
            raise _unusable(path, "written", error) from error
        finally:
            if _is_still(out, beside):
                with suppress(OSError):
                    beside.unlink()


def _is_still(out: IO[bytes], path: Path) -> bool:
    """Return whether a path is still the file that was opened by it."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(out: IO[bytes], path: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write the documents of files. Their ids go out as they come; the rest is held, or put aside, until the end."""
    ends, skipped, first, has_prompts = array.array("q"), 0, "", False
    of_ids, of_learned = hashlib.sha256(), hashlib.sha256()
    with tempfile.TemporaryFile(dir=path.parent) as aside:
        num_ids = 0
        for piece in _encoded(source, tokenizer):
            if isinstance(piece, Broken):
                skipped, first = skipped + 1, first or f"{piece.place} {piece.reason}"
                continue
            ids = piece.ids.astype(tokenizer.dtype)
            out.write(ids.data)
            of_ids.update(ids.data)
            learned = np.ones(len(ids), bool) if piece.is_learned is None else piece.is_learned
            has_prompts = has_prompts or piece.is_learned is not None
            aside.write(learned.data)
            of_learned.update(learned.data)
            num_ids += len(ids)
            if piece.is_end:
                ends.append(num_ids)
        arrays = [("ids", tokenizer.dtype.name, num_ids), ("ends", "int64", len(ends))]
        _pad(out)
        out.write(memoryview(ends).cast("B") if ends else b"")
        if has_prompts:
            arrays.append(("is_learned", "bool", num_ids))
            aside.seek(0)
            while chunk := aside.read(1 << 20):
                out.write(chunk)
            _pad(out)
    out.flush()
    content = of_ids.hexdigest() + (f" {of_learned.hexdigest()}" if has_prompts else "")
    record = {"arrays": arrays, "content": content, "skipped": skipped, "first": first}
    text = json.dumps(record | {"digests": _digests(Path(out.name), arrays)}).encode()
    out.write(text + len(text).to_bytes(8, "little") + MARK)


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


# --- encoding --------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    ids: np.ndarray
    is_learned: np.ndarray | None  # None: all
    is_end: bool  # of a document


def _encoded(source: Source, tokenizer: Tokenizer) -> Iterator[Piece | Broken]:
    """Yield the documents of files as ids, and those that are broken, where they may be skipped."""
    held: list[Document | Broken] = []
    num_chars, is_new = 0, True
    for document in documents_of(source, "tokenizing"):
        held.append(document)
        num_chars += 1 if isinstance(document, Broken) else 1 + len(document.prompt) + len(document.content)
        if num_chars >= CHARS_AT_ONCE:
            yield from _together(held, tokenizer, source, is_new)
            is_new = not (isinstance(document, Document) and document.goes_on)
            held, num_chars = [], 0
    yield from _together(held, tokenizer, source, is_new)


def _together(
    held: Sequence[Document | Broken], tokenizer: Tokenizer, source: Source, is_new: bool
) -> Iterator[Piece | Broken]:
    """Yield documents as ids, encoded together."""
    texts: list[str] = []
    for document in held:
        if isinstance(document, Document) and isinstance(document.content, str):
            texts += [document.prompt, document.content] if document.prompt else [document.content]
    encoded = iter(tokenizer.encode(texts))
    for document in held:
        if isinstance(document, Broken):
            yield document
            continue
        if isinstance(document.content, str):
            prompt = next(encoded) if document.prompt else np.empty(0, np.uint32)
            ids = next(encoded)
            start = tokenizer.start if is_new else ()
            is_learned = None
            if document.prompt:
                is_learned = np.arange(len(start) + len(prompt) + len(ids)) >= len(start) + len(prompt)
            found: Piece | Broken = Piece(np.concatenate([start, prompt, ids]), is_learned, not document.goes_on)
        elif isinstance(document.content, np.ndarray):
            found = _of_ids(document, document.content, tokenizer)
        else:
            found = _of_chat(document, tokenizer)
        if isinstance(found, Broken):
            check_skipped(found, source)
            yield found
            continue
        yield _with_end(found, tokenizer) if found.is_end else found
        is_new = found.is_end


def _of_ids(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> Piece | Broken:
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= tokenizer.vocab_size:
        wrong = least if least < 0 else most
        return Broken(document.place, f"holds the id {wrong}, not in 0..{tokenizer.vocab_size - 1} of the tokenizer")
    return Piece(ids, None, True)


def _of_chat(document: Document, tokenizer: Tokenizer) -> Piece | Broken:
    if tokenizer.template is None:
        known = "none" if tokenizer.name == BYTES else "chat_template.jinja, and chat_template in tokenizer_config.json"
        raise DataError(
            f"{document.place} holds messages, and data.tokenizer={tokenizer.name} has no chat template (looked for: "
            f"{known}). Use the directory of a tokenizer with one, or a data.field of texts."
        )
    messages = cast("Sequence[Mapping[str, Any]]", document.content)
    try:
        check_messages(messages)
        chat = render(tokenizer.template, messages)
    except DataError as error:
        return Broken(document.place, str(error).rstrip("."))
    return Piece(*tokenizer.encode_chat(chat.text, chat.answers), True)


def _with_end(piece: Piece, tokenizer: Tokenizer) -> Piece:
    """Return a document with the end behind it, if it has none. It is learned if the token before it is."""
    if len(piece.ids) and piece.ids[-1] == tokenizer.end:
        return piece
    learned = piece.is_learned
    if learned is not None:
        learned = np.append(learned, bool(len(learned) and learned[-1]))
    return Piece(np.append(piece.ids, tokenizer.end), learned, True)
