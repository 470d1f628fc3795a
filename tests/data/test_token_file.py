"""Token files: accepted and refused ones, and their windows."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ppctl.data import token_examples as windows
from ppctl.errors import DataError

IDS = np.arange(2000)


def write(path, ids):
    ids.tofile(path) if path.suffix == ".bin" else np.save(path, ids)
    return {"path": str(path), "dtype": ids.dtype.name if path.suffix == ".bin" else "uint16"}


def all_windows(dataset):
    return dataset.read(np.arange(dataset.num_examples)), dataset.read(
        np.arange(dataset.num_examples, dataset.num_examples + dataset.num_eval_examples)
    )


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        (suffix, dtype)
        for suffix in (".npy", ".bin")
        for dtype in ("uint8", "uint16", "int32", "uint32")
    ]
    + [
        (".npy", "int64"),
        (".npy", ">u2"),
    ],  # a raw file has no other type in its config, and this machine's byte order
)
def test_every_integer_type_reads_as_the_same_tokens(build, tmp_path, suffix, dtype):
    ids = IDS % 200
    dataset = build("tokens", **write(tmp_path / f"x{suffix}", ids.astype(dtype)), eval_fraction=0)
    assert dataset.vocab_size == 200
    np.testing.assert_array_equal(dataset.read(np.array([3]))["inputs"][0], ids[48:64])
    np.testing.assert_array_equal(dataset.read(np.array([3]))["targets"][0], ids[49:65])


@pytest.mark.parametrize("num_tokens", [994, 1000, 1001])
def test_windows_predict_each_token_once(build, tmp_path, num_tokens):
    dataset = build("tokens", **write(tmp_path / "x.npy", np.arange(num_tokens)), eval_fraction=0)
    train, _ = all_windows(dataset)
    assert dataset.num_examples == (num_tokens - 1) // 16
    np.testing.assert_array_equal(
        train["targets"].ravel(), np.arange(1, 1 + 16 * dataset.num_examples)
    )


@pytest.mark.parametrize("num_tokens", [993, 994, 995, 1000])
def test_held_out_windows_are_the_tail_and_share_no_token_with_training(
    build, tmp_path, num_tokens
):
    dataset = build("tokens", **write(tmp_path / "x.npy", np.arange(num_tokens)), eval_fraction=0.2)
    train, held_out = all_windows(dataset)
    assert train["targets"].max() < held_out["inputs"].min()
    assert held_out["targets"].max() <= num_tokens - 1
    assert dataset.num_eval_examples == int(0.2 * ((num_tokens - 2) // 16))


@pytest.mark.parametrize("fraction", [0, 0.2])
@pytest.mark.parametrize("num_tokens", [2, 16, 18, 993, 994, 1000])
def test_windows_and_the_final_short_one_have_each_target_once(
    build, tmp_path, num_tokens, fraction
):
    how = write(tmp_path / "x.npy", np.arange(num_tokens)) | {"eval_fraction": fraction}
    if num_tokens < 993 and fraction:
        with pytest.raises(DataError, match=r"hold out another takes 2.data.batch_size = 2"):
            build("tokens", **how, batch_size=1)
        return
    dataset = build("tokens", **how, batch_size=1)
    targets = dataset.read(np.array(dataset.numbers(held_out=False)))["targets"]
    first = int(dataset.read(np.array([dataset.num_examples]))["inputs"][0, 0])
    expected = [n for n in range(1, num_tokens) if not fraction or n != first]
    assert targets[targets != windows.NO_TOKEN].tolist() == expected
    held_out = dataset.numbers(held_out=True)
    assert [*held_out] == [*range(dataset.num_examples, len(targets))] * bool(fraction)


def test_vocab_size_defaults_to_the_largest_id_plus_one(build, tmp_path):
    written = write(tmp_path / "x.npy", IDS)
    assert build("tokens", **written).vocab_size == 2000
    assert build("tokens", **written, vocab_size=2048).vocab_size == 2048


def test_of_a_large_file_samples_are_read_at_start_and_each_batch_is_checked(
    build, tmp_path, monkeypatch
):
    monkeypatch.setattr(windows, "DIGEST_WHOLE_BYTES", 1024)
    monkeypatch.setattr(windows, "DIGEST_BLOCK_BYTES", 64)
    ids = np.full(100_000, 7, np.uint16)
    ids[500] = 60_000  # between two samples
    written = write(tmp_path / "x.npy", ids) | {"vocab_size": 256}
    read, samples = [], windows._samples
    monkeypatch.setattr(windows, "_samples", lambda a: map(spy(read), samples(a)))
    dataset = build("tokens", **written)
    assert sum(read) <= 2 * 1024
    dataset.read(np.arange(20))
    dataset.read(np.array(dataset.numbers(held_out=True)))
    with pytest.raises(DataError, match=r"holds the id 60000, not below data.vocab_size=256"):
        dataset.read(np.arange(40))
    with pytest.raises(DataError, match=r"data.tokenizer=DIR, or data.vocab_size=N \(8 or more\)"):
        build("tokens", **written | {"vocab_size": None})
    assert build("tokens", **written | {"vocab_size": None, "tokenizer": "bytes"}).vocab_size == 256


def test_all_ids_of_a_small_file_are_read_in_chunks(build, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "CHUNK_TOKENS", 7)
    assert build("tokens", **write(tmp_path / "x.npy", IDS)).vocab_size == 2000


def test_the_vocabulary_is_the_tokenizers(build, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1999}, "a"))
    made.save(str(tmp_path / "tokenizer.json"))
    how = write(tmp_path / "x.npy", IDS) | {"tokenizer": str(tmp_path)}
    assert build("tokens", **how).vocab_size == 2000
    assert build("tokens", **how, vocab_size=2048).vocab_size == 2048
    how |= write(tmp_path / "y.npy", IDS + 1)
    limit = f"holds the id 2000, not below the 2000 ids of data.tokenizer={tmp_path}. Use data.voc"
    with pytest.raises(DataError, match=limit):
        build("tokens", **how)


def spy(read):
    return lambda part: read.append(part.nbytes) or part


@pytest.mark.parametrize("change", [0, 1000, 1999])
def test_content_decides_the_fingerprint(build, tmp_path, change):
    other = IDS.copy()
    other[change] += 1
    first, again, changed = (
        build("tokens", **write(tmp_path / f"{i}.npy", ids)).fingerprint
        for i, ids in enumerate((IDS, IDS, other))
    )
    assert first == again != changed


def test_digest_of_a_large_array_sees_its_length_and_both_ends(monkeypatch):
    monkeypatch.setattr(windows, "DIGEST_WHOLE_BYTES", 1024)
    monkeypatch.setattr(windows, "DIGEST_BLOCK_BYTES", 64)
    ids = np.arange(5000, dtype=np.uint16)
    ends = [ids.copy(), ids.copy()]
    ends[0][0] += 1
    ends[1][-1] += 1
    assert (
        len({windows.digest(array) for array in (ids, ids[:-1], *ends, ids.astype(np.uint32))}) == 5
    )
    assert windows.digest(ids) == windows.digest(ids.copy())


@pytest.mark.parametrize(
    ("name", "ids", "settings", "fault"),
    [
        (
            "x.npy",
            IDS,
            {"vocab_size": 1999},
            r"holds the id 1999, not below data.vocab_size=1999. Use data.vocab_size=2000, or ",
        ),
        ("x.npy", -IDS, {}, r"holds the id -1999, outside 0..2147483646 .* Write ids from 0 up"),
        (
            "x.npy",
            IDS.astype(np.float32),
            {},
            r"holds float32 of shape \(2000,\), not a flat array of integers. Write ",
        ),
        (
            "x.npy",
            IDS.reshape(20, 100),
            {},
            r"holds int64 of shape \(20, 100\), not a flat array of integers. Write ",
        ),
        ("x.npy", np.array(3), {}, r"holds int64 of shape \(\), not a flat array of integers"),
        ("x.npy", IDS[:0], {}, r"holds no ids. Use "),
        ("x.bin", IDS[:0], {}, r"holds no ids. Use "),
        ("x.npy", IDS + 2**31, {}, r"holds the id 2147485647, outside 0..* use the type"),
        (
            "x.bin",
            IDS.astype(np.uint8)[:999],
            {"dtype": "uint16"},
            r"cannot be read \(.*not a multiple.*or use their type \(data.dtype=uint16\)",
        ),
    ],
)
def test_a_file_that_is_not_token_ids_is_refused_with_the_remedy(
    build, tmp_path, name, ids, settings, fault
):
    with pytest.raises(DataError, match=rf"^data=tokens data.path=.*{name}: {fault}"):
        build("tokens", **write(tmp_path / name, ids) | settings)


@pytest.mark.parametrize("content", [b"", b"not numpy", "cut short"])
def test_a_broken_npy_is_refused_with_the_remedy(build, tmp_path, content):
    path = tmp_path / "x.npy"
    np.save(path, IDS)
    path.write_bytes(path.read_bytes()[:-100] if content == "cut short" else content)
    with pytest.raises(DataError, match=r"x.npy: cannot be read \(.*\)\. Write the ids again"):
        build("tokens", path=str(path))


HEADER = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }"
HOSTILE = {  # headers, which numpy reads as the text of a Python literal
    "objects": HEADER % ("|O", "(3,)"),
    "beyond a file": HEADER % ("<i8", "(1000000000000000000,)"),
    "beyond an address": HEADER % ("<i8", f"({2**63},)"),
    "beyond a number": HEADER % ("<i8", f"({'9' * 5000},)"),
    "below nothing": HEADER % ("<i8", "(-5,)"),
    "nested": "(" * 9000,
    "nested signs": "-" * 9000 + "1",
    "open text": '{"descr',
    "lines": "  \n\tx = 1\n y",
    "code": "__import__('os').mkdir('made')",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_header_that_is_made_to_harm_its_reader_is_refused(build, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    header = HOSTILE[kind].encode()
    # numpy would unpickle it if allowed
    content = (
        b"\x93NUMPY\x01\x00"
        + len(header).to_bytes(2, "little")
        + header
        + b"cos\nmkdir\n(Vmade\ntR."
    )
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(
        DataError, match=r"x.npy: cannot be read \(.{1,200}\)\. Write the ids again"
    ):
        build("tokens", path=str(tmp_path / "x.npy"))
    assert not (tmp_path / "made").exists()


def test_a_header_of_gigabytes_is_not_read(build, tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little"))
    os.truncate(path, 2**33)  # takes no disk
    with pytest.raises(DataError, match=r"x.npy: cannot be read \(a header of 4294967295 bytes\)"):
        build("tokens", path=str(path))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("gone.npy", "No such file or directory"), ("text.txt", "is neither .npy nor .bin")],
)
def test_a_path_to_something_else_is_refused_with_the_remedy(build, tmp_path, name, fault):
    with pytest.raises(DataError, match=rf"{name}: {fault}\. (Use|Write) "):
        build("tokens", path=str(tmp_path / name))
