"""Language data as documents packed into sequences; attention stays within a document.

Inputs and targets: [examples, seq_len]. The first token of each document in a sequence is written
as its complement, ~id = -1 - id, which tells the model where documents start, and the first token
of padding as PADDING. Targets of padding and prompts are NO_TOKEN.
"""

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided
from ppctl.data.token_windows import NO_TOKEN, digest
from ppctl.errors import DataError

PADDING = -(2**31)  # the input that begins padding, as in ppctl.model.packed_sequences
MOST_OPEN = 64  # maximum sequences kept open for further pieces


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

    Document i is ids[ends[i - 1] : ends[i]]; its last token is only a target. The last sequences
    are held out. end: token that fills padding. Other arguments are those of `from_tokens`. Raises
    DataError for too few sequences, or without a token that is learned.
    """
    # 1. the pieces of each sequence
    packing = pack(ends, seq_len)
    num_sequences = len(packing.bounds) - 1
    if is_learned is not None and not is_learned.any():
        raise DataError(f"{source}: all tokens are prompts. Use another data.prompt_field.")

    # 2. make sequences when they are read
    def read(examples: np.ndarray) -> Batch:
        inputs = np.full((len(examples), seq_len), end, np.int32)
        targets = np.full((len(examples), seq_len), NO_TOKEN, np.int32)
        for row, example in enumerate(examples.tolist()):
            place = 0
            for piece in range(packing.bounds[example], packing.bounds[example + 1]):
                start, length = int(packing.starts[piece]), int(packing.lengths[piece])
                here, after = slice(place, place + length), slice(start + 1, start + 1 + length)
                inputs[row, here] = ids[start : start + length]
                targets[row, here] = ids[after]
                if is_learned is not None:
                    targets[row, here][~is_learned[after]] = NO_TOKEN
                inputs[row, place] = ~inputs[row, place]
                place += length
            if place < seq_len:
                inputs[row, place] = PADDING
        return {"inputs": inputs, "targets": targets}

    # 3. names and sizes
    full = packing.lengths.sum() / max(1, num_sequences * seq_len)
    sequences = f"{num_sequences} sequences of model.seq_len={seq_len}"
    about += f", {len(ends):,} documents packed"
    return divided(
        source=f"{source}{about}, sequences {100 * full:.1f} % full",
        content=[content, digest(np.asarray(ends)), MOST_OPEN, seq_len],
        have=f"{source}: {len(ends)} documents packed into {sequences}",
        num_examples=num_sequences,
        read=read,
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
