"""Language data from one flat array of tokens: non-overlapping windows, the tail held out."""

import hashlib
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided

NO_TOKEN = -1  # a masked target, as in ppctl.model.cross_entropy
DIGEST_WHOLE_BYTES = 256 << 20  # arrays up to this size are hashed whole
DIGEST_BLOCK_BYTES = 1 << 20


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

    Window i starts at token i*seq_len: the last target of one is the first input of the next, so
    that each token is predicted once. The windows held out are the last ones; they start one token
    later, to share none with training.

    Args:
        source: Names the tokens in messages; `about` is added for people.
        content: The digest of the tokens.
        is_learned: [num_tokens], False for tokens that are no targets (NO_TOKEN); None: all are.
        how: name, vocab_size, batch_size, seed and eval_fraction.

    Raises:
        DataError: Too few tokens.
    """
    # 1. views of all windows
    gap = 1 if how["eval_fraction"] > 0 else 0
    num_windows = max(0, len(tokens) - 1 - gap) // seq_len
    views = np.lib.stride_tricks.sliding_window_view
    windows = views(np.asarray(tokens), seq_len + 1)
    learned = None if is_learned is None else views(is_learned, seq_len + 1)

    # 2. examples
    def read(examples: np.ndarray) -> Batch:
        starts = examples * seq_len + (examples >= data.num_examples)
        batch = next_token(windows[starts].astype(np.int32))
        if learned is not None:
            targets = np.where(learned[starts][:, 1:], batch["targets"], np.int32(NO_TOKEN))
            batch["targets"] = targets  # not in place: a view of the windows
        return batch

    count = f"({len(tokens)} tokens - {1 + gap})//{seq_len} = {num_windows} windows"
    data = divided(
        source=source + about,
        content=[content, seq_len],
        have=f"{source}: {count} of model.seq_len={seq_len}",
        num_examples=num_windows,
        read=read,
        **how,
    )
    return data


def next_token(windows: np.ndarray) -> Batch:
    """Return inputs [n, seq_len] and the targets after them of windows [n, seq_len+1].

    >>> next_token(np.array([[5, 6, 7]]))
    {'inputs': array([[5, 6]]), 'targets': array([[6, 7]])}
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return {"inputs": np.ascontiguousarray(inputs), "targets": np.ascontiguousarray(targets)}


def digest(array: np.ndarray) -> str:
    """Return the sha256 of a flat array's type, length and bytes; of blocks of a large one.

    A whole hash of 100 GB would hold every start up for minutes. The evenly spaced blocks tell
    apart any two corpora; they miss a few tokens changed in place.

    >>> digest(np.zeros(3, np.uint8)) == digest(np.zeros(4, np.uint8))
    False
    """
    sha = hashlib.sha256(f"{array.dtype.str} {len(array)}".encode())
    if array.nbytes <= DIGEST_WHOLE_BYTES:
        sha.update(array.data)
    else:
        size = DIGEST_BLOCK_BYTES // array.itemsize
        starts = np.linspace(0, len(array) - size, DIGEST_WHOLE_BYTES // DIGEST_BLOCK_BYTES)
        for start in starts.astype(np.int64):
            sha.update(array[start : start + size].data)
    return sha.hexdigest()
