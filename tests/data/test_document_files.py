"""Documents in files as people have them, what is broken in them, and the cache of their ids."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from ppctl.data import documents, encoding, token_cache
from ppctl.data.bpe import train_bpe, write_tokenizer
from ppctl.data.documents import Broken, Document, Fields, Source, read_documents
from ppctl.data.token_cache import cached_tokens
from ppctl.data.tokenizer import byte_tokenizer, load_tokenizer
from ppctl.data.windows import NO_TOKEN
from ppctl.errors import DataError

TEXTS = ["one fox", "zwei füchse\nin lines", "three"]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))


def texts_of(file, **fields):
    found = list(read_documents(file, Fields(**fields)))
    assert all(isinstance(each, Document) for each in found), found
    return [each.content for each in found]


def written(path, text):
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":  # two frames
        content = b"".join(map(zstandard.ZstdCompressor().compress, (content[:20], content[20:])))
    path.write_bytes(content)
    return path


def records(path, *contents):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for content in contents:
        writer.write(content)
    writer.close()
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"])
def test_json_lines_are_documents(tmp_path, suffix):
    assert texts_of(written(tmp_path / f"a{suffix}", LINES + "\n")) == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("document", "expected"),
    [("file", ["a\r\nb\n\n c\nd"]), ("line", ["a", "b", " c", "d"]), ("paragraph", ["a\r\nb", " c\nd"])],
)
def test_plain_text_is_documents(tmp_path, suffix, document, expected):
    assert texts_of(written(tmp_path / f"a.txt{suffix}", "a\r\nb\n\n c\nd"), document=document) == expected


def test_parquet_is_documents(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"body": TEXTS, "id": [1, 2, 3]}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", text="body") == TEXTS
    (missing,) = read_documents(tmp_path / "a.parquet", Fields())
    assert missing.reason == "has no column text (it has body, id)"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    (broken,) = read_documents(tmp_path / "b.parquet", Fields())
    assert broken.reason.startswith("is no Parquet")


def test_array_records_are_documents(tmp_path):
    assert texts_of(records(tmp_path / "a.arrayrecord", *map(str.encode, TEXTS))) == TEXTS
    ids = [np.array([5, 6], np.uint16), np.array([7], np.uint16)]
    found = texts_of(records(tmp_path / "b.array_record", *(a.tobytes() for a in ids)), records="uint16")
    assert [a.tolist() for a in found] == [[5, 6], [7]]
    (tmp_path / "c.arrayrecord").write_bytes(b"nothing of the sort")
    (broken,) = read_documents(tmp_path / "c.arrayrecord", Fields())
    assert "is no ArrayRecord" in broken.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 holds list, not an object with fields"),
        ('{"body": "x"}', r"line 2 has no field text \(it has body\)"),
        ('{"text": 3}', "line 2 field text is int, not a text"),
        ('{"text": " "}', "line 2 field text is empty"),
        ("\udcff", "line 2 is no JSON"),
    ],
)
def test_a_broken_line_is_named_and_stops_or_is_skipped(build, tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    good = json.dumps({"text": "x" * 9000})
    file.write_bytes(f"{good}\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"a.jsonl {reason}.* Use data.on_error=skip"):
        build("text", path=str(file))
    dataset = build("text", path=str(file), on_error="skip")
    assert ", 1 broken skipped (first: " in dataset.source
    assert dataset.num_examples + dataset.num_eval_examples == (2 * 9001 - 2) // 16


@pytest.mark.parametrize(
    ("name", "reason"), [("a.jsonl", "is empty"), ("a.txt", "is empty"), ("a.jsonl.gz", "is cut short|is in a comp")]
)
def test_an_empty_or_cut_file_is_named(build, tmp_path, name, reason):
    file = tmp_path / name
    file.write_bytes(gzip.compress(LINES.encode())[:-9] if name.endswith("gz") else b"")
    with pytest.raises(DataError, match=rf"{name}.* ({reason}).* Use data.on_error=skip"):
        build("text", path=str(file))


def test_a_zst_file_that_is_cut_short_is_named(tmp_path):
    whole = zstandard.ZstdCompressor().compress(LINES.encode() * 50)
    (tmp_path / "a.jsonl.zst").write_bytes(whole[:-5])
    *_, last = read_documents(tmp_path / "a.jsonl.zst", Fields())
    assert isinstance(last, Broken)
    assert "it ends inside a frame" in last.reason


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "corpus.txt").write_text("some words, of a few languages\n" + LINES * 20)
    found = train_bpe(Source([directory / "corpus.txt"], frozenset(), Fields(), False), 300)
    write_tokenizer(directory, found.tokenizer)
    return directory


def test_documents_are_their_texts_with_the_end_behind_each(tmp_path, tokenizer):
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


def test_prompts_and_what_users_say_are_no_targets(build, tmp_path, tokenizer):
    chat = [{"role": "user", "content": "fox " * 40}, {"role": "assistant", "content": "zwei " * 40}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 50)
    (tmp_path / "ask.jsonl").write_text((json.dumps({"q": "fox " * 40, "a": "zwei " * 40}) + "\n") * 50)
    for file, fields in (("chat", {"field": "messages"}), ("ask", {"field": "a", "prompt_field": "q"})):
        how = {"path": str(tmp_path / f"{file}.jsonl"), "tokenizer": str(tokenizer), "seq_len": 400, "batch_size": 1}
        dataset = build("text", **how, **fields)
        batch = next(dataset.batches())
        by = load_tokenizer(str(tokenizer), None)
        learned = by.decode(batch["targets"][batch["targets"] != NO_TOKEN].tolist())
        assert "zwei" in learned
        assert "fox" not in learned
        assert "fox" in by.decode(batch["inputs"][0].tolist())


def test_messages_need_a_template(build, tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(DataError, match=r"line 1 holds messages, and data.tokenizer=bytes has no chat template"):
        build("text", path=str(tmp_path / "chat.jsonl"), field="messages")


def test_ids_that_the_tokenizer_does_not_have_are_refused(build, tmp_path):
    file = records(tmp_path / "a.arrayrecord", np.array([5, 300], np.uint16).tobytes())
    with pytest.raises(DataError, match=r"record 1 holds the id 300, not in 0\.\.255 of the tokenizer"):
        build("text", path=str(file), records="uint16")


TOKENIZE = """
import sys, time
from pathlib import Path
from ppctl.data import encoding, token_cache
from ppctl.data.documents import Fields, Source
from ppctl.data.tokenizer import byte_tokenizer
stop, encoding.CHARS_AT_ONCE, encoded = int(sys.argv[3]), int(sys.argv[4]), token_cache.encoded
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
print(len(token_cache.cached_tokens("t", source, byte_tokenizer(), "", sys.argv[2]).ends), flush=True)
"""


@pytest.mark.parametrize(("chars", "is_kept"), [(1, True), (10**6, False)], ids=["blocks of one", "one block"])
def test_who_waited_for_a_killed_writer_goes_on_behind_its_last_block(tmp_path, chars, is_kept):
    rows = [{"text": text, "prompt": "ask" if i == 1 else ""} for i, text in enumerate(TEXTS)]
    file, cache = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)), tmp_path / "cache"

    def start(stop):
        words = [sys.executable, "-c", TOKENIZE, file, cache, str(stop), str(chars)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    killed = start(3)
    assert [killed.stdout.readline() for _ in range(3)] == ["piece\n"] * 3  # two of them whole
    waiting = start(0)
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate(timeout=60) == ("", None)
    assert waiting.communicate(timeout=60)[0].split() == ["piece"] * (1 if is_kept else 3) + ["3"]
    (found,) = cache.iterdir()
    source = Source([file], frozenset(), Fields(prompt="prompt"), False)
    tokens = cached_tokens("t", source, byte_tokenizer(), "", str(tmp_path / "whole"))
    assert tokens.ids.tobytes() == b"".join((row["prompt"] + row["text"]).encode() + b"\0" for row in rows)
    assert not tokens.is_learned.all()
    assert found.read_bytes() == (tmp_path / "whole" / found.name).read_bytes()


@pytest.mark.parametrize("damage", ["ids", "learned", "ends", "progress", "cut"])
def test_what_an_interrupted_writer_left_counts_where_it_is_whole(tmp_path, monkeypatch, damage):
    """Ctrl-C behind the second of three blocks; then something happens to the files. The result is the same."""
    monkeypatch.setattr(encoding, "CHARS_AT_ONCE", 1)
    file, cache = written(tmp_path / "a.jsonl", LINES), tmp_path / "cache"
    source, number = Source([file], frozenset(), Fields(), False), 0
    whole = cached_tokens("t", source, byte_tokenizer(), "", str(tmp_path / "whole"))

    def interrupted(block, *given):
        nonlocal number
        number += 1
        if number == 3:
            raise KeyboardInterrupt
        return encoding.encoded(block, *given)

    monkeypatch.setattr(token_cache, "encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_tokens("t", source, byte_tokenizer(), "", str(cache))
    parts = {path.suffix: path for path in cache.iterdir()}
    assert parts.keys() == {".tmp", ".ends", ".learned", ".progress"}
    if damage == "cut":
        parts[".progress"].write_bytes(parts[".progress"].read_bytes()[:-5])  # of the second block nothing is known
    else:
        part = parts[".tmp" if damage == "ids" else f".{damage}"]
        part.write_bytes(b"\2" + part.read_bytes()[1 if damage != "ends" else 9 :])
    found = cached_tokens("t", source, byte_tokenizer(), "", str(cache))
    number_again = number - 3
    assert number_again == {"cut": 2, "progress": 1}.get(damage, 3)
    assert [each.tobytes() for each in found[:2]] == [each.tobytes() for each in whole[:2]]
    assert found.content == whole.content
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


def test_a_writer_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "CHARS_AT_ONCE", 1)
    file = written(tmp_path / "a.jsonl", LINES + "{\n")
    with pytest.raises(DataError):
        cached_tokens("t", Source([file], frozenset(), Fields(), False), byte_tokenizer(), "", str(tmp_path / "cache"))
    assert not [*(tmp_path / "cache").iterdir()]
