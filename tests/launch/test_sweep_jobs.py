"""The jobs of a sweep: skipped, resumed, run side by side, and refused beforehand."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from ppctl.config import Config, Run
from ppctl.config.code_digests import sources_here
from ppctl.config.groups.command_settings import SideBySide
from ppctl.errors import ConfigError, ScheduleError
from ppctl.launch.sweep import local_jobs
from ppctl.launch.sweep.run_sweep import run_jobs, run_sweep
from ppctl.launch.sweep.sweep_jobs import LOG, Job, Sweep, check_finished, check_sweep, has_ended
from ppctl.launch.sweep.sweep_records import show_results

NUM_STEPS = 20
# a process that ends with an error as ppctl does: the document in the file of its starter
LEAVES = """
import json, os, sys
document = {{"error": {{"kind": "config", "message": {message!r}, "remedy": None}}}}
with open(os.environ["PPCTL_ERROR_FILE"], "w") as file: json.dump(document, file)
print("ppctl:", {message!r}, file=sys.stderr)
sys.exit({code})
"""
FAILS = LEAVES.format(message="too few examples.", code=1)
FAST = [sys.executable, "-I", "-S", "-c"]  # starts in a few milliseconds


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep_of(number, *, side=1, **more):
    jobs = []
    for index in range(number):
        run_dir = Path("runs/s") / f"run.seed={index}"
        config = Config(run=Run(dir=str(run_dir), num_steps=NUM_STEPS, seed=index))
        swept = f"run.seed={index}"
        jobs.append(Job(index, {"run.seed": index}, swept, run_dir, ("train", swept), config))
    return Sweep("train", Path("runs/s"), jobs, SideBySide(jobs=side), **more)


def programs(monkeypatch, *texts):
    """Programs that the jobs run instead of ppctl; the last one also for all further jobs."""
    monkeypatch.setattr(
        local_jobs, "job_command", lambda job: [*FAST, texts[min(job.index, len(texts) - 1)]]
    )


def told(sweep):
    """Return (outcomes, signal, output on the terminal)."""
    out = io.StringIO()
    outcomes, stop = run_jobs(sweep, Console(file=out, width=200))
    return outcomes, stop, out.getvalue()


def saved(job, step=NUM_STEPS, **changed):
    """A run that has saved this step, of the job's settings but for some of `run`."""
    (job.run_dir / "checkpoints" / str(step)).mkdir(parents=True)
    config = replace(job.config, run=replace(job.config.run, **changed))
    (job.run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(config)))


def other_settings(job):
    """Return the differences that refuse the finished run in a job's directory, or None."""
    try:
        check_finished(job.run_dir, job.config)
    except ConfigError as error:
        found = re.search(r"holds a finished run of other settings \((.*)\)\. Use", str(error))
        assert found is not None
        return found[1]
    return None


def test_finished_jobs_are_skipped_and_broken_ones_started_again(monkeypatch, capfd):
    sweep = sweep_of(3, as_json=True)
    programs(monkeypatch, "print('{}')")
    saved(sweep.jobs[0])
    saved(sweep.jobs[1], step=10)
    outcomes, stop, text = told(sweep)
    assert [outcome.status for outcome in outcomes] == ["finished earlier", "finished", "finished"]
    assert stop is None
    assert "ppctl: job 0: run.seed=0: finished earlier (runs/s/run.seed=0)" in text
    assert "ppctl: job 1: run.seed=1: running on after step 10 in runs/s/run.seed=1" in text
    assert "ppctl: job 2: run.seed=2: running in runs/s/run.seed=2" in text
    documents = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert documents == [
        {"status": "finished", "run_dir": "runs/s/run.seed=0", "step": NUM_STEPS},
        {},
        {},
    ]


def test_a_refused_job_is_a_document_too(monkeypatch, capfd):
    sweep = sweep_of(2, as_json=True)
    programs(monkeypatch, "print('{}')")
    sweep.jobs[0] = replace(
        sweep.jobs[0], config=None, refusal=ScheduleError("x=1 is odd. Use x=2.")
    )
    outcomes, _, _ = told(sweep)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished"]
    error = {"kind": "schedule", "message": "x=1 is odd. Use x=2.", "remedy": "Use x=2."}
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == [
        {"error": error},
        {},
    ]


