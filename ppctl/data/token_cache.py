"""Documents as token ids: written once to a cache directory, then memory-mapped.

A directory holds ids.bin (the ids of all documents: the tokenizer's end token follows each text;
the template writes all tokens of a chat), ends.bin (the end offset of each document),
is_learned.bin (unless all ids are learned) and record.json (dtypes and digests). It is written
under another name and then renamed, so readers find a complete directory or none. One process
writes while the others wait; if it is killed, one of them starts over.
"""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ppctl.data import document_files
from ppctl.data.chat_templates import render
from ppctl.data.document_files import Broken, Document, Source
from ppctl.data.token_examples import digest, open_bin
from ppctl.data.tokenizer import BYTES, Tokenizer
from ppctl.errors import IN_BRACKETS, DataError, os_errors

VERSION = 4  # version of the files, hashed into the directory's name
RECORD = "record.json"
CHARS_AT_ONCE = 1 << 22  # characters encoded together, on all cores


class Tokens(NamedTuple):
    """Documents as ids: document i is ids[ends[i - 1] : ends[i]]."""

    ids: np.ndarray  # memory-mapped
    ends: np.ndarray  # int64
    is_learned: np.ndarray | None  # [num_ids]; None: all are learned
    content: str  # digests of the arrays
    num_skipped: int
    first_skipped: str  # place of the first skipped document, and the reason


def cached_tokens(
    name: str, source: Source, tokenizer: Tokenizer, salt: str, cache_dir: str
) -> Tokens:
    """Return the documents of files as ids, from the cache or newly written to it.

    The directory's name contains a hash of the files' paths, sizes and times and of all settings
    that determine the ids; salt: further text to hash. A damaged directory is written again. Raises
    DataError for a broken document that may not be skipped, an unreadable file, and a cache that
    cannot be written.
    """
    path = Path(cache_dir).expanduser() / f"{name}-{_key(source, tokenizer, salt)}.tokens"
    if (tokens := _read(path)) is None:
        with _locked(path) as made:
            if (tokens := _read(path)) is None:  # no other process has written it meanwhile
                _write(path, made, source, tokenizer)
                tokens = _read(path)
    if tokens is None:
        what = f"The token cache {path} does not read back as written"
        raise DataError(f"{what}. Use another data.cache_dir.")
    return tokens


def _key(source: Source, tokenizer: Tokenizer, salt: str) -> str:
    template = tokenizer.template and asdict(tokenizer.template)
    reading = asdict(source.fields), source.skips_broken
    decides = [VERSION, tokenizer.fingerprint, template, salt, *reading]
    sha = hashlib.sha256(json.dumps(decides).encode())
    for file in source.files:
        with document_files.readable(file):
            stat = file.stat()
        facts = os.fsencode(file), stat.st_size, stat.st_mtime_ns, file in source.unnamed
        sha.update(b"%s\0%d\0%d\0%d\0" % facts)
    return sha.hexdigest()[:16]


def _read(path: Path) -> Tokens | None:
    """Return the tokens in a directory; None if it does not exist or is damaged."""
    with _usable(path, "read"):
        try:
            record = json.loads((path / RECORD).read_text())
            dtypes, digests = record["dtypes"], record["digests"]
            arrays = {name: open_bin(path / f"{name}.bin", dtypes[name]) for name in dtypes}
        except (FileNotFoundError, ValueError):
            return None
    if any(digest(array) != digests[name] for name, array in arrays.items()):
        return None
    content, skipped = " ".join(digests.values()), (record["skipped"], record["first"])
    return Tokens(arrays["ids"], arrays["ends"], arrays.get("is_learned"), content, *skipped)


def _usable(path: Path, done: str) -> AbstractContextManager[None]:
    remedy = "Use data.cache_dir=<a directory that you may write, with space left>."
    return os_errors(f"The token cache {path} cannot be {done}", remedy, DataError, IN_BRACKETS)


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Hold a directory's lock; yield the directory of unfinished files, removed at the end."""
    made = path.with_suffix(".tmp")
    with _usable(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # file system without locks: each process writes
                made = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
            try:
                yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)


