"""Data sets: examples, their order, the rows of a batch. BUILDERS: a function for each choice."""

from collections.abc import Callable

from ppctl.data.dataset import Batch, DataSet
from ppctl.data.generated_data import regression, synthetic
from ppctl.data.mixture import mixture
from ppctl.data.text_dataset import stdlib, text
from ppctl.data.token_windows import tokens

BUILDERS: dict[str, Callable[..., DataSet]] = {
    "stdlib": stdlib,
    "text": text,
    "mixture": mixture,
    "tokens": tokens,
    "synthetic": synthetic,
    "regression": regression,
}

__all__ = ["BUILDERS", "Batch", "DataSet"]
__all__ += ["mixture", "regression", "stdlib", "synthetic", "text"]
