"""The prediction that `ppctl train` prints is compared with the run."""

import json
import re
from dataclasses import replace

import pytest

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.executors.work.task_flops import work_of
from ppctl.planner.cost import predict_step as predict
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.known_hardware import known
from ppctl.training.run.run_lines import StepPrediction

WORDS = (
    "mesh=1x2 schedule=gpipe schedule.num_microbatches=2 data=regression data.batch_size=16 "
    "data.num_rows=512 data.num_features=5 data.num_targets=3 data.eval_fraction=0.1 model=mlp "
    "model.num_layers=2 model.d_model=16 run.dtype=float32 run.platform=cpu run.eval_every=null "
    "run.trackers=[] run.checkpoint.every=null run.num_steps=3"
)
UNKNOWN = StepPrediction(None, 3 * 2**20, "unknown hardware")
KNOWN = StepPrediction(0.5, 3 * 2**20, "hardware=host")


def step_s(job):
    """The seconds of a step that are predicted."""
    time = predict.predict_job(job).time
    assert time is not None
    return time.total_s


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def train(tmp_path, capsys):
    """Return a function that trains: (output, records of steps)."""

    def run(*words):
        assert cli.main(["train", *WORDS.split(), f"run.dir={tmp_path}/run", *words]) == 0
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        return capsys.readouterr().out, [json.loads(line) for line in lines]

    return run


def composed(*words):
    config = compose([*WORDS.split(), *words])
    assert isinstance(config, Config)
    return config


@pytest.mark.full
def test_every_record_holds_prediction_and_compiled_memory_and_the_last_line_compares(train):
    out, records = train()
    job = assemble(composed())
    compiled = job.pipe.engine.compile(evaluate=False).total_bytes
    for record in records:
        assert record["predicted_step_time_s"] == pytest.approx(step_s(job))
        assert record["memory_bytes"] == max(compiled)
        assert 0.2 < record["predicted_memory_bytes"] / record["memory_bytes"] < 5
    first, last = (line for line in out.splitlines() if line.startswith("plan "))
    source = r"\(hardware=host\)"
    bubble = r"bubble 33.3% ideal, [\d.]+% predicted"
    assert re.fullmatch(
        rf"plan      [\d.]+ [mu]?s a step, {bubble}, .* a device predicted {source}", first
    )
    assert re.fullmatch(
        r"plan      \S+ [mu]?s a step predicted, \S+ [mu]?s measured \([\d.]+ times; "
        r"hardware=host\); \S+ \w+ a device predicted, \S+ \w+ compiled",
        last,
    )


@pytest.mark.full
def test_of_unknown_hardware_no_time_is_predicted_and_it_trains(train, monkeypatch):
    monkeypatch.setattr(
        "ppctl.training.pipeline.known_hardware.of_device", lambda device_kind: None
    )
    out, records = train()
    assert len(records) == 3
    assert all(
        "predicted_step_time_s" not in record for record in records
    )  # like every unknown number
    assert all(record["predicted_memory_bytes"] > 0 for record in records)
    first, last = (line for line in out.splitlines() if line.startswith("plan "))
    assert re.fullmatch(
        r"plan      no step time, bubble 33.3% ideal, .* a device predicted \("
        r"unknown hardware\)",
        first,
    )
    assert last.endswith("s a step measured, none predicted")


def test_lines_for_people():
    assert KNOWN.line() == "plan      500 ms a step, 3.0 MiB a device predicted (hardware=host)"
    found = replace(KNOWN, ideal_bubble_fraction=0.025, bubble_fraction=0.203)
    assert found.line() == (
        "plan      500 ms a step, bubble 2.5% ideal, 20.3% predicted, "
        "3.0 MiB a device predicted (hardware=host)"
    )
    assert KNOWN.compared([9.0, 0.25, 0.2], 4 * 2**20) == (
        "plan      500 ms a step predicted, 250 ms measured (2.00 times; "
        "hardware=host); 3.0 MiB a device predicted, 4.0 MiB compiled"
    )
    assert "250 ms measured (2.00 times" in KNOWN.compared([9.0, 0.25], 1)  # a run of two steps
    assert UNKNOWN.compared([0.25], 4 * 2**20) == (
        "plan      3.0 MiB a device predicted, 4.0 MiB compiled; 250 ms a step measured, none "
        "predicted"
    )


def test_a_dtype_without_a_stated_peak_predicts_no_time_and_is_refused_where_hardware_is_chosen(
    monkeypatch,
):
    request = compose(WORDS.split())
    assert isinstance(request, Config)
    job = assemble(request)
    silent = replace(known()["host"], peak_flops={})
    monkeypatch.setattr("ppctl.training.pipeline.known_hardware.of_device", lambda kind: silent)
    assert predict.predict_step(job).step_time_s is None
    job = replace(job, config=replace(request, hardware=silent))
    with pytest.raises(ConfigError, match=r"^hardware=host states no peak for float32\."):
        predict.predict_step(job)


@pytest.mark.full
def test_a_model_planned_for_absent_hardware_has_its_kernels():
    """cuDNN reads and writes no scores; XLA's plain form, which this machine would take, does."""
    words = (
        "model=transformer model.d_model=64 model.num_heads=2 model.seq_len=512 data=synthetic "
        "data.vocab_size=64"
    )
    words = (
        f"{words} run.dtype=bfloat16 mesh=1x2 schedule=gpipe data.batch_size=4 "
        "schedule.num_microbatches=2"
    )
    job, plain = (
        assemble(compose([*words.split(), "hardware=h100", *more]))
        for more in ([], ["model.attention=xla"])
    )
    flops = lambda job: sum(op.flops for op in work_of(job.counted_model).layer.once)
    assert flops(job) == flops(plain)
    assert 0 < step_s(job) < 0.9 * step_s(plain)
    for none in ("hardware=host", "hardware=auto"):
        here = assemble(compose([*words.split(), none]))
        assert here.counted_model is here.pipe.model
