"""Documents in files of many kinds, broken files, and the cache of token ids."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet

from ppctl.data import document_files as documents, token_cache
from ppctl.data.chat_templates import ChatTemplate
from ppctl.data.document_files import Broken, Document, Fields, Source, read_documents
from ppctl.data.token_cache import cached_tokens
from ppctl.data.token_examples import NO_TOKEN
from ppctl.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe, write_tokenizer
from ppctl.errors import DataError

TEXTS = ["one fox", "zwei füchse\nin lines", "three"]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))


def texts_of(file, **fields):
    found = list(read_documents(file, Fields(**fields)))
    assert all(isinstance(each, Document) for each in found), found
    return [each.content for each in found]


def zstd(content):
    return pyarrow.compress(content, "zstd", asbytes=True)


def written(path, text):
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":  # two frames
        content = b"".join(map(zstd, (content[:20], content[20:])))
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"])
def test_json_lines_are_documents(tmp_path, suffix):
    assert texts_of(written(tmp_path / f"a{suffix}", LINES + "\n")) == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["a\r\nb\n\n c\nd"]),
        ("line", ["a", "b", " c", "d"]),
        ("paragraph", ["a\r\nb", " c\nd"]),
    ],
)
def test_plain_text_is_documents(tmp_path, suffix, document, expected):
    assert (
        texts_of(written(tmp_path / f"a.txt{suffix}", "a\r\nb\n\n c\nd"), document=document)
        == expected
    )


def test_parquet_is_documents(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"body": TEXTS, "id": [1, 2, 3]}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", text="body") == TEXTS
    (missing,) = read_documents(tmp_path / "a.parquet", Fields())
    assert missing.reason == "has no column text (it has body, id)"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    (broken,) = read_documents(tmp_path / "b.parquet", Fields())
    assert broken.reason.startswith("is not Parquet")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 holds list, not an object with fields"),
        ('{"body": "x"}', r"line 2 has no field text \(it has body\)"),
        ('{"text": 3}', "line 2 field text is int, not a text"),
        ('{"text": " "}', "line 2 field text is empty"),
        ("\udcff", "line 2 is not JSON"),
    ],
)
def test_a_broken_line_is_named_and_stops_or_is_skipped(build, tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    good = json.dumps({"text": "x" * 9000})
    file.write_bytes(f"{good}\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"a.jsonl {reason}.* Use on_error=skip"):
        build("text", path=str(file))
    dataset = build("text", path=str(file), on_error="skip")
    assert ", 1 broken skipped (first: " in dataset.source
    assert dataset.num_examples + dataset.num_eval_examples == (2 * 9001 - 2) // 16


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a.jsonl", "is empty"), ("a.txt", "is empty"), ("a.jsonl.gz", "is cut short|is in a comp")],
)
def test_an_empty_or_cut_file_is_named(build, tmp_path, name, reason):
    file = tmp_path / name
    file.write_bytes(gzip.compress(LINES.encode())[:-9] if name.endswith("gz") else b"")
    with pytest.raises(DataError, match=rf"{name}.* ({reason}).* Use on_error=skip"):
        build("text", path=str(file))


HALF = json.dumps("half \ud83d of a pair")  # a text that UTF-8 cannot hold


@pytest.mark.parametrize(
    "row",
    [
        f'{{"text": {HALF}}}',
        f'{{"text": "good", "prompt": {HALF}}}',
        f'{{"text": [{{"role": "user", "content": {HALF}}}]}}',
        f'{{"text": [{{"role": "user", "content": [{{"type": "text", {HALF}: 1}}]}}]}}',
    ],
)
def test_text_that_utf8_cannot_hold_is_a_broken_line(tmp_path, row):
    file = written(tmp_path / "a.jsonl", row + "\n" + json.dumps({"text": "good", "prompt": ""}))
    fields = Fields(prompt="prompt") if "prompt" in row else Fields()
    broken, good = read_documents(file, fields)
    assert broken.place.endswith("line 1")
    assert "holds half of a surrogate pair, which UTF-8 cannot encode" in broken.reason
    assert good.content == "good"


def test_values_of_parquet_that_json_cannot_hold_are_texts_or_refused(tmp_path):
    """Null, decimal, date and dictionary columns next to the words of a chat; bytes are no text."""
    when, price = datetime.datetime(2026, 11, 25, 12), decimal.Decimal("1.50")
    message = {"role": "user", "content": "x", "at": when, "price": price, "none": None}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}], "day": when.date()}
    table = pyarrow.table({"text": [[message], [message | {"content": "y"}]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    first, second = read_documents(tmp_path / "a.parquet", Fields())
    stated = {"at": "2026-11-25 12:00:00", "price": "1.50", "none": None}
    assert first.content == [{"role": "user", "content": "x", **stated}]
    assert json.dumps(second.content)
    parquet.write_table(pyarrow.table({"text": [[parts]]}), tmp_path / "b.parquet")
    (only,) = read_documents(tmp_path / "b.parquet", Fields())
    assert only.content[0]["day"] == "2026-11-25"
    parquet.write_table(
        pyarrow.table({"text": [[{"role": "user", "content": b"x"}]]}), tmp_path / "c.parquet"
    )
    (broken,) = read_documents(tmp_path / "c.parquet", Fields())
    assert "holds bytes, which are not text" in broken.reason
    words = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": words}), tmp_path / "d.parquet")
    assert texts_of(tmp_path / "d.parquet") == ["a", "b", "a"]


@pytest.mark.parametrize("document", ["file", "line"])
def test_byte_order_marks_are_no_text_and_utf16_is_named(tmp_path, document):
    """Lines of documents end at line feeds only."""
    text = "one\u2028two\x0cthree\x85"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
    assert texts_of(tmp_path / "a.txt", document=document) == [
        text.rstrip() if document == "line" else text
    ]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8-sig"
    )
    assert texts_of(tmp_path / "a.jsonl") == [text]
    for name in ("b.txt", "b.jsonl"):
        (tmp_path / name).write_text(LINES, encoding="utf-16")
        broken, *_ = read_documents(tmp_path / name, Fields(document=document))
        assert "is UTF-16" in broken.reason


def test_a_zst_file_that_is_cut_short_is_named(tmp_path):
    whole = zstd(b"".join(b'{"text": "%d"}\n' % i for i in range(30_000)))
    for length in (len(whole) - 5, len(whole) // 2):
        (tmp_path / "a.jsonl.zst").write_bytes(whole[:length])
        (tmp_path / "a.txt.zst").write_bytes(whole[:length])
        *_, last = read_documents(tmp_path / "a.jsonl.zst", Fields())
        (only,) = read_documents(tmp_path / "a.txt.zst", Fields())
        for broken in (last, only):
            assert isinstance(broken, Broken)
            assert "cut short or damaged (Truncated compressed stream)" in broken.reason
    (tmp_path / "b.txt.zst").write_bytes(b"no frame")
    (broken,) = read_documents(tmp_path / "b.txt.zst", Fields())
    assert "is cut short or damaged" in broken.reason


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "corpus.txt").write_text("some words, of a few languages\n" + LINES * 20)
    found = train_bpe(Source([directory / "corpus.txt"], frozenset(), Fields(), False), 300)
    write_tokenizer(directory, found.tokenizer)
    return directory


def test_documents_are_their_texts_each_followed_by_the_end_token(tmp_path, tokenizer):
    by = load_tokenizer(str(tokenizer), None)
    source = Source([written(tmp_path / "a.jsonl", LINES)], frozenset(), Fields(), False)
    tokens = cached_tokens("t", source, by, "", str(tmp_path / "cache"))
    starts = [0, *tokens.ends[:-1]]
    found = [tokens.ids[a:b].tolist() for a, b in zip(starts, tokens.ends, strict=True)]
    assert [by.decode(ids[:-1]) for ids in found] == TEXTS
    assert {ids[-1] for ids in found} == {by.end}
    assert tokens.is_learned is None


def test_a_long_text_in_pieces_has_the_ids_of_the_whole(tmp_path, tokenizer, monkeypatch):
    by = load_tokenizer(str(tokenizer), None)
    text = "words; of\n\n  lines\nfüchse,\n" * 30
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 41)
    source = Source([tmp_path / "a.txt"], frozenset(), Fields(), False)
    assert len(texts_of(tmp_path / "a.txt")) > 10
    tokens = cached_tokens("t", source, by, "", str(tmp_path / "cache"))
    assert tokens.ids.tolist() == [*by.encode([text])[0].tolist(), by.end]
    assert tokens.ends.tolist() == [len(tokens.ids)]


def test_prompts_and_user_messages_are_not_targets(build, tmp_path, tokenizer):
    chat = [
        {"role": "user", "content": "fox " * 40},
        {"role": "assistant", "content": "zwei " * 40},
    ]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 50)
    (tmp_path / "ask.jsonl").write_text(
        (json.dumps({"q": "fox " * 40, "a": "zwei " * 40}) + "\n") * 50
    )
    for file, fields in (
        ("chat", {"field": "messages"}),
        ("ask", {"field": "a", "prompt_field": "q"}),
    ):
        how = {
            "path": str(tmp_path / f"{file}.jsonl"),
            "tokenizer": str(tokenizer),
            "seq_len": 400,
            "batch_size": 1,
        }
        dataset = build("text", **how, **fields)
        batch = next(dataset.batches())
        by = load_tokenizer(str(tokenizer), None)
        learned = by.decode(batch["targets"][batch["targets"] != NO_TOKEN].tolist())
        assert "zwei" in learned
        assert "fox" not in learned
        assert "fox" in by.decode(batch["inputs"][0].tolist())


@pytest.mark.parametrize("marked", [True, False])
def test_only_the_chat_template_decides_which_tokens_are_learned(tmp_path, tokenizer, marked):
    """The end token of an answer is learned once, and no other follows a chat."""
    answer = "{{ m.content + '<|im_end|>' }}"
    answer = "{% generation %}" + answer + "{% endgeneration %}" if marked else answer
    question = "{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
    template = f"{{% for m in messages %}}{question}{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
    by = replace(load_tokenizer(str(tokenizer), None), template=ChatTemplate(template))
    turns = [("user", "fox"), ("assistant", "zwei"), ("user", "one"), ("assistant", "three")]
    chat = [{"role": role, "content": content} for role, content in turns]
    file = written(tmp_path / "a.jsonl", 3 * (json.dumps({"text": chat}) + "\n"))
    source = Source([file], frozenset(), Fields(), False)
    tokens = cached_tokens("t", source, by, "", str(tmp_path / "cache"))
    text = "<|im_start|>fox<|im_end|>zwei<|im_end|><|im_start|>one<|im_end|>three<|im_end|>"
    ids = by.encode_chat(text, ())[0].tolist()
    assert tokens.ids.tolist() == 3 * ids
    assert tokens.ends.tolist() == [len(ids), 2 * len(ids), 3 * len(ids)]
    learned = by.encode_chat("zwei<|im_end|>three<|im_end|>", ())[0].tolist()
    assert tokens.ids[tokens.is_learned].tolist() == 3 * learned


def test_messages_need_a_template(build, tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(
        DataError, match=r"line 1 holds messages, and data.tokenizer=bytes has no chat template"
    ):
        build("text", path=str(tmp_path / "chat.jsonl"), field="messages")


TOKENIZE = """
import sys, time
from pathlib import Path
from ppctl.data import token_cache
from ppctl.data.document_files import Fields, Source
from ppctl.data.tokenizer import byte_tokenizer
stop, token_cache.CHARS_AT_ONCE = int(sys.argv[3]), int(sys.argv[4])
encoded = token_cache.encoded
number = 0
def slowly(*given):
    global number
    for piece in encoded(*given):
        number += 1
        print("piece", flush=True)
        time.sleep(100 if number == stop else 0)
        yield piece
