"""A run keeps the tokenizer that it was trained with, also after the original has moved."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from ppctl import cli
from ppctl.config import Config, Run, Synthetic, Text, Tokens
from ppctl.config.groups.data_settings import Mixture, Part
from ppctl.errors import ConfigError
from ppctl.training.run.kept_tokenizer import (
    changed_tokenizer,
    configured_ends,
    keep_source,
    with_start_tokenizer,
)

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 60
TRAIN = (
    "train model.num_layers=1 model.d_model=8 model.num_heads=2 model.seq_len=16 "
    "model.activation=swiglu mesh=1x1 schedule=gpipe schedule.num_microbatches=1 "
    "executor=reference data=text data.path=text.txt data.batch_size=4 data.cache_dir=cache "
    "data.tokenizer=t run.platform=cpu run.dtype=float32 run.trackers=[] run.eval_every=null "
    "run.dir=run run.checkpoint.every=1"
)


@pytest.mark.full
def test_a_run_keeps_its_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    assert cli.main(["tokenize", "text.txt", "--vocab-size", "270", "--out", "t"]) == 0
    text = (tmp_path / "t/tokenizer.json").read_text()
    assert cli.main([*TRAIN.split(), "run.num_steps=1"]) == 0
    assert (tmp_path / "run/source/tokenizer.json").read_text() == text

    # a file of the same tokens in another form is taken, with a note
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(json.loads(text)))
    capsys.readouterr()
    assert cli.main([*TRAIN.split(), "run.num_steps=2"]) == 0
    differs = "data.tokenizer=t differs from the copy in run/source: tokenizer.json"
    assert f"note      {differs}; it makes the same tokens of this text" in capsys.readouterr().out

    # one that makes other tokens of the text is refused
    assert cli.main(["tokenize", "text.txt", "--vocab-size", "262", "--out", "t"]) == 0
    capsys.readouterr()
    assert cli.main([*TRAIN.split(), "run.num_steps=3", "model.vocab_size=270"]) == 2
    assert f"was trained on other data or another order ({differs}" in capsys.readouterr().err

    # and without the original all goes on
    (tmp_path / "t").rename(tmp_path / "away")
    assert cli.main(["generate", "run", "--prompt", "the cat", "--max-tokens", "3", "--json"]) == 0
    assert cli.main(["evaluate", "run", "--limit", "2"]) == 0
    assert cli.main(["evaluate", "run", "data.path=text.txt", "--limit", "2"]) == 0
    assert cli.main(["export", "run", "--out", "out"]) == 0
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == json.loads(text)
    assert (tmp_path / "out/tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("data", "tokenizer", "ends"),
    [
        (Tokens(path="tokens.bin"), ["tokenizer.json"], (1, 106)),
        (Text(path="text.txt", tokenizer="same"), ["tokenizer.json"], (1, 106)),
        (Text(path="text.txt", tokenizer="other"), ["tokenizer.json"], ()),
        (Text(path="text.txt"), [], ()),
    ],
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_run_keeps_the_configs_of_its_start_without_ids_of_another_tokenizer(
    data, tokenizer, ends, name, tmp_path, monkeypatch
):
    """Also one hop later, and after the imported directory has moved."""
    monkeypatch.chdir(tmp_path)
    for folder, text in (("first/source", "{}"), ("same", "{}"), ("other", "{ }")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tokenizer.json").write_text(text)
    (tmp_path / "first/source/config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "first/source" / name).write_text(
        '{"max_position_embeddings": 64, "eos_token_id": [1, 106]}'
    )
    keep_source(Run(dir="second", start_from="first"), data)
    (tmp_path / "first").rename(tmp_path / "away")
    keep_source(Run(dir="second", start_from="first"), data)
    keep_source(Run(dir="third", start_from="second"), data)
    for run_dir in (tmp_path / "second", tmp_path / "third"):
        configs = {"config.json", *([name] if ends else [])}
        assert {file.name for file in run_dir.rglob("*.json")} == {*tokenizer, *configs}
        assert configured_ends(run_dir) == ends
        config = json.loads((run_dir / "source/config.json").read_text())
        assert config["max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("stored", "is_kept", "data", "expected"),
    [
        (Tokens(path="x.npy"), True, Text(path="t"), "first/source"),
        (Tokens(path="x.npy"), True, Mixture(parts=[Part(path="t")]), "first/source"),
        (Tokens(path="x.npy"), True, Tokens(path="y.npy"), "first/source"),
        (Tokens(path="x.npy"), True, Text(path="t", tokenizer="bytes"), "bytes"),  # noted
        (Tokens(path="x.npy"), False, Tokens(path="y.npy"), None),
        (Tokens(path="x.npy", tokenizer="bytes"), False, Text(path="t"), "bytes"),
        (Text(path="t"), False, Text(path="t"), "bytes"),
        (Tokens(path="x.npy"), False, Text(path="t"), ConfigError),
        (Synthetic(), False, Text(path="t"), ConfigError),
    ],
)
def test_a_run_takes_the_tokenizer_of_the_run_that_it_starts_from(
    stored, is_kept, data, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first/source").mkdir(parents=True)
    (tmp_path / "first/config.yaml").write_text(yaml.safe_dump(asdict(Config(data=stored))))
    if is_kept:
        (tmp_path / "first/source/tokenizer.json").write_text("{}")
    if expected is ConfigError:
        with pytest.raises(ConfigError, match=r"^run.start_from=first neither keeps nor names a"):
            with_start_tokenizer("first", data)
    else:
        assert with_start_tokenizer("first", data) == replace(data, tokenizer=expected)
    assert with_start_tokenizer("first", Synthetic()) == Synthetic()


def test_a_tokenizer_that_differs_from_the_starts_is_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, text in (("first/source", "{}"), ("other", "{ }")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tokenizer.json").write_text(text)
    for data, name in ((Text(path="t", tokenizer="other"), "other"), (Text(path="t"), "bytes")):
        text = f"data.tokenizer={name} differs from the copy in first/source: tokenizer.json"
        assert changed_tokenizer(Path("first"), data) == text
    assert changed_tokenizer(Path("first"), Text(path="t", tokenizer="first/source")) is None
    assert changed_tokenizer(Path("first"), Synthetic()) is None


@pytest.mark.full
def test_a_run_whose_tokenizer_moved_resumes_with_its_copy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    assert cli.main(["tokenize", "text.txt", "--vocab-size", "270", "--out", "t"]) == 0
    assert cli.main([*TRAIN.split(), "run.num_steps=1"]) == 0
    (tmp_path / "t").rename(tmp_path / "away")
    capsys.readouterr()
    assert cli.main([*TRAIN.split(), "data.tokenizer=run/source", "run.num_steps=2"]) == 0
    assert "changed   since step 1: data.tokenizer t -> run/source" in capsys.readouterr().out
