"""The profile window: traces that tools can read, of its steps and no other."""

import contextlib
import gzip
import json
import os
import re
import signal
from collections import defaultdict

import jax
import pytest
from support.traced_run import traced_run

from ppctl.config import Run
from ppctl.training.run import train_run as run
from ppctl.training.run.metrics import Metrics
from ppctl.training.run.profiler import ProfileWindow


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
def test_a_run_interrupted_in_the_window_leaves_a_readable_trace(tmp_path, monkeypatch, capsys):
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
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("profile")]
    assert lines[0].startswith(f"profile   {tmp_path}/profile (xprof, Perfetto), cut by the end of")
    assert re.search(r"of the run: steps 2-[345] of steps 2-41; tasks by rank", lines[0])
    events = [
        event.name
        for plane in planes(tmp_path / "profile")
        for line in plane.lines
        for event in line.events
    ]
    assert "train" in events


@pytest.mark.parametrize(
    ("start", "steps", "line"),
    [
        (0, range(2, 10), None),
        (2, range(2, 10), None),
        (4, range(4, 10), "traces only steps 4-9: this start begins with step 4 (the first is 0)"),
        (10, range(0), "traces nothing: this start begins with step 10 (the first is 0)"),
    ],
)
def test_a_start_traces_the_steps_of_the_window_that_it_runs_and_names_the_others(
    start, steps, line
):
    window = ProfileWindow(Run(profile="2-9"), start)
    assert window.steps == steps
    assert window.passed == (line and f"run.profile {line}")
    assert ProfileWindow(Run(), start).passed is None


@pytest.mark.full
def test_a_run_that_ends_before_its_profile_window_prints_a_note(train, monkeypatch):
    late = lambda finished: signal.SIGTERM if finished == 2 else None
    monkeypatch.setattr(run, "_stop_requests", lambda *_: contextlib.nullcontext(late))
    code, out, _ = train("run.profile=4")
    assert code == 143
    assert "\nprofile   no trace: the run ends before step 4 (the first is 0)\n" in out
    code, out, _ = train("run.profile=0")
    assert "\nprofile   run.profile traces nothing: this start begins with step 2 (the" in out
    assert len([line for line in out.splitlines() if line.startswith("profile")]) == 1
