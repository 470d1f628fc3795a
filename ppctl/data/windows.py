"""Language data from one flat array of tokens: non-overlapping windows, the tail held out."""

from __future__ import annotations

import hashlib

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, num_held_out

NO_TOKEN = -1  # a target that is none, as in ppctl.model.cross_entropy
DIGEST_WHOLE_BYTES = 256 << 20  # arrays up to this size are hashed whole
DIGEST_BLOCK_BYTES = 1 << 20


def from_tokens(
    tokens: np.ndarray,
    *,
    name: str,
    source: str,
    content: str,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    seed: int,
    eval_fraction: float,
    is_learned: np.ndarray | None = None,
    about: str = "",
) -> DataSet:
    """Return the data set of `tokens` [num_tokens] (integers, maybe memory-mapped) in windows of seq_len+1 tokens.

    Window i starts at token i*seq_len: the last target of one is the first input of the next, so that each token is
    predicted once. The windows held out are the last ones; they start one token later, to share none with training.
    is_learned [num_tokens]: a token that is not is no target (NO_TOKEN); None: all are. `content` is the digest of the
    tokens, `source` names them in messages, `about` says more of them to people. Raises DataError when there are too
    few.
    """
    gap = 1 if eval_fraction > 0 else 0
    num_windows = max(0, len(tokens) - 1 - gap) // seq_len
    have = f"{source}: ({len(tokens)} tokens - {1 + gap})//{seq_len} = {num_windows} windows of model.seq_len={seq_len}"
    num_eval = num_held_out(have, num_windows, eval_fraction, batch_size)
    num_train = num_windows - num_eval
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), seq_len + 1)

    learned = None if is_learned is None else np.lib.stride_tricks.sliding_window_view(is_learned, seq_len + 1)

    def read(examples: np.ndarray) -> Batch:
        starts = examples * seq_len + (examples >= num_train)
        batch = next_token(windows[starts].astype(np.int32))
        if learned is not None:
            batch["targets"] = np.where(learned[starts][:, 1:], batch["targets"], np.int32(NO_TOKEN))
        return batch

    return DataSet(
        name=name,
        source=source + about,
        fingerprint=fingerprint(
            name=name,
            content=content,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            eval_fraction=eval_fraction,
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=num_train,
        num_eval_examples=num_eval,
        read=read,
        vocab_size=vocab_size,
    )


def next_token(windows: np.ndarray) -> Batch:
    """Inputs and targets [n, seq_len] of windows [n, seq_len+1]: each token's target is the one after it.

    >>> next_token(np.array([[5, 6, 7]]))
    {'inputs': array([[5, 6]]), 'targets': array([[6, 7]])}
    """
    return {"inputs": np.ascontiguousarray(windows[:, :-1]), "targets": np.ascontiguousarray(windows[:, 1:])}


def digest(array: np.ndarray) -> str:
    """sha256 of a one-dimensional array's type, length and bytes; above DIGEST_WHOLE_BYTES of evenly spaced blocks.

    A whole hash of 100 GB would hold every start up for minutes. The blocks tell apart any two corpora; they miss a few
    tokens changed in place.

    >>> digest(np.zeros(3, np.uint8)) == digest(np.zeros(4, np.uint8))
    False
    """
    sha = hashlib.sha256(f"{array.dtype.str} {len(array)}".encode())
    if array.nbytes <= DIGEST_WHOLE_BYTES:
        sha.update(array.data)
    else:
        size = DIGEST_BLOCK_BYTES // array.itemsize
        starts = np.linspace(0, len(array) - size, DIGEST_WHOLE_BYTES // DIGEST_BLOCK_BYTES).astype(np.int64)
        for start in starts:
            sha.update(array[start : start + size].data)
    return sha.hexdigest()
