"""Language data from token ids: windows of one flat array, or packed documents.

Inputs and targets: [examples, seq_len]. The ids are a memory-mapped file of the user, or the cache
of tokenized documents. With packing, attention stays within a document.
"""

import hashlib
import textwrap
import tokenize
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided
from ppctl.data.tokenizer import vocabulary_size
from ppctl.errors import DataError
from ppctl.user_files import why_not_plain

NO_TOKEN = -1  # a masked target, as in ppctl.model.cross_entropy
PADDING = -(2**31)  # the input that begins padding, as in ppctl.model.packed_sequences
MOST_OPEN = 64  # maximum sequences kept open for further pieces
DIGEST_WHOLE_BYTES = 256 << 20  # arrays up to this size are hashed whole
DIGEST_BLOCK_BYTES = 1 << 20
MAX_ID = 2**31 - 2  # batches are int32, and so is the vocabulary's size
CHUNK_TOKENS = 1 << 24
# maximum bytes of a .npy header; numpy has this limit, but first reads the header, up to 4 GiB
MOST_HEADER_BYTES = 10_000
# numpy's errors for a damaged or cut file: it parses the header as a Python literal
UNREADABLE = (OSError, ValueError, OverflowError, SyntaxError, MemoryError, RecursionError)
UNREADABLE += (tokenize.TokenError,)


def from_tokens(
    tokens: np.ndarray,
    *,
    source: str,
    content: str,
    seq_len: int,
    is_learned: np.ndarray | None = None,
    about: str = "",
    **how: Any,
) -> DataSet:
    """Return the data set of `tokens` [num_tokens] (integers) in windows of seq_len+1 tokens.

    Window i starts at token i*seq_len: the last target of a window is the first input of the next,
    so each token is predicted once. The last windows are held out; they start one token later, to
    share no token with training. Tokens after the last full window form a short one, padded with
    targets NO_TOKEN; training uses it only if no window is full and batch_size is 1.
    source: name of the data in messages; about: appended to it in the description; content: digest
    of the tokens; is_learned: [num_tokens], False for tokens that are not targets. Raises DataError
    for too few tokens.
    """
    # 1. the number of windows
    gap = 1 if how["eval_fraction"] > 0 else 0
    num_targets = max(0, len(tokens) - 1 - gap)
    num_windows, num_short = num_targets // seq_len, int(num_targets % seq_len > 0)
    count = f"({len(tokens)} tokens - {1 + gap})//{seq_len} = {num_windows} windows"
    if num_windows == 0 and how["batch_size"] == 1:
        num_windows, num_short = num_short, 0
    shorter = num_targets // (2 * how["batch_size"])
    fewer = f"model.seq_len={shorter}" if shorter else ""

    # 2. examples
    def piece(window: int) -> list[tuple[int, int]]:
        start = window * seq_len + gap * (window >= data.num_examples)
        return [(start, len(tokens[start + 1 : start + 1 + seq_len]))]

    data = divided(
        source=source + about,
        content=[content, seq_len],
        have=f"{source}: {count} of model.seq_len={seq_len}",
        num_examples=num_windows,
        num_short=num_short,
        fewer=fewer,
        read=_reader(tokens, is_learned, seq_len, piece),
        **how,
    )
    return data


class Packing(NamedTuple):
    """Pieces of documents by sequence: sequence i has the pieces bounds[i] : bounds[i + 1]."""

    starts: np.ndarray  # index of each piece's first token
    lengths: np.ndarray  # number of inputs of each piece; its targets begin one token later
    bounds: np.ndarray


def packed(
    ids: np.ndarray,
    ends: np.ndarray,
    *,
    source: str,
    content: str,
    end: int,
    seq_len: int,
    is_learned: np.ndarray | None = None,
    about: str = "",
    **how: Any,
) -> DataSet:
    """Return the data set of documents packed into sequences of seq_len tokens.

    Document i is ids[ends[i - 1] : ends[i]]; its last token is only a target. The first token of
    each document in a sequence is written as its complement, ~id = -1 - id, which tells the model
    where documents start, and the first token of padding as PADDING. Targets of padding and prompts
    are NO_TOKEN. The last sequences are held out. end: token that fills padding; other arguments
    as in `from_tokens`. Raises DataError for too few sequences, or without a learned token.
    """
    # 1. the pieces of each sequence
    packing = pack(ends, seq_len)
    num_sequences = len(packing.bounds) - 1

    def pieces(sequence: int) -> Iterator[tuple[int, int]]:
        places = slice(*packing.bounds[sequence : sequence + 2].tolist())
        return zip(packing.starts[places].tolist(), packing.lengths[places].tolist(), strict=True)

    if is_learned is not None and not is_learned.any():
        raise DataError(f"{source}: all tokens are prompts. Use another data.prompt_field.")

    # 2. names and sizes
    full = packing.lengths.sum() / max(1, num_sequences * seq_len)
    sequences = f"{num_sequences} sequences of model.seq_len={seq_len}"
    about += f", {len(ends):,} documents packed"
    return divided(
        source=f"{source}{about}, sequences {100 * full:.1f} % full",
        content=[content, digest(np.asarray(ends)), MOST_OPEN, seq_len],
        have=f"{source}: {len(ends)} documents packed into {sequences}",
        num_examples=num_sequences,
        read=_reader(ids, is_learned, seq_len, pieces, padding=end),
        is_packed=True,
        **how,
    )


