"""A byte-level BPE tokenizer, trained on documents and written in the usual files."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.data.chat_templates import CHATML
from ppctl.data.document_files import Broken, Source, documents_of
from ppctl.data.tokenizer import FILE, SETTINGS, tokenizers_library
from ppctl.errors import DataError

END = "<|endoftext|>"
SPECIAL = (END, "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2: end of a document, ChatML's marks


class Trained(NamedTuple):
    """A tokenizer and the amount of text that it was trained on."""

    tokenizer: Any
    num_documents: int
    num_bytes: int
    skipped: Sequence[Broken]


def train_bpe(source: Source, vocab_size: int, special: Sequence[str] = SPECIAL) -> Trained:
    """Return a byte-level BPE of at most vocab_size tokens, the special ones first; reproducible.

    Any text is encoded and decoded without loss. Raises DataError for broken documents, unless they
    are skipped, and for files without text.
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
    # 2. the texts
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
        files = ", ".join(map(str, source.files[:3]))
        raise DataError(f"{files} hold no text. Use files with some.")
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


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a document: itself, or the contents of the messages of a chat."""
    if isinstance(content, str):
        yield content
    else:
        messages = (each for each in content if isinstance(each, dict))
        yield from (each["content"] for each in messages if isinstance(each.get("content"), str))
