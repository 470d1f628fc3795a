"""Language data from several parts, each with its files and its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, held_out_of
from ppctl.data.documents import Fields
from ppctl.data.text_files import of_files
from ppctl.data.tokenizer import load_tokenizer


def mixture(
    *,
    parts: Sequence[Mapping[str, Any]],
    tokenizer: str,
    end_token: str | None,
    on_error: str,
    packing: bool,
    cache_dir: str,
    seq_len: int,
    batch_size: int,
    seed: int,
    eval_fraction: float,
) -> DataSet:
    """Return the data set of several: of any number of sequences in a row, each part has its weight's share.

    A part is shuffled by itself, and anew whenever all of it was met, so that a small one comes round more often. Each
    holds out its own eval_fraction. Raises DataError for a part of which there is nothing to train on or to hold out.
    """
    by = load_tokenizer(tokenizer, end_token)
    sets: list[DataSet] = []
    for number, part in enumerate(parts):
        fields = Fields(part["field"], part["prompt_field"], part["document"], part["records"])
        found = of_files(
            part["path"],
            by,
            fields,
            source=f"data.parts[{number}].path={part['path']}",
            on_error=on_error,
            packing=packing,
            cache_dir=cache_dir,
            seq_len=seq_len,
            batch_size=1,
            seed=seed,
            eval_fraction=eval_fraction,
        )
        sets.append(found)
    weights = [float(part["weight"]) for part in parts]
    return _mixed(sets, weights, batch_size=batch_size, seed=seed, is_evaluated=eval_fraction > 0)


def _mixed(
    sets: Sequence[DataSet], weights: Sequence[float], *, batch_size: int, seed: int, is_evaluated: bool
) -> DataSet:
    """Return data sets as one: the examples to train on of all of them, then the held-out ones of all."""
    trained, held_out = ([getattr(each, n) for each in sets] for n in ("num_examples", "num_eval_examples"))
    bounds = np.cumsum([0, *trained, *held_out])

    def read(numbers: np.ndarray) -> Batch:
        piece = np.searchsorted(bounds, numbers, side="right") - 1  # of training, then of what is held out
        part, is_held_out = piece % len(sets), piece >= len(sets)
        own = numbers - bounds[piece] + np.where(is_held_out, np.asarray(trained)[part], 0)
        batch: Batch = {}
        for i, each in enumerate(sets):
            rows = np.flatnonzero(part == i)
            if len(rows) or not batch:
                for name, array in each.read(own[rows]).items():
                    to = batch.setdefault(name, np.empty((len(numbers), *array.shape[1:]), array.dtype))
                    to[rows] = array
        return batch

    shares = [weight / sum(weights) for weight in weights]
    mixture = tuple(zip(trained, held_out, weights, strict=True))
    return DataSet(
        name="mixture",
        source="data=mixture: " + "; ".join(f"{s:.1%} {each.source}" for s, each in zip(shares, sets, strict=True)),
        fingerprint=fingerprint(
            name="mixture",
            parts=[each.fingerprint for each in sets],
            weights=list(weights),
            batch_size=batch_size,
            seed=seed,
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=sum(trained),
        num_eval_examples=len(held_out_of(sum(trained), mixture)) if is_evaluated else 0,
        read=read,
        vocab_size=sets[0].vocab_size,
        is_packed=sets[0].is_packed,
        most_documents=max((each.most_documents for each in sets if each.most_documents is not None), default=None),
        mixture=mixture,
    )
