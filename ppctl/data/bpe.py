"""A byte-level BPE tokenizer, trained on documents without a network, and written as others read it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.data.chat import CHATML
from ppctl.data.documents import Broken, Source, documents_of
from ppctl.data.tokenizer import FILE, SETTINGS, tokenizers_library
from ppctl.errors import DataError

END = "<|endoftext|>"
SPECIAL = (END, "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2: what ends a document, and what ChatML marks turns with


class Trained(NamedTuple):
    """A tokenizer, and what it was trained on."""

    tokenizer: Any
    num_documents: int
    num_bytes: int
    skipped: Sequence[Broken]


def train_bpe(source: Source, vocab_size: int, special: Sequence[str] = SPECIAL) -> Trained:
    """Return a byte-level BPE of at most vocab_size tokens, the special ones first; the same files give the same one.

    Any text is encoded and decoded without loss. Raises DataError for what is broken in the files, unless it is
    skipped, and where they hold no text.
    """
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
    counts: Counter[str] = Counter()
    skipped: list[Broken] = []

    def texts() -> Iterator[str]:
        for document in documents_of(source, "reading"):
            if isinstance(document, Broken):
                skipped.append(document)
                continue
            counts["documents"] += not document.goes_on
            for text in (document.prompt, *_texts(document.content)):
                counts["bytes"] += len(text.encode())
                yield text

    bpe.train_from_iterator(texts(), trainer)
    if not counts["bytes"]:
        raise DataError(f"{', '.join(map(str, source.files[:3]))} hold no text. Use files with some.")
    return Trained(bpe, counts["documents"], counts["bytes"], skipped)


def write_tokenizer(directory: Path, bpe: Any, special: Sequence[str] = SPECIAL) -> None:
    """Write tokenizer.json and tokenizer_config.json, the first special token as what starts and ends documents."""
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


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a document: itself, or what the messages of a chat say; token ids hold none."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (
            each["content"] for each in content if isinstance(each, dict) and isinstance(each.get("content"), str)
        )
