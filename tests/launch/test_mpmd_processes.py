"""`executor=mpmd` on several processes by the command: the run of one, also through checkpoints of each other."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from ppctl import cli

LIMIT_S = 600  # of a machine that does much else
TINY = (
    "data=regression data.batch_size=16 data.num_rows=4096 model=mlp model.num_layers=5 model.d_model=16 schedule=1f1b "
    "schedule.num_microbatches=4 run.platform=cpu run.tensorboard=false run.checkpoint.every=2 run.num_steps=4 "
    "run.eval_every=2 run.eval_batches=1 optim.warmup_steps=2"
)


def losses(run_dir):
    """Those of the steps, and of the evaluations."""
    lines = [(run_dir / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "eval")]
    records = [json.loads(line) for each in lines for line in each]
    return [record.get("loss", record.get("eval_loss")) for record in records]


def back_to_step_2(run_dir, copy):
    """A copy of a finished run that has come to its checkpoint of step 2 only."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "4")
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["2"]
    return copy


def train(run_dir, *words):
    assert cli.main(["train", *TINY.split(), "executor=spmd", f"run.dir={run_dir}", *words]) == 0
    return losses(run_dir)


def train_by_processes(run_dir, count, *words):
    """The losses of a run of `count` processes with executor=mpmd."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "ppctl.cli", "train", *TINY.split(), "executor=mpmd", f"run.dir={run_dir}", *words]
    command += ["run.distributed=explicit", f"run.coordinator={address}", f"run.num_processes={count}"]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    logs = [run_dir.with_name(f"{run_dir.name}.{i}.log") for i in range(count)]
    processes = []
    for i, log in enumerate(logs):
        with log.open("w") as file:
            own = [*command, f"run.process_id={i}"]
            processes.append(subprocess.Popen(own, stdout=file, stderr=subprocess.STDOUT, env=environment))
    deadline = time.monotonic() + LIMIT_S
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    codes = [p.poll() for p in processes]
    for process in processes:
        process.kill()
        process.wait()
    assert codes == [0] * count, "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
    return losses(run_dir)


@pytest.mark.full
@pytest.mark.slow
def test_runs_of_one_and_of_several_processes_continue_each_other(tmp_path):
    of_one, of_four = tmp_path / "one", tmp_path / "four"
    expected = train(of_one, "mesh=1x4")
    assert train_by_processes(of_four, 4, "mesh=1x4") == pytest.approx(expected, rel=1e-6)
    resumed = train(back_to_step_2(of_four, tmp_path / "four then one"), "mesh=2x4")
    assert resumed == pytest.approx(expected, rel=1e-6)
    resumed = train_by_processes(back_to_step_2(of_one, tmp_path / "one then two"), 2, "mesh=2x2")
    assert resumed == pytest.approx(expected, rel=1e-6)


def test_a_timeline_of_several_processes_is_refused(tmp_path, capsys):
    words = ["run.distributed=explicit", "run.coordinator=127.0.0.1:8476", "run.num_processes=2", "run.process_id=0"]
    words += ["run.timeline=true", "mesh=1x2", f"run.dir={tmp_path}"]
    assert cli.main(["train", *TINY.split(), "executor=mpmd", *words]) == 2
    assert "run.timeline=true measures the ranks of one process" in capsys.readouterr().err
