"""Jobs submitted by submitit, to commands that stand in for Slurm's, and to a Slurm of one node if installed."""

from __future__ import annotations

import getpass
import io
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import submitit
from rich.console import Console

from ppctl.config import Config, Run
from ppctl.config.groups.command_settings import SubmititSlurm
from ppctl.errors import ConfigError
from ppctl.launch.sweep import submitit_jobs
from ppctl.launch.sweep.run_sweep import run_jobs, run_sweep
from ppctl.launch.sweep.sweep_jobs import SUBMITIT, SUBMITTED, SUBMITTED_LOG, Job, Sweep

NUM_STEPS = 20
FAST = [sys.executable, "-I", "-S", "-c"]  # starts in a few milliseconds
WRONG = """
import json, os, sys
with open(os.environ["PPCTL_ERROR_FILE"], "w") as file:
    json.dump({"error": {"message": "it is wrong."}}, file)
sys.exit("wrong")
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submitit_jobs, "POLL_S", 0.2)
    return tmp_path


def sweep_of(number, launcher=None):
    jobs = []
    for index in range(number):
        run_dir = Path("runs/s") / f"run.seed={index}"
        config = Config(run=Run(dir=str(run_dir), num_steps=NUM_STEPS, seed=index))
        swept = f"run.seed={index}"
        jobs.append(Job(index, {"run.seed": index}, swept, run_dir, ("train", swept), config))
    return Sweep("train", Path("runs/s"), jobs, launcher or SubmititSlurm(jobs=2))


def programs(monkeypatch, *texts):
    """What jobs run instead of ppctl, the last one for all others too."""
    monkeypatch.setattr(
        submitit_jobs, "job_command", lambda job: [*FAST, texts[min(job.index, len(texts) - 1)]]
    )


def told(sweep):
    out = io.StringIO()
    outcomes, stop = run_jobs(sweep, Console(file=out, width=200))
    return outcomes, stop, out.getvalue()


def stop_when(condition):
    """Asks this process to stop as soon as a condition holds."""

    def wait():
        until_s = time.monotonic() + 60
        while not condition() and time.monotonic() < until_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


SBATCH = """#!/bin/sh
cp "$1" sbatch.txt
sh -c "$(dirname "$0")/started" > /dev/null 2>&1 &
echo Submitted batch job 7
"""
STARTED = """#!/bin/sh
export SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
export SLURM_JOB_NODELIST=node0 SLURM_JOB_ID=7
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' sbatch.txt)
test -z "$last" && exec sh sbatch.txt
export SLURM_ARRAY_JOB_ID=7
for task in $(seq 0 $last); do SLURM_ARRAY_TASK_ID=$task sh sbatch.txt & done
"""
SRUN = """#!/bin/sh
while true; do case "$1" in --output|--error) shift 2;; --*) shift;; *) break;; esac; done
echo $$ >> pids
exec "$@"
"""
SACCT = """#!/bin/sh
echo 'JobID|State|NodeList'
for job in 7 7_0 7_1 7_2; do echo "$job|$(cat state)|node0"; done
"""


@pytest.fixture
def commands_of_slurm(tmp_path, monkeypatch):
    """Commands that answer as Slurm's do, and run jobs here. The file `state` is the state of all.

    `pids` are the processes of jobs.
    """
    texts = {"sbatch": SBATCH, "started": STARTED, "scontrol": STARTED, "srun": SRUN}
    (tmp_path / "bin").mkdir()
    for name, text in {**texts, "sacct": SACCT}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(submitit_jobs, "QUEUE_S", 0.2)
    monkeypatch.setattr(submitit.SlurmJob, "watcher", type(submitit.SlurmJob.watcher)())
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0.5)
    Path("state").write_text("PENDING")


COUNTS = """
import pathlib, time
with open("began", "a") as file: file.write("x")
until = time.monotonic() + 60
while not pathlib.Path("go").exists() and time.monotonic() < until: time.sleep(0.02)
print("said so")
"""


@pytest.mark.slow
def test_ends_and_outputs_of_jobs(commands_of_slurm, monkeypatch, capfd):
    programs(monkeypatch, "print('good')", WRONG, "import os; os.kill(os.getpid(), 9)")
    sweep = sweep_of(3)
    assert run_sweep(sweep) == 1
    outcomes = json.loads(Path("runs/s/sweep.json").read_text())
    assert [(each["status"], each["exit_code"]) for each in outcomes] == [
        ("finished", 0),
        ("failed", 1),
        ("failed", 137),
    ]
    assert [each["error"] for each in outcomes] == [None, "it is wrong.", "was killed by SIGKILL"]
    assert [(job.run_dir / SUBMITTED_LOG).read_text() for job in sweep.jobs] == [
        "good\n",
        "wrong\n",
        "",
    ]
    err = capfd.readouterr().err
    assert "job 0: run.seed=0: queued as Slurm job 7_0, output in runs/s/run.seed=0/" in err


def test_jobs_continue_without_the_sweep_which_finds_them_again(commands_of_slurm, monkeypatch):
    Path("state").write_text("RUNNING")
    programs(monkeypatch, COUNTS)
    stop_when(lambda: Path("began").exists())
    outcomes, stop, text = told(sweep_of(1))
    assert ([each.status for each in outcomes], stop) == (["running"], signal.SIGTERM)
    assert (
        "SIGTERM: submitted jobs continue; repeat the command to await them, or cancel them: "
        "scancel 7\n" in text
    )
    threading.Timer(1.0, Path("go").touch).start()
    outcomes, stop, text = told(sweep_of(1))
    assert ([each.status for each in outcomes], stop) == (["finished"], None)
    assert "queued as Slurm job 7, submitted before" in text
    assert Path("began").read_text() == "x"


SAVES = """
import pathlib, signal, sys, time
def leave(number, frame):
    pathlib.Path("saved").write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
