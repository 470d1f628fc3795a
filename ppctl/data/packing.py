"""Language data as documents packed into sequences, of which none sees another.

Shape suffix of inputs and targets: [examples, seq_len]. The first token of each document in a sequence is written as
its complement, ~id = -1 - id: so the model, which attends within documents only, knows where they start. A target that
is none (padding, or a prompt) is NO_TOKEN.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, num_held_out
from ppctl.data.windows import NO_TOKEN, digest
from ppctl.errors import DataError

MOST_OPEN = 64  # sequences at a time that a document may still go into


class Packing(NamedTuple):
    """Pieces of documents by the sequences that they are in: those of sequence i are bounds[i] : bounds[i + 1]."""

    starts: np.ndarray  # the piece's first token
    lengths: np.ndarray  # its inputs; as many targets, each one token later
    bounds: np.ndarray


def packed(
    ids: np.ndarray,
    ends: np.ndarray,
    *,
    name: str,
    source: str,
    content: str,
    end: int,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    seed: int,
    eval_fraction: float,
    is_learned: np.ndarray | None = None,
    about: str = "",
) -> DataSet:
    """Return the data set of documents packed into sequences of seq_len tokens; the last sequences are held out.

    Document i is ids[ends[i - 1] : ends[i]], its last token only a target; `end` fills sequences up. Other arguments
    are those of `windows.from_tokens`. Raises DataError when there are too few.
    """
    packing = pack(ends, seq_len)
    num_sequences = len(packing.bounds) - 1
    have = f"{source}: {len(ends)} documents packed into {num_sequences} sequences of model.seq_len={seq_len}"
    num_eval = num_held_out(have, num_sequences, eval_fraction, batch_size)
    if is_learned is not None and not is_learned.any():
        raise DataError(f"{source}: no token is learned, as all are prompts. Use another data.prompt_field.")

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
                inputs[row, place] = ~end  # padding is a document that is not learned
        return {"inputs": inputs, "targets": targets}

    fill = packing.lengths.sum() / max(1, num_sequences * seq_len)
    return DataSet(
        name=name,
        source=f"{source}{about}, {len(ends):,} documents packed, sequences {100 * fill:.1f} % full",
        fingerprint=fingerprint(
            name=name,
            content=content,
            packing=[digest(np.asarray(ends)), MOST_OPEN],
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            eval_fraction=eval_fraction,
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=num_sequences - num_eval,
        num_eval_examples=num_eval,
        read=read,
        vocab_size=vocab_size,
        is_packed=True,
        most_documents=most_documents(packing, seq_len),
    )


def most_documents(packing: Packing, seq_len: int) -> int:
    """Return how many documents a sequence has at most; padding is one.

    >>> most_documents(pack(np.array([4, 6, 11]), 5), 5), most_documents(pack(np.array([4, 6, 11]), 4), 4)
    (3, 2)
    """
    ends = np.concatenate([[0], np.cumsum(packing.lengths)])[packing.bounds]
    is_padded = np.diff(ends) < seq_len
    return int((np.diff(packing.bounds) + is_padded).max(initial=1))


def pack(ends: np.ndarray, seq_len: int) -> Packing:
    """Return how documents are packed: each into the fullest of the last sequences that has room for it, or a new one.

    A document that is longer than a sequence is cut, so that each of its tokens but the first is predicted once; what
    follows a cut starts anew. Of two pieces of the same length the one that comes first in the data is placed first.

    >>> pack(np.array([4, 6, 11]), 4).bounds.tolist()  # documents of 4, 2 and 5 tokens: 3, 1 and 4 inputs
    [0, 2, 3]
    """
    starts: list[int] = []
    lengths: list[int] = []
    sequences: list[int] = []
    room: list[tuple[int, int]] = []  # (tokens that are free, sequence), by these
    num_sequences, first = 0, 0
    for last in ends.tolist():
        for start in range(first, last - 1, seq_len):
            length = min(seq_len, last - 1 - start)
            place = bisect_left(room, (length, 0))
            if place < len(room):
                free, sequence = room.pop(place)
            else:
                free, sequence, num_sequences = seq_len, num_sequences, num_sequences + 1
            starts.append(start)
            lengths.append(length)
            sequences.append(sequence)
            if free > length:
                insort(room, (free - length, sequence))
                if len(room) > MOST_OPEN:
                    del room[0]
        first = last
    order = np.argsort(np.asarray(sequences, np.int64), kind="stable")
    bounds = np.zeros(num_sequences + 1, np.int64)
    np.cumsum(np.bincount(np.asarray(sequences, np.int64), minlength=num_sequences), out=bounds[1:])
    return Packing(np.asarray(starts, np.int64)[order], np.asarray(lengths, np.int32)[order], bounds)
