"""Data sets: what is read, in which order, and how a batch is divided. BUILDERS holds one function for each choice."""

from __future__ import annotations

from collections.abc import Callable

from ppctl.data.dataset import Batch, DataSet
from ppctl.data.mixture import mixture
from ppctl.data.synthetic_tokens import synthetic
from ppctl.data.teacher_rows import regression
from ppctl.data.text_files import stdlib, text
from ppctl.data.token_file import tokens

BUILDERS: dict[str, Callable[..., DataSet]] = {
    "stdlib": stdlib,
    "text": text,
    "mixture": mixture,
    "tokens": tokens,
    "synthetic": synthetic,
    "regression": regression,
}

__all__ = ["BUILDERS", "Batch", "DataSet", "mixture", "regression", "stdlib", "synthetic", "text", "tokens"]
