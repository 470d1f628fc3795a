"""Text to token ids: bytes, which need nothing, or a `tokenizer.json`, which the `tokenizers` library reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from ppctl.data.chat import ChatTemplate, chat_template, render, special_token
from ppctl.errors import DataError

BYTES = "bytes"  # data.tokenizer of one token a byte
NUM_BYTES = 256
BYTE_END = 0  # the id behind each document of bytes; a file that holds such a byte is not text
FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"

Spans = Sequence[tuple[int, int]]  # characters from, to


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as a function of texts.

    A text is encoded as it stands: what looks like a special token in it is text. `encode_chat` takes special tokens
    for what they are, as a chat template writes them, and says which tokens begin in given spans of characters.
    """

    name: str  # as in data.tokenizer=
    vocab_size: int
    end: int  # the id behind each document
    start: tuple[int, ...]  # ids before each document
    fingerprint: str  # sha256 of all that decides the ids
    encode: Callable[[Sequence[str]], list[np.ndarray]] = field(repr=False, compare=False)
    encode_chat: Callable[[str, Spans], tuple[np.ndarray, np.ndarray]] = field(repr=False, compare=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)
    template: ChatTemplate | None = None
    special: frozenset[int] = frozenset()  # ids of tokens that no text becomes

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id."""
        return next(
            np.dtype(t) for t in ("uint8", "uint16", "uint32") if self.vocab_size <= 2 ** (8 * np.dtype(t).itemsize)
        )


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of UTF-8 bytes, which are the ids; 0 ends a document.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode(["aé"])[0].tolist(), tokenizer.decode([97, 195, 169])
    ([97, 195, 169], 'aé')
    """

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_chat(text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        ids = encode([text])[0]
        is_learned = np.zeros(len(ids), bool)
        for first, last in spans:
            start = len(text[:first].encode())
            is_learned[start : start + len(text[first:last].encode())] = True
        return ids, is_learned

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    return Tokenizer(BYTES, NUM_BYTES, BYTE_END, (), BYTES, encode, encode_chat, decode)


def load_tokenizer(name: str, end_token: str | None) -> Tokenizer:
    """Return the tokenizer of data.tokenizer and data.end_token (None: the eos_token of its tokenizer_config.json).

    name: bytes, a tokenizer.json, or a directory with one. Raises DataError for what is none.
    """
    if name == BYTES:
        if end_token is not None:
            raise DataError(
                f"data.end_token={end_token}: data.tokenizer=bytes has no special tokens, and ends documents with the "
                "byte 0. Leave it out."
            )
        return byte_tokenizer()
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(
            f"data.tokenizer={name}: {file} cannot be read ({why}). Use bytes, a tokenizer.json, or a directory with "
            "one, as `ppctl tokenize` writes."
        ) from error
    settings = tokenizer_settings(file.parent)
    return _loaded(name, text, end_token, json.dumps(settings, sort_keys=True), chat_template(file.parent, settings))


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """Return what stands in the tokenizer_config.json of a directory, {} where there is none."""
    file = directory / SETTINGS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}). Restore it, or remove it.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds no settings by name. Restore it, or remove it.")
    return cast("dict[str, Any]", found)


@lru_cache(8)  # parts of a mixture have the same
def _loaded(name: str, text: str, end_token: str | None, settings: str, template: ChatTemplate | None) -> Tokenizer:
    library = tokenizers_library()

    def made() -> Any:
        try:
            loaded = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"data.tokenizer={name}: is no tokenizer of the tokenizers library ({error}).") from error
        loaded.no_truncation()
        loaded.no_padding()
        return loaded

    of_text, of_chat = made(), made()
    of_text.encode_special_tokens = True
    vocabulary: dict[str, int] = of_text.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"data.tokenizer={name}: holds no tokens. Use one that was trained.")
    ending = end_token or special_token(json.loads(settings), "eos_token")
    if ending not in vocabulary:
        known = ", ".join(str(each.content) for each in of_text.get_added_tokens_decoder().values()) or "none"
        what = f"{ending} is none of its tokens" if ending else f"no eos_token in a {SETTINGS} says what ends documents"
        raise DataError(f"data.tokenizer={name}: {what}. Use data.end_token=TOKEN (its special tokens: {known}).")
    end = vocabulary[ending]
    start: list[int] = of_text.encode("", add_special_tokens=True).ids  # what its post-processor adds
    if start and start[-1] == end:
        start = start[:-1]

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        found = of_text.encode_batch_fast(list(texts), add_special_tokens=False)  # on all cores
        return [np.asarray(each.ids, np.uint32) for each in found]

    def encode_chat(chat: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        found = of_chat.encode(chat, add_special_tokens=False)
        firsts = np.asarray([first for first, _ in found.offsets], np.int64)
        bounds = np.asarray([[first, last] for first, last in spans], np.int64).reshape(-1)
        assert all(a <= b for a, b in pairwise(bounds.tolist())), "spans in order"
        is_learned = np.searchsorted(bounds, firsts, side="right") % 2 == 1
        return np.asarray(found.ids, np.uint32), is_learned

    def decode(ids: Sequence[int]) -> str:
        return of_text.decode([int(each) for each in ids], skip_special_tokens=False)

    fingerprint = hashlib.sha256(f"{text}\0{ending}".encode()).hexdigest()
    vocab_size = max(vocabulary.values()) + 1
    special = frozenset(i for i, token in of_text.get_added_tokens_decoder().items() if token.special)
    return Tokenizer(name, vocab_size, end, tuple(start), fingerprint, encode, encode_chat, decode, template, special)


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the special token that its chat template writes behind an answer; None for none, or no template."""
    if tokenizer.template is None:
        return None
    answer = "answer"
    chat = render(tokenizer.template, [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}])
    behind = chat.text.rfind(answer) + len(answer)
    ids, is_behind = tokenizer.encode_chat(chat.text, [(behind, len(chat.text))])
    return next((i for i in ids[is_behind].tolist() if i in tokenizer.special), None)


def tokenizers_library() -> Any:
    """Return the tokenizers library, imported. DataError where it is not installed."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            "A tokenizer other than bytes needs tokenizers, which is not installed. Install it: "
            "pip install 'ppctl[text]'."
        ) from error
    return tokenizers
