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
    """Compile each program once a test process: many tests train the same tiny model in functions of their own.

    Only this process uses the directory, and only while it lives. JAX writes its entries in place, so that a process
    beside it could read half of one; the processes that tests start therefore compile for themselves.
    """
    import jax

    directory = tempfile.mkdtemp(prefix="ppctl-tests-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


keep_compiled_programs()
