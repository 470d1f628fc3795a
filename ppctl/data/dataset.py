"""A data set is a function from example numbers to arrays; grain puts the numbers in order and reads ahead."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grain
import numpy as np

from ppctl.errors import DataError

Batch = dict[str, np.ndarray]
Part = tuple[int, int, float]  # examples to train on, held-out ones, weight

ORDER_VERSION = 1  # part of every fingerprint: raise it when the same settings come to mean other batches
EVAL_ORDER_SEED = 0  # not the run's seed: runs that differ in the seed are compared on the same text
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


@dataclass(frozen=True)
class DataSet:
    """Training examples 0..num_examples-1, then num_eval_examples held-out ones, and the order they are met in.

    Global batch k is a function of the data, `seed`, `batch_size` and k alone, never of what was read before it or of
    how its rows are divided. Every epoch is shuffled anew, if at all; a batch may hold the end of one and the start of
    the next.
    """

    name: str  # the choice in the config, as in data=stdlib
    source: str  # what was read, for people
    fingerprint: str  # sha256 of the content and of everything that decides the order
    batch_size: int  # global, examples a step
    seed: int
    num_examples: int  # to train on: one epoch
    num_eval_examples: int  # held out
    read: Callable[[np.ndarray], Batch] = field(repr=False, compare=False)  # example numbers [n] to arrays [n, ...]
    vocab_size: int | None = None  # None: rows of numbers
    input_dim: int | None = None  # features a row; None: tokens
    target_dim: int | None = None
    is_shuffled: bool = True  # False: every epoch meets its examples in the order of their numbers
    is_packed: bool = False  # inputs say where documents start, see `ppctl.data.packing`
    most_documents: int | None = None  # of a packed sequence, padding counted as one; None: not known
    mixture: Sequence[Part] = ()  # consecutive parts that are met by their weights, each in an order of its own

    def batches(self, start_step: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Global batches start_step, start_step+1, ... without end, each restricted to `rows` (None: all).

        Of tokens: inputs and targets int32 [rows, seq_len], targets the next token. Of numbers: inputs float32
        [rows, input_dim], targets float32 [rows, target_dim]. No batch before start_step is read.
        """
        assert start_step >= 0, start_step
        return self._in_order(self._order(), range(start_step, sys.maxsize // self.batch_size), rows)

    def eval_batches(self, num_batches: int, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """The first num_batches held-out batches, restricted to `rows`: the same in every call and for every seed.

        Raises DataError at the call, not at the first batch, when so many batches are not held out.
        """
        if self.num_eval_examples == 0:
            raise DataError(
                "data.eval_fraction=0 holds out nothing to evaluate on. "
                "Use data.eval_fraction=0.05 or run.eval_every=null."
            )
        num_needed = num_batches * self.batch_size
        if num_needed > self.num_eval_examples:
            most = self.num_eval_examples // self.batch_size
            few = f"run.eval_batches={most} or a larger data.eval_fraction"
            if not most:
                few = "a smaller data.batch_size, a larger data.eval_fraction, or run.eval_every=null"
            raise DataError(
                f"run.eval_batches*data.batch_size = {num_batches}*{self.batch_size} = {num_needed} is more than the "
                f"{self.num_eval_examples} examples held out of {self.num_examples + self.num_eval_examples}. "
                f"Use {few}."
            )
        if self.mixture:
            return self._in_order(held_out_of(self.num_examples, self.mixture), range(num_batches), rows)
        held_out = grain.MapDataset.range(self.num_examples, self.num_examples + self.num_eval_examples)
        return self._in_order(held_out.shuffle(seed=EVAL_ORDER_SEED), range(num_batches), rows)

    def _order(self) -> grain.MapDataset[int]:
        """Return the numbers of the examples to train on, without end."""
        bounds = (
            np.cumsum([0, *(num for num, _, _ in self.mixture)]).tolist() if self.mixture else [0, self.num_examples]
        )
        orders = []
        for i, (first, last) in enumerate(pairwise(bounds)):
            order = grain.MapDataset.range(first, last)
            if self.is_shuffled:
                order = order.shuffle(seed=_order_seed(self.seed, *((i,) if self.mixture else ())))
            orders.append(order.repeat())
        return mixed(orders, [weight for _, _, weight in self.mixture])

    def _in_order(self, order: grain.MapDataset[int], steps: range, rows: Sequence[int] | None) -> Iterator[Batch]:
        rows = range(self.batch_size) if rows is None else rows
        assert not rows or (min(rows) >= 0 and max(rows) < self.batch_size), f"{rows} of {self.batch_size} rows"

        def batch(step: int) -> Batch:
            first = step * self.batch_size
            return self.read(np.array([order[first + row] for row in rows], dtype=np.int64))

        order[0]  # grain sets its counters up on the first access, and not thread-safely
        return iter(grain.MapDataset.range(steps.start, steps.stop).map(batch).to_iter_dataset(READ_AHEAD))


def held_out_of(first: int, mixture: Sequence[Part]) -> grain.MapDataset[int]:
    """Return the numbers of the held-out examples of a mixture, from `first` on, until those of a part are used up."""
    bounds = np.cumsum([first, *(num for _, num, _ in mixture)]).tolist()
    orders = [grain.MapDataset.range(a, b).shuffle(seed=EVAL_ORDER_SEED) for a, b in pairwise(bounds)]
    return mixed(orders, [weight for _, _, weight in mixture])


def mixed(orders: Sequence[grain.MapDataset[int]], weights: Sequence[float]) -> grain.MapDataset[int]:
    """Return several orders as one, by weights; one alone as it is."""
    if len(orders) == 1:
        return orders[0]
    for order in orders:
        order[0]  # grain sets its counters up on the first access, and not thread-safely
    return grain.MapDataset.mix(orders, weights)


def _order_seed(seed: int, *part: int) -> int:
    # grain shuffles epoch e with seed+e: unmixed, epoch 1 of seed 0 would be epoch 0 of seed 1.
    return int(np.random.SeedSequence(seed, spawn_key=part).generate_state(1)[0])


def num_held_out(have: str, num_examples: int, eval_fraction: float, batch_size: int) -> int:
    """Examples held out for evaluation: eval_fraction of num_examples, rounded down.

    Raises DataError when either part is smaller than one batch; `have` opens the message: what there is, in settings.

    >>> num_held_out("data.num_rows=1000", 1000, 0.05, 32)
    50
    """
    num_eval = math.floor(eval_fraction * num_examples + 1e-9)  # 0.29*100 is 28.999999999999996
    num_train = num_examples - num_eval
    if num_train < batch_size:
        smaller = " or data.eval_fraction" if num_eval else ""
        raise DataError(
            f"{have}: {num_examples}-{num_eval} = {num_train} are left to train on, fewer than "
            f"data.batch_size={batch_size}. Use more data, or a smaller data.batch_size{smaller}."
        )
    if eval_fraction > 0 and num_eval < batch_size:
        enough = math.ceil(1000 * batch_size / num_examples) / 1000
        larger = f"data.eval_fraction={enough}, " if 2 * batch_size <= (1 - 0.001) * num_examples else ""
        raise DataError(
            f"{have}: data.eval_fraction={eval_fraction} of {num_examples} holds out {num_eval}, fewer than "
            f"data.batch_size={batch_size}. Use {larger}more data, a smaller data.batch_size, or data.eval_fraction=0 "
            "with run.eval_every=null."
        )
    return num_eval


def fingerprint(**parts: object) -> str:
    """sha256, in hexadecimal, of the named parts (JSON values).

    >>> fingerprint(seed=0)[:8] == fingerprint(seed=0)[:8] != fingerprint(seed=1)[:8]
    True
    """
    return hashlib.sha256(json.dumps({"order": ORDER_VERSION} | parts, sort_keys=True).encode()).hexdigest()


def generator(seed: int, *key: int) -> np.random.Generator:
    """Random numbers that depend on (seed, key) alone, so that an example needs none of those before it.

    >>> bool(generator(0, 1, 7).random() == generator(0, 1, 7).random())
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))
