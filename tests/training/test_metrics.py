"""Metrics: each step exactly once on disk, through kill -9 and resume; valid JSON always; a
readable terminal.
"""

import io
import json
import math
import os
import signal
import struct
import subprocess
import sys

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from ppctl.errors import ConfigError
from ppctl.training.run.metrics import Metrics


def record(step, **changes):
    usual = {
        "step": step,
        "loss": 3.14159 / step,
        "grad_norm": 0.912,
        "lr": 1e-3,
        "step_time_s": 0.123,
    }
    return {**usual, "tokens_per_s": 12345.4, **changes}


def plain():
    return Console(file=io.StringIO(), width=40)


def metrics(run_dir, start_step=0, num_steps=20, **changes):
    settings = {"log_every": 10, "console": plain(), **changes}
    return Metrics(run_dir, num_steps=num_steps, start_step=start_step, **settings)


def run(run_dir, first, last, **changes):
    with metrics(run_dir, start_step=first - 1, **changes) as written:
        for step in range(first, last + 1):
            written.log(record(step))


def read(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(run_dir, name="metrics.jsonl"):
    return [line["step"] for line in read(run_dir / name)]


def test_every_step_is_one_object_with_the_logged_values(tmp_path):
    run(tmp_path / "runs" / "a", 1, 3)
    assert read(tmp_path / "runs" / "a" / "metrics.jsonl") == [record(1), record(2), record(3)]


def test_none_is_left_out_and_non_finite_values_are_null(tmp_path):
    with metrics(tmp_path) as written:
        written.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.0, "mfu": None})
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "grad_norm": None, "lr": 0.0}
    ]


def test_a_line_is_on_disk_when_log_returns(tmp_path):
    with metrics(tmp_path) as written:
        for step in (1, 2):
            written.log(record(step))
            assert steps(tmp_path) == list(range(1, step + 1))


def test_kill_9_loses_no_line_that_was_logged(tmp_path):
    code = (
        "import os, sys; from ppctl.training.run.metrics import Metrics\n"
        "m = Metrics(sys.argv[1], num_steps=9, start_step=0, log_every=1)\n"
        "for step in range(1, 8): m.log({'step': step, 'loss': 1.0})\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "torn", ["", '{"step": 8, "lo', '{"step": 4', "\0\0\0", "{}\n", "[1]\n", "1\n"]
)
def test_a_resumed_run_has_each_step_exactly_once(tmp_path, torn):
    run(tmp_path, 1, 7)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    run(tmp_path, 5, 9)
    assert steps(tmp_path) == list(range(1, 10))
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".tmp", ".part")] == []


def test_a_file_without_later_records_is_not_rewritten(tmp_path):
    run(tmp_path, 1, 4)
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    run(tmp_path, 5, 6)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_evaluations_go_to_a_separate_file_that_resumes_like_metrics(tmp_path):
    with metrics(tmp_path) as written:
        written.log(record(1))
        for step in (5, 10):
            written.log_eval(step, {"eval_loss": 2.5})
    assert read(tmp_path / "eval.jsonl") == [
        {"step": 5, "eval_loss": 2.5},
        {"step": 10, "eval_loss": 2.5},
    ]
    assert steps(tmp_path) == [1]
    with metrics(tmp_path, start_step=5) as written:
        written.log_eval(10, {"eval_loss": 2.0})
    assert read(tmp_path / "eval.jsonl") == [
        {"step": 5, "eval_loss": 2.5},
        {"step": 10, "eval_loss": 2.0},
    ]


def test_a_run_dir_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        metrics(tmp_path / "file")
    assert str(error.value) == (
        f"run.dir={tmp_path / 'file'} cannot be written: File exists. Use another run.dir, or "
        "make this one writable."
    )


# Terminal


def shown(run_dir, console, **changes):
    run(run_dir, 1, 20, console=console, **changes)
    return console.file.getvalue()


def test_the_first_the_last_and_every_nth_step_are_one_plain_line(tmp_path):
    lines = shown(tmp_path, plain(), num_steps=20, log_every=6).splitlines()
    assert [line.split("/")[0] for line in lines] == [
        f"step {step:2}" for step in (1, 6, 12, 18, 20)
    ]
    assert (
        lines[0]
        == "step  1/20  loss 3.1416  grad_norm 0.912  lr 1.0e-03  12,345 tok/s  123 ms/step"
    )


def test_a_line_shows_the_mean_of_the_steps_since_the_previous_line(tmp_path):
    console, own_s = plain(), [0.5, 0.2, 0.0001, 0.9, 0.4]  # one of them seen too late to be timed
    with metrics(tmp_path, num_steps=5, log_every=4, console=console) as written:
        for step, seconds in enumerate(own_s, start=1):
            written.log(
                {
                    "step": step,
                    "tokens_per_s": 100 / seconds,
                    "mfu_fraction": 0.05 / seconds,
                    "step_time_s": seconds,
                }
            )
    assert console.file.getvalue().splitlines() == [
        "step 1/5  200 tok/s  mfu 10.0%  500 ms/step",
        "step 4/5  273 tok/s  mfu 13.6%  367 ms/step",
        "step 5/5  250 tok/s  mfu 12.5%  400 ms/step",
    ]
    assert [record["step_time_s"] for record in read(tmp_path / "metrics.jsonl")] == own_s


