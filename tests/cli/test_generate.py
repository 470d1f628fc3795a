"""`ppctl generate` and `ppctl evaluate` of a run of a few steps."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.selection import full

import ppctl
from ppctl import cli
from ppctl.cli.commands.evaluate import _config
from ppctl.config import Text
from ppctl.language.generation import Sampling
from ppctl.language.language_model import open_language_model
from ppctl.language.text_evaluation import log_likelihood
from ppctl.training.pipeline.job import open_data

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 60
TRAIN = (
    "model.num_layers=2 model.d_model=16 model.num_heads=2 model.num_kv_heads=1 model.seq_len=16 "
    "mesh=1x1 schedule=gpipe schedule.num_microbatches=1 data=text data.path=text.txt "
    "data.batch_size=8 data.cache_dir=cache optim.lr=0.02 optim.warmup_steps=0 run.num_steps=20 "
    "run.platform=cpu run.dtype=float32 run.trackers=[] run.eval_every=20 run.eval_batches=1 "
    "run.dir=run executor=reference"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        (place / "text.txt").write_text(TEXT)
        assert cli.main(["train", *TRAIN.split()]) == 0
    return place


@pytest.fixture
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def printed(capsys, *words):
    capsys.readouterr()
    assert cli.main([*words]) == 0
    return capsys.readouterr().out


def test_a_text_depends_only_on_seed_and_prompt(here, capsys):
    words = ["generate", "run", "--max-tokens", "6", "--top-p", "0.9", "--top-k", "20", "--json"]
    alone = json.loads(printed(capsys, *words, "--prompt", "the"))["completions"]
    both = json.loads(printed(capsys, *words, "--prompt", "the", "--prompt", "and the dog"))[
        "completions"
    ]
    assert both[0] == alone[0]
    other = json.loads(printed(capsys, *words, "--prompt", "the", "--seed", "1"))["completions"]
    assert other != alone


def test_a_terminal_gets_prompt_and_text(here, capsys):
    out = printed(
        capsys,
        "generate",
        "run/checkpoints/20",
        "--prompt",
        "the",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
    )
    assert out.startswith("the")
    assert len(out.rstrip("\n")) <= 3 + 5


def test_data_of_a_run_are_found_from_another_directory(here, tmp_path, monkeypatch, capsys):
    """Those that were relative where it started; words of the command are relative to here."""
    expected = printed(capsys, "evaluate", "run", "--json")
    monkeypatch.chdir(tmp_path)
    found = json.loads(printed(capsys, "evaluate", str(here / "run"), "--json"))
    assert found["loss"] == json.loads(expected)["loss"]
    printed(capsys, "evaluate", str(here / "run"), "data.eval_fraction=0.05", "--limit", "1")
    assert ppctl.load_run(here / "run").data.num_examples > 0
    words = ["evaluate", str(here / "run"), "data=text", "data.path=text.txt"]
    assert cli.main(words) == 2
    assert "data.path=text.txt: No such file" in capsys.readouterr().err


ANSWER = [[104], [105], [7], [104]]  # "hi", and the bytes after it


@pytest.fixture
def answering(here, tmp_path, monkeypatch):
    """Return a function that changes the run and runs `ppctl generate`, where the model prints ANSWER."""

    def generated(change, *words):
        shutil.copytree(here / "run", tmp_path / "run", dirs_exist_ok=True)
        (tmp_path / "run/source").mkdir(exist_ok=True)
        change(tmp_path / "run/source")
        said = (np.asarray(tokens) for tokens in ANSWER)
        monkeypatch.setattr("ppctl.language.generation.continuations", lambda *_, **__: said)
        return cli.main(["generate", str(tmp_path / "run"), "--prompt", "the", "--json", *words])

    return generated


def config_of(name, ends):
    return lambda source: (source / name).write_text(json.dumps({"eos_token_id": ends}))


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        (lambda _: None, [], ("hi\ah", "length")),
        (lambda _: None, ["--stop", "\a"], ("hi", "end")),
        (config_of("generation_config.json", [9, 7]), [], ("hi", "end")),
        (config_of("config.json", 7), [], ("hi", "end")),
        (config_of("config.json", None), [], ("hi\ah", "length")),
    ],
)
def test_a_text_ends_at_each_end_token_of_the_model_or_the_user(
    answering, capsys, change, words, expected
):
    assert answering(change, *words) == 0
    (found,) = json.loads(capsys.readouterr().out)["completions"]
    assert (found["text"], found["finished"]) == expected
    assert found["tokens"] == [104, 105, 7, 104][: 4 if expected[1] == "length" else 3]


@pytest.mark.parametrize(("behind", "is_known"), [("<|im_end|>", True), ("", False)])
def test_an_answer_ends_where_the_chat_template_ends_a_turn(answering, capsys, behind, is_known):
    tokenizers = pytest.importorskip("tokenizers")

    def change(source):
        words = {"<end>": 0, "<|im_end|>": 7, "?": 104, "!": 105}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
        made.add_special_tokens(["<end>", "<|im_end|>"])
        (source / "tokenizer.json").write_text(made.to_str())
        template = "{% for m in messages %}{{ m.content + '" + behind + "' }}{% endfor %}"
        (source / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<end>", "chat_template": template})
        )

    assert answering(change, "--chat") == 0
    said = capsys.readouterr()
    (found,) = json.loads(said.out)["completions"]
    assert found["tokens"] == ([104, 105, 7] if is_known else [104, 105, 7, 104])
    assert found["finished"] == ("end" if is_known else "length")
    note = "note: the chat template ends an answer with no special token. Name one with --stop."
    assert (note in said.err) is not is_known
    assert answering(change, "--chat", "--stop", "<|im_end|>") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["completions"][0]["tokens"] == [104, 105, 7]
    assert note not in said.err


@pytest.mark.full
def test_a_conversation_answers_each_message_after_all_before(here, tmp_path, capsys, monkeypatch):
    """An answer is the text that follows the whole conversation as the template writes it."""
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(here / "run", run := tmp_path / "run")
    (run / "source").mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(code): code for code in range(128)}, "?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    (run / "source/tokenizer.json").write_text(made.to_str())
    template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}a"
    (run / "source/tokenizer_config.json").write_text(
        json.dumps({"eos_token": "~", "chat_template": template})
    )
    words = ["generate", str(run), "--max-tokens", "2", "--top-k", "3", "--json"]

    def after(text):
        (found,) = json.loads(printed(capsys, *words, "--prompt", text))["completions"]
        return found["text"]

    def talk(*more, lines):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return json.loads(printed(capsys, *words, "--chat", *more))["messages"]

    first = after("sxuha")
    second = after(f"sxuha{first}uya")
    assert len(first) == len(second) == 2
    assert talk("--system", "x", lines="h\ny\n\nz\n") == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": second},
    ]
    assert talk(lines="h") == [
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": after("uha")},
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("h\n" * 9))
    assert cli.main([*words, "--chat"]) == 2
    assert "is longer than the 16 positions" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main([*words, "--chat"]) == 2
    assert "got no message" in capsys.readouterr().err


def test_an_unreadable_end_token_is_named_in_one_line(answering, capsys):
    for text, message in (
        ("{", "cannot be read"),
        ('{"eos_token_id": ["a"]}', "is neither a token id nor a list of token ids"),
        ('{"eos_token_id": [9, 256]}', "eos_token_id=256 in the files of"),
        ('{"eos_token_id": -1}', "is not one of the model's 256 tokens. Correct it, or remove it"),
    ):
        assert (
            answering(
                lambda source, text=text: (source / "generation_config.json").write_text(text)
            )
            != 0
        )
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_evaluation_is_the_mean_over_all_targets(here, capsys):
    found = json.loads(printed(capsys, "evaluate", "run", "data.path=text.txt", "--json"))
    run = ppctl.load_run("run")
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    assert found["num_tokens"] == found["num_sequences"] * 16
    starts = np.arange(found["num_sequences"]) * 16
    windows = np.stack([[*ids, 0][s : s + 17] for s in starts])
    expected = run.loss({"inputs": windows[:, :-1], "targets": windows[:, 1:]})
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(
        found["loss"] / math.log(2), rel=0.01
    )  # the last byte ends the text
    held_out = json.loads(printed(capsys, "evaluate", "run", "--json"))
    assert held_out["num_sequences"] < found["num_sequences"]


@pytest.mark.parametrize("seq_len", [11, 16, full(5000)])
def test_evaluation_counts_every_target_and_each_byte_of_them_once(here, capsys, seq_len):
    (here / "cut.txt").write_text("天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。")
    for name, num_bytes in (("text.txt", len(TEXT)), ("cut.txt", 20 * 3)):
        words = "data=text", f"data.path={name}", f"model.seq_len={seq_len}"
        found = json.loads(printed(capsys, "evaluate", "run", *words, "--json"))
        assert found["num_tokens"] == num_bytes  # all but the first byte, and the end
        bits = found["loss"] * found["num_tokens"] / math.log(2)
        assert bits / found["bits_per_byte"] == pytest.approx(num_bytes - 1)


@pytest.mark.parametrize("words", [["data.packing=true"], ["model.seq_len=32"]])
@pytest.mark.parametrize("has_file", [True, False])
def test_evaluation_of_the_same_text_is_of_its_held_out_part(here, words, has_file):
    """However it is cut, of a share and of a file; another path is evaluated whole."""
    (here / "held.txt").write_text("z" * 40)
    model = open_language_model(here / "run")
    if has_file:
        data = replace(model.config.data, eval_path="held.txt")
        model = replace(model, config=replace(model.config, data=data))
    for more, is_held_out in ((words, True), ([*words, "data.path=text.txt"], False)):
        config, only_held_out = _config(model, more)
        assert only_held_out is is_held_out
        data = open_data(config)
        found = data.read(np.array(data.numbers(held_out=is_held_out)))["targets"]
        number = int((found >= 0).sum())
        assert (number < len(TEXT) / 4) is is_held_out
        assert (found == ord("z")).any() == (has_file and is_held_out)
        assert number >= (38 if is_held_out else len(TEXT))


def test_evaluation_keeps_the_packing_of_training_unless_requested_otherwise(here):
    model = open_language_model(here / "run")
    packed = replace(model, config=replace(model.config, data=Text(path="text.txt", packing=True)))
    words = ["data=text", "data.path=other.txt"]
    assert [_config(each, words)[0].data.packing for each in (model, packed)] == [False, True]
    assert not _config(packed, [*words, "data.packing=false"])[0].data.packing


def test_an_answer_is_the_likeliest_choice(here, capsys):
    rows = [
        {"prompt": "sat on the ", "choices": ["mat", "qzxv"], "answer": 0},
        {"prompt": "sat on the ", "choices": ["mat", "qzxv"], "answer": 1},
    ]
    (here / "q.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = json.loads(printed(capsys, "evaluate", "run", "--choices", "q.jsonl", "--json"))
    assert (found["num_questions"], found["accuracy"], found["accuracy_per_byte"]) == (2, 0.5, 0.5)


MARK = "\ufeff"  # byte order mark, as some editors write it


def test_lines_end_only_at_line_feeds_and_a_byte_order_mark_is_dropped(here, capsys):
    prompts = ["the\u2028cat", "on\x0cthe", "mat\x85", "sat"]
    (here / "p.txt").write_bytes((MARK + "\r\n".join(prompts) + "\n").encode())
    words = ["--max-tokens", "1", "--json"]
    found = json.loads(printed(capsys, "generate", "run", "--prompts", "p.txt", *words))
    assert [each["prompt"] for each in found["completions"]] == prompts
    row = {"prompt": "the\u2028", "choices": ["cat\x0c", "\x85"], "answer": 0}
    (here / "q.jsonl").write_text(f"{MARK}{json.dumps(row, ensure_ascii=False)}\n")
    found = json.loads(printed(capsys, "evaluate", "run", "--choices", "q.jsonl", "--json"))
    assert found["num_questions"] == 1
    for name in ("wide.txt", "wide.csv"):
        (here / name).write_text("the cat", encoding="utf-16")
    for name in ("pipe", "pipe.npy"):
        os.mkfifo(here / name)
    for words, reason in (
        ("generate run --prompts wide.txt", "It is UTF-16: write it as UTF-8"),
        ("evaluate run --choices wide.txt", "It is UTF-16: write it as UTF-8"),
        ("generate run --prompts /dev/zero", "Not a plain file"),
        ("evaluate run --choices pipe", "Not a plain file"),
        ("evaluate run data=text data.path=run data.tokenizer=/dev/zero", "Not a plain file"),
        ("schedule show schedule=csv schedule.path=/dev/zero", "cannot be read: Not a plain file"),
        ("schedule check wide.csv", "It is UTF-16: write it as UTF-8"),
        ("evaluate run data=text data.path=pipe", "data.path=pipe: Not a plain file but a FIFO."),
        ("evaluate run data=tokens data.path=pipe.npy", "pipe.npy: Not a plain file but a FIFO."),
        ("import . --out new", "config.json cannot be read (Not a plain file but a FIFO)"),
    ):
        (here / "config.json").unlink(missing_ok=True)
        if "import" in words:
            os.mkfifo(here / "config.json")
        assert cli.main(words.split()) == 2
        assert reason in capsys.readouterr().err
    (here / "config.json").unlink()
    (here / "s.csv").write_bytes(f"{MARK}0F0,0B0\r\n".encode())
    assert cli.main(["schedule", "check", "s.csv"]) == 0


@pytest.mark.parametrize("how", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_ids_that_pad_the_vocabulary_are_never_chosen(how):
    logits = np.where(np.arange(300) < 256, 0.0, 9.0)[None].repeat(50, 0)
    found = Sampling(**how).choose(logits, seed=0, place=0, num_tokens=256)
    assert found.max() < 256


def test_a_score_is_the_sum_over_the_continuation(here):
    model = open_language_model(here / "run")
    logits = np.asarray(ppctl.load_run("run").predict(np.array([list(b"the ca")]))[0], np.float64)
    of_token = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = sum(of_token[i, b] for i, b in zip((2, 3, 4), b" ca", strict=True))
    assert log_likelihood(model)("the", " ca") == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate run", "needs a prompt"),
        ("generate --prompt a", "are required: RUN. Write ppctl generate RUN"),
        ("generate nowhere --prompt a", "nowhere is no run"),
        (
            "generate run/checkpoints/7 --prompt a",
            "run has no checkpoint of step 7; it has steps 20",
        ),
        ("generate run --prompt a --max-tokens 0", "--max-tokens 0 is too small. Use 1 or more"),
        ("generate run --prompt a --temperature -1", "--temperature -1.0 is invalid"),
        (
            "generate run --prompt a --temperature 0 --top-k 3",
            "--temperature 0 takes the likeliest",
        ),
        ("generate run --prompt a --top-p 2", "--top-p 2.0 is not a probability"),
        ("generate run --prompt a --chat", "has no chat template"),
        (
            "generate run --prompt a --stop ab",
            "'ab' is 2 tokens of the tokenizer of run. Name one token",
        ),
        (
            f"generate run --prompt {'a' * 17}",
            "a text of 17 tokens is longer than the 16 positions of the model in run. Use a shorter",
        ),
        (
            "generate run --prompt a --system b",
            "--system is a message of a chat template. Add --chat",
        ),
        ("generate run --chat", "has no chat template"),
        ("generate run --prompt a --devices 99", "--devices 99 are more than"),
        (
            "evaluate run model.d_model=3",
            "takes only data=..., data.SETTING=... and model.seq_len=N",
        ),
        ("generate run --prompt a\ud83d", "holds half of a surrogate pair"),
        ("generate run --chat --prompt \udcff", "holds half of a surrogate pair"),
        ("generate run --prompt a --stop \udcff", "holds half of a surrogate pair"),
        ("evaluate run --choices half.jsonl", "half.jsonl:1 is not a question"),
        ("evaluate run --choices none.jsonl", "--choices none.jsonl cannot be read"),
        ("evaluate run --choices text.txt", "text.txt:1 is not a question"),
        ("evaluate run --choices text.txt data=stdlib", "evaluates questions, not data"),
        ("evaluate run data=regression", "tokens"),
    ],
)
def test_impossible_requests_of_generate_are_refused_in_one_line(
    here, capsys, monkeypatch, words, message
):
    question = {"prompt": "\ud83d", "choices": ["a", "b"], "answer": 0}
    (here / "half.jsonl").write_text(json.dumps(question) + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    capsys.readouterr()
    assert cli.main(words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