token_cache.encoded = slowly
source = Source([Path(sys.argv[1])], frozenset(), Fields(prompt="prompt"), False)
tokens = token_cache.cached_tokens("t", source, byte_tokenizer(), "", sys.argv[2])
print(len(tokens.ends), flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "chars",
    [
        pytest.param(1, id="blocks of one", marks=pytest.mark.full),
        pytest.param(10**6, id="one block"),
    ],
)
def test_who_waited_for_a_killed_writer_begins_anew(tmp_path, chars):
    rows = [{"text": text, "prompt": "ask" if i == 1 else ""} for i, text in enumerate(TEXTS)]
    file, cache = (
        written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        tmp_path / "cache",
    )

    def start(stop):
        words = [sys.executable, "-c", TOKENIZE, file, cache, str(stop), str(chars)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    killed = start(3)
    assert [killed.stdout.readline() for _ in range(3)] == ["piece\n"] * 3
    waiting = start(0)
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate(timeout=60) == ("", None)
    assert waiting.communicate(timeout=60)[0].split() == ["piece"] * 3 + ["3"]
    (found,) = cache.glob("*.tokens")
    source = Source([file], frozenset(), Fields(prompt="prompt"), False)
    tokens = cached_tokens("t", source, byte_tokenizer(), "", str(tmp_path / "whole"))
    assert tokens.ids.tobytes() == b"".join(
        (row["prompt"] + row["text"]).encode() + b"\0" for row in rows
    )
    assert not tokens.is_learned.all()
    names = sorted(file.name for file in found.iterdir())
    assert names == ["ends.bin", "ids.bin", "is_learned.bin", "record.json"]
    for name in names:
        assert (found / name).read_bytes() == (tmp_path / "whole" / found.name / name).read_bytes()


def test_an_interrupted_writer_leaves_no_file(tmp_path, monkeypatch):
    encoded = token_cache.encoded

    def interrupted(*given):
        yield next(encoded(*given))
        raise KeyboardInterrupt

    file, cache = written(tmp_path / "a.jsonl", LINES), tmp_path / "cache"
    source = Source([file], frozenset(), Fields(), False)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "encoded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached_tokens("t", source, byte_tokenizer(), "", str(cache))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    found = cached_tokens("t", source, byte_tokenizer(), "", str(cache))
    assert found.ids.tobytes() == b"".join(text.encode() + b"\0" for text in TEXTS)
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".tokens"}


