"""Searches by Optuna: trials, results and records, with programs that write the files of runs."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from rich.console import Console

from ppctl.cli.multirun import compose_sweep
from ppctl.cli.optuna_sweeper import OptunaStudy, distribution
from ppctl.config import Config, Run
from ppctl.config.groups.command_settings import Search, SideBySide
from ppctl.errors import ConfigError
from ppctl.launch.sweep import local_jobs
from ppctl.launch.sweep.run_sweep import run_jobs, run_sweep
from ppctl.launch.sweep.sweep_jobs import STUDY, Job, Sweep

NUM_STEPS = 20
FAST = [sys.executable, "-I", "-S", "-c"]  # starts in a few milliseconds
TOP = Path("runs/s")
LR = {"optim.lr": FloatDistribution(1e-4, 1.0, log=True)}
BEST = 0.03

# the files of a run: a loss that is least at BEST, and a last checkpoint
RUNS = """
import json, math, pathlib
top = pathlib.Path({run_dir!r})
(top / "checkpoints/{num_steps}").mkdir(parents=True)
loss = (math.log({lr}) - math.log({best})) ** 2
(top / "metrics.jsonl").write_text(json.dumps({{"step": {num_steps}, "loss": loss}}) + chr(10))
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def job_command(job):
        text = RUNS.format(
            run_dir=str(job.run_dir), num_steps=NUM_STEPS, lr=job.values["optim.lr"], best=BEST
        )
        return [*FAST, text]

    monkeypatch.setattr(local_jobs, "job_command", job_command)


def made(index, overrides):
    (name,) = (each for each in overrides if each.startswith("optim.lr"))
    values = {"optim.lr": float(name.partition("=")[2])}
    config = Config(run=Run(dir=str(TOP / name), num_steps=NUM_STEPS))
    return Job(index, values, name, TOP / name, ("train", *overrides), config)


def searched(space=LR, make=made, fixed=("recipes=tiny",), side=1, **settings):
    """(jobs, outcomes, study) of a search in this directory."""
    TOP.mkdir(parents=True, exist_ok=True)
    study = OptunaStudy(Search(**settings), space, fixed, TOP, make)
    study.open()
    sweep = Sweep("train", TOP, [], SideBySide(jobs=side), study=study)
    outcomes, _ = run_jobs(sweep, Console(file=io.StringIO(), width=200))
    return sweep.jobs, [outcome.status for outcome in outcomes], study.study


def test_the_sampler_comes_closer_than_chance():
    jobs, outcomes, study = searched(n_trials=30)
    assert outcomes == ["finished"] * 30
    errors = [abs(math.log(job.values["optim.lr"] / BEST)) for job in jobs]
    assert study.best_value == pytest.approx(min(errors) ** 2)
    assert sum(errors[20:]) < sum(errors[:10])  # drawn at random


def test_a_search_is_summed_up():
    TOP.mkdir(parents=True)
    study = OptunaStudy(Search(n_trials=4), LR, (), TOP, made)
    assert run_sweep(Sweep("train", TOP, [], study=study)) == 0
    assert "lowest final_loss: " in (TOP / "sweep.html").read_text()
    assert [each["status"] for each in json.loads((TOP / "sweep.json").read_text())] == [
        "finished"
    ] * 4


def test_a_search_resumes_where_it_ended():
    first, _, _ = searched(n_trials=3)
    again, outcomes, _ = searched(n_trials=5, side=2)
    assert [job.name for job in again[:3]] == [job.name for job in first]
    assert outcomes == ["finished earlier"] * 3 + ["finished"] * 2
    assert len({job.name for job in again}) == 5
    _, outcomes, study = searched(n_trials=5)
    assert outcomes == ["finished earlier"] * 5
    assert len(study.trials) == 5


def test_jobs_that_broke_off_run_again_with_their_values(monkeypatch):
    good = local_jobs.job_command
    monkeypatch.setattr(local_jobs, "job_command", lambda job: [*FAST, "raise SystemExit(1)"])
    first, outcomes, study = searched(n_trials=2)
    assert outcomes == ["failed"] * 2
    assert not any(trial.state.is_finished() for trial in study.trials)
    monkeypatch.setattr(local_jobs, "job_command", good)
    again, outcomes, study = searched(n_trials=2)
    assert [job.name for job in again] == [job.name for job in first]
    assert outcomes == ["finished"] * 2
    assert all(trial.state.is_finished() for trial in study.trials)


def test_a_run_that_diverges_is_the_worst_result(monkeypatch):
    monkeypatch.setattr(local_jobs, "job_command", lambda job: [*FAST, "raise SystemExit(4)"])
    _, outcomes, study = searched(n_trials=1)
    assert outcomes == ["failed"]
    assert study.trials[0].value == math.inf


def test_a_finished_run_whose_last_loss_is_not_finite_is_the_worst(monkeypatch):
    finite = local_jobs.job_command
    monkeypatch.setattr(  # jobs 0 and 1 record null, as runs do for NaN and for a skipped last step
        local_jobs,
        "job_command",
        lambda job: [
            *finite(job)[:-1],
            finite(job)[-1].replace(
                '"loss": loss', '"loss": None' if job.index < 2 else '"loss": loss'
            ),
        ],
    )
    _, outcomes, study = searched(n_trials=4)
    assert outcomes == ["finished"] * 4
    assert [trial.value == math.inf for trial in study.trials] == [True, True, False, False]
    assert math.isfinite(study.best_value)
    _, outcomes, _ = searched(n_trials=5)
    assert outcomes == ["finished earlier"] * 4 + ["finished"]


