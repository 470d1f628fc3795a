"""The data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ppctl.config.field_checks import above_zero, at_least, choice, dotted, fraction
from ppctl.config.groups.model_settings import UserFunction
from ppctl.errors import ConfigError


@dataclass
class Data:
    """Settings of every data set."""

    name: str = "???"
    batch_size: int = 32  # global: examples (sequences, for text) a step
    eval_fraction: float = 0.05  # held out for evaluation

    def check(self) -> None:
        at_least("data.batch_size", self.batch_size, 1)
        fraction("data.eval_fraction", self.eval_fraction, below_one=True)


@dataclass
class Stdlib(Data):
    """Text of the Python standard library's own sources: on every machine, no download."""

    name: str = "stdlib"
    cache_dir: str = "~/.cache/ppctl"  # where the tokenized memmap is kept
    tokenizer: str = "bytes"  # bytes | a tokenizer.json | a directory with one
    # after each document; None: the tokenizer's eos_token; of bytes the byte 0
    end_token: str | None = None
    # true: whole documents in a sequence, separated in attention; false: windows over all
    packing: bool = False


@dataclass
class TextFiles:
    """Files of text, and where their documents are."""

    path: str = "???"  # a file, a pattern such as data/*.jsonl.gz, or a directory
    # column of JSON lines and Parquet: a document's text, or a list of chat messages
    field: str = "text"
    prompt_field: str | None = None  # likewise: a text before it, read but not learned
    document: str = "file"  # of plain text: file | paragraph | line

    DOCUMENT: ClassVar[tuple[str, ...]] = ("file", "paragraph", "line")


@dataclass
class UserText(Stdlib):
    """Text of the user's files."""

    on_error: str = "stop"  # at a broken line, row or file: stop | skip

    ON_ERROR: ClassVar[tuple[str, ...]] = ("stop", "skip")

    def check(self) -> None:
        super().check()
        choice("data.on_error", self.on_error, self.ON_ERROR)


@dataclass
class Text(TextFiles, UserText):
    """Text of files: plain, JSON lines, Parquet."""

    name: str = "text"

    def check(self) -> None:
        super().check()
        choice("data.document", self.document, self.DOCUMENT)


@dataclass
class Part(TextFiles):
    """A part of a mixture: files as of data=text, and how often they come."""

    weight: float = 1.0


@dataclass
class Mixture(UserText):
    """Text of several parts by weights, each with files as data=text, and one tokenizer."""

    name: str = "mixture"
    # [{path: PATH, weight: 0.7}, ...], and field, ... of each
    parts: list[Part] = field(default_factory=list[Part])

    def check(self) -> None:
        super().check()
        if not self.parts:
            remedy = "Use data.parts=[{path: PATH, weight: 0.7}, {path: PATH}]."
            raise ConfigError(f"data.parts=[] has nothing to mix. {remedy}")
        for number, part in enumerate(self.parts):
            above_zero(f"data.parts[{number}].weight", part.weight)
            choice(f"data.parts[{number}].document", part.document, Text.DOCUMENT)


@dataclass
class Tokens(Data):
    """Token ids in a flat memory-mapped file: `.npy` (1-D integers), or raw `.bin` of `dtype`."""

    name: str = "tokens"
    path: str = "???"
    dtype: str = "uint16"  # of a raw .bin file: uint8 | uint16 | int32 | uint32
    vocab_size: int | None = None  # None: largest id in the file plus one

    DTYPE: ClassVar[tuple[str, ...]] = ("uint8", "uint16", "int32", "uint32")

    def check(self) -> None:
        super().check()
        choice("data.dtype", self.dtype, self.DTYPE)
        at_least("data.vocab_size", self.vocab_size, 1)


@dataclass
class CustomData(UserFunction, Data):
    """A user's function (batch_size, seed, eval_fraction, **options) -> ppctl.data.DataSet."""

    name: str = "custom"

    def check(self) -> None:
        super().check()
        dotted("data.target", self.target)


@dataclass
class Synthetic(Data):
    """Random token sequences with a learnable rule; a batch is a function of seed and step."""

    name: str = "synthetic"
    vocab_size: int = 256
    num_sequences: int = 65536

    def check(self) -> None:
        super().check()
        at_least("data.vocab_size", self.vocab_size, 2)
        at_least("data.num_sequences", self.num_sequences, 1)


@dataclass
class Regression(Data):
    """Noisy examples of a fixed random network: inputs [num_features], targets [num_targets]."""

    name: str = "regression"
    num_features: int = 32
    num_targets: int = 8
    num_rows: int = 65536

    def check(self) -> None:
        super().check()
        for key in ("num_features", "num_targets", "num_rows"):
            at_least(f"data.{key}", getattr(self, key), 1)


AnyData = Stdlib | Text | Mixture | Tokens | Synthetic | Regression | CustomData
