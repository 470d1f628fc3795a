"""Documents as token ids, a block of them encoded together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np

from ppctl.data.chat import check_messages, render
from ppctl.data.documents import Broken, Document, Source, check_skipped, documents_of
from ppctl.data.tokenizer import BYTES, Tokenizer
from ppctl.errors import DataError

CHARS_AT_ONCE = 1 << 22  # encoded together, on all cores


class Piece(NamedTuple):
    ids: np.ndarray
    is_learned: np.ndarray | None  # None: all
    is_end: bool  # of a document


class Block(NamedTuple):
    """Documents that are encoded together."""

    documents: Sequence[Document | Broken]
    is_new: bool  # whether the first begins a document, and not the rest of one

    @property
    def ends_document(self) -> bool:
        """Whether what comes behind the block begins a document."""
        last = self.documents[-1]
        return not (isinstance(last, Document) and last.goes_on)


def blocks_of(source: Source, num_done: int, *, is_new: bool) -> Iterator[Block]:
    """Yield the documents of files in blocks, behind the first `num_done`; is_new: as of the first block."""
    held: list[Document | Broken] = []
    num_chars = 0
    for document in islice(documents_of(source, "tokenizing"), num_done, None):
        held.append(document)
        num_chars += 1 if isinstance(document, Broken) else 1 + len(document.prompt) + len(document.content)
        if num_chars >= CHARS_AT_ONCE:
            yield (block := Block(held, is_new))
            held, num_chars, is_new = [], 0, block.ends_document
    if held:
        yield Block(held, is_new)


def encoded(block: Block, source: Source, tokenizer: Tokenizer) -> Iterator[Piece | Broken]:
    """Yield the documents of a block as ids, and those that are broken, where they may be skipped."""
    held, is_new = block
    texts: list[str] = []
    for document in held:
        if isinstance(document, Document) and isinstance(document.content, str):
            texts += [document.prompt, document.content] if document.prompt else [document.content]
    of_texts = iter(tokenizer.encode(texts))
    for document in held:
        if isinstance(document, Broken):
            yield document
            continue
        if isinstance(document.content, str):
            prompt = next(of_texts) if document.prompt else np.empty(0, np.uint32)
            ids = next(of_texts)
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
