"""Eight simulated CPU devices and float64, set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
# a busy machine must not abort a collective
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
)

collect_ignore = ["support/mpmd_worker.py"]  # a program; the search for doctests would import it
