"""Eight simulated CPU devices, float64, and a cache of compiled programs, set before JAX starts."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
# a busy machine must not abort a collective
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
)

collect_ignore = ["support/mpmd_worker.py"]  # a program; the search for doctests would import it
collect_ignore_glob = ["*conftest.py"]  # the search for doctests would import each as the one module `conftest`


def keep_compiled_programs() -> None:
    """Compile each program once in all: many tests train the same tiny model, and so do the processes that they start.

    JAX writes entries in place. Who reads half of one warns and compiles; the warning is ignored here and in
    pyproject.toml.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # has the directory from the process that started it
    directory = tempfile.mkdtemp(prefix="ppctl-tests-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry"


keep_compiled_programs()
