"""The data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppctl.config.checks import at_least, choice, dotted, fraction


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
    """Byte-level text of the Python standard library's own sources: on every machine, no download."""

    name: str = "stdlib"
    cache_dir: str = "~/.cache/ppctl"  # where the tokenized memmap is kept


@dataclass
class Text(Stdlib):
    """Byte-level text of a file, or of every text file below a directory."""

    name: str = "text"
    path: str = "???"  # a file, or a directory


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
