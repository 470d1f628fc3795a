"""Token ids that someone else made, in a flat memory-mapped file."""

import textwrap
import tokenize
from pathlib import Path
from typing import Any

import numpy as np

from ppctl.data.dataset import DataSet
from ppctl.data.token_windows import digest, from_tokens
from ppctl.errors import DataError

MAX_ID = 2**31 - 2  # batches are int32, and so is the vocabulary's size
CHUNK_TOKENS = 1 << 24
MOST_HEADER_BYTES = 10_000  # numpy's own limit, which it checks when it has read up to 4 GiB
# numpy's errors for a damaged or cut file: it parses the header as a Python literal
UNREADABLE = (OSError, ValueError, OverflowError, SyntaxError, MemoryError, RecursionError)
UNREADABLE += (tokenize.TokenError,)


def tokens(
    *, path: str, dtype: str, vocab_size: int | None, sizes_only: bool = False, **how: Any
) -> DataSet:
    """Return the data set of a flat integer `.npy`, or a raw `.bin` of `dtype` (native order).

    `vocab_size` None: the largest id plus one. The file is mapped, and read once from end to end to
    check its ids, unless only the sizes matter. Raises DataError when it is missing, is not what
    its name says, or holds an id outside 0..vocab_size-1.
    """
    source = f"data=tokens data.path={path}"
    ids = open_tokens(Path(path).expanduser(), dtype, source)
    how |= {"name": "tokens", "source": source}
    if sizes_only:
        return from_tokens(ids, content="", vocab_size=vocab_size or 1, **how)
    smallest, largest = extremes(ids)
    if smallest < 0:
        raise DataError(f"{source}: holds the negative id {smallest}. Write ids from 0 up.")
    if largest > MAX_ID:
        raise DataError(
            f"{source}: holds the id {largest}, but batches are int32 (at most {MAX_ID}). "
            f"Use the type that the file was written with (a .bin is read as data.dtype={dtype})."
        )
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"{source}: holds the id {largest}, not below data.vocab_size={vocab_size}. "
            f"Use data.vocab_size={largest + 1} or null, or another data.dtype "
            f"(a .bin is read as {dtype})."
        )
    vocab_size = largest + 1 if vocab_size is None else vocab_size
    return from_tokens(ids, content=digest(ids), vocab_size=vocab_size, **how)


def open_tokens(path: Path, dtype: str, source: str) -> np.ndarray:
    """Return the ids in a file, memory-mapped, at least one. DataErrors begin with `source`."""
    if path.suffix not in (".npy", ".bin"):
        remedy = "Write the ids with numpy.save, or use data=text for text."
        raise DataError(f"{source}: is neither .npy nor .bin. {remedy}")
    if not path.is_file():
        raise DataError(f"{source}: no such file. Use the path of a .npy or .bin of token ids.")
    try:
        ids = open_npy(path) if path.suffix == ".npy" else _checked_bin(path, dtype, source)
    except UNREADABLE as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 150)
        remedy = "Write the ids again with numpy.save."
        raise DataError(f"{source}: cannot be read ({reason}). {remedy}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{source}: holds {ids.dtype} of shape {ids.shape}, not a flat array of integers. "
            "Write ids.reshape(-1) of an integer type with numpy.save."
        )
    if not len(ids):
        raise DataError(f"{source}: holds no ids. Use a file with at least a batch of them.")
    return ids


def open_npy(path: Path) -> np.ndarray:
    """Return the array in a .npy file, memory-mapped. One of UNREADABLE for a damaged file."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        num_bytes = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if num_bytes > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {num_bytes} bytes")
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))


def _checked_bin(path: Path, dtype: str, source: str) -> np.ndarray:
    num_bytes, item = path.stat().st_size, np.dtype(dtype).itemsize
    if num_bytes % item:
        raise DataError(
            f"{source}: {num_bytes} bytes are not a multiple of the {item} bytes of "
            f"data.dtype={dtype}. Use the type that the file was written with."
        )
    return open_bin(path, dtype)


def open_bin(path: Path, dtype: str) -> np.ndarray:
    """Return the numbers in a raw file, memory-mapped. ValueError where a part of one is there."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def extremes(ids: np.ndarray) -> tuple[int, int]:
    """Return the smallest and the largest id, read in chunks.

    >>> extremes(np.array([3, 1, 2], np.uint16))
    (1, 3)
    """
    chunks = [ids[start : start + CHUNK_TOKENS] for start in range(0, len(ids), CHUNK_TOKENS)]
    least_and_most = [(int(chunk.min()), int(chunk.max())) for chunk in chunks]
    return min(least for least, _ in least_and_most), max(most for _, most in least_and_most)