def test_values_that_are_impossible_together_are_no_trial():
    def make(index, overrides):
        refusal = ConfigError("they do not go together.")
        return replace(made(index, overrides), config=None, refusal=refusal)

    _, outcomes, study = searched(n_trials=2, make=make)
    assert outcomes == ["failed"] * 2
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 2


def test_no_request_is_tried_twice():
    jobs, outcomes, _ = searched(
        space={"optim.lr": CategoricalDistribution(("0.1", "0.2"))}, n_trials=10
    )
    assert sorted(job.name for job in jobs) == ["optim.lr=0.1", "optim.lr=0.2"]
    assert outcomes == ["finished"] * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"metric": "step_time_s"},
        {"fixed": ("recipes=big",)},
        {"space": {"optim.lr": FloatDistribution(0.1, 0.2)}},
    ],
)
def test_another_search_in_its_place_is_another_study(changed):
    first, _, study = searched(n_trials=1)
    with suppress(ConfigError):  # these jobs do not record step_time_s
        _, _, other = searched(n_trials=2, **changed)
        assert other.study_name != study.study_name
        assert len(other.trials) == 2
    again, outcomes, _ = searched(n_trials=1)
    assert ([job.name for job in again], outcomes) == ([first[0].name], ["finished earlier"])


def test_a_file_of_something_else_stays():
    TOP.mkdir(parents=True)
    (TOP / STUDY).write_text("mine\n")
    with pytest.raises(ConfigError, match="not a study of ppctl, and is kept"):
        searched()
    assert (TOP / STUDY).read_text() == "mine\n"


def test_a_number_that_runs_do_not_record():
    with pytest.raises(
        ConfigError, match=r"metric=rows_per_s: job 0 .optim.lr=.*. has not recorded it"
    ):
        searched(n_trials=3, metric="rows_per_s")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b", CategoricalDistribution(("a", "b"))),
        ("1,null", CategoricalDistribution(("1", "null"))),
        ("[1,2],[3]", CategoricalDistribution(("[1,2]", "[3]"))),
        ("range(1,10,3)", IntDistribution(1, 7, step=3)),
        ("range(0.5,1.6,0.5)", FloatDistribution(0.5, 1.5, step=0.5)),
        ("int(interval(1,8))", IntDistribution(1, 8)),
        ("interval(1.0,8)", FloatDistribution(1.0, 8.0)),
        ("tag(log,interval(1e-4,1e-2))", FloatDistribution(1e-4, 1e-2, log=True)),
        ("tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
    ],
)
def test_a_search_covers_exactly_the_typed_values(text, expected):
    assert distribution(OverridesParser.create().parse_override(f"x={text}")) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optim.lr=tag(log,interval(0,1))", "cannot search optim.lr=tag.*low=0.0, high=1.0"),
        ("optim.lr=interval(2,1)", "cannot search optim.lr"),
        (
            "optim.rl=interval(0,1)",
            "optim.rl is not a setting of optim=adamw. Did you mean optim.lr",
        ),
        ("optim.lr=0.1", "no setting has several values"),
        (
            "optim.lr=interval(0,1) hydra.sweeper.metric=loss",
            "hydra.sweeper.metric=loss is not one of final_loss, eval",
        ),
        ("optim.lr=interval(0,1) hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0 must be"),
        (
            "optim.lr=interval(0,1) hydra.sweeper.metric=eval_loss run.eval_every=null",
            "run.eval_every=null evaluates nothing in 200 steps",
        ),
        (
            "optim.lr=interval(0,1) hydra.sweeper.metric=eval_loss run.eval_every=9 run.num_steps=8",
            "run.eval_every=9 evaluates nothing in 8 steps",
        ),
        ("optim.lr=interval(0,1) hydra.sweeper.trials=3", "trials"),
        (
            "optim.lr=0.1,abc run.seed=1,2",
            "could not be converted to Float",
        ),  # not when it is that value's turn
    ],
)
def test_impossible_searches_are_refused_before_any_job(words, message):
    with pytest.raises(ConfigError, match=message) as error:
        compose_sweep(["hydra/sweeper=optuna", *words.split()], None, ["train"])
    assert "\n" not in str(error.value)
    assert not Path("runs").exists()


def test_the_values_of_a_job_reach_its_config():
    sweep = compose_sweep(
        [
            "hydra/sweeper=optuna",
            "recipes=tiny",
            "optim.lr=interval(0.1,0.2)",
            "schedule=gpipe,1f1b",
        ],
        None,
        ["train"],
    )
    assert isinstance(sweep, Sweep)
    TOP.parent.joinpath("tiny").mkdir(parents=True)
    sweep.study.open()
    job = sweep.study.ask()
    assert job.config.optim.lr == job.values["optim.lr"]
    assert 0.1 <= job.config.optim.lr <= 0.2
    assert job.config.schedule.name == job.values["schedule"]
    assert job.words[:2] == ("train", "recipes=tiny")
    assert json.loads(json.dumps(job.values)) == job.values