def test_two_writers_without_locks_have_the_same_tokens(tmp_path, monkeypatch):
    """The second one writes the whole cache while the first one writes it."""

    def no_locks(*_):
        raise OSError(37, "No locks available")

    def meanwhile(source, tokenizer):
        yield next(pieces := encoded(source, tokenizer))
        monkeypatch.setattr(token_cache, "encoded", encoded)
        second.append(read())
        yield from pieces

    def read():
        source = Source([file], frozenset(), Fields(), False)
        return cached_tokens("t", source, byte_tokenizer(), "", str(tmp_path / "cache"))

    encoded, second = token_cache.encoded, []
    file = written(tmp_path / "a.jsonl", LINES)
    monkeypatch.setattr(token_cache.fcntl, "flock", no_locks)
    monkeypatch.setattr(token_cache, "encoded", meanwhile)
    first = read()
    assert first.ids.tobytes() == second[0].ids.tobytes() == read().ids.tobytes()
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock", ".tokens"}


def test_a_failed_writer_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "CHARS_AT_ONCE", 1)
    file = written(tmp_path / "a.jsonl", LINES + "{\n")
    with pytest.raises(DataError):
        cached_tokens(
            "t",
            Source([file], frozenset(), Fields(), False),
            byte_tokenizer(),
            "",
            str(tmp_path / "cache"),
        )
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
