"""Text to token ids: bytes, or a `tokenizer.json` that the `tokenizers` library reads or trains."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ppctl.data.chat_templates import CHATML, ChatTemplate, chat_template, render, special_token
from ppctl.data.document_files import Broken, Source, documents_of
from ppctl.errors import IN_BRACKETS, DataError, missing_package, one_line, os_errors
from ppctl.user_files import read_text

BYTES = "bytes"  # data.tokenizer with one token per byte
NUM_BYTES = 256
BYTE_END = 0  # id after each document of bytes; never occurs in text
FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # document end, ChatML's marks

Spans = Sequence[tuple[int, int]]  # (start, stop) in characters
Encoded = tuple[np.ndarray, np.ndarray]  # ids, and whether each is learned


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as a function of texts.

    `encode` treats the names of special tokens as text. `encode_chat` encodes them as special
    tokens, because chat templates write them, and also returns which tokens begin in given spans.
    """

    name: str  # value of data.tokenizer
    vocab_size: int
    end: int  # id after each document
    start: tuple[int, ...]  # ids before each document
    fingerprint: str  # sha256 of all inputs that determine the ids
    encode: Callable[[Sequence[str]], list[np.ndarray]] = field(repr=False, compare=False)
    encode_chat: Callable[[str, Spans], Encoded] = field(repr=False, compare=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)
    # (id, whether it begins a text) -> UTF-8 bytes of the text, possibly a part of a character
    num_bytes: Callable[[int, bool], int] = field(repr=False, compare=False)
    template: ChatTemplate | None = None
    special: frozenset[int] = frozenset()  # ids that `encode` never returns


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids are UTF-8 bytes; 0 ends a document.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode(["aé"])[0].tolist(), tokenizer.decode([97, 195, 169])
    ([97, 195, 169], 'aé')
    """

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_chat(text: str, spans: Spans) -> Encoded:
        ids = encode([text])[0]
        is_learned = np.zeros(len(ids), bool)
        for first, last in spans:
            start = len(text[:first].encode())
            is_learned[start : start + len(text[first:last].encode())] = True
        return ids, is_learned

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def num_bytes(token: int, is_first: bool) -> int:
        return int(token != BYTE_END)

    return Tokenizer(BYTES, NUM_BYTES, BYTE_END, (), BYTES, encode, encode_chat, decode, num_bytes)


def load_tokenizer(name: str | None, end_token: str | None) -> Tokenizer:
    """Return the tokenizer of data.tokenizer. DataError if it cannot be used.

    name: bytes or None (one token per byte), a tokenizer.json, or a directory with one. end_token:
    token that ends documents; None: eos_token in the tokenizer's settings.
    """
    if name is None or name == BYTES:
        if end_token is not None:
            what = "data.tokenizer=bytes has no special tokens, and ends documents with the byte 0"
            raise DataError(f"data.end_token={end_token}: {what}. Leave it out.")
        return byte_tokenizer()
    folder, text = _read(name)
    settings = json_object(folder / SETTINGS)
    end_token = end_token or special_token(settings, "eos_token")
    return _loaded(name, text, end_token, chat_template(folder, settings))


def vocabulary_size(name: str) -> int:
    """Return the largest id of data.tokenizer plus one. Raises as `load_tokenizer` does."""
    if name == BYTES:
        return NUM_BYTES
    return max(_from_json(_read(name)[1]).get_vocab(with_added_tokens=True).values()) + 1


def token_with_id(name: str, end: int) -> str | None:
    """Return the token with the id `end`; None if data.tokenizer states an end or lacks the id."""
    if name == BYTES:
        return None
    folder, text = _read(name)
    states_end = special_token(json_object(folder / SETTINGS), "eos_token")
    return None if states_end else _from_json(text).id_to_token(end)


def _read(name: str) -> tuple[Path, str]:
    """Return the directory and the content of a tokenizer.json."""
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    remedy = "Use bytes, a tokenizer.json, or a directory with one, as `ppctl tokenize` writes."
    with os_errors(f"data.tokenizer={name}: {file} cannot be read", remedy, DataError, IN_BRACKETS):
        return file.parent, read_text(file)


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if the file is missing. DataError for anything else."""
    try:
        values = json.loads(read_text(file))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", error)
        raise DataError(f"{file} cannot be read ({why}). Restore it, or remove it.") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} does not hold a JSON object. Restore it, or remove it.")
    return cast("dict[str, Any]", values)


