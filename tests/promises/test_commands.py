"""README: the other rows of its table of commands, and requests that cannot work."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.environment import BY_USER
from support.promise import MODEL

import ppctl
from ppctl import cli

GOLDEN = Path(__file__).parents[1] / "golden/models/llama2"
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
WITHOUT_JAX = """
import sys
from ppctl.cli import main

codes = [main(line.split()) for line in {lines}]
print(codes, [name for name in ("jax", "flax") if name in sys.modules])
"""


def test_impossible_requests_are_refused_in_one_line_and_schedules_start_no_jax():
    """An impossible request is refused in one line with the remedy, before JAX starts:"""
    lines = ["train schedule.num_microbatches=6 data.batch_size=36", "schedule list mesh=1x8"]
    command = [sys.executable, "-c", WITHOUT_JAX.format(lines=lines)]
    done = subprocess.run(command, env=BY_USER | PATHS, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[2, 0] []\n")
    assert done.stderr == (
        "ppctl: num_microbatches=6 is not a multiple of num_ranks=4 (interleaved). Use a multiple of "
        "4 that divides the batch, or schedule=1f1b.\n"
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The directory where two jobs have run."""
    place = tmp_path_factory.mktemp("sweep")
    words = [
        *MODEL,
        "mesh=1x2",
        "schedule=gpipe,1f1b",
        "executor.remat=layer",
        "run.num_steps=2",
        "run.name=s",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.main(["train", "-m", *words]) == 0
    return place


def test_a_sweep_has_a_directory_for_each_job_and_one_page(sweep):
    """a sweep: a process and a directory for each job, then one page of all"""
    jobs = json.loads((sweep / "runs/s/sweep.json").read_text())
    assert [(job["schedule"], job["status"], job["steps"]) for job in jobs] == [
        ("gpipe", "finished", 2),
        ("1f1b", "finished", 2),
    ]
    page = (sweep / "runs/s/sweep.html").read_text()
    for job in jobs:
        assert (sweep / job["run_dir"] / "metrics.jsonl").exists()
        assert job["schedule"] in page


def test_runs_are_listed_with_their_ends_and_reported_in_a_page(sweep, monkeypatch, capsys):
    """all runs and how they ended; one HTML page of a run to send to others"""
    monkeypatch.chdir(sweep)
    assert cli.main(["runs", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {(run["status"], run["step"], run["num_steps"]) for run in runs} == {("finished", 2, 2)}
    (run_dir,) = sweep.glob("runs/s/*1f1b*")
    assert cli.main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "schedule=1f1b" in page
    assert "<svg" in page


def test_a_model_is_imported_evaluated_and_exported_bit_for_bit(tmp_path, monkeypatch, capsys):
    """a model of Hugging Face's format, or GGUF, as a run, and back"""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, "llama")
    assert cli.main(["import", "llama", "--out", "run"]) == 0
    assert cli.main(["export", "run", "--out", "out"]) == 0
    before, after = load_file("llama/model.safetensors"), load_file("out/model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert json.loads(Path("out/config.json").read_text()) == json.loads(
        Path("llama/config.json").read_text()
    )


LANGUAGE = [
    "model.num_layers=2",
    "model.d_model=16",
    "model.num_heads=2",
    "model.seq_len=16",
    "mesh=1x2",
    "schedule=1f1b",
    "schedule.num_microbatches=2",
    "data=text",
    "data.path=text.txt",
    "data.batch_size=8",
    "data.cache_dir=cache",
    "data.eval_fraction=0.25",
    "optim.lr=0.02",
    "optim.warmup_steps=0",
    "run.num_steps=10",
    "run.platform=cpu",
    "run.dtype=float64",
    "run.trackers=[]",
    "run.eval_every=10",
    "run.eval_batches=1",
    "run.dir=run",
]


def test_a_trained_model_writes_text_and_has_a_perplexity(tmp_path, monkeypatch, capsys):
    """text from a trained or imported model; perplexity, bits per byte"""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat, and the dog sat on the log.\n" * 60)
    assert cli.main(["train", *LANGUAGE]) == 0
    capsys.readouterr()
    words = ["--prompt", "the", "--max-tokens", "9", "--temperature", "0", "--json"]
    assert cli.main(["generate", "run", *words]) == 0
    (completion,) = json.loads(capsys.readouterr().out)["completions"]
    run = ppctl.load_run("run")
    logits = run.predict(np.array([[*b"the", *completion["tokens"]]]))[0]
    assert completion["tokens"] == np.argmax(logits[2:-1], -1).tolist()
    assert len(completion["tokens"]) == 9
    assert cli.main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-12)
    nats = found["loss"] * found["num_tokens"]
    num_bytes = found["num_tokens"] - 1  # the token that ends the text has none
    assert found["bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-12)
    assert found["loss"] < math.log(256)


def test_inspect_shows_ticks_collectives_and_hlo(capsys):
    """the tasks of each rank in every tick, collectives, HLO"""
    words = [*MODEL, "mesh=1x2", "schedule=1f1b", "executor.remat=layer", "--json"]
    assert cli.main(["inspect", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    (program,) = found["programs"]
    assert program["collectives"]
    assert found["ticks"]
    assert cli.main(["inspect", *words, "inspect.what=hlo"]) == 0
    assert "collective-permute" in json.loads(capsys.readouterr().out)["hlo"]["step"]
