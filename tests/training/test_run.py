"""The training loop: files of a run, resumes, and runs ended by signals or non-finite numbers."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from jax import monitoring
from orbax.checkpoint import v1 as ocp
from support.small_runs import ROWS, TOKENS, checkpoints, losses, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppctl
from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.config import Run
from ppctl.config.groups.run_settings import Checkpoint
from ppctl.data import token_examples
from ppctl.errors import ConfigError, DataError
from ppctl.language.language_model import open_language_model
from ppctl.launch.supervisor import STOP_SIGNALS
from ppctl.training.pipeline import known_hardware
from ppctl.training.pipeline.engines.train_states import PlacedBatches
from ppctl.training.pipeline.job import open_data
from ppctl.training.run import loop, train_run as run
from ppctl.training.run.metrics import Metrics
from ppctl.training.run.run_environment import check_disk

FULL = pytest.mark.full  # run by `make test-full`


# files of a run


SPEEDS = [(ROWS, "rows_per_s"), (TOKENS, "tokens_per_s")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiny", "speed"),
    [pytest.param(*SPEEDS[0], id="rows"), pytest.param(*SPEEDS[1], id="tokens", marks=FULL)],
)
def test_a_run_leaves_settings_and_a_record_of_every_step(train, tmp_path, tiny, speed):
    words = ["run.eval_every=3", "run.eval_batches=1", "run.trackers=[tensorboard]", "--json"]
    words += ["hardware=host", "hardware.peak_flops.float32=1e12"]
    code, out, err = train(*words, tiny=tiny)
    assert code == 0
    run_dir = tmp_path / "run"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        *(
            "checkpoints",
            "config.yaml",
            "eval.jsonl",
            "memory.json",
            "metrics.jsonl",
            "status.jsonl",
            "tensorboard",
        )
    ]
    lines = records(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert set(line) == {
            *(
                "step",
                "loss",
                "grad_norm",
                "lr",
                "step_time_s",
                "compile_time_s",
                "model_flops_per_s",
                "mfu_fraction",
            ),
            *(
                "mfu_causal_fraction",
                "ideal_bubble_fraction",
                "predicted_bubble_fraction",
                "predicted_step_time_s",
                "predicted_memory_bytes",
                "memory_bytes",
                speed,
            ),
        }
        count = 16 * 8 if speed == "tokens_per_s" else 16
        assert line[speed] == pytest.approx(count / line["step_time_s"])
        assert line["mfu_fraction"] == pytest.approx(line["model_flops_per_s"] / 2e12)
        assert line["ideal_bubble_fraction"] == pytest.approx(1 / 3)  # (p-1)/(m+p-1)
        assert 0 < line["predicted_bubble_fraction"] < 1
    assert [line["step"] for line in records(run_dir, "eval.jsonl")] == [3, 6]
    assert [(line["status"], line["step"]) for line in records(run_dir, "status.jsonl")] == [
        *(("started", 0), ("finished", 6))
    ]

    summary = json.loads(out)  # one document and nothing else
    assert summary["status"] == "finished"
    assert summary["run_dir"] == str(run_dir)
    assert {key: summary[key] for key in lines[-1]} == lines[-1]
    assert "finished at step 6" in err

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(
        [event.value for event in events.Scalars("train/loss")], losses(run_dir), rtol=1e-6
    )
    assert [event.step for event in events.Scalars("eval/loss")] == [3, 6]
    assert set(events.Tags()["scalars"]) >= {
        "train/lr",
        "train/grad_norm",
        f"speed/{speed}",
        "speed/step_time_s",
    }
    started = records(run_dir, "status.jsonl")[0]
    assert started["versions"]["jax"] == jax.__version__
    assert (started["platform"], started["num_devices"], started["num_processes"]) == ("cpu", 2, 1)
    assert (started["task_costs"]["forward_s"], started["task_costs"]["weight_grad_s"]) == (1, 1)


def test_config_yaml_is_the_composed_config(train, tmp_path, capsys):
    train("optim.lr=3e-4", "optim.clip_norm=null")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    words = [*ROWS.split(), f"run.dir={tmp_path / 'run'}", "optim.lr=3e-4", "optim.clip_norm=null"]
    assert cli.main(["train", *words, "--cfg", "job"]) == 0
    assert written == yaml.safe_load(capsys.readouterr().out)


@pytest.mark.slow
def test_the_second_train_step_compiles_nothing(train, tmp_path):
    compiled_after = []  # lines in metrics.jsonl at each compilation

    def hear(event, *_args, **_rest):
        if event == "/jax/core/compile/backend_compile_duration":
            path = tmp_path / "run" / "metrics.jsonl"
            compiled_after.append(len(path.read_text().splitlines()) if path.exists() else 0)

    monitoring.register_event_duration_secs_listener(hear)
    try:
        words = [
            "run.num_steps=12",
            "run.eval_every=2",
            "run.eval_batches=1",
            "run.checkpoint.every=2",
        ]
        assert train(*words)[0] == 0
    finally:
        monitoring.unregister_event_duration_listener(hear)
    assert len(compiled_after) > 2  # it was heard
    assert 1 not in compiled_after
    assert max(compiled_after) <= 2  # the first save


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_anything_is_compiled(
    train, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    code, out, err = train("run.checkpoint.every=2")
    assert (code, err.count("\n"), "compiling" in out) == (2, 1, False)
    assert "has 100 B free, but 3 x " in err
    run = Run(dir=str(tmp_path), num_steps=1000)
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    check_disk(run, 50)  # 2 of 3 and the next one are written
    with pytest.raises(ConfigError, match=r"2 x 51 B = 102 B are needed .* 2 are written\)"):
        check_disk(run, 51)
    check_disk(replace(run, checkpoint=Checkpoint(enabled=False)), 1000)


def test_a_disk_that_fills_up_ends_the_run_with_one_line(train, tmp_path, monkeypatch):
    log = Metrics.log

    def full(self, record, *attached):
        if record["step"] == 3:
            raise OSError(28, "No space left on device")
        log(self, record, *attached)

    monkeypatch.setattr(Metrics, "log", full)
    code, _, err = train()
    assert code == 2
    assert err == (
        f"ppctl: run.dir={tmp_path}/run cannot be written: No space left on device. "
        "Free or extend the disk, or use another run.dir. Step 4 is saved.\n"
    )
    last = records(tmp_path / "run", "status.jsonl")[-1]
    assert (last["status"], last["reason"]) == ("failed", err.removeprefix("ppctl: ").strip())


@pytest.mark.full
def test_the_dtype_that_devices_decided_is_the_runs_elsewhere_too(train, monkeypatch, tmp_path):
    """As of a run on accelerators, in bfloat16, that is read and goes on on CPUs."""
    words = ("run.dtype=null", "run.checkpoint.every=2", "mesh=1x1", "executor=reference")
    with monkeypatch.context() as accelerators:
        accelerators.setattr(known_hardware, "default_dtype", lambda *_: "bfloat16")
        assert train(*words, "run.num_steps=2", tiny=TOKENS)[0] == 0
    saved = ppctl.load_run(tmp_path / "run")
    assert (saved.settings["run"]["dtype"], saved.dtype) == (None, "bfloat16")
    assert (
        open_language_model(saved.directory).dtype == "bfloat16"
    )  # error of generate and evaluate
    code, out, _ = train(*words, "run.num_steps=3", tiny=TOKENS)
    assert (code, "changed   since step 2: run.dtype bfloat16 -> float32\n" in out) == (0, True)
    last = records(tmp_path / "run")[-1]
    assert last["tokens_per_s"] == pytest.approx(16 * 8 / last["step_time_s"])


def test_a_finished_run_started_again_is_unchanged(train, copy):
    run_dir = copy(6)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    code, out, err = train()
    assert (code, err) == (0, "")
    assert (
        out
        == f"{run_dir} has finished all run.num_steps=6 steps. Use a larger run.num_steps to go "
        "on.\n"
    )
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    code, out, _ = train("--json")
    assert code == 0
    assert json.loads(out) == {"status": "finished", "run_dir": str(run_dir), "step": 6}


@pytest.mark.slow
def test_must_and_auto_resume_from_the_newest_checkpoint(train, copy, six_steps):
    run_dir = copy(4)
    code, out, _ = train("run.resume=must")
    assert code == 0
    assert "resuming after step 4" in out
    assert losses(run_dir) == losses(six_steps)
    assert [record["step"] for record in records(run_dir)] == [1, 2, 3, 4, 5, 6]


# numbers that are not finite


@pytest.mark.slow
def test_a_diverging_run_stops_and_resumes_from_the_good_checkpoint(train, copy):
    run_dir = copy(2)
    code, _, err = train("optim.lr=1e30", "optim.clip_norm=null", "run.checkpoint.every=1")
    assert code == 4
    # step 3 still had a finite loss; the state after it, saved, gives step 4 whatever the learning
    # rate
    assert err.startswith("ppctl: step 4: loss=")
    assert "nan" in err or "inf" in err
    assert (
        f"Training stopped; the checkpoint of step 2 is good ({run_dir}/checkpoints); move 3 "
        "away: resuming from there fails again. Try a smaller optim.lr (now 1e+30), more "
        "optim.warmup_steps (now 20) or optim.clip_norm=1.0 (now null).\n"
    ) in err
    assert err.count("\n") == 1
    last = records(run_dir)[-1]
    assert last["step"] == 4
    assert last["loss"] is None or last["grad_norm"] is None
    assert_checkpoints_are_finite(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "3")
    code, out, _ = train("optim.lr=1e-4")
    assert code == 0
    assert "resuming after step 2" in out
    assert all(map(math.isfinite, losses(run_dir)))
    assert len(losses(run_dir)) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_state_that_is_not_finite_is_never_saved(train, copy):
    run_dir = copy(2)
    code, _, err = train("optim.lr=1e39", "run.checkpoint.every=1")  # infinite in float32
    assert code == 4
    assert err.startswith(
        "ppctl: step 3: its update is not finite. Training stopped; the checkpoint of step 2 is "
        f"good ({run_dir}/checkpoints). Try a smaller optim.lr (now 1e+39)"
    )
    assert checkpoints(run_dir) == [2]
    assert train("optim.lr=1e-4")[0] == 0


@pytest.mark.full
def test_a_batch_without_targets_is_noted_once(train, tmp_path):
    """As of long prompts: all but the last sequence of the text ask for nothing."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "ask " * 2000, "text": "!"}) + "\n")
    words = [
        f"data.path={tmp_path / 'text.jsonl'}",
        "data.prompt_field=prompt",
        f"data.cache_dir={tmp_path}",
    ]
    words += [
        "data=text",
        "data.batch_size=4",
        "data.eval_fraction=0",
        "executor=reference",
        "mesh=1x1",
        "run.num_steps=4",
    ]
    left_out = ("data", "mesh", "run.num_steps")
    tiny = " ".join(word for word in TOKENS.split() if not word.startswith(left_out))
    code, out, _ = train(*words, tiny=tiny)
    assert code == 0
    assert losses(tmp_path / "run").count(0) >= 3
    assert out.count("has loss 0 and gradient 0: its batch has no tokens to predict") == 1


