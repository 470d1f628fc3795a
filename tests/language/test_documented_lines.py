"""Every line of docs/language-models.md runs, and every line that `ppctl import` prints, on a tiny
model that came with a tokenizer and a chat template.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.oracle import FOLDER
from support.selection import full

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/language-models.md").read_text()
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.startswith("ppctl ")
]
ELSEWHERE = "smollm2"  # a model of 135 M parameters: tests/language/test_smollm2.py
PLANS = "model=llama3_8b"  # tests/house/test_readme.py composes it
SPECIAL = ["<s>", "<unk>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
)
ONCE = "run.num_steps=1 run.trackers=[] data.cache_dir=cache run.platform=cpu"


def write_tokenizer(directory, **settings):
    """A tokenizer of letters, smaller than the vocabulary of the golden models."""
    letters = "abcdefghijklmnopqrstuvwxyz .,?\n0123456789"
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(SPECIAL)
    (directory / "tokenizer.json").write_text(made.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a model and texts, where commands run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER / "llama2", tmp_path / "model")
    write_tokenizer(tmp_path / "model", eos_token="</s>", chat_template=TEMPLATE)
    for name in ("notes.txt", "novel.txt", "TEXT.txt"):
        (tmp_path / name).write_text("the cat sat on the mat and the dog on the log.\n" * 90)
    chat = [{"role": "user", "content": "hi?"}, {"role": "assistant", "content": "hello."}]
    for name in ("chats.jsonl", "CHATS.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps({'messages': chat})}\n" * 130)
    question = {"prompt": "2 plus 2 is", "choices": [" 4", " 5"], "answer": 0}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    return tmp_path


def run(line, number, capsys):
    """Run a line of the page, or of `import`, for a step; return its output."""
    names = {"DIR": "model", "RUN_DIR": "base", "runs/NAME": "runs/adapters"}
    words = [names.get(word, word) for word in shlex.split(line, comments=True)[1:]]
    if words[0] == "train":
        is_lora = "optim.train=lora" in words
        words += [*ONCE.split(), f"run.dir=runs/{'adapters' if is_lora else f'line{number}'}"]
        # the first line runs on the recipe's mesh and schedule, the second needs no second compile
        words += ["executor=reference", "mesh=1x1", "data.batch_size=8"] * is_lora
    assert cli.main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("trained", [("adapters",), full((("line1", "adapters"),))], ids=len)
def test_every_line_of_the_page_runs(place, capsys, trained):
    """In `make test` but the training of all weights: a line as `import` prints it, see below."""
    lines = [line for line in LINES if ELSEWHERE not in line and PLANS not in line]
    assert {shlex.split(line)[1] for line in lines} == {
        *("import", "train", "export", "generate", "evaluate")
    }
    for number, line in enumerate(lines):
        shutil.rmtree(place / "exported", ignore_errors=True)  # two lines write it
        if number != 1 or "line1" in trained:
            run(line, number, capsys)
    for name in trained:
        kept = (place / "runs" / name / "source/tokenizer.json").read_text()
        assert kept == (place / "model/tokenizer.json").read_text()


@pytest.mark.parametrize("has", ["template", "end", "tokenizer", "none"])
def test_import_prints_lines_that_run(place, capsys, has):
    """On chats with a template, on token ids without a tokenizer, with a place for an end token."""
    if has == "none":
        (place / "model/tokenizer.json").unlink()
    elif has != "template":
        write_tokenizer(place / "model", **{"eos_token": "</s>"} if has == "end" else {})
    printed = run("ppctl import DIR --out RUN_DIR", 0, capsys)
    lines = re.findall(r"^train    (.*)$", printed, re.MULTILINE)
    words = [line.partition("recipes=imported ")[2].split() for line in lines]
    end = ["'data.end_token=\"TOKEN\"'"] * (has == "tokenizer")
    expected = [["data=text", "data.path=TEXT.txt", *end]]
    if has == "template":
        chats = ["data.path=CHATS.jsonl", "data.field=messages", "data.packing=true"]
        expected.append(["data=text", *chats])
    assert words == (expected if has != "none" else [["data=tokens", "data.path=IDS.npy"]])
    recipe = (place / "base/recipes/imported.yaml").read_text()
    assert all(f"# Command: {line}\n" in recipe for line in lines)
    named = "none came with the model" if has == "none" else str(place / "base/source")
    assert f"# Tokenizer: {named} (" in recipe
    for line in lines:  # they compose, with the model's tokenizer
        _, _, _, folder, *words = shlex.split(line)
        found = compose(words, folder)
        assert found.data.tokenizer == (None if has == "none" else str(place / "base/source"))


def test_lines_of_the_quickstart_compose(place):
    """Of its model of 135 M parameters, here the tiny one."""
    assert cli.main(["import", "model", "--out", "runs/smollm2"]) == 0
    text = (ROOT / "docs/quickstart.md").read_text()
    (block,) = re.findall(r"^```text\n(ppctl import .*?)^```$", text, re.DOTALL | re.MULTILINE)
    small = re.search('^SMALL="(.*)"$', block, re.MULTILINE)[1]
    lines = re.findall(r"^ppctl \w+ --config-dir (\S+) (.*)$", block, re.MULTILINE)
    assert len(lines) == 3
    for folder, words in lines:
        words = shlex.split(words.replace("$SMALL", small), comments=True)
        assert compose(words, folder).data.tokenizer == "runs/smollm2/source"


@pytest.mark.parametrize("ends_in_config", [True, False])
def test_a_tokenizer_without_an_end_token(place, capsys, ends_in_config):
    """The model's eos_token_id is used, else the message names a remedy that the command takes."""
    write_tokenizer(place / "model")
    config = json.loads((place / "model/config.json").read_text()) | {"eos_token_id": 2}
    config |= {} if ends_in_config else {"eos_token_id": None}
    (place / "model/generation_config.json").unlink(missing_ok=True)
    (place / "model/config.json").write_text(json.dumps(config))
    run("ppctl import DIR --out RUN_DIR", 0, capsys)
    lines = ["generate base --prompt a --max-tokens 2", "evaluate base --choices questions.jsonl"]
    text = "evaluate base data=text data.path=notes.txt data.cache_dir=cache --limit 1"
    for line in (*lines, text):
        assert (cli.main(line.split()) == 0) is ends_in_config
    if not ends_in_config:
        err = capsys.readouterr().err
        assert err.count('Write {"eos_token": TOKEN} to tokenizer_config.json') == 3
        assert cli.main(["evaluate", "base", *text.split()[2:], 'data.end_token="</s>"']) == 0
        (place / "base/source/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        assert cli.main(lines[0].split()) == 0


def test_ids_of_an_unknown_tokenizer_are_not_decoded(place, capsys):
    (place / "model/tokenizer.json").unlink()
    run("ppctl import DIR --out RUN_DIR", 0, capsys)
    for line, message in (
        ("generate base --prompt a", "base has no tokenizer.json, and its data=tokens names no"),
        ("evaluate base data=text data.path=notes.txt", "the meaning of its ids is unknown. Put"),
        ("evaluate base", "base was imported, and has no held-out sequences. Name data="),
    ):
        assert cli.main(line.split()) == ConfigError.exit_code
        assert message in capsys.readouterr().err
