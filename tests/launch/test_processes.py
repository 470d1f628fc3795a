"""Runs of several real processes on one machine: their training and their common end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
from support.environment import BY_USER
from support.processes import WORDS, Process, processes

from ppctl import cli
from ppctl.errors import ConfigError
from ppctl.executors import device_mesh
from ppctl.launch import join_processes
from ppctl.launch.cluster_variables import NO_PROXY, PROXIES, SET_BY


class Simulated(NamedTuple):
    """A simulated device."""

    process_index: int
    id: int
    platform: str = "cpu"


TWO = ("mesh=1x2", "model.num_layers=2", "run.num_steps=1000000")

# A process whose data are gone at its third step.
FAILING = """
from ppctl import cli
from ppctl.training.pipeline.engines.train_states import PlacedBatches
from ppctl.errors import DataError

put, puts = PlacedBatches.put, []

def failing(self, batch):
    puts.append(batch)
    if len(puts) == 3:
        raise DataError("the rows are gone")
    return put(self, batch)

PlacedBatches.put = failing
cli.console_script()
"""


def losses(run_dir):
    return [
        json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def assert_losses_of_one_process(run_dir, alone_dir, num_steps):
    words = [*WORDS, "mesh=1x1", f"run.dir={alone_dir}", f"run.num_steps={num_steps}"]
    assert cli.main(["train", *words]) == 0
    found = losses(run_dir)
    assert len(found) == num_steps
    assert found == pytest.approx(losses(alone_dir), rel=1e-9)


@pytest.mark.full
def test_four_processes_stop_at_the_same_step_and_two_resume_it(tmp_path):
    with processes(4, tmp_path / "run", "mesh=2x2", "run.num_steps=100000") as started:
        started[0].wait_for("step +8/")
        started[2].popen.send_signal(signal.SIGTERM)
        assert [process.end() for process in started] == [143] * 4
    [step] = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert started[0].lines[-3] == f"SIGTERM: saving step {step} and leaving\n"
    assert [process.lines for process in started[1:]] == [[]] * 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *(
            "checkpoints",
            "config.yaml",
            "eval.jsonl",
            "memory.json",
            "metrics.jsonl",
            "status.jsonl",
        )
    ]
    with processes(
        2, tmp_path / "run", "mesh=1x4", f"run.num_steps={step + 4}", "--json"
    ) as started:
        assert [process.end() for process in started] == [0, 0]
    assert any(f"resuming after step {step}" in line for line in started[0].lines)
    [summary] = [json.loads(line) for line in started[0].lines if line.startswith("{")]
    assert (summary["status"], summary["step"]) == ("finished", step + 4)
    assert started[1].lines == []
    assert_losses_of_one_process(tmp_path / "run", tmp_path / "alone", step + 4)


@pytest.mark.full
def test_a_pipeline_over_four_processes_trains_like_one_process(tmp_path):
    words = ["mesh=1x4", "run.num_steps=4", "run.eval_every=2", "run.eval_batches=1"]
    with processes(4, tmp_path / "run", *words) as started:
        assert [process.end() for process in started] == [0] * 4
    assert [process.lines for process in started[1:]] == [[]] * 3
    assert_losses_of_one_process(tmp_path / "run", tmp_path / "alone", 4)
    assert len((tmp_path / "run" / "eval.jsonl").read_text().splitlines()) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            {2: ["optim.lr=0.5"]},
            "optim.lr is 0.002 on process 0 and 0.5 on process 2. All processes need the same",
        ),
        (
            {1: ["mesh=1x6"], 2: ["run.seed=7"]},
            'mesh is "1x3" on process 0 and "1x6" on process 1.',
        ),
    ],
    ids=["lr", "mesh and seed"],
)
def test_processes_with_different_settings_end_before_anything_is_compiled(tmp_path, of, message):
    words = ["mesh=1x3", "model.num_layers=6"]
    with processes(3, tmp_path / "run", *words, of=of) as started:
        assert [process.end() for process in started] == [2] * 3
    [line] = [line for process in started for line in process.lines]
    assert line.startswith(f"ppctl: {message}")
    assert started[0].lines == [line]
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_processes_of_a_cluster_find_each_other_and_refuse_a_mesh_once(tmp_path):
    words = [
        "mesh=1x3",
        "model.num_layers=3",
        f"run.dir={tmp_path / 'run'}",
        "run.distributed=auto",
    ]
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    started = [
        Process(words, env=slurm | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)})
        for i in range(2)
    ]
    assert [process.end() for process in started] == [2, 2]
    assert started[0].lines == [
        "ppctl: mesh=1x3 has 3 devices, which 2 processes cannot share evenly. Use a mesh of 2, "
        "4, ... devices, or another number of processes.\n"
    ]
    assert started[1].lines == []


@pytest.mark.full
def test_a_failed_process_is_named_and_ends_the_others(tmp_path):
    events = tmp_path / "events.jsonl"
    words = *TWO, f"run.on_event=tee -a {events}"
    with processes(2, tmp_path / "run", *words, programs={1: FAILING}) as started:
        assert started[1].end() == 2
        assert started[0].end() == 3
    assert started[1].lines == ["ppctl: process 1: the rows are gone\n"]
    line = "ppctl: process 1 has failed, and all others leave: the rows are gone\n"
    assert line in started[0].lines  # the main thread may still print a step after it
    end = json.loads(events.read_text().splitlines()[-1])
    assert (end["event"], end["reason"]) == ("lost", "process 1 has failed: the rows are gone")


@pytest.mark.full
def test_a_process_that_stands_still_or_is_killed_has_a_name(tmp_path):
    events = tmp_path / "events.jsonl"
    words = ["run.slow_after_s=3", "run.heartbeat_s=20", f"run.on_event=tee -a {events}"]
    with processes(2, tmp_path / "run", *TWO, *words) as (lead, other):
        lead.wait_for("step +400/")  # by then the other has sent its position more than once
        other.popen.send_signal(signal.SIGSTOP)
        lead.wait_for(
            r"ppctl: process 1 is slow: (running|reading the data of) step \d+ for \d+ s(, "
            r"without a sign of life for \d+ s)?; 1 of 2 processes wait\.$"
        )
        other.popen.send_signal(signal.SIGCONT)
        steps = len(losses(tmp_path / "run"))
        while len(losses(tmp_path / "run")) < steps + 20:
            assert lead.popen.poll() is None, lead.lines[-1]  # a slow process ends nothing
            time.sleep(0.01)
        other.popen.kill()
        assert lead.end(timeout_s=60) not in (0, None)
        assert other.lines == []
        assert re.fullmatch(
            r"ppctl: process 0: lost contact with another process while \w+ .*step \d+ \(.*\); "
            r"process 1 stopped responding\.\n",
            lead.lines[-1],
        )
    told = [json.loads(line) for line in events.read_text().splitlines()]
    stalled, end = next(each for each in told if each["event"] == "stalled"), told[-1]
    assert stalled["reason"].startswith("process 1 is slow")
    assert end["event"] == "lost"
    assert end["reason"].startswith("lost contact with another process (")


@pytest.mark.full
def test_no_process_outlives_the_first_and_each_prints_one_line(tmp_path):
    with processes(2, tmp_path / "run", *TWO) as (lead, other):
        lead.wait_for("step +8/")
        lead.popen.kill()
        assert other.end(timeout_s=60) not in (0, None)
    [line] = other.lines
    assert re.fullmatch(
        r"ppctl: process 1: lost contact.*; process 0, which all others need, has ended\.\n", line
    )


@pytest.mark.full
def test_a_process_that_finds_no_other_prints_the_address(tmp_path):
    program = (
        "from ppctl import cli\nfrom ppctl.launch import join_processes as distributed\ndistributed.JOIN_S = "
        "2\ncli.console_script()"
    )
    words, programs = {0: ["run.num_processes=2"]}, {0: program}
    with processes(1, tmp_path / "run", "mesh=1x2", of=words, programs=programs) as [lead]:
        assert lead.end() == 2
    [line] = lead.lines
    assert re.match(
        r"ppctl: run.distributed: process 0 waited 2 s with run.coordinator=127.0.0.1:\d+,", line
    )


SOME_OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "coordinator", "message"),
    [
        (
            SOME_OF_SLURM,
            None,
            "cannot join with the cluster's variables: SLURM_STEP_NODELIST and SLURM_LOCALID, "
            "which srun sets, are missing. Use run.distributed=explicit with",
        ),
        (
            SOME_OF_SLURM | {"SLURM_NTASKS": "2(x2)"},
            None,
            "cannot join with the cluster's variables: SLURM_NTASKS='2(x2)', which srun sets, is "
            "not a number. Use run.distributed=explicit with",
        ),
        (
            {},
            None,
            "cannot join with the cluster's variables: coordinator_address should be defined.",
        ),
        (
            {"http_proxy": "http://proxy:3128"},
            "10.0.0.1:80",
            "not all 2 processes joined (http_proxy is set: add 10.0.0.1 to no_proxy). Start every",
        ),
        (
            {"http_proxy": "http://proxy:3128", "no_proxy": "node2, 10.0.0.1"},
            "10.0.0.1:80",
            "not all 2 processes joined. Start every process",
        ),
    ],
    ids=["some of Slurm's", "no number", "no cluster", "proxy", "no proxy"],
)
def test_variables_that_keep_processes_apart_are_named(monkeypatch, environ, coordinator, message):
    def initialize(address, *_, **__):
        if address is None:
            raise ValueError("coordinator_address should be defined.")
        time.sleep(1)

    names = {*os.environ, *environ} & {
        *PROXIES,
        *NO_PROXY,
        *(n for s in SET_BY.values() for n in s),
    }
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(join_processes, "JOIN_S", 0.2)
    monkeypatch.setattr(join_processes.jax.distributed, "initialize", initialize)
    monkeypatch.setattr(join_processes.jax.config, "update", lambda *_: None)
    with pytest.raises(ConfigError) as raised:
        join_processes.join(coordinator, 2, None, heartbeat_s=30)
    assert message in str(raised.value)


def test_processes_exchange_texts_by_devices_that_no_mesh_uses(monkeypatch):
    devices = [Simulated(process, number) for process in range(3) for number in range(4)]
    monkeypatch.setattr(join_processes.jax, "devices", lambda *_: devices)
    assert device_mesh.all_devices() == devices  # of a program that has joined by itself
    monkeypatch.setattr(join_processes, "_extra_on", {"cpu"})
    used, exchanging = device_mesh.all_devices(), join_processes.exchange_devices()
    assert [(device.process_index, device.id) for device in exchanging] == [(0, 3), (1, 2), (2, 2)]
    assert used == [device for device in devices if device.id < 2]


@pytest.mark.full
def test_a_port_that_is_taken_is_refused(tmp_path):
    request = ["mesh=1x2", f"run.dir={tmp_path}", "run.distributed=explicit", "run.num_processes=2"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = Process([*request, f"run.coordinator={address}", "run.process_id=0"])
        assert process.end() == 2
    [line] = process.lines
    assert re.match(
        rf"ppctl: run.coordinator={address}: process 0 cannot listen at port \d+ \(.*in use", line
    )


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_other_commands_refuse_several_processes(command, capsys):
    words = [
        "run.distributed=explicit",
        "run.coordinator=a:1",
        "run.num_processes=2",
        "run.process_id=0",
    ]
    assert cli.main([command, *WORDS, "mesh=1x2", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"ppctl: ppctl {command} runs in one process, but run.distributed=explicit. Use run."
    )


REFUSED = (
    (
        "run.distributed=explicit",
        "run.distributed=explicit needs run.coordinator=... run.num_processes=... run.process_id=",
    ),
    (
        "run.process_id=1",
        "run.process_id=1 needs a run of several processes, but run.distributed=off.",
    ),
    ("run.distributed=auto run.coordinator=here", "run.coordinator=here is not HOST:PORT"),
    (
        "run.distributed=auto run.num_processes=2 run.process_id=2",
        "run.process_id=2 is not one of the 2 processes",
    ),
)


def test_impossible_requests_are_refused_before_jax_is_loaded():
    program = "import sys; from ppctl.cli import main\n"
    program += "".join(f"print(main(['train', *{words.split()}]))\n" for words, _ in REFUSED)
    program += "print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=BY_USER
    )
    assert done.stdout.split() == ["2"] * len(REFUSED) + ["False"]
    for line, (_, message) in zip(done.stderr.splitlines(), REFUSED, strict=True):
        assert line.startswith(f"ppctl: {message}")