def test_data_that_overflows_stops_the_run_at_its_first_step(train, tmp_path, monkeypatch):
    monkeypatch.setattr("ppctl.data.array_data.NOISE", 1e30)
    code, _, err = train(tiny=ROWS)
    assert code == 4
    assert err.startswith(
        "ppctl: step 1: loss=inf, grad_norm=inf. Training stopped; no checkpoint is good "
        f"({tmp_path}/run/checkpoints). Try a smaller optim.lr"
    )
    assert checkpoints(tmp_path / "run") == []


def assert_checkpoints_are_finite(run_dir):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for step in checkpoints(run_dir):
        path = str(run_dir / "checkpoints" / str(step))
        described = ocp.checkpointables_metadata(path).metadata["state"]
        wanted = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), described
        )
        state = ocp.load_checkpointables(path, {"state": wanted})["state"]
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


# faults found after the first step


def failing_at(call, error):
    """A function that raises an error at its call-th call, and returns None before."""
    calls = itertools.count(1)

    def fail(*_):
        if next(calls) == call:
            raise error

    return fail


@pytest.mark.parametrize("where", ["reading a batch", "evaluating", "writing the metrics"])
def test_a_fault_that_is_found_after_a_step_saves_it_first(train, tmp_path, monkeypatch, where):
    fail = failing_at(3, DataError("the rows are gone."))
    if where == "reading a batch":
        put = PlacedBatches.put
        monkeypatch.setattr(PlacedBatches, "put", lambda self, b: fail() or put(self, b))
    elif where == "evaluating":
        monkeypatch.setattr(loop, "evaluate", lambda *_: fail() or 1.0)
    else:
        monkeypatch.setattr(Metrics, "log", fail)
    words = ["run.eval_every=1", "run.eval_batches=1"] if where == "evaluating" else []
    code, _, err = train(*words, tiny=ROWS)
    step = {"reading a batch": 2, "evaluating": 3, "writing the metrics": 4}[where]
    assert (code, err) == (2, f"ppctl: the rows are gone. Step {step} is saved.\n")
    assert checkpoints(tmp_path / "run") == [step]


