"""The data sets."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from ppctl.config.field_checks import (
    Count,
    Positive,
    Rate,
    Settings,
    at_least,
    domains,
    one_of,
    up_to,
)
from ppctl.config.groups.model_settings import UserFunction, VocabSize
from ppctl.errors import ConfigError

OfExample = Annotated[int, up_to(2**20, "an example is read whole")]


@dataclass
class Data(Settings):
    """Settings of every data set."""

    name: str = "???"
    # global: examples (sequences, for text) a step
    batch_size: Annotated[int, up_to(2**24, "a batch is put together on a host")] = 32
    eval_fraction: Rate = 0.05  # held out for evaluation

    KEY = "data"


@dataclass
class Stdlib(Data):
    """Text of the Python standard library's own sources: on every machine, no download."""

    name: str = "stdlib"
    cache_dir: str = "~/.cache/ppctl"  # where the tokenized memmap is kept
    # bytes | a tokenizer.json | a directory with one; None: that of run.start_from, else bytes
    tokenizer: str | None = None
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
    # of plain text: file | paragraph | line
    document: Annotated[str, one_of("file", "paragraph", "line")] = "file"


@dataclass
class UserText(Stdlib):
    """Text of the user's files."""

    # at a broken line, row or file: stop | skip
    on_error: Annotated[str, one_of("stop", "skip")] = "stop"


@dataclass
class Text(TextFiles, UserText):
    """Text of files: plain, JSON lines, Parquet."""

    name: str = "text"
    eval_path: str | None = None  # held-out files, instead of data.eval_fraction

    def check(self) -> None:
        super().check()
        _check_held_out(self)


@dataclass
class Part(TextFiles):
    """A part of a mixture: files as of data=text, and how often they come."""

    weight: Positive = 1.0


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
            domains(f"data.parts[{number}]", part)


@dataclass
class Tokens(Data):
    """Token ids in a flat memory-mapped file: `.npy` (1-D integers), or raw `.bin` of `dtype`."""

    name: str = "tokens"
    path: str = "???"
    eval_path: str | None = None  # held-out files, instead of data.eval_fraction
    # of a raw .bin file: uint8 | uint16 | int32 | uint32
    dtype: Annotated[str, one_of("uint8", "uint16", "int32", "uint32")] = "uint16"
    # that made the ids: a tokenizer.json, a directory with one, or bytes; None: of run.start_from
    tokenizer: str | None = None
    vocab_size: VocabSize | None = None  # None: the tokenizer's, else the largest id plus one

    def check(self) -> None:
        super().check()
        _check_held_out(self)


def _check_held_out(data: Data) -> None:
    path, share = getattr(data, "eval_path"), data.eval_fraction  # noqa: B009
    if path is not None and share != Data.eval_fraction:
        raise ConfigError(
            f"data.eval_fraction={share} holds out a share of data.path, and data.eval_path={path} "
            "is held out instead. Leave out one of them."
        )


@dataclass
class CustomData(UserFunction, Data):
    """A user's function (batch_size, seed, eval_fraction, **options) -> ppctl.data.DataSet."""

    name: str = "custom"


@dataclass
class Synthetic(Data):
    """Random token sequences with a learnable rule; a batch is a function of seed and step."""

    name: str = "synthetic"
    vocab_size: Annotated[VocabSize, partial(at_least, least=2)] = 256
    num_sequences: Count = 65536


@dataclass
class Regression(Data):
    """Noisy examples of a fixed random network: inputs [num_features], targets [num_targets]."""

    name: str = "regression"
    num_features: OfExample = 32
    num_targets: OfExample = 8
    num_rows: Count = 65536


AnyData = Stdlib | Text | Mixture | Tokens | Synthetic | Regression | CustomData
