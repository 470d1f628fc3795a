"""Freed memory stays in the process on CPUs, unless the user sets malloc's variables."""

import os
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
from ppctl.training.pipeline.jax_start import keep_freed_memory
is_kept = keep_freed_memory()
touch = lambda: len(b"x" * (64 << 20))
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(int(is_kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(("variables", "is_kept"), [({}, 1), ({"MALLOC_ARENA_MAX": "4"}, 0)])
def test_a_block_that_was_freed_is_used_again_without_page_faults(variables, is_kept):
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = map(int, done.stdout.split())
    pages = 4 * (64 << 20) // os.sysconf("SC_PAGESIZE")
    assert kept == is_kept
    # not the reverse: with transparent huge pages a new block has few faults, too
    assert not is_kept or faults < pages / 10
