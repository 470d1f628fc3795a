"""A mark for tests that compile for GPUs that are not here, which takes XLA's plugin for CUDA; no
driver, no GPU.
"""

from importlib.metadata import version

import pytest

from ppctl.executors.described_devices import has_plugin

IS_NEWER = tuple(map(int, version("jaxlib").split(".")[:2])) >= (
    0,
    12,
)  # its compiler schedules differently
needs_cuda_plugin = pytest.mark.skipif(
    not has_plugin(), reason="needs XLA's plugin for CUDA: pip install ppctl[cuda12]"
)