@pytest.mark.parametrize(
    "name", [f"{NUM_STEPS}.damaged", f"{NUM_STEPS}.orbax-checkpoint-tmp", str(NUM_STEPS - 1)]
)
def test_only_the_last_step_saved_whole_is_an_end(name):
    job = sweep_of(1).jobs[0]
    assert job.config is not None
    (job.run_dir / "checkpoints" / name).mkdir(parents=True)
    assert not has_ended(job.run_dir, job.config.run)
    (job.run_dir / "checkpoints" / str(NUM_STEPS)).mkdir()
    assert has_ended(job.run_dir, job.config.run)
    never = replace(job.config, run=replace(job.config.run, resume="never"))
    assert not has_ended(job.run_dir, never.run)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 7}, "run.seed: 7 then, 0 now"),
        ({"dtype": "bfloat16"}, "run.dtype: bfloat16 then, null now"),
        (
            {"timeline": True, "eval_every": 3},
            "run.eval_every: 3 then, 100 now; run.timeline: true then, false now",
        ),
        (
            {"log_every": 3, "name": "x", "dir": "/x", "resume": "must", "distributed": "explicit"},
            None,
        ),
    ],
)
def test_a_finished_run_of_other_settings_is_refused_and_stays(changed, message):
    job = sweep_of(2).jobs[0]
    saved(job, **changed)
    assert other_settings(job) == message


def test_another_choice_of_a_part_is_named():
    job = sweep_of(1).jobs[0]
    assert job.config is not None
    saved(job)
    file = job.run_dir / "config.yaml"
    before = yaml.safe_load(file.read_text())
    before["schedule"]["name"] = "zb_h1"
    file.write_text(yaml.safe_dump(before))
    assert other_settings(job) == "schedule=zb_h1 then, gpipe now"
    file.unlink()
    assert other_settings(job) == "its config.yaml cannot be read"


def test_a_finished_run_of_other_code_is_refused():
    job = sweep_of(1).jobs[0]
    assert job.config is not None
    Path("own.py").write_text("def model(): return 1\n")
    saved(job)
    file = job.run_dir / "checkpoints" / str(NUM_STEPS) / "meta" / "data.json"
    file.parent.mkdir()
    file.write_text(
        json.dumps({"meta": {"sources": {"model": sources_here(["own", "installed.elsewhere"])}}})
    )
    Path("own.py").write_text("def model():\n    return 1  # the same\n")
    assert other_settings(job) is None
    Path("own.py").write_text("def model(): return 2\n")
    assert other_settings(job) == "the code of own has changed"
    file.write_text("[" * 100000)
    assert other_settings(job) is None


def test_a_failing_job_ends_no_other_and_its_error_is_printed(monkeypatch, capfd):
    sweep = sweep_of(4)
    programs(
        monkeypatch,
        LEAVES.format(message="step 3: loss=nan.", code=4),
        "raise RuntimeError('Oh')",
        "import os; print('step 1'); os.kill(os.getpid(), 9)",
        "",
    )
    outcomes, stop, text = told(sweep)
    assert [(outcome.status, outcome.code) for outcome in outcomes] == [
        *(("failed", 4), ("failed", 1), ("failed", 137), ("finished", 0))
    ]
    errors = ["step 3: loss=nan.", "ended with exit code 1", "was killed by SIGKILL", None]
    assert [outcome.error for outcome in outcomes] == errors
    assert stop is None
    assert "job 0: run.seed=0: failed after" in text
    assert "ppctl: step 3: loss=nan." in capfd.readouterr().err  # a single job has the terminal
    out = io.StringIO()
    show_results(Console(file=out, width=200), outcomes)
    assert "4 jobs: 1 finished, 3 failed" in out.getvalue()
    assert "ppctl: job 1: run.seed=1: ended with exit code 1\n" in out.getvalue()


def test_the_exit_code_is_1_if_a_job_failed_and_the_summary_is_written(monkeypatch, capfd):
    programs(monkeypatch, "raise SystemExit(3)", "")
    assert run_sweep(sweep_of(2)) == 1
    assert [each["status"] for each in json.loads(Path("runs/s/sweep.json").read_text())] == [
        "failed",
        "finished",
    ]
    assert "ended with exit code 3" in Path("runs/s/sweep.html").read_text()
    programs(monkeypatch, "")
    assert run_sweep(sweep_of(2)) == 0


WAITS = """
import pathlib, time
pathlib.Path("began-{0}").touch()
until = time.monotonic() + 20
while not pathlib.Path("began-{1}").exists():
    assert time.monotonic() < until, "the other never began"
    time.sleep(0.01)
print("said {0}")
"""