def test_a_resumed_run_shows_its_first_step(tmp_path):
    console = plain()
    run(tmp_path, 8, 11, console=console)
    assert [line.split("/")[0] for line in console.file.getvalue().splitlines()] == [
        "step  8",
        "step 10",
    ]


def test_a_run_over_rows_shows_rows(tmp_path):
    console = plain()
    with metrics(tmp_path, console=console) as written:
        written.log(
            {
                "step": 1,
                "loss": 1e-4,
                "rows_per_s": 5000.0,
                "mfu_fraction": 0.25,
                "step_time_s": 2.0,
            }
        )
        written.log_eval(1, {"eval_loss": math.nan})
        written.note("checkpoint [1] saved")
    assert console.file.getvalue() == (
        "step  1/20  loss 1.000e-04  5,000 rows/s  mfu 25.0%  2 s/step\n"
        "eval  1/20  eval_loss nan\n"
        "checkpoint [1] saved\n"
    )


# TensorBoard


def events(run_dir):
    """Every event in the order of the files: (tag, step, value), or ("purge", step, None)."""
    found = []
    for path in sorted(
        (run_dir / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns
    ):
        data = path.read_bytes()
        while data:  # TFRecord: length, its checksum, the event, its checksum
            (size,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log"):
                found.append(("purge", event.step, None))
            scalars = [value for value in event.summary.value if value.HasField("simple_value")]
            found += [(value.tag, event.step, value.simple_value) for value in scalars]
    return found


def test_scalars_are_grouped_and_hold_the_logged_values(tmp_path):
    with metrics(tmp_path, trackers=["tensorboard"]) as written:
        written.log({**record(1, loss=2.0), "mfu": None, "model_flops_per_s": 3.0})
        written.log_eval(1, {"eval_loss": 2.5})
    got = [(tag, step) for tag, step, _ in events(tmp_path) if tag != "purge"]
    train = ["train/loss", "train/grad_norm", "train/lr", "speed/step_time_s", "speed/tokens_per_s"]
    assert got == [(tag, 1) for tag in [*train, "speed/model_flops_per_s", "eval/loss"]]
    assert ("train/loss", 1, 2.0) in events(tmp_path)
    assert ("eval/loss", 1, 2.5) in events(tmp_path)


def test_numbers_of_layers_are_a_list_on_disk_and_a_tag_for_each_in_tensorboard(tmp_path):
    of_layers = {"expert_load": [None, 1.5, math.nan], "expert_dropped_tokens": [0, 0, 2]}
    with metrics(tmp_path, trackers=["tensorboard"]) as written:
        written.log({"step": 1, "loss": 2.0, **of_layers})
    line = {"step": 1, "loss": 2.0, "expert_load": [None, 1.5, None]}
    assert read(tmp_path / "metrics.jsonl") == [{**line, "expert_dropped_tokens": [0, 0, 2]}]
    found = {tag: value for tag, _, value in events(tmp_path) if tag.startswith("experts/")}
    assert found.pop("experts/load_layer_01") == 1.5
    assert math.isnan(found.pop("experts/load_layer_02"))
    dropped = {f"experts/dropped_tokens_layer_0{l}": n for l, n in enumerate((0, 0, 2))}
    assert found == dropped


def test_a_line_shows_the_most_loaded_layer_and_dropped_tokens_if_any(tmp_path):
    for dropped, text in ([0, None], ""), ([1, 3000], "  dropped 3,001"):
        console = Console(file=io.StringIO(), width=200)
        with metrics(tmp_path, console=console) as written:
            loads = {"expert_load": [1.25, 2.66], "expert_dropped_tokens": dropped}
            written.log({"step": 1, "loss": 2.0, **loads})
        assert console.file.getvalue().strip() == f"step  1/20  loss 2.0000  load 2.7{text}"


def test_a_resumed_run_purges_the_steps_that_it_repeats(tmp_path):
    run(tmp_path, 1, 3, trackers=["tensorboard"])
    (first,) = (tmp_path / "tensorboard").iterdir()
    os.utime(first, (0, 0))
    run(tmp_path, 3, 4, trackers=["tensorboard"])
    losses = [(tag, step) for tag, step, _ in events(tmp_path) if tag in ("purge", "train/loss")]
    one, two, three, four = [("train/loss", step) for step in (1, 2, 3, 4)]
    assert losses == [("purge", 1), one, two, three, ("purge", 3), three, four]


def test_without_tensorboard_no_event_file_is_written(tmp_path):
    run(tmp_path, 1, 2)
    assert not (tmp_path / "tensorboard").exists()