def _write(path: Path, made: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write the ids of documents to the directory `made`, then rename it."""
    for directory in (made, path):
        shutil.rmtree(directory, ignore_errors=True)
    made.mkdir()
    skipped: list[str] = []
    smallest = np.min_scalar_type(tokenizer.vocab_size - 1)  # type of ids
    dtypes = {"ids": smallest.str, "ends": "<i8", "is_learned": "|b1"}
    places = {name: made / f"{name}.bin" for name in dtypes}
    with ExitStack() as stack:
        files = {name: stack.enter_context(place.open("wb")) for name, place in places.items()}

        def append(name: str, values: Any) -> None:
            files[name].write(np.asarray(values, dtypes[name]).tobytes())

        # 1. write the arrays
        num_ids, all_learned = 0, True
        for piece in encoded(source, tokenizer):
            if isinstance(piece, Broken):
                skipped.append(f"{piece.place} {piece.reason}")
                continue
            num_ids += len(piece.ids)
            append("ids", piece.ids)
            append("is_learned", piece.is_learned)
            append("ends", [num_ids] if piece.is_end else [])
            all_learned = all_learned and piece.is_learned.all()
    # 2. write the record, and rename
    if all_learned:
        places["is_learned"].unlink()
        del dtypes["is_learned"]
    digests = {name: digest(open_bin(places[name], dtype)) for name, dtype in dtypes.items()}
    record = {"dtypes": dtypes, "digests": digests}
    record |= {"skipped": len(skipped), "first": skipped[0] if skipped else ""}
    (made / RECORD).write_text(json.dumps(record))
    try:
        made.replace(path)
    except OSError:
        if not path.exists():  # without locks another process may have written the same
            raise


# --- documents as ids -----------------------------------------------------------------------------


class Piece(NamedTuple):
    ids: np.ndarray
    is_learned: np.ndarray
    is_end: bool  # last piece of its document


def encoded(source: Source, tokenizer: Tokenizer) -> Iterator[Piece | Broken]:
    """Yield the documents of files as ids, and the broken ones if the source skips them."""
    is_new = True  # whether the next piece begins a document
    for documents in _blocks(source):
        # 1. encode all texts of a block together
        texts: list[str] = []
        for document in documents:
            if isinstance(document, Document) and isinstance(document.content, str):
                texts += [document.prompt] if document.prompt else []
                texts.append(document.content)
        of_texts = iter(tokenizer.encode(texts))
        # 2. divide the ids among the documents
        for document in documents:
            if isinstance(document, Broken):
                yield document
                continue
            if isinstance(document.content, str):
                piece = _of_text(document, of_texts, tokenizer, is_new=is_new)
            else:
                piece = _of_chat(document, tokenizer)
            if isinstance(piece, Broken):
                document_files.check_skipped(piece, source)
            else:
                is_new = piece.is_end
            yield piece


def _blocks(source: Source) -> Iterator[list[Document | Broken]]:
    """Yield lists of documents to encode together, each of about CHARS_AT_ONCE characters."""
    documents: list[Document | Broken] = []
    num_chars = 0
    for document in document_files.documents_of(source, "tokenizing"):
        documents.append(document)
        num_chars += 1
        if isinstance(document, Document):
            content = document.content  # a text, or the messages of a chat
            texts = [content] if isinstance(content, str) else map(str, content)
            num_chars += len(document.prompt) + sum(map(len, texts))
        if num_chars >= CHARS_AT_ONCE:
            yield documents
            documents, num_chars = [], 0
    if documents:
        yield documents


def _of_text(
    document: Document, of_texts: Iterator[np.ndarray], tokenizer: Tokenizer, *, is_new: bool
) -> Piece:
    """Return a document's ids, with its start and end tokens; `of_texts` yields those of texts."""
    prompt = next(of_texts) if document.prompt else np.empty(0, np.uint32)
    ids = np.concatenate([tokenizer.start if is_new else (), prompt, text := next(of_texts)])
    if not document.goes_on and not (len(ids) and ids[-1] == tokenizer.end):
        ids, text = np.append(ids, tokenizer.end), np.append(text, tokenizer.end)
    is_learned = np.full(len(ids), fill_value=True)
    if document.prompt:
        is_learned[: len(ids) - len(text)] = False
    return Piece(ids, is_learned, not document.goes_on)


def _of_chat(document: Document, tokenizer: Tokenizer) -> Piece | Broken:
    if tokenizer.template is None:
        files = "chat_template.jinja, and chat_template in tokenizer_config.json"
        raise DataError(
            f"{document.place} holds messages, and data.tokenizer={tokenizer.name} has no chat "
            f"template (looked for: {'none' if tokenizer.name == BYTES else files}). "
            "Use the directory of a tokenizer with one, or a data.field of texts."
        )
    messages = cast("Sequence[Mapping[str, Any]]", document.content)
    try:
        chat = render(tokenizer.template, messages)
    except DataError as error:
        return Broken(document.place, str(error).rstrip("."))
    return Piece(*tokenizer.encode_chat(chat.text, chat.answers), is_end=True)