def test_jobs_run_side_by_side_and_write_to_their_logs(monkeypatch, capfd):
    sweep = sweep_of(3, side=2)
    programs(
        monkeypatch, *(WAITS.format(0, 1), WAITS.format(1, 0), LEAVES.format(message="no.", code=2))
    )
    (sweep.jobs[2].run_dir).mkdir(parents=True)
    (sweep.jobs[2].run_dir / LOG).write_text("ppctl: of an earlier start\n")
    outcomes, _, text = told(sweep)
    assert [outcome.status for outcome in outcomes] == ["finished", "finished", "failed"]
    assert [(job.run_dir / LOG).read_text() for job in sweep.jobs] == [
        *("said 0\n", "said 1\n", "ppctl: of an earlier start\nppctl: no.\n")
    ]
    assert outcomes[2].error == "no."
    assert f"job 0: run.seed=0: running, output in runs/s/run.seed=0/{LOG}" in text
    assert capfd.readouterr() == ("", "")


def test_json_of_jobs_side_by_side_comes_in_whole_lines(monkeypatch, capfd):
    line = "{'a': 'x' * 3000}"
    programs(monkeypatch, f"import json\nfor _ in range(20): print(json.dumps({line}), flush=True)")
    told(sweep_of(3, side=3, as_json=True))
    out, err = capfd.readouterr()
    assert [json.loads(each) for each in out.splitlines()] == [{"a": "x" * 3000}] * 60
    assert err == ""


SAVES = """
import pathlib, signal, sys, time
def leave(number, frame):
    time.sleep(0.3)
    pathlib.Path("saved-{0}").write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGINT, leave); signal.signal(signal.SIGTERM, leave)
pathlib.Path("began-{0}").touch()
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_jobs_which_are_waited_for_and_starts_no_other(number, monkeypatch):
    sweep = sweep_of(4, side=2)
    programs(monkeypatch, *(SAVES.format(index) for index in range(4)))

    def interrupt():
        until = time.monotonic() + 20
        while (
            not (Path("began-0").exists() and Path("began-1").exists()) and time.monotonic() < until
        ):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    outcomes, stop, text = told(sweep)
    assert stop == number
    assert [outcome.status for outcome in outcomes] == [
        "interrupted",
        "interrupted",
        "not started",
        "not started",
    ]
    assert [Path(f"saved-{index}").read_text() for index in (0, 1)] == [str(int(number))] * 2
    assert f"{number.name}: no other job is started; waiting for jobs 0, 1" in text
    assert not Path("began-2").exists()


def test_a_job_that_was_interrupted_itself_ends_the_sweep(monkeypatch):
    programs(monkeypatch, "raise SystemExit(143)", "")
    outcomes, stop, _ = told(sweep_of(2))
    assert ([outcome.status for outcome in outcomes], stop) == (
        ["interrupted", "not started"],
        signal.SIGTERM,
    )


def test_an_unwritable_log_fails_only_its_job(monkeypatch):
    sweep = sweep_of(2, side=2)
    sweep.jobs[0].run_dir.parent.mkdir(parents=True)
    sweep.jobs[0].run_dir.write_text("a file of the user's")
    programs(monkeypatch, "")
    outcomes, _, _ = told(sweep)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished"]
    assert outcomes[0].error == "runs/s/run.seed=0 cannot be written: File exists"
    assert sweep.jobs[0].run_dir.read_text() == "a file of the user's"


def test_equal_failures_are_printed_in_one_line_with_a_count(monkeypatch):
    sweep = sweep_of(5)
    programs(monkeypatch, FAILS, "", FAILS)
    outcomes, _, text = told(sweep)
    assert re.search(r"job 2: run.seed=2: failed after \S+ s: too few examples.\n", text)
    out = io.StringIO()
    show_results(Console(file=out, width=200), outcomes)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("ppctl")]
    assert lines == ["ppctl: job 0: run.seed=0 and 3 more: too few examples."]


@pytest.mark.parametrize(
    ("reasons", "message"), [("aba", "All 3 jobs are refused; the first: a"), ("a", "a")]
)
def test_a_sweep_of_refused_jobs_is_refused_once(reasons, message):
    sweep = sweep_of(len(reasons))
    jobs = [
        replace(job, config=None, refusal=ConfigError(reason))
        for job, reason in zip(sweep.jobs, reasons, strict=True)
    ]
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_sweep(replace(sweep, jobs=jobs))
