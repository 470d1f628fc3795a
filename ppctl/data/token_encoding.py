"""Documents as token ids, many of them encoded together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ppctl.data.chat_templates import render
from ppctl.data.document_files import Broken, Document, Source, check_skipped, documents_of
from ppctl.data.tokenizer import BYTES, Tokenizer
from ppctl.errors import DataError

CHARS_AT_ONCE = 1 << 22  # encoded together, on all cores


class Piece(NamedTuple):
    ids: np.ndarray
    is_learned: np.ndarray | None  # None: all
    is_end: bool  # of a document


def encoded(source: Source, tokenizer: Tokenizer) -> Iterator[Piece | Broken]:
    """Yield the documents of files as ids, and the broken ones, if these may be skipped."""
    is_new = True  # whether the next piece begins a document, and not the rest of one
    for documents in _blocks(source):
        # 1. all texts of a block together
        texts: list[str] = []
        for document in documents:
            if isinstance(document, Document) and isinstance(document.content, str):
                texts += [document.prompt] if document.prompt else []
                texts.append(document.content)
        of_texts = iter(tokenizer.encode(texts))
        # 2. the ids of each document
        for document in documents:
            if isinstance(document, Broken):
                yield document
                continue
            if isinstance(document.content, str):
                piece = _of_text(document, of_texts, tokenizer.start if is_new else ())
            else:
                piece = _of_chat(document, tokenizer)
            if isinstance(piece, Broken):
                check_skipped(piece, source)
                yield piece
                continue
            yield _with_end(piece, tokenizer) if piece.is_end else piece
            is_new = piece.is_end


def _blocks(source: Source) -> Iterator[list[Document | Broken]]:
    """Yield the documents of files, as many at a time as are encoded together."""
    documents: list[Document | Broken] = []
    num_chars = 0
    for document in documents_of(source, "tokenizing"):
        documents.append(document)
        num_chars += 1
        if isinstance(document, Document):
            num_chars += len(document.prompt) + len(document.content)
        if num_chars >= CHARS_AT_ONCE:
            yield documents
            documents, num_chars = [], 0
    if documents:
        yield documents


def _of_text(document: Document, of_texts: Iterator[np.ndarray], start: Sequence[int]) -> Piece:
    """Return the next text of `of_texts`, after `start` and its prompt, which is not learned."""
    prompt = next(of_texts) if document.prompt else np.empty(0, np.uint32)
    ids = np.concatenate([start, prompt, text := next(of_texts)])
    is_learned = np.arange(len(ids)) >= len(ids) - len(text) if document.prompt else None
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
    return Piece(*tokenizer.encode_chat(chat.text, chat.answers), True)


def _with_end(piece: Piece, tokenizer: Tokenizer) -> Piece:
    """Return a document with the end after it, unless present; learned if the last token is."""
    if len(piece.ids) and piece.ids[-1] == tokenizer.end:
        return piece
    learned = piece.is_learned
    if learned is not None:
        learned = np.append(learned, bool(len(learned) and learned[-1]))
    return Piece(np.append(piece.ids, tokenizer.end), learned, True)
