"""Which files are read as text, and the cache between them and the batches."""

from __future__ import annotations

import mmap
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from ppctl.data import text_dataset as text_files
from ppctl.data.document_files import CHUNK_BYTES, Fields, Source, why_no_text
from ppctl.data.text_dataset import files_below
from ppctl.data.token_cache import cached_tokens
from ppctl.data.tokenizer import byte_tokenizer
from ppctl.errors import DataError


def tokens_of(*files, cache_dir, salt=""):
    source = Source(files, frozenset(), Fields(), False)
    return cached_tokens("t", source, byte_tokenizer(), salt, str(cache_dir))


def text_of(*files, cache_dir):
    return tokens_of(*files, cache_dir=cache_dir).ids.tobytes()


@pytest.fixture
def library(tmp_path):
    """A directory with one file of each sort; the names say whether it is text that belongs."""
    root = tmp_path / "corpus"
    for name, content in {
        "b.py": b"second\n",
        "a/z.txt": "fünf\n".encode(),
        "a/empty.txt": b"",
        "a/latin1.txt": "fünf\n".encode("latin-1"),
        "a/binary": b"PNG\0",
        ".hidden": b"hidden\n",
        ".git/config": b"hidden\n",
        "c/deep/er.md": b"last\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    os.symlink(root / "nowhere", root / "dangling")
    return root


def test_text_is_every_visible_utf8_file_in_the_order_of_paths(build, library, monkeypatch):
    seen = []
    monkeypatch.setattr(
        text_files, "from_tokens", lambda tokens, **_: seen.append(tokens.tobytes())
    )
    build("text", path=str(library))
    assert seen == ["fünf\n\0second\n\0last\n\0".encode()]


def test_text_excludes_the_token_cache(build, library, monkeypatch):
    seen = []
    monkeypatch.setattr(
        text_files, "from_tokens", lambda tokens, **_: seen.append(tokens.tobytes())
    )
    for _ in range(2):
        build("text", path=str(library), cache_dir=str(library / "cache"))
    assert seen[0] == seen[1]
    assert len(list((library / "cache").glob("*.tokens"))) == 1


def test_windows_of_a_file_hold_its_bytes(build, tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(1 + i % 100 for i in range(161)))
    dataset = build("text", path=str(path), seq_len=16, batch_size=1, eval_fraction=0)
    inputs = sorted(
        tuple(next(dataset.batches(k))["inputs"][0]) for k in range(dataset.num_examples)
    )
    assert inputs == sorted(tuple(path.read_bytes()[16 * i : 16 * i + 16]) for i in range(10))


def test_stdlib_is_sources_without_tests_and_generated_files():
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file.relative_to(root) for file in files_below(root, text_files._is_library)]
    parts = {part for file in files for part in file.parts}
    assert {file.suffix for file in files} == {".py"}
    assert {"argparse.py", "asyncio", "json"} <= parts
    assert not parts & {"test", "tests", "site-packages", "__pycache__"}
    assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)
    assert len(files) > 400


def test_stdlib_is_several_megabytes_with_vocabulary_256(build):
    dataset = build("stdlib")
    assert dataset.vocab_size == 256
    assert (dataset.num_examples + dataset.num_eval_examples) * 16 > 5_000_000
    assert ".".join(map(str, sys.version_info[:3])) in dataset.source


@pytest.mark.parametrize("file", ["ids.bin", "ends.bin", "record.json"])
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"", lambda b: b[:-1] + b"x"]
)
def test_a_damaged_cache_is_written_again(tmp_path, library, damage, file):
    before = text_of(library / "b.py", cache_dir=tmp_path / "cache")
    (cache,) = (tmp_path / "cache").glob("*.tokens")
    (cache / file).write_bytes(damage((cache / file).read_bytes()))
    assert text_of(library / "b.py", cache_dir=tmp_path / "cache") == before == b"second\n\0"


def test_a_sound_cache_is_not_written_again(tmp_path, library):
    text_of(library / "b.py", cache_dir=tmp_path)
    (cache,) = tmp_path.glob("*.tokens")
    inode = cache.stat().st_ino
    text_of(library / "b.py", cache_dir=tmp_path)
    assert cache.stat().st_ino == inode


