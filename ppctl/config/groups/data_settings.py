"""The data sets."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, PathCheck, Positive, Rate, Settings, SomePath
from ppctl.config.groups.model_settings import UserFunction
from ppctl.config.groups.transformer_sizes import VocabSize
from ppctl.errors import ConfigError

Tokenizer = Annotated[str, PathCheck("bytes")]
OfExample = Annotated[int, checks.up_to(2**20, "an example is read whole")]


@dataclass
class Data(Settings):
    """Settings of every data set."""

    name: str = "???"
    # global batch: examples (sequences, for text) per step
    batch_size: Annotated[int, checks.up_to(2**24, "a batch is put together on a host")] = 32
    # share of examples held out for evaluation, at least a batch; 0: none
    eval_fraction: Rate = 0.05

    def check(self) -> None:
        super().check()
        path, share = getattr(self, "eval_path", None), self.eval_fraction
        if path is not None and share not in (0, Data.eval_fraction):
            raise ConfigError(
                f"data.eval_fraction={share} holds out a share of data.path, but "
                f"data.eval_path={path} is held out instead. Leave out one of them."
            )


@dataclass
class Stdlib(Data):
    """The sources of Python's standard library: on every machine, no download."""

    name: str = "stdlib"
    # directory of tokenized texts; auto: ~/.cache/ppctl
    cache_dir: Annotated[str, PathCheck("auto")] = "auto"
    # bytes | a tokenizer.json | a directory with one; None: run.start_from's, else bytes
    tokenizer: Tokenizer | None = None
    # token after each document; None: the tokenizer's eos_token, or the byte 0 for bytes
    end_token: str | None = None
    # true: whole documents in a sequence, separated in attention; false: windows over all tokens
    packing: bool = False


@dataclass
class TextFiles:
    """Text files, and where in them the documents are."""

    path: SomePath = "???"  # a file, a pattern such as data/*.jsonl.gz, or a directory
    # column of JSON lines and Parquet: a document's text, or a list of chat messages
    field: str = "text"
    prompt_field: str | None = None  # column with a prompt before the text; not a target
    # unit of a document in plain text: file | paragraph | line
    document: Annotated[str, checks.one_of("file", "paragraph", "line")] = "file"


@dataclass
class UserText(Stdlib):
    """Text of the user's files."""

    # action at a broken line, row or file: stop | skip
    on_error: Annotated[str, checks.one_of("stop", "skip")] = "stop"


@dataclass
class Text(TextFiles, UserText):
    """Text from plain, JSON-lines or Parquet files."""

    name: str = "text"
    eval_path: SomePath | None = None  # held-out files, instead of data.eval_fraction


@dataclass
class Part(TextFiles):
    """A part of a mixture: files, as in data=text, and their weight."""

    weight: Positive = 1.0


@dataclass
class Mixture(UserText):
    """Text of several weighted parts, each with files as in data=text; all share a tokenizer."""

    name: str = "mixture"
    # [{path: PATH, weight: 0.7}, ...]; each may have field, ... too
    parts: list[Part] = field(default_factory=list[Part])

    def check(self) -> None:
        super().check()
        if not self.parts:
            remedy = "Use data.parts=[{path: PATH, weight: 0.7}, {path: PATH}]."
            raise ConfigError(f"data.parts=[] has nothing to mix. {remedy}")
        for number, part in enumerate(self.parts):
            checks.domains(f"data.parts[{number}]", part)


@dataclass
class Tokens(Data):
    """Token ids in a flat memory-mapped file: `.npy` (1-D integers), or raw `.bin` of `dtype`."""

    name: str = "tokens"
    path: SomePath = "???"
    eval_path: SomePath | None = None  # held-out files, instead of data.eval_fraction
    # dtype of a raw .bin file: uint8 | uint16 | int32 | uint32
    dtype: Annotated[str, checks.one_of("uint8", "uint16", "int32", "uint32")] = "uint16"
    # tokenizer of the ids: a tokenizer.json, a directory with one, or bytes; None: run.start_from's
    tokenizer: Tokenizer | None = None
    vocab_size: VocabSize | None = None  # None: the tokenizer's, else the largest id plus one


@dataclass
class CustomData(UserFunction, Data):
    """A user's function (batch_size, seed, eval_fraction, **options) -> ppctl.data.DataSet."""

    name: str = "custom"


@dataclass
class Synthetic(Data):
    """Random token sequences with a learnable rule; a batch is a function of seed and step."""

    name: str = "synthetic"
    vocab_size: Annotated[VocabSize, partial(checks.at_least, least=2)] = 256
    num_sequences: Count = 65536


@dataclass
class Regression(Data):
    """Noisy examples of a fixed random network: inputs [num_features], targets [num_targets]."""

    name: str = "regression"
    num_features: OfExample = 32
    num_targets: OfExample = 8
    num_rows: Count = 65536


AnyData = Stdlib | Text | Mixture | Tokens | Synthetic | Regression | CustomData
