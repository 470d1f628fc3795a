"""Data sets: examples, their order, the rows of a batch. BUILDERS: a function for each choice."""

from collections.abc import Callable

from ppctl.data.dataset import Batch, DataSet
from ppctl.data.generated_data import regression, synthetic
from ppctl.data.mixture import mixture
from ppctl.data.text_dataset import stdlib, text
from ppctl.data.token_windows import tokens

OF_CHOICES = stdlib, text, mixture, tokens, synthetic, regression
BUILDERS: dict[str, Callable[..., DataSet]] = {build.__name__: build for build in OF_CHOICES}

__all__ = ["BUILDERS", "Batch", "DataSet"]
