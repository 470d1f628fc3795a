"""Data sets: examples, their order, and batches. One function per choice of `data`."""

from ppctl.data.dataset import Batch, DataSet, with_held_out
from ppctl.data.generated_data import regression, synthetic
from ppctl.data.text_dataset import mixture, stdlib, text
from ppctl.data.token_examples import tokens

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
