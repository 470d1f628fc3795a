"""Data sets: examples, their order, and batches. One function per choice of `data`."""

from ppctl.data.array_data import regression, synthetic
from ppctl.data.dataset import Batch, DataSet
from ppctl.data.text_dataset import mixture, stdlib, text
from ppctl.data.token_examples import tokens

__all__ = ["Batch", "DataSet", "mixture", "regression", "stdlib", "synthetic", "text", "tokens"]
