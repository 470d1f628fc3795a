"""The environment of processes that tests start."""

import os

OF_TESTS = (
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_ENABLE_X64",
)  # variables that tests/conftest.py sets
# a user's environment, but for compiled programs, which all tests share
BY_USER = {
    name: value
    for name, value in os.environ.items()
    if name not in OF_TESTS and not name.startswith("PPCTL_")
}
