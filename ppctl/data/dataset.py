"""A data set maps indices of examples to arrays; grain orders the indices and reads ahead."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import grain
import numpy as np

from ppctl.errors import DataError

Batch = dict[str, np.ndarray]
Part = tuple[int, int, float]  # number of training examples, number of held-out ones, weight

ORDER_VERSION = 2  # part of every fingerprint: raise it when a change of code changes batches
EVAL_ORDER_SEED = 0  # not the run's seed, so that all seeds are evaluated on the same text
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


@dataclass(frozen=True)
class DataSet:
    """Training examples 0..num_examples-1, then num_eval_examples held-out ones, and their order.

    Global batch k depends only on the data, `seed`, `batch_size` and k, not on earlier batches or
    on how its rows are divided. If the data are shuffled, every epoch has a new order. A batch may
    hold the end of one epoch and the start of the next.
    """

    name: str  # choice in the config, as in data=stdlib
    source: str  # the files or the rule, as shown to users
    fingerprint: str  # sha256 of the content and of all settings of the order
    batch_size: int  # examples per step, global
    seed: int
    num_examples: int  # training examples: one epoch
    num_eval_examples: int  # held-out examples
    # indices [n] -> arrays [n, ...] by name
    read: Callable[[np.ndarray], Batch] = field(repr=False, compare=False)
    vocab_size: int | None = None  # None: numeric data
    input_dim: int | None = None  # features per row; None: tokens
    target_dim: int | None = None
    is_shuffled: bool = True  # False: each epoch is in the order of the indices
    is_packed: bool = False  # inputs mark where documents start, see `ppctl.data.token_examples`
    mixture: Sequence[Part] = ()  # consecutive parts, mixed by weight, each with a separate order
    num_short: int = 0  # padded examples with the last indices; not used in training
    # the user's row of each index [num_examples + num_eval_examples]; None: equal to the index
    rows: np.ndarray | None = field(default=None, repr=False, compare=False)

    def batches(self, start_step: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield global batches start_step, start_step+1, ... without end.

        rows: the rows of each batch to read; None: all. Token data have int32 inputs and targets
        [rows, seq_len]; a target is the next token. Numeric data have float32 inputs
        [rows, input_dim] and targets [rows, target_dim]. Earlier batches are not read.
        """
        assert start_step >= 0, start_step
        steps = range(start_step, sys.maxsize // self.batch_size)
        return self._in_order(self._order(), steps, rows)

    def examples_of(self, step: int) -> list[int]:
        """Return the user's rows of the batch_size examples in global batch `step`, in order."""
        order: Any = self._order()
        first = step * self.batch_size
        numbers = [int(order[first + row]) for row in range(self.batch_size)]
        return numbers if self.rows is None else self.rows[numbers].tolist()

    def eval_batches(self, num_batches: int, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield `rows` of the first num_batches held-out batches, the same for every seed.

        rows: as in `batches`. Raises DataError if fewer batches are held out: already in the call,
        not at the first batch.
        """
        if self.num_eval_examples == 0:
            remedy = "Use data.eval_fraction=0.05 or run.eval_every=null."
            raise DataError(f"data.eval_fraction=0 holds out nothing to evaluate on. {remedy}")
        num_needed = num_batches * self.batch_size
        if num_needed > self.num_eval_examples:
            most = self.num_eval_examples // self.batch_size
            smaller = "a smaller data.batch_size, run.eval_every=null"
            fewer = f"run.eval_batches={most}" if most else smaller
            raise DataError(
                f"run.eval_batches*data.batch_size = {num_batches}*{self.batch_size} = "
                f"{num_needed} is more than the {self.num_eval_examples} examples held out of "
                f"{self.num_examples + self.num_eval_examples}. "
                f"Use {fewer} or a larger data.eval_fraction (of data.eval_path: more text)."
            )
        return self._in_order(held_out_of(self.num_examples, self._parts), range(num_batches), rows)

    def numbers(self, *, held_out: bool) -> range:
        """Return the indices of all examples, or of all held-out ones; both include short ones.

        Together, the examples contain each target once. Empty if held_out, and none are held out.
        """
        num_held_out = sum(number for _, number, _ in self._parts)
        if held_out and not num_held_out:
            return range(0)
        last = self.num_examples + num_held_out + self.num_short
        return range(self.num_examples if held_out else 0, last)

    @property
    def _parts(self) -> Sequence[Part]:
        return self.mixture or ((self.num_examples, self.num_eval_examples, 1.0),)

    def _order(self) -> grain.MapDataset[int]:
        """Return the endless sequence of the training examples' indices."""
        bounds = np.cumsum([0, *(num for num, _, _ in self._parts)]).tolist()
        orders = []
        for i, (first, last) in enumerate(pairwise(bounds)):
            part = (i,) if self.mixture else ()
            # grain shuffles epoch e with seed + e: without a hash, epoch 1 of seed 0 would be epoch
            # 0 of seed 1
            seed = int(np.random.SeedSequence(self.seed, spawn_key=part).generate_state(1)[0])
            in_order = grain.MapDataset.range(first, last)
            orders.append((shuffled(first, last, seed) if self.is_shuffled else in_order).repeat())
        return mixed(orders, [weight for _, _, weight in self._parts])

    def _in_order(
        self, order: grain.MapDataset[int], steps: range, rows: Sequence[int] | None
    ) -> Iterator[Batch]:
        rows = range(self.batch_size) if rows is None else rows
        assert all(0 <= row < self.batch_size for row in rows), (rows, self.batch_size)

        def batch(step: int) -> Batch:
            first = step * self.batch_size
            return self.read(np.array([order[first + row] for row in rows], dtype=np.int64))

        order[0]  # grain sets up its counters on the first access, which is not thread-safe
        numbers = grain.MapDataset.range(steps.start, steps.stop)
        return iter(numbers.map(batch).to_iter_dataset(READ_AHEAD))


def held_out_of(first: int, mixture: Sequence[Part]) -> grain.MapDataset[int]:
    """Return the held-out examples' indices from `first` on, up to the end of the first part."""
    bounds = np.cumsum([first, *(num for _, num, _ in mixture)]).tolist()
    orders = [shuffled(a, b, EVAL_ORDER_SEED) for a, b in pairwise(bounds)]
    return mixed(orders, [weight for _, _, weight in mixture])


def shuffled(first: int, last: int, seed: int) -> grain.MapDataset[int]:
    """Return the numbers from `first` to `last` - 1 in an order that each epoch draws anew.

    grain permutes blocks of 2^b values, b even and at least 16. Of 2^b + 1 numbers it gives one
    twice and leaves one out. For these, the cycles of its permutation of one more number are used,
    with that number taken out.
    """
    num = last - first
    if num - 1 < 2**16 or (num - 1) & (num - 2) or num.bit_length() % 2 == 0:
        return grain.MapDataset.range(first, last).shuffle(seed=seed)
    longer: Any = grain.MapDataset.range(num + 1).shuffle(seed=seed)

    def number(position: int, _: int) -> int:
        epoch, index = divmod(position, num)
        found = longer[epoch * (num + 1) + index]
        return first + (longer[epoch * (num + 1) + num] if found == num else found)

    return grain.MapDataset.range(first, last).map_with_index(number)


def mixed(
    orders: Sequence[grain.MapDataset[int]], weights: Sequence[float]
) -> grain.MapDataset[int]:
    """Return one sequence of indices, mixed from several by weight; a single one is unchanged."""
    if len(orders) == 1:
        return orders[0]
    for order in orders:
        order[0]  # grain sets up its counters on the first access, which is not thread-safe
    return grain.MapDataset.mix(orders, weights)


def num_held_out(
    have: str,
    num_examples: int,
    eval_fraction: float,
    batch_size: int,
    least: int | None = None,
    fewer: str = "",
) -> int:
    """Return the number of held-out examples. DataError if either part is less than a batch.

    have: the data and their size, as error messages begin. least: number to hold out of few
    examples, if that leaves a batch to train on; None: a batch. fewer: a setting with which the
    data suffice, for error messages.

    >>> num_held_out("", 1000, 0.05, 32), num_held_out("", 100, 0.05, 32)
    (50, 32)
    """
    if eval_fraction > 0 and num_examples < 2 * batch_size:
        smaller = f", {fewer or f'data.batch_size={num_examples // 2}'} or less"
        smaller = smaller if fewer or num_examples > 1 else ""
        raise DataError(
            f"{have}: to train on a batch and hold out another takes 2*data.batch_size = "
            f"{2 * batch_size}. Use more data{smaller}, or data.eval_fraction=0 with "
            "run.eval_every=null."
        )
    num_eval = math.floor(eval_fraction * num_examples + 1e-9)  # 0.29*100 is 28.999999999999996
    if eval_fraction > 0:
        num_eval = max(num_eval, min(least or batch_size, num_examples - batch_size))
    num_train = num_examples - num_eval
    if num_train < batch_size:
        smaller = ", or a smaller data.batch_size" if batch_size > 1 else ""
        smaller += " or data.eval_fraction" if num_eval else ""
        left = f"{num_examples}-{num_eval} = {num_train} are left to train on" if num_eval else ""
        raise DataError(
            f"{have}: {left or f'{num_examples} examples'}, fewer than "
            f"data.batch_size={batch_size}. Use more data{smaller}."
        )
    return num_eval


def divided(
    *,
    name: str,
    content: object,
    have: str,
    num_examples: int,
    batch_size: int,
    seed: int,
    eval_fraction: float,
    least_held_out: int | None = None,
    fewer: str = "",
    **facts: Any,
) -> DataSet:
    """Return a data set of num_examples examples, the last eval_fraction of them held out.

    content: JSON values that determine the examples; have, least_held_out, fewer: as in
    `num_held_out`; facts: other fields of the DataSet.
    """
    sizes = num_examples, eval_fraction, batch_size
    num_eval = num_held_out(have, *sizes, least_held_out, fewer)
    order = {"name": name, "batch_size": batch_size, "seed": seed}
    return DataSet(
        **order,
        fingerprint=fingerprint(**order, content=content, eval_fraction=eval_fraction),
        num_examples=num_examples - num_eval,
        num_eval_examples=num_eval,
        **facts,
    )


def with_held_out(data: DataSet, held_out: DataSet) -> DataSet:
    """Return `data` with all examples of `held_out` as its held-out examples."""
    first = data.num_examples

    def read(numbers: np.ndarray) -> Batch:
        is_held_out = numbers >= first
        return read_from((data, held_out), is_held_out, numbers - first * is_held_out)

    return replace(
        data,
        read=read,
        source=f"{data.source}, held out {held_out.source}",
        fingerprint=fingerprint(trained=data.fingerprint, held_out=held_out.fingerprint),
        num_eval_examples=held_out.num_examples,
        num_short=held_out.num_short,
    )


def read_from(sets: Sequence[DataSet], part: np.ndarray, numbers: np.ndarray) -> Batch:
    """Return a batch of several data sets: row i is example numbers[i] of sets[part[i]]."""
    batch: Batch = {}
    for i, each in enumerate(sets):
        rows = np.flatnonzero(part == i)
        if len(rows) or not len(numbers):
            for name, array in each.read(numbers[rows]).items():
                shape = len(numbers), *array.shape[1:]
                batch.setdefault(name, np.empty(shape, array.dtype))[rows] = array
    return batch


def fingerprint(**parts: object) -> str:
    """Return the sha256, in hexadecimal, of the named parts (JSON values)."""
    text = json.dumps({"order": ORDER_VERSION} | parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return a generator seeded by (seed, *key): by an example's index, in any order of drawing."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


# --- descriptions in checkpoints: the fields of a data set, without its examples -----------------

STORED = tuple(each.name for each in fields(DataSet) if each.compare)


def description(data: DataSet, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data set's fields and an example's types as JSON values; shapes: of a batch."""
    example = {name: [str(np.dtype(a.dtype)), *a.shape[1:]] for name, a in shapes.items()}
    return {name: getattr(data, name) for name in STORED} | {"example": example}


def described(stored: Mapping[str, Any]) -> DataSet:
    """Return the data set of a `description`, with zeros as examples.

    >>> stored = {"name": "custom", "source": "", "fingerprint": "", "batch_size": 4, "seed": 0}
    >>> stored |= {"num_examples": 8, "num_eval_examples": 0, "example": {"inputs": ["float32", 5]}}
    >>> described(stored).read(np.arange(2))["inputs"].shape
    (2, 5)
    """
    example = stored["example"].items()

    def read(numbers: np.ndarray) -> Batch:
        return {n: np.zeros((len(numbers), *shape), dtype) for n, (dtype, *shape) in example}

    return DataSet(**{name: stored[name] for name in STORED if name in stored}, read=read)
