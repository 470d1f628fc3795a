"""The profile window: traces that tools can read, of its steps and no other."""

import gzip
import json
import os
import signal
from collections import defaultdict

import jax
import pytest
from support.traced_run import traced_run

from ppctl.training.run.metrics import Metrics


def planes(directory):
    """The planes of the only trace below `directory`."""
    [file] = directory.rglob("*.xplane.pb")
    return list(jax.profiler.ProfileData.from_file(str(file)).planes)


@pytest.mark.full
def test_the_window_holds_its_steps_and_no_other(tmp_path, capsys):
    assert traced_run(tmp_path, "mesh=1x2", "schedule=gpipe", "model.num_layers=2") == 0
    out = capsys.readouterr().out
    assert (
        f"profile   {tmp_path}/profile (xprof, Perfetto); tasks by rank for Perfetto in "
        f"{tmp_path}/profile/" in out
    )
    modules = defaultdict(set)
    for plane in planes(tmp_path / "profile"):
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_module" in stats:
                    modules[stats["hlo_module"]].add(stats["run_id"])
    assert {name: len(runs) for name, runs in modules.items()} == {"jit_step": 2}
    [perfetto] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    trace = json.loads(gzip.decompress(perfetto.read_bytes()))
    steps = {
        event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("train")
    }
    assert steps == {"train"}


@pytest.mark.full
def test_a_run_interrupted_in_the_window_leaves_a_readable_trace(tmp_path, monkeypatch):
    log = Metrics.log

    def signal_itself(self, record, *attached):
        log(self, record, *attached)
        if record["step"] == 3:  # the first of the window
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Metrics, "log", signal_itself)
    words = [
        "mesh=1x2",
        "schedule=gpipe",
        "model.num_layers=2",
        "run.num_steps=50",
        "run.profile=2-41",
    ]
    assert traced_run(tmp_path, *words) == 143
    events = [
        event.name
        for plane in planes(tmp_path / "profile")
        for line in plane.lines
        for event in line.events
    ]
    assert "train" in events