def pack(ends: np.ndarray, seq_len: int) -> Packing:
    """Return a best-fit packing: each document goes into the fullest open sequence with room.

    A document longer than a sequence is cut so that each of its tokens, except the first, is
    predicted once. Each piece counts as a document. Pieces are placed in the order of the data.

    >>> pack(np.array([4, 6, 11]), 4).bounds.tolist()  # documents of 3, 1 and 4 inputs
    [0, 2, 3]
    """
    # 1. choose a sequence for each piece
    pieces: list[tuple[int, int, int]] = []  # index of first token, number of inputs, sequence
    room: list[tuple[int, int]] = []  # (free tokens, sequence) of open sequences, ascending
    num_sequences, first = 0, 0
    for last in ends.tolist():
        for start in range(first, last - 1, seq_len):
            length = min(seq_len, last - 1 - start)
            place = bisect_left(room, (length, 0))
            if place < len(room):
                free, sequence = room.pop(place)
            else:
                free, sequence, num_sequences = seq_len, num_sequences, num_sequences + 1
            pieces.append((start, length, sequence))
            if free > length:
                insort(room, (free - length, sequence))
                if len(room) > MOST_OPEN:
                    del room[0]
        first = last
    # 2. order the pieces by sequence
    starts, lengths, sequences = np.asarray(pieces, np.int64).reshape(-1, 3).T
    order = np.argsort(sequences, kind="stable")
    bounds = np.cumsum(np.bincount(sequences + 1, minlength=num_sequences + 1))
    return Packing(starts[order], lengths[order].astype(np.int32), bounds)


def _reader(
    ids: np.ndarray,
    is_learned: np.ndarray | None,
    seq_len: int,
    pieces: Callable[[int], Iterable[tuple[int, int]]],
    padding: int | None = None,
) -> Callable[[np.ndarray], Batch]:
    """Return the function that makes examples, each of pieces of `ids` one after the other.

    pieces: example -> (index of the first token, number of inputs) of each of its pieces; targets
    begin one token later. padding: the token after the pieces, if they are packed documents; None:
    0, and no marks.
    """

    def read(examples: np.ndarray) -> Batch:
        inputs = np.full((len(examples), seq_len), padding or 0, np.int32)
        targets = np.full_like(inputs, NO_TOKEN)
        for row, example in enumerate(examples.tolist()):
            place = 0
            for start, length in pieces(example):
                here, after = slice(place, place + length), slice(start + 1, start + 1 + length)
                inputs[row, here] = ids[start : start + length]
                targets[row, here] = ids[after]
                if is_learned is not None:
                    targets[row, here][~is_learned[after]] = NO_TOKEN
                if padding is not None:
                    inputs[row, place] = ~inputs[row, place]
                place += length
            if padding is not None and place < seq_len:
                inputs[row, place] = PADDING
        return {"inputs": inputs, "targets": targets}

    return read


def digest(array: np.ndarray) -> str:
    """Return the sha256 of a flat array's dtype, length and bytes.

    A large array is sampled: the hash tells corpora apart, but can miss a few changed tokens.
    """
    sha = hashlib.sha256(f"{array.dtype.str} {len(array)}".encode())
    for part in [array] if array.nbytes <= DIGEST_WHOLE_BYTES else _samples(array):
        sha.update(part.data)
    return sha.hexdigest()


# --- files of token ids ---------------------------------------------------------------------------


