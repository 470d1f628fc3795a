"""Language data from several parts, each with its files and its weight."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, held_out_of
from ppctl.data.text_dataset import text


def mixture(
    *,
    parts: Sequence[Mapping[str, Any]],
    batch_size: int,
    seed: int,
    eval_fraction: float,
    **how: Any,
) -> DataSet:
    """Return a data set that interleaves several parts in proportion to their weights.

    Epochs are counted for each part separately. Each part holds out eval_fraction of its examples,
    and its share of a batch at least.
    how: further arguments of `text`. Raises DataError if a part has too few examples to train on or
    to hold out.
    """
    # 1. the data set of each part
    how |= {"batch_size": 1, "seed": seed, "eval_fraction": eval_fraction}
    sets, weights = list[DataSet](), [float(part["weight"]) for part in parts]
    shares = [weight / sum(weights) for weight in weights]
    for number, part in enumerate(parts):
        of_part = {key: value for key, value in part.items() if key != "weight"}
        how["least_held_out"] = math.ceil(batch_size * shares[number])
        sets.append(text(source=f"data.parts[{number}].path={part['path']}", **of_part, **how))

    # 2. number the examples: training ones of all parts, then held-out ones, then short ones
    sizes = [(each.num_examples, each.num_eval_examples, each.num_short) for each in sets]
    trained, held_out, short = zip(*sizes, strict=True)
    bounds = np.cumsum([0, *trained, *held_out, *short])
    # piece: training, held-out or short examples of a part; before: first index in the part
    before = (np.cumsum(sizes, axis=1) - sizes).T.ravel()

    def read(numbers: np.ndarray) -> Batch:
        piece = np.searchsorted(bounds, numbers, side="right") - 1
        part, own = piece % len(sets), numbers - bounds[piece] + before[piece]
        batch: Batch = {}
        for i, each in enumerate(sets):
            rows = np.flatnonzero(part == i)
            if len(rows) or not batch:
                for name, array in each.read(own[rows]).items():
                    shape = len(numbers), *array.shape[1:]
                    batch.setdefault(name, np.empty(shape, array.dtype))[rows] = array
        return batch

    # 3. names and sizes
    texts = [f"{share:.1%} {each.source}" for share, each in zip(shares, sets, strict=True)]
    mixed = tuple(zip(trained, held_out, weights, strict=True))
    order = {"name": "mixture", "batch_size": batch_size, "seed": seed}
    digests = [each.fingerprint for each in sets]
    return DataSet(
        **order,
        source=f"data=mixture: {'; '.join(texts)}",
        fingerprint=fingerprint(**order, parts=digests, weights=weights),
        num_examples=sum(trained),
        num_eval_examples=len(held_out_of(sum(trained), mixed)) if eval_fraction > 0 else 0,
        read=read,
        vocab_size=sets[0].vocab_size,
        is_packed=sets[0].is_packed,
        mixture=mixed,
        num_short=sum(short),
    )
