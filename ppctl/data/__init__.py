"""Data sets: examples, their order, and batches. One function per choice of `data`."""

from ppctl.data.dataset import Batch, DataSet, with_held_out
from ppctl.data.generated_data import regression, synthetic
from ppctl.data.mixture import mixture
from ppctl.data.text_dataset import stdlib, text
from ppctl.data.token_windows import tokens

__all__ = [
    "Batch",
    "DataSet",
    "mixture",
    "regression",
    "stdlib",
    "synthetic",
    "text",
    "tokens",
    "with_held_out",
]