@pytest.mark.full
def test_an_id_beyond_the_vocabulary_that_is_found_in_a_batch_saves_first(
    train, tmp_path, monkeypatch
):
    """In a large token file; only samples are read at start."""
    monkeypatch.setattr(token_examples, "DIGEST_WHOLE_BYTES", 1024)
    monkeypatch.setattr(token_examples, "DIGEST_BLOCK_BYTES", 64)
    path, ids = tmp_path / "ids.npy", np.zeros(4096, np.uint16)
    np.save(path, ids)
    words = f"{TOKENS} data=tokens data.path={path}".replace("data=synthetic ", "")
    words = words.replace("data.num_sequences=512 ", "")
    data = open_data(compose(words.split()))
    for example in sorted({*data.examples_of(3)}):  # examples of the fourth batch
        ids[example * 8 + 3] = 60_000
        if max(part.max() for part in token_examples._samples(ids)) == 0:
            break
        ids[example * 8 + 3] = 0
    assert ids.max() == 60_000
    np.load(path, mmap_mode="r+")[:] = ids  # in place: readers ahead have mapped the file
    code, _, err = train(tiny=words)
    assert code == 2
    assert "holds the id 60000, not below data.vocab_size=16. Use data.vocab_size=60001" in err
    assert err.endswith(" Step 3 is saved.\n")
    assert checkpoints(tmp_path / "run") == [3]


