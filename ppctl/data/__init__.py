"""Data sets: examples, their order, the rows of a batch. BUILDERS: a function for each choice."""

from __future__ import annotations

from collections.abc import Callable

from ppctl.data.dataset import Batch, DataSet
from ppctl.data.generated_data import regression, synthetic
from ppctl.data.mixture import mixture
from ppctl.data.text_dataset import stdlib, text
from ppctl.data.token_file import tokens, tokens_by_size

BUILDERS: dict[str, Callable[..., DataSet]] = {
    "stdlib": stdlib,
    "text": text,
    "mixture": mixture,
    "tokens": tokens,
    "synthetic": synthetic,
    "regression": regression,
}
BUILDERS_BY_SIZE = BUILDERS | {"tokens": tokens_by_size}  # as quickly as the sizes can be known

__all__ = ["BUILDERS", "BUILDERS_BY_SIZE", "Batch", "DataSet"]
__all__ += ["mixture", "regression", "stdlib", "synthetic", "text"]