@lru_cache(8)  # parts of a mixture share a tokenizer
def _loaded(
    name: str, text: str, end_token: str | None, template: ChatTemplate | None
) -> Tokenizer:
    # 1. the library's tokenizer, for texts and for chats
    with _in_library(name):
        of_text, of_chat = _from_json(text), _from_json(text)
        of_text.encode_special_tokens = True
        vocabulary: dict[str, int] = of_text.get_vocab(with_added_tokens=True)
        added: dict[int, Any] = of_text.get_added_tokens_decoder()
        start: list[int] = of_text.encode("").ids  # ids that the post-processor adds
    if not vocabulary:
        raise DataError(f"data.tokenizer={name}: the vocabulary is empty. Use a trained tokenizer.")
    # 2. the tokens around a document
    if end_token not in vocabulary:
        names = ", ".join(str(each.content) for each in added.values()) or "none"
        what, remedy = f"{end_token} is not one of its tokens", "Use 'data.end_token=\"TOKEN\"'"
        if not end_token:
            what = f"no {SETTINGS} with an eos_token, which ends documents"
            remedy = f'Write {{"eos_token": TOKEN}} to {SETTINGS} next to {FILE}, or (except '
            remedy += "in `ppctl generate`) use 'data.end_token=\"TOKEN\"'"
        raise DataError(f"data.tokenizer={name}: {what}. {remedy} (its special tokens: {names}).")
    end = vocabulary[end_token]
    if start and start[-1] == end:
        start = start[:-1]

    # 3. its encoders and decoder
    @_in_library(name)
    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        batch = of_text.encode_batch_fast(list(texts), add_special_tokens=False)  # on all cores
        return [np.asarray(each.ids, np.uint32) for each in batch]

    @_in_library(name)
    def encode_chat(chat: str, spans: Spans) -> Encoded:
        encoding = of_chat.encode(chat, add_special_tokens=False)
        firsts = np.asarray([first for first, _ in encoding.offsets], np.int64)
        bounds = np.asarray(spans, np.int64).reshape(-1)  # characters, ascending
        is_learned = np.searchsorted(bounds, firsts, side="right") % 2 == 1
        return np.asarray(encoding.ids, np.uint32), is_learned

    @_in_library(name)
    def decode(ids: Sequence[int]) -> str:
        return of_text.decode([int(each) for each in ids], skip_special_tokens=False)

    with _in_library(name):
        num_bytes = _byte_counter(name, of_text, {end, *start})
    fingerprint = hashlib.sha256(f"{text}\0{end_token}".encode()).hexdigest()
    values = name, max(vocabulary.values()) + 1, end, tuple(start), fingerprint
    special = frozenset(i for i, token in added.items() if token.special)
    return Tokenizer(*values, encode, encode_chat, decode, num_bytes, template, special)


