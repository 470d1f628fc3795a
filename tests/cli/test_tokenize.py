"""`ppctl tokenize`: its files train a model with data=text, and refused requests."""

from __future__ import annotations

import json

import pytest

from ppctl.cli import main

TINY = [
    *(
        "mesh=1x1",
        "schedule=gpipe",
        "schedule.num_microbatches=2",
        "model.num_layers=1",
        "model.d_model=16",
    ),
    *(
        "model.num_heads=2",
        "model.seq_len=16",
        "data.batch_size=4",
        "run.eval_every=null",
        "run.num_steps=2",
    ),
    *("run.trackers=[]", "run.platform=cpu", "run.checkpoint.enabled=false"),
]
OUT = ["--out", "t"]
SIZE = ["--vocab-size", "300"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(
        "".join(f"note {i * i} of {i**3} to learn from\n" for i in range(99))
    )
    (tmp_path / "more.jsonl").write_text('{"body": "more notes"}\n{"text": 3}\n')
    return tmp_path


@pytest.mark.full
def test_tokens_written_by_tokenize_train_a_model(here, capsys):
    assert (
        main(
            [
                "tokenize",
                "notes.txt",
                "more.jsonl",
                "--vocab-size",
                "300",
                "--out",
                "t",
                "--field",
                "body",
                "--on-error",
                "skip",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "skipped  1 broken (first: " in printed
    assert "trained  300 tokens on 2 documents, 0.0 MB" in printed
    assert "sha256" in printed
    words = [
        "data=text",
        "data.path=notes.txt",
        "data.tokenizer=t",
        "data.cache_dir=c",
        "run.dir=r",
    ]
    assert main(["train", *words, *TINY]) == 0
    printed = capsys.readouterr().out
    assert "data.path=notes.txt, " in printed
    assert "tokens of t" in printed
    (loss, _) = (
        json.loads(line)["loss"] for line in (here / "r/metrics.jsonl").read_text().splitlines()
    )
    assert 5 < loss < 6.5, "about ln 300"


def test_the_result_as_json(here, capsys):
    assert (
        main(
            [
                "tokenize",
                "notes.txt",
                "--vocab-size",
                "270",
                "--out",
                "t",
                "--special",
                "<eos>",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["vocab_size"], found["documents"], found["skipped"]) == (270, 1, 0)
    assert json.loads((here / "t/tokenizer_config.json").read_text())["eos_token"] == "<eos>"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --vocab-size, --out. Write"),
        (["notes.txt", *OUT], "the following arguments are required: --vocab-size"),
        (["notes.txt", *SIZE], "the following arguments are required: --out"),
        (
            ["notes.txt", "--vocab-size", "258", *OUT],
            "--vocab-size 258 is not in 259..1048576: 256 bytes and 3 special",
        ),
        (
            ["notes.txt", *SIZE, "--out", "notes.txt"],
            "--out notes.txt is not a directory. Use another.",
        ),
        (
            ["notes.txt", *SIZE, *OUT, "--special", "a", "--special", "a"],
            "--special names a token twice. Name each",
        ),
        (["none.txt", *SIZE, *OUT], "none.txt: No such file or directory. Use "),
        (
            ["more.jsonl", *SIZE, *OUT],
            "line 1 has no field text (it has body). Use --on-error skip",
        ),
        (["notes.txt", "--vocab", "300"], "--vocab is not an option. Did you mean --vocab-size?"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(here, capsys, words, message):
    assert main(["tokenize", *words]) == 2
    assert message in capsys.readouterr().err


def test_empty_and_binary_files_are_refused(here, capsys):
    (here / "empty.txt").touch()
    (here / "binary.txt").write_bytes(b"a\0")
    for name, reason in (("empty.txt", "is empty"), ("binary.txt", "is not text: byte 1 is 0")):
        assert main(["tokenize", name, "--vocab-size", "300", "--out", "t"]) == 2
        assert reason in capsys.readouterr().err
        assert (
            main(["tokenize", name, "--vocab-size", "300", "--out", "t", "--on-error", "skip"]) == 2
        )
        assert "hold no text. Use files with text." in capsys.readouterr().err
    assert not (here / "t").exists()