@pytest.mark.parametrize("change", ["size", "mtime", "files", "salt"])
def test_a_changed_corpus_gets_a_new_cache(tmp_path, library, change):
    file = library / "b.py"
    os.utime(file, ns=(1, 1))
    tokens_of(file, cache_dir=tmp_path / "cache")
    if change in ("size", "mtime"):
        file.write_bytes(b"another text" if change == "size" else b"SECOND\n")
    files = [file, library / "c/deep/er.md"] if change == "files" else [file]
    text = tokens_of(
        *files, salt="salt" if change == "salt" else "", cache_dir=tmp_path / "cache"
    ).ids
    assert text.tobytes() == b"".join(file.read_bytes() + b"\0" for file in files)
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 2


def test_content_decides_the_fingerprint_not_its_place(build, tmp_path):
    same, other = tmp_path / "a" / "copy.txt", tmp_path / "b" / "other.txt"
    for path, text in ((same, (tmp_path / "text.txt").read_text()), (other, "x" * 9000)):
        path.parent.mkdir()
        path.write_text(text)
    assert build("text", path=str(same)).fingerprint == build("text").fingerprint
    assert build("text", path=str(other)).fingerprint != build("text").fingerprint


def test_home_is_expanded(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    build("text", path="~/text.txt", cache_dir="~/kept")
    assert list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"a", None),
        (b"a\xff", "is not UTF-8 text (invalid start byte at about byte 1)"),
        (b"a\0", "is not text: byte 1 is 0"),
    ],
)
def test_why_no_text(tmp_path, content, expected):
    (tmp_path / "f").write_bytes(content)
    assert why_no_text(tmp_path / "f") == expected


def test_characters_across_chunks_are_decoded_and_a_truncated_one_is_found(tmp_path):
    (tmp_path / "f").write_bytes(b"a" * (CHUNK_BYTES - 1) + "ü".encode())
    assert why_no_text(tmp_path / "f") is None
    (tmp_path / "f").write_bytes(b"a" * (CHUNK_BYTES - 1) + "ü".encode()[:1])
    assert "unexpected end of data" in why_no_text(tmp_path / "f")


def test_a_cache_that_cannot_be_written_is_an_error_with_its_path(build, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError,
        match=r"The token cache .*file/text-.*\.tokens cannot be .* \(.*\)\. Use data.cache_dir=",
    ):
        build("text", cache_dir=str(tmp_path / "file"))


def test_a_full_disk_leaves_no_partial_file(tmp_path, library, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        text_of(library / "b.py", cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_file_that_vanishes_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.txt cannot be read \(No such file"):
        text_of(tmp_path / "gone.txt", cache_dir=tmp_path)


def test_a_library_without_sources_is_refused_with_the_remedy(build, tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(
        DataError, match=r"python311.zip holds no Python sources .* Use data=text data.path="
    ):
        build("stdlib")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, r"data=text data.path=\S+x.txt: No such file or directory\. Use "),
        (b"\xff\xff", r"x.txt is not UTF-8 text .*\. Use on_error=skip"),
        (b"", r"x.txt is empty\. Use on_error=skip"),
    ],
)
def test_a_path_without_text_is_refused_with_the_remedy(build, tmp_path, content, fault):
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=fault):
        build("text", path=str(path))


def test_a_directory_without_text_is_refused_with_the_remedy(build, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/binary").write_bytes(b"\0")
    with pytest.raises(
        DataError, match=r"no UTF-8 text found .hidden and binary files are skipped.\. Use another"
    ):
        build("text", path=str(tmp_path / "empty"))


def test_a_pattern_names_files_in_order(build, library, monkeypatch):
    seen = []
    monkeypatch.setattr(
        text_files, "from_tokens", lambda tokens, **_: seen.append(tokens.tobytes())
    )
    build("text", path=str(library / "**/*.[mp]*"))
    assert seen == [b"second\n\0last\n\0"]
    with pytest.raises(DataError, match=r"\*.jsonl: no file matches\. Use "):
        build("text", path=str(library / "*.jsonl"))


def test_cached_text_is_mapped_and_read_only(tmp_path, library):
    text = tokens_of(library / "b.py", cache_dir=tmp_path).ids
    base = text
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)
    assert not text.flags.writeable
