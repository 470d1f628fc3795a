"""Settings for those who measure: nothing saved, options of the compiler, a GPU's memory."""

import json
import os
import signal

import pytest

from ppctl import cli
from ppctl.training.pipeline import execution
from ppctl.training.run.metrics import Metrics

WORDS = (
    "model=mlp model.num_layers=2 model.d_model=8 data=regression data.batch_size=8 "
    "data.num_rows=256 data.num_features=5 data.num_targets=3 mesh=1x2 schedule=gpipe "
    "schedule.num_microbatches=2 run.platform=cpu run.num_steps=4 run.eval_every=null "
    "run.trackers=[] run.checkpoint.every=2"
)


@pytest.fixture
def train(tmp_path, capsys):
    """A function that trains: (exit code, lines of stdout, the line of stderr)."""

    def train(*words):
        code = cli.main(["train", *WORDS.split(), f"run.dir={tmp_path / 'run'}", *words])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return train


def steps(run_dir):
    return [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.full
def test_without_checkpoints_a_run_saves_no_state_and_begins_again(train, tmp_path):
    for _ in range(2):
        code, out, _ = train("run.checkpoint.enabled=false")
        assert code == 0
        assert out[-1] == f"finished at step 4; metrics and logs are in {tmp_path / 'run'}"
        assert any("from the start" in line for line in out)
        assert steps(tmp_path / "run") == [1, 2, 3, 4]
        assert not list(tmp_path.rglob("checkpoints/*"))


@pytest.mark.full
def test_without_checkpoints_an_interrupted_run_leaves_at_once(train, tmp_path, monkeypatch):
    log = Metrics.log

    def signal_itself(self, record, *attached):
        log(self, record, *attached)
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Metrics, "log", signal_itself)
    code, out, _ = train("run.checkpoint.enabled=false")
    assert code == 143
    assert "SIGTERM: leaving after step 3, unsaved" in out
    assert not list(tmp_path.rglob("checkpoints/*"))


@pytest.mark.full
def test_options_of_the_compiler_are_printed_and_recorded(train, tmp_path, monkeypatch):
    flags = (("xla_backend_optimization_level", "1"),)
    monkeypatch.setattr(execution, "flags_for", lambda request, device, has_loops: flags)
    code, out, _ = train()
    assert code == 0
    assert "xla       xla_backend_optimization_level=1" in out
    started = json.loads((tmp_path / "run/status.jsonl").read_text().splitlines()[0])
    assert started["xla_flags"] == "xla_backend_optimization_level=1"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("executor.xla_flags=fast", "executor.xla_flags=fast is not one of auto, traced, none"),
        (
            "run.memory_fraction=0.9",
            "run.memory_fraction=0.9 is for GPUs, but the devices are cpu. Leave it out.",
        ),
        ("run.memory_fraction=1.5", "run.memory_fraction=1.5 must lie in [0, 1]"),
        ("mesh.order=pp-dp", "mesh.order=pp-dp is not one of auto, dp-pp-fsdp"),
    ],
)
def test_settings_without_effect_are_refused_in_one_line(train, tmp_path, word, message):
    code, out, err = train(word)
    assert (code, out) == (2, [])
    assert err.startswith(f"ppctl: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
