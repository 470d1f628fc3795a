"""Sweeps from the command line: composed and checked before anything runs, then a process a job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.cli.multirun import compose_sweep
from ppctl.errors import ConfigError

PPCTL = str(Path(sys.executable).parent / "ppctl")
pytestmark = pytest.mark.usefixtures("in_empty_directory")

# A stand-in for `ppctl train` in the jobs of a sweep, which are processes: Python imports
# sitecustomize at its start.
STAND_IN = """
import json, os, signal, sys, time, types

def train(config, words, *, as_json):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        shown = {"layers": config.model.num_layers, "dir": config.run.dir, "as_json": as_json}
        print(json.dumps(shown), flush=True)
        if config.run.seed == 9:  # a long run
            for _ in range(3000):  # a signal just before a sleep begins is heard after it
                time.sleep(0.1)
    except KeyboardInterrupt:  # as a run that takes a moment to save when interrupted
        time.sleep(0.5)
        print("saved", flush=True)
        return 130
    return 1 if config.model.num_layers == 3 else 0

sys.modules["ppctl.cli.commands.train"] = types.ModuleType("ppctl.cli.commands.train")
sys.modules["ppctl.cli.commands.train"].train = train
"""


@pytest.fixture
def jobs_environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def sweep(environment, *words):
    command = [PPCTL, "train", "--multirun", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_sweep_runs_each_job_in_a_separate_process_and_directory(
    jobs_environment, in_empty_directory
):
    done = sweep(jobs_environment, "model.num_layers=2,3,4", "run.name=abc", "--json")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results == [
        {"layers": n, "dir": f"runs/abc/model.num_layers={n}", "as_json": True} for n in (2, 3, 4)
    ]  # the failing second job did not stop the third
    assert done.returncode == 1
    rows = re.findall(r"^\d: model.num_layers=(\d) +(\w+)", done.stderr, re.MULTILINE)
    assert rows == [("2", "finished"), ("3", "failed"), ("4", "finished")]
    assert "ppctl: job 1: model.num_layers=3: ended with exit code 1\n" in done.stderr
    left = {
        str(path.relative_to("runs/abc")) for path in Path("runs/abc").rglob("*") if path.is_file()
    }
    assert left == {"sweep.json", "sweep.html"}


@pytest.mark.full
def test_a_sweep_over_run_dir_uses_the_typed_directories(jobs_environment):
    done = sweep(jobs_environment, "run.dir=x,y")
    assert [json.loads(line)["dir"] for line in done.stdout.splitlines()] == ["x", "y"]
    assert done.returncode == 0


@pytest.mark.full
def test_a_sweeps_directories_have_names_that_are_one_path_component(jobs_environment):
    done = sweep(jobs_environment, "data=text", "data.path=/a/b,/a_b", "run.dir='it\\'s, here'")
    found = [json.loads(line)["dir"] for line in done.stdout.splitlines()]
    assert len(set(found)) == 2
    assert all(re.fullmatch(r"it's, here/data\.path=_a_b(-\w{8})?", name) for name in found), found


def test_a_job_that_is_refused_does_not_stop_the_others(jobs_environment):
    done = sweep(jobs_environment, "data.batch_size=7,16")
    assert done.returncode == 1
    assert (
        "ppctl: job 0: data.batch_size=7: refused: data.batch_size=7 is not a multiple"
        in done.stderr
    )
    assert [json.loads(line)["dir"] for line in done.stdout.splitlines()] == [
        "runs/default/data.batch_size=16"
    ]


@pytest.mark.parametrize(
    ("command", "swept", "why"),
    [
        ("train", "optim.lr=1e-3,0.001", "have the same run.dir"),
        ("verify", "optim.lr=1e-3,0.001", "are the same request: their values are equal. Leave"),
        ("train", "optim.lr=1,1.0", "are the same request: their values are equal. Leave one"),
        ("train", "mesh=1x4,1x4x1", "are the same request: their values are equal. Leave one"),
    ],
)
def test_equal_values_in_different_spellings_are_refused(command, swept, why, capsys, served):
    assert cli.main([command, "-m", swept]) == 2
    assert why in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("values", ["range(1,10000000000)", "shuffle(range(0,1e9,0.5))"])
def test_a_sweep_without_end_is_refused_before_it_is_composed(values):
    with pytest.raises(ConfigError, match="a sweep of more than 65,536 jobs"):
        compose_sweep([f"run.seed={values}"], None, ["train"])


def test_a_sweep_of_tune_writes_a_recipe_for_each_job():
    words = ["data.batch_size=32,64", "tune.recipe=mine"]
    jobs = compose_sweep(words, None, ["tune"]).jobs
    assert [job.config.tune.recipe for job in jobs] == ["mine-0", "mine-1"]
    assert [compose([*job.words[1:]]).tune.recipe for job in jobs] == ["mine-0", "mine-1"]
    swept = compose_sweep(["tune.recipe=a,null"], None, ["tune"]).jobs
    assert [job.config.tune.recipe for job in swept] == ["a", None]


@pytest.mark.full
def test_a_sweep_of_tune_tunes_each_job():
    words = "model.num_layers=2 model.d_model=32 model.num_heads=2 model.seq_len=32 data=synthetic"
    words += " hardware=h100 tune.devices=2 data.batch_size=16,32 tune.recipe=mine"
    command = [PPCTL, "tune", "-m", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 jobs: 2 finished" in ended.stderr
    for number, size in enumerate((16, 32)):
        found = compose([f"recipes=mine-{number}"], Path.cwd())
        assert (found.data.batch_size, found.hardware.name) == (size, "h100")


@pytest.mark.parametrize(
    ("command", "seeds"),
    [("verify", [1, 2]), ("train hydra.launcher.jobs=2", [2, 1]), ("train", [1, 2])],
)
def test_a_sweep_is_composed_and_checked_before_anything_runs(
    command, seeds, served, monkeypatch, in_empty_directory
):
    sweeps = []
    monkeypatch.setattr(
        "ppctl.launch.sweep.run_sweep.run_sweep", lambda found, *given: sweeps.append(found) or 0
    )
    words = command.split()
    assert (
        cli.main([words[0], "-m", f"run.seed={seeds[0]},{seeds[1]}", "optim.lr=0.1", *words[1:]])
        == 0
    )
    [found] = sweeps
    assert [job.values for job in found.jobs] == [{"run.seed": seed} for seed in seeds]
    assert found.num_parallel == (2 if len(words) > 1 else 1)
    assert found.trains == (words[0] == "train")
    assert [job.config.run.dir for job in found.jobs] == [
        f"runs/default/run.seed={seed}" for seed in seeds
    ]
    assert found.jobs[0].words == (words[0], f"run.seed={seeds[0]}", "optim.lr=0.1")
    assert (served, list(in_empty_directory.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("number", "code", "last", "side"),
    [
        (signal.SIGINT, 130, "saved", 2),
        pytest.param(signal.SIGTERM, 143, "", 1, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, "saved", 1, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 143, "", 2, marks=pytest.mark.full),
    ],
)
def test_an_interrupted_sweep_waits_for_its_jobs_and_starts_no_other(
    number, code, last, side, jobs_environment
):
    command = [PPCTL, "train", "--multirun", "run.seed=9", "model.num_layers=1,2,4"]
    command += [f"hydra.launcher.jobs={side}"]
    logs = [Path(f"runs/default/model.num_layers={n}/output.log") for n in range(1, side + 1)]
    with subprocess.Popen(
        command,
        env=jobs_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        if side == 1:  # its job has the terminal
            assert json.loads(process.stdout.readline())["layers"] == 1
        while side == 2 and not all(log.exists() and "layers" in log.read_text() for log in logs):
            time.sleep(0.1)
        if number == signal.SIGINT:  # a terminal sends it to all of its foreground processes
            os.killpg(process.pid, number)
        else:
            process.terminate()
        out, err = process.communicate()
    ends = [out] if side == 1 else [log.read_text().partition("\n")[2] for log in logs]
    assert (process.returncode, [end.strip() for end in ends]) == (code, [last] * side)
    assert err.count(f"interrupted ({code})") == side
    assert "ppctl: job 2: model.num_layers=4: running" not in err
    states = [
        record["status"] for record in json.loads(Path("runs/default/sweep.json").read_text())
    ]
    assert states == ["interrupted"] * side + ["not started"] * (3 - side)
