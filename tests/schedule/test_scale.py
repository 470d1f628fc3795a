"""Large schedules are simulated in seconds."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc"
)
def test_64_ranks_512_microbatches_and_two_chunks_take_less_than_a_gigabyte():
    code = (
        "import re; from pathlib import Path; "
        "from ppctl.schedule.costs import Costs; from ppctl.schedule.families.registry import build; "
        "from ppctl.schedule.simulator import simulate; "
        "schedule = build('interleaved', 64, 512, num_chunks=2); timeline = simulate(schedule, Costs()); "
        "print(sum(map(len, schedule.ranks)), timeline.makespan_s, "
        # not ru_maxrss, which a process inherits from the one that started it
        "int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_tasks, makespan_s, rss_bytes = map(float, found.stdout.split())
    assert num_tasks == 131072
    assert makespan_s == 3 * 512 + 3 * 63 / 2
    assert rss_bytes < 1e9