print("began", flush=True)
pathlib.Path("began").touch()
if not pathlib.Path("saved").exists(): time.sleep(30)
"""


@pytest.mark.full
def test_a_job_saves_before_the_end_of_its_time_and_is_queued_again(commands_of_slurm, monkeypatch):
    Path("state").write_text("RUNNING")
    programs(monkeypatch, SAVES)

    def end_of_time():
        while not Path("began").exists():
            time.sleep(0.05)
        os.kill(int(Path("pids").read_text().split()[0]), signal.SIGUSR2)

    threading.Thread(target=end_of_time, daemon=True).start()
    outcomes, _, _ = told(sweep_of(1))
    assert [each.status for each in outcomes] == ["finished"]
    assert Path("saved").read_text() == str(int(signal.SIGTERM))
    assert Path("runs/s/run.seed=0", SUBMITTED_LOG).read_text() == "began\nbegan\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jobs": 0}, "hydra.launcher.jobs=0 must be a finite number of at least 1"),
        ({"time": 2}, "hydra.launcher.time=2 must be a finite number of at least 3"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        SubmititSlurm(**settings).check()


def test_without_slurm_no_file_is_written(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match="needs Slurm's sbatch, which is not on this machine's PATH"
    ):
        run_sweep(sweep_of(1, SubmititSlurm()))
    assert not Path("runs").exists()


# --- Slurm --------------------------------------------------------------------------------------

SLURM = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/slurmd.log
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/slurmd.pid
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={host} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm of one node, as long as a test takes."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed (slurmctld, slurmd)")
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    top = tmp_path / "slurm"
    for name in ("state", "spool"):
        (top / name).mkdir(parents=True)
    conf = top / "slurm.conf"
    conf.write_text(
        SLURM.format(
            host=socket.gethostname().split(".")[0], ports=ports, user=getpass.getuser(), top=top
        )
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            command = [name, "-D", "-f", str(conf)]
            daemons.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        until_s = time.monotonic() + 30
        while (
            "idle"
            not in subprocess.run(
                ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True
            ).stdout
        ):
            assert time.monotonic() < until_s, (top / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()


@pytest.mark.slow
def test_slurm_runs_an_array_whose_jobs_continue_without_the_sweep(slurm, monkeypatch):
    programs(monkeypatch, COUNTS, WRONG)
    settings = SubmititSlurm(cpus_per_task=1)
    stop_when(lambda: Path("began").exists())
    outcomes, stop, text = told(sweep_of(2, settings))
    assert stop == signal.SIGTERM
    assert outcomes[0].status in ("queued", "running")
    assert "job 0: run.seed=0: queued as Slurm job 1_0" in text
    assert "cancel them: scancel 1_0" in text
    threading.Timer(2.0, Path("go").touch).start()
    outcomes, _, text = told(sweep_of(2, settings))
    assert [each.status for each in outcomes] == ["finished", "failed"]
    assert outcomes[1].error == "it is wrong."
    assert "job 0: run.seed=0: queued as Slurm job 1_0, submitted before" in text
    assert Path("began").read_text() == "x"


def test_a_job_that_slurm_drops_is_no_hang(commands_of_slurm, monkeypatch):
    programs(monkeypatch, "import time; time.sleep(20)")  # ends after the test, without a result

    def run_and_drop():
        Path("state").write_text("RUNNING")
        time.sleep(1.0)
        Path("state").write_text("CANCELLED by 0")

    threading.Timer(1.0, run_and_drop).start()
    more = {"qos": "low", "tasks_per_node": 2, "mail-type": "END"}
    outcomes, _, text = told(
        sweep_of(1, SubmititSlurm(partition="p", gpus_per_node=2, additional_parameters=more))
    )
    assert outcomes[0].error.startswith("it has ended without a result (CANCELLED by 0): ")
    assert re.findall(r"job 0: run.seed=0: (\w+(?: as Slurm job 7)?)", text) == [
        *("queued as Slurm job 7", "running", "failed")
    ]
    record = json.loads(Path("runs/s/run.seed=0", SUBMITTED).read_text())
    assert record == {"id": "7", "tasks": 2}
    lines = set(Path("sbatch.txt").read_text().splitlines())
    assert lines >= {
        f"#SBATCH --{option}"
        for option in (
            "partition=p",
            "gpus-per-node=2",
            "qos=low",
            "ntasks-per-node=2",
            "mail-type=END",
            "time=60",
        )
    }


@pytest.mark.full
def test_refusals_of_slurm_are_printed(slurm, monkeypatch):
    programs(monkeypatch, "")
    outcomes, _, _ = told(sweep_of(1, SubmititSlurm(partition="nowhere")))
    assert outcomes[0].status == "failed"
    assert "it cannot be submitted" in outcomes[0].error
    assert "nowhere" in outcomes[0].error or "partition" in outcomes[0].error


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made",)


def test_a_record_of_a_job_leads_to_no_pickle_elsewhere(commands_of_slurm):
    sweep = sweep_of(1)
    (job,) = sweep.jobs
    job.run_dir.mkdir(parents=True)
    (sweep.directory / SUBMITIT).mkdir()
    (job.run_dir / SUBMITTED).write_text(json.dumps({"id": "../evil", "tasks": 1}))
    (sweep.directory / "evil_0_result.pkl").write_bytes(pickle.dumps(Evil()))
    assert submitit_jobs.SubmittedJobs(sweep)._submitted_before(job) is None
    assert not Path("made").exists()