def _byte_counter(name: str, library: Any, around: set[int]) -> Callable[[int, bool], int]:
    """Return a function (id, whether it begins a text) -> number of its UTF-8 bytes.

    The bytes of a text's tokens sum to those of the text, if its decoder restores the text. around:
    ids around texts, without bytes. A token that begins a text lacks the space that the encoder
    puts before all texts.
    """
    kinds = json.dumps(json.loads(library.to_str())["decoder"])
    letters = {*tokenizers_library().pre_tokenizers.ByteLevel.alphabet()}  # a letter for each byte
    some: list[int] = library.encode("a", add_special_tokens=False).ids
    before = library.decode(some, skip_special_tokens=False)

    def text_of(token: int) -> tuple[str, int]:
        """Return the text of a token after others, and its number of bytes."""
        piece: str = library.id_to_token(token) or ""
        if '"ByteLevel"' in kinds and letters.issuperset(piece):
            return piece.replace("\u0120", " "), len(piece)
        if '"ByteFallback"' in kinds and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return piece, 1
        text = library.decode([*some, token], skip_special_tokens=False)[len(before) :]
        return text, len(text.encode())

    puts_space = any(text_of(token)[0].startswith(" ") for token in some[:1])

    @lru_cache(None)
    @_in_library(name)
    def num_bytes(token: int, is_first: bool) -> int:
        text, number = text_of(token)
        without = is_first and puts_space and text.startswith(" ")
        return 0 if token in around else number - without

    return num_bytes


@contextmanager
def _in_library(name: str) -> Iterator[None]:
    """Turn any error of the tokenizers library in the body into a DataError."""
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        what = f"the tokenizers library fails ({one_line(error)})"
        raise DataError(f"data.tokenizer={name}: {what}. Use another tokenizer.json.") from error


def _from_json(text: str) -> Any:
    library = tokenizers_library().Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    return library


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the special token that the chat template writes after an answer; None without one."""
    if tokenizer.template is None:
        return None
    messages = {"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}
    text = render(tokenizer.template, messages).text
    end = text.rfind("answer") + len("answer")
    ids, is_after = tokenizer.encode_chat(text, [(end, len(text))])
    return next((i for i in ids[is_after].tolist() if i in tokenizer.special), None)


def tokenizers_library() -> Any:
    """Import and return the tokenizers library. DataError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise missing_package("A tokenizer other than bytes", "tokenizers", "text") from error
    return tokenizers


# --- training a byte-level BPE --------------------------------------------------------------------


class Trained(NamedTuple):
    """A tokenizer and the amount of text that it was trained on."""

    tokenizer: Any
    num_documents: int
    num_bytes: int
    skipped: Sequence[Broken]


def train_bpe(source: Source, vocab_size: int, special: Sequence[str] = SPECIAL) -> Trained:
    """Train a byte-level BPE of at most vocab_size tokens; special tokens have the first ids.

    Equal texts give equal tokenizers. Encoding and decoding lose no text. Raises DataError for
    broken documents, unless they are skipped, and for files without text.
    """
    # 1. the empty tokenizer
    library = tokenizers_library()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # 2. train on the texts
    counts, skipped = Counter[str](), list[Broken]()

    def texts() -> Iterator[str]:
        for document in documents_of(source, "reading"):
            if isinstance(document, Broken):
                skipped.append(document)
                continue
            counts["documents"] += not document.goes_on
            content = document.content
            if not isinstance(content, str):  # the messages of a chat
                found = [each.get("content") for each in content if isinstance(each, dict)]
                content = [each for each in found if isinstance(each, str)]
            for text in (document.prompt, *([content] if isinstance(content, str) else content)):
                counts["bytes"] += len(text.encode())
                yield text

    bpe.train_from_iterator(texts(), trainer)
    if not counts["bytes"]:
        files = ", ".join(map(str, source.files[:3]))
        raise DataError(f"{files} hold no text. Use files with text.")
    return Trained(bpe, counts["documents"], counts["bytes"], skipped)


def write_tokenizer(directory: Path, bpe: Any, special: Sequence[str] = SPECIAL) -> None:
    """Write the tokenizer and its settings; the first special token starts and ends documents."""
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[0],
        "clean_up_tokenization_spaces": False,
    }
    if {*SPECIAL} <= {*special}:
        settings["chat_template"] = CHATML
    for name, text in ((FILE, bpe.to_str(pretty=True)), (SETTINGS, json.dumps(settings, indent=2))):
        beside = directory / f"{name}.tmp"
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(directory / name)
