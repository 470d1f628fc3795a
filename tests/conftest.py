"""Eight simulated CPU devices, float64, and a cache of compiled programs, set before JAX starts."""

import atexit
import gc
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from importlib.metadata import version

import absl.logging
import pytest

from ppctl.config.config_dirs import user_cache_dir

FLAGS = [
    # a busy machine must not abort a collective
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
    # the same programs in slower machine code: most of the time of tests is compiling
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # the modules are too small to be worth dividing
]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12):  # 0.12 has only MLIR's emitters
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
# Hydra sets up logging anew, which closes the streams of handlers but the process's own: pytest's
# would be one.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # has the variables of the process that started it
KEPT = user_cache_dir() / "tests"  # compiled programs and seconds of tests, for later runs


def set_environment() -> None:
    """Simulate eight devices, compute in float64, and keep compiled programs for all tests and the
    processes that they start.

    The programs stay for later runs of the tests, in the user's cache directory: a directory for
    each machine, version of JAX, and set of flags. JAX writes entries of its cache in place: who
    reads half of one warns and compiles; the warning is ignored here and in pyproject.toml. Python
    keeps its bytecode too, whatever PYTHONDONTWRITEBYTECODE says. Other files of the cache, such as
    tokens of texts, go to a temporary directory.
    """
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": " ".join([*os.environ.get("XLA_FLAGS", "").split(), *FLAGS]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
    }
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    of_user = tempfile.TemporaryDirectory(prefix="ppctl-cache-")
    atexit.register(of_user.cleanup)
    os.environ.setdefault("MPLCONFIGDIR", str(KEPT / "matplotlib"))  # its list of fonts
    os.environ["XDG_CACHE_HOME"] = of_user.name
    import jax  # reads these variables

    from ppctl.training.pipeline.jax_start import drop_oldest, machine_directory

    key = hashlib.sha256(f"{version('jax')} {os.environ['XLA_FLAGS']}".encode()).hexdigest()[:12]
    directory = machine_directory(KEPT / key)
    directory.mkdir(parents=True, exist_ok=True)
    drop_oldest(directory)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))


if not IS_WORKER:
    set_environment()


@pytest.fixture(autouse=True)
def sixty_four_bits():
    """Compute in float64 at the start of each test: commands set JAX's width by their run.dtype."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.fixture(autouse=True)
def modules_of_users(tmp_path_factory):
    """Drop the modules that a test imports from a temporary directory: names may repeat."""
    before, top = len(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in [*sys.modules][before:]:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and file.startswith(top):
            del sys.modules[name]


SECONDS = KEPT / "seconds.json"  # {id of a test: seconds of its newest run, with its fixtures}
ran: Counter[str] = Counter()  # the same for the tests of this run


def seconds_of_tests() -> dict[str, float]:
    """Return the recorded seconds of tests by id; empty without a readable record."""
    with suppress(OSError, ValueError):
        return json.loads(SECONDS.read_text())
    return {}


RECORDED = {} if IS_WORKER else seconds_of_tests()
NEW_S = 0.1  # seconds of a test without a record


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give all workers one record, so that they put their tests in the same order."""
    node.workerinput["seconds"] = RECORDED


def pytest_collection_modifyitems(config, items):
    """Run the longest files first, so that the workers end together (with --dist loadfile)."""
    if not IS_WORKER:
        return  # one process keeps the order of the command
    known = config.workerinput["seconds"]
    of_file: Counter[str] = Counter()
    for item in items:
        of_file[item.nodeid.partition("::")[0]] += known.get(item.nodeid, NEW_S)
    items.sort(key=lambda item: -of_file[item.nodeid.partition("::")[0]])


def pytest_runtest_logreport(report):
    ran[report.nodeid] += report.duration


def pytest_sessionfinish():
    if not IS_WORKER and ran:
        KEPT.mkdir(parents=True, exist_ok=True)
        written = SECONDS.with_suffix(f".{os.getpid()}")  # renamed when it is whole
        written.write_text(json.dumps(seconds_of_tests() | ran))
        written.replace(SECONDS)


def pytest_collection_finish():
    """Look for garbage seldom, and only in what tests make: modules and collected tests are many
    objects that stay.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


# programs; the search for doctests would import them, and torch or another program
collect_ignore = [
    "support/mpmd_worker.py",
    "benchmarks/pytorch_step.py",
    "benchmarks/pytorch_pipeline.py",
    "benchmarks/fp8_kernels.py",
]
collect_ignore_glob = [
    "*conftest.py"
]  # the search for doctests would import each as the one module `conftest`
