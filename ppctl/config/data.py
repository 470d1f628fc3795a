"""The data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppctl.config.checks import above_zero, at_least, choice, dotted, fraction
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
    end_token: str | None = None  # behind each document; None: the tokenizer's eos_token; of bytes the byte 0
    packing: bool = False  # true: whole documents in a sequence, none of which sees another; false: windows over all


@dataclass
class Text(Stdlib):
    """Text of files: plain, JSON lines, Parquet, ArrayRecord."""

    name: str = "text"
    path: str = "???"  # a file, a pattern such as data/*.jsonl.gz, or a directory
    field: str = "text"  # of JSON lines and Parquet: what holds a document's text, or a list of chat messages
    prompt_field: str | None = None  # likewise: a text before it that is read, but not learned
    document: str = "file"  # of plain text: file | paragraph | line
    records: str = "text"  # of ArrayRecord: text | token ids of type uint8 | uint16 | int32 | uint32
    on_error: str = "stop"  # at a broken line, row or file: stop | skip

    DOCUMENT: ClassVar[tuple[str, ...]] = ("file", "paragraph", "line")
    RECORDS: ClassVar[tuple[str, ...]] = ("text", "uint8", "uint16", "int32", "uint32")
    ON_ERROR: ClassVar[tuple[str, ...]] = ("stop", "skip")

    def check(self) -> None:
        super().check()
        choice("data.document", self.document, self.DOCUMENT)
        choice("data.records", self.records, self.RECORDS)
        choice("data.on_error", self.on_error, self.ON_ERROR)


@dataclass
class Part:
    """A part of a mixture: files as of data=text, and how often they come."""

    path: str = "???"
    weight: float = 1.0
    field: str = "text"
    prompt_field: str | None = None
    document: str = "file"
    records: str = "text"


@dataclass
class Mixture(Stdlib):
    """Text of several parts by weights: each has files as data=text has, and shares the tokenizer."""

    name: str = "mixture"
    parts: list[Part] = field(default_factory=list[Part])  # [{path: PATH, weight: 0.7}, ...], and field, ... of each
    on_error: str = "stop"  # at a broken line, row or file: stop | skip

    def check(self) -> None:
        super().check()
        choice("data.on_error", self.on_error, Text.ON_ERROR)
        if not self.parts:
            raise ConfigError(
                "data.parts=[] has nothing to mix. Use data.parts=[{path: PATH, weight: 0.7}, {path: PATH}]."
            )
        for number, part in enumerate(self.parts):
            above_zero(f"data.parts[{number}].weight", part.weight)
            choice(f"data.parts[{number}].document", part.document, Text.DOCUMENT)
            choice(f"data.parts[{number}].records", part.records, Text.RECORDS)


@dataclass
class Tokens(Data):
    """Token ids in a flat memory-mapped file: `.npy` (one dimension, integers), or raw `.bin` of `dtype`."""

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
class CustomData(Data):
    """Data of one's own: a function (batch_size, seed, eval_fraction, **options) that returns a ppctl.data.DataSet."""

    name: str = "custom"
    target: str = "???"  # the function: package.module.function, looked for in the current directory first
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # its other arguments: +data.options.NAME=VALUE

    def check(self) -> None:
        super().check()
        dotted("data.target", self.target)


@dataclass
class Synthetic(Data):
    """Random token sequences with a learnable rule; every batch is a function of the seed and the step."""

    name: str = "synthetic"
    vocab_size: int = 256
    num_sequences: int = 65536

    def check(self) -> None:
        super().check()
        at_least("data.vocab_size", self.vocab_size, 2)
        at_least("data.num_sequences", self.num_sequences, 1)


@dataclass
class Regression(Data):
    """Examples of a fixed random teacher network with noise: inputs [num_features], targets [num_targets]."""

    name: str = "regression"
    num_features: int = 32
    num_targets: int = 8
    num_rows: int = 65536
    noise: float = 0.01  # standard deviation added to the targets

    def check(self) -> None:
        super().check()
        for key in ("num_features", "num_targets", "num_rows"):
            at_least(f"data.{key}", getattr(self, key), 1)
        at_least("data.noise", self.noise, 0)
