"""Two starts of one run within seconds, as of a job that is queued twice: one trains, the other is
refused.
"""

import json
import subprocess
import sys
import time

import pytest
from support.environment import BY_USER

WORDS = (
    "model=mlp model.num_layers=2 model.d_model=8 data=regression data.batch_size=8 "
    "data.num_rows=512 mesh=1x1 schedule=gpipe schedule.num_microbatches=2 run.platform=cpu "
    "run.trackers=[] run.eval_every=null run.log_every=1"
)
DELAYS_S = [
    round(3 * i / 19, 2) for i in range(20)
]  # with a fresh and a resumed pair each: 40 pairs


def start(run_dir, num_steps):
    words = [
        *WORDS.split(),
        f"run.dir={run_dir}",
        f"run.num_steps={num_steps}",
        "run.checkpoint.every=10",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "ppctl.cli", "train", *words],
        env=BY_USER,
        stderr=subprocess.PIPE,
        text=True,
    )


def pair(run_dir, num_steps, delay_s):
    """(exit code, stderr) of both starts, the one that trained first."""
    first = start(run_dir, num_steps)
    time.sleep(delay_s)
    second = start(run_dir, num_steps)
    ends = [(process.communicate()[1], process.returncode)[::-1] for process in (first, second)]
    return sorted(ends)


@pytest.mark.full
@pytest.mark.parametrize(("delay_s", "starts"), [(0.0, 1), *((delay_s, 2) for delay_s in DELAYS_S)])
def test_the_second_of_two_starts_is_refused(tmp_path, delay_s, starts):
    run_dir = tmp_path / "run"
    for num_steps in (300, 600)[:starts]:  # from the start, and resumed
        (trained, _), (refused, said) = pair(run_dir, num_steps, delay_s)
        assert (trained, refused) == (0, 2), said
        assert f"run.dir={run_dir} is written by" in said
        steps = [
            json.loads(line)["step"]
            for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps == list(range(1, num_steps + 1))
    records = [json.loads(line) for line in (run_dir / "status.jsonl").read_text().splitlines()]
    assert [record["status"] for record in records] == ["started", "finished"] * starts
