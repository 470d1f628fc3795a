"""Requests that a run refuses before compilation, with all files unchanged."""

import re

import pytest
from support.remedies import suggestions


@pytest.mark.parametrize(
    ("step", "words", "message"),
    [
        (
            6,
            "run.resume=never",
            r"run.resume=never, but there is a checkpoint of step 6 in .*Use run.resume=auto or",
        ),
        (
            4,
            "run.num_steps=3",
            r"The checkpoint of step 4 in .* is past run.num_steps=3\. Use run.num_steps=4 or more",
        ),
        (
            4,
            "run.seed=1",
            r"other data or another order \(run.seed: 0 then, 1 now\), so its position 4 is "
            r"invalid for these data",
        ),
        (4, "data.batch_size=8", r"\(data.batch_size: 16 then, 8 now\)"),
        (4, "data.num_rows=400", r"\(data.num_rows: 512 then, 400 now\)"),
        (
            4,
            "model.d_model=32",
            r"holds other arrays: model.d_model: 16 then, 32 now; .* stored as float32.* wanted "
            r"float32.* of \d+ a",
        ),
        (
            4,
            "model.num_layers=3",
            r"model.num_layers: 2 then, 3 now; .* is stored as float32\[2.* wanted float32\[3",
        ),
        (6, "model.d_model=32", r"holds other arrays: model.d_model: 16 then, 32 now; "),
        (
            4,
            "optim=sgd",
            r"holds other arrays: optim=adamw then, sgd now; .*Restore that, or use another "
            r"run.dir",
        ),
        (4, "run.dtype=float64", r"holds other arrays: run.dtype: float32 then, float64 now; "),
        (
            4,
            "model.activation=tanh",
            r"is of another model: model.activation: relu then, tanh now\. .* run.resume_with",
        ),
        (
            0,
            "run.resume=must",
            r"run.resume=must, but there is no checkpoint in .*Use run.resume=auto\.",
        ),
        (
            0,
            "run.eval_every=1 run.eval_batches=9",
            r"run.eval_batches\*data.batch_size = 9\*16 = 144 is more than",
        ),
    ],
)
def test_a_resume_that_cannot_be_is_refused_before_compiling(train, copy, step, words, message):
    run_dir = copy(step)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    code, out, err = train(*words.split())
    assert code == 2
    assert "compiling" not in out
    assert err.count("\n") == 1
    assert err.startswith("ppctl: ")
    assert re.search(message, err), err
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (6, "run.resume=never"),
        (4, "run.num_steps=3"),
        (4, "model.activation=tanh"),
        (0, "run.resume=must"),
    ],
)
def test_the_remedy_of_a_refused_resume_runs(train, copy, step, words):
    copy(step)
    tried = suggestions(train(*words.split())[2])
    assert tried
    for suggestion in tried:
        code, _, err = train(*words.split(), *suggestion)
        assert (code, err) == (0, "")


def test_a_run_dir_that_cannot_be_written_is_refused_before_compiling(train, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = train(run_dir=tmp_path / "file" / "run")
    assert (code, "compiling" in out) == (2, False)
    assert err == (
        f"ppctl: run.dir={tmp_path}/file/run cannot be written: Not a directory. "
        "Use another run.dir, or make this one writable.\n"
    )


def test_a_config_yaml_that_cannot_be_written_is_refused_before_compiling(train, tmp_path):
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    code, out, err = train()
    assert (code, "compiling" in out) == (2, False)
    assert err == (
        f"ppctl: run.dir={tmp_path}/run cannot be written: Is a directory. "
        "Use another run.dir, or make this one writable.\n"
    )