def test_a_fault_before_the_first_step_saves_no_checkpoint(train, tmp_path, monkeypatch):
    monkeypatch.setattr(PlacedBatches, "put", failing_at(1, DataError("the rows are gone.")))
    assert train(tiny=ROWS)[::2] == (2, "ppctl: the rows are gone.\n")
    assert checkpoints(tmp_path / "run") == []


# signals


@pytest.mark.parametrize("asked", [pytest.param(5, marks=FULL), 6])
def test_a_signal_at_any_place_of_the_loop_leaves_the_last_step_saved(
    train, tmp_path, monkeypatch, asked
):
    """The signal comes just before the loop's `asked`-th check for signals."""

    times = itertools.count(1)
    late = lambda finished: signal.SIGTERM if next(times) >= asked else None
    monkeypatch.setattr(run, "_stop_requests", lambda *_: contextlib.nullcontext(late))
    code, out, _ = train("run.num_steps=50", tiny=ROWS)
    assert code == 143
    steps = [record["step"] for record in records(tmp_path / "run")]
    assert checkpoints(tmp_path / "run") == [steps[-1]]
    assert f"SIGTERM: saving step {steps[-1]} and leaving" in out
    last = records(tmp_path / "run", "status.jsonl")[-1]
    assert (last["status"], last["step"], last["reason"]) == ("interrupted", steps[-1], "SIGTERM")


def test_a_real_signal_is_answered_after_the_step_and_handlers_are_put_back(
    train, tmp_path, monkeypatch
):
    log, before = Metrics.log, {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def signal_itself(self, record, *attached):
        log(self, record, *attached)
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Metrics, "log", signal_itself)
    code, _, err = train("run.num_steps=50", "--json", tiny=ROWS)
    assert code == 130
    steps = [record["step"] for record in records(tmp_path / "run")]
    assert checkpoints(tmp_path / "run") == [steps[-1]]
    assert steps[-1] in (3, 4, 5)  # the step after it had been sent to the devices
    assert "interrupted at step" in err
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
