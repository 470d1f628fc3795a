"""A mark for tests that compile for GPUs that are not here, which takes XLA's plugin for CUDA; no driver, no GPU."""

import pytest

from ppctl.executors.topology import has_plugin

needs_cuda_plugin = pytest.mark.skipif(
    not has_plugin(), reason="needs XLA's plugin for CUDA: pip install ppctl[cuda12]"
)