def tokens(
    *,
    path: str,
    dtype: str,
    vocab_size: int | None,
    tokenizer: str | None,
    sizes_only: bool = False,
    source: str | None = None,
    **how: Any,
) -> DataSet:
    """Return the data set of a flat `.npy` file of integers, or of a raw `.bin` file.

    dtype: type of the ids in a .bin file, in native byte order. vocab_size None: the tokenizer's,
    else the largest id plus one, found by reading all ids. sizes_only: read no ids. source: name of
    the data in messages. Raises DataError for a missing or damaged file, a large file without
    vocab_size and tokenizer, and an id outside 0..vocab_size-1.
    """
    source = source or f"data=tokens data.path={path}"
    ids = open_tokens(Path(path).expanduser(), dtype, source)
    how |= {"name": "tokens", "source": source}
    if sizes_only:
        return from_tokens(ids, content="", vocab_size=vocab_size or 1, **how)
    # 1. check all ids of a small file, or samples of a large one
    limit, is_sampled = f"data.vocab_size={vocab_size}", ids.nbytes > DIGEST_WHOLE_BYTES
    if vocab_size is None and tokenizer is not None:
        vocab_size = vocabulary_size(tokenizer)
        limit = f"the {vocab_size} ids of data.tokenizer={tokenizer}"
    check = partial(check_ids, vocab_size=vocab_size, limit=limit, dtype=dtype, source=source)
    chunks = (ids[start : start + CHUNK_TOKENS] for start in range(0, len(ids), CHUNK_TOKENS))
    largest = check(_samples(ids) if is_sampled else chunks)
    if vocab_size is None and is_sampled:
        raise DataError(
            f"{source}: {ids.nbytes >> 20} MiB are more than the {DIGEST_WHOLE_BYTES >> 20} that "
            "are read at start for the largest id. Use data.tokenizer=DIR, or data.vocab_size=N "
            f"({largest + 1} or more)."
        )
    vocab_size = largest + 1 if vocab_size is None else vocab_size
    data = from_tokens(ids, content=digest(ids), vocab_size=vocab_size, **how)
    if not is_sampled:
        return data

    # 2. check each batch of a large file
    def read(examples: np.ndarray) -> Batch:
        batch = data.read(examples)
        check((batch["inputs"], batch["targets"][batch["targets"] != NO_TOKEN]))
        return batch

    return replace(data, read=read)


def check_ids(
    parts: Iterable[np.ndarray], *, vocab_size: int | None, limit: str, dtype: str, source: str
) -> int:
    """Return the largest id. DataError for one below 0, above MAX_ID, or not below vocab_size."""
    pairs = [(int(part.min()), int(part.max())) for part in parts if part.size]
    smallest, largest = min(least for least, _ in pairs), max(most for _, most in pairs)
    if smallest < 0 or largest > MAX_ID:
        raise DataError(
            f"{source}: holds the id {min(smallest, 0) or largest}, outside 0..{MAX_ID} of int32 "
            "batches. Write ids from 0 up, and use the type that they were written with (a .bin is "
            f"read as data.dtype={dtype})."
        )
    if vocab_size is not None and largest >= vocab_size:
        remedy = f"Use data.vocab_size={largest + 1}, or another data.dtype"
        what = f"{source}: holds the id {largest}, not below {limit}"
        raise DataError(f"{what}. {remedy} (a .bin is read as {dtype}).")
    return largest


def _samples(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield evenly spaced blocks of a large array, the first and the last one included."""
    size = DIGEST_BLOCK_BYTES // array.itemsize
    starts = np.linspace(0, len(array) - size, DIGEST_WHOLE_BYTES // DIGEST_BLOCK_BYTES)
    return (array[start : start + size] for start in starts.astype(np.int64))


def open_tokens(path: Path, dtype: str, source: str) -> np.ndarray:
    """Return a file's ids, at least one, memory-mapped. DataErrors begin with `source`."""
    if path.suffix not in (".npy", ".bin"):
        remedy = "Write the ids with numpy.save, or use data=text for text."
        raise DataError(f"{source}: is neither .npy nor .bin. {remedy}")
    if (why := why_not_plain(path)) is not None:
        raise DataError(f"{source}: {why}. Use the path of a .npy or .bin of token ids.")
    try:
        ids = open_npy(path) if path.suffix == ".npy" else open_bin(path, dtype)
    except UNREADABLE as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 150)
        remedy = f"Write the ids again with numpy.save, or use their type (data.dtype={dtype})."
        raise DataError(f"{source}: cannot be read ({reason}). {remedy}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        remedy = "Write ids.reshape(-1) of an integer type with numpy.save."
        what = f"{source}: holds {ids.dtype} of shape {ids.shape}, not a flat array of integers"
        raise DataError(f"{what}. {remedy}")
    if not len(ids):
        raise DataError(f"{source}: holds no ids. Use a file with at least a batch of them.")
    return ids


def open_npy(path: Path) -> np.ndarray:
    """Return a .npy file's array, memory-mapped. Raises one of UNREADABLE for a damaged file."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        num_bytes = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if num_bytes > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {num_bytes} bytes")
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))


def open_bin(path: Path, dtype: str) -> np.ndarray:
    """Return the numbers of a raw file, memory-mapped. ValueError if it ends within a number."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)
