"""The order of examples: endless shuffled epochs, mixtures by weight, and batches read ahead.

Nothing is stored: the example at a place follows from the place and the seed, so data sets of any
size start at once and at any step. An epoch is shuffled by a block cipher on its places: Simon
(Beaulieu et al. 2013, eprint.iacr.org/2013/404) with four rounds, walked until the result is a
place (Black, Rogaway 2002, "Ciphers with arbitrary finite domains"). The order is that of grain's
`MapDataset.shuffle`, `repeat` and `mix`, whose import takes longer than the first step of a run.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import numpy as np

T = TypeVar("T")
ROUNDS = 4
LEAST_BITS = 16  # of a block: shuffles of smaller blocks show patterns
NUM_THREADS, NUM_AHEAD = 2, 4  # threads that read, and batches that they read ahead
LEAST_WEIGHT = 100  # integer that stands for the smallest weight of a mixture


@dataclass(frozen=True)
class Epochs:
    """Consecutive examples first, first + 1, ..., first + number - 1, in one order or shuffled."""

    first: int
    number: int
    seed: int | None  # None: in the order of the indices; else epoch e is shuffled by seed + e

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the examples at places 0, 1, ...; each epoch has every example once."""
        epochs, within = np.divmod(places, self.number)
        if self.seed is None:
            return self.first + within
        found = np.empty_like(within)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            seed = (self.seed + int(epoch)) % 2**32
            found[of_epoch] = shuffled(within[of_epoch], self.number, seed)
        return self.first + found


@dataclass(frozen=True)
class ExampleOrder:
    """Examples of several parts, interleaved in proportion to their weights."""

    parts: tuple[Epochs, ...]
    weights: tuple[float, ...]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the examples at places 0, 1, ...: int64, as `places`."""
        if len(self.parts) == 1:
            return self.parts[0].at(places)
        chosen = np.array([self._part_at(int(place)) for place in places]).reshape(-1, 2)
        found = np.empty(len(places), np.int64)
        for i, part in enumerate(self.parts):
            rows = chosen[:, 0] == i
            found[rows] = part.at(chosen[rows, 1])
        return found

    @property
    def length(self) -> int:
        """The number of places until one part has no further example in its first epoch."""
        shares, total = self._shares, sum(self._shares)
        pairs = zip(self.parts, shares, strict=True)
        return min(int(part.number / (share / total)) for part, share in pairs)

    @property
    def _shares(self) -> tuple[int, ...]:
        scale = LEAST_WEIGHT / min(self.weights)
        return tuple(int(weight * scale) for weight in self.weights)

    def _part_at(self, place: int) -> tuple[int, int]:
        """Return (number of the part that gives a place, number of its earlier places).

        Part i gives its share of the places that parts 0, ..., i - 1 leave, as evenly as possible.
        """
        rest, before, until = sum(self._shares), place, place + 1
        for i, share in enumerate(self._shares):
            left, left_until = (k * (rest - share) // rest for k in (before, until))
            if before - left != until - left_until:
                return i, before - left
            rest, before, until = rest - share, left, left_until
        raise AssertionError("the shares add up to all places")


def shuffled(places: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return a permutation of 0, ..., number - 1 at `places`; seed: 0 to 2**32 - 1.

    >>> shuffled(np.arange(8), 8, 3).tolist()
    [4, 7, 0, 1, 2, 5, 3, 6]
    """
    bits = (number - 1).bit_length()
    if bits <= LEAST_BITS:
        return _small_epoch(number, seed)[places]
    found = _encrypted(places, bits, seed)
    while (is_outside := found >= number).any():
        found[is_outside] = _encrypted(found[is_outside], bits, seed)
    return found


@lru_cache(16)
def _small_epoch(number: int, seed: int) -> np.ndarray:
    """Return the whole permutation, for numbers of which most ciphers are outside.

    A table of steps, each outside number to its cipher, is composed with itself until each number
    leads inside.
    """
    ciphers = _encrypted(np.arange(2**LEAST_BITS), LEAST_BITS, seed)
    steps = np.where(np.arange(len(ciphers)) < number, np.arange(len(ciphers)), ciphers)
    for _ in range(LEAST_BITS):
        steps = steps[steps]
    return steps[ciphers[:number]]


def _encrypted(values: np.ndarray, bits: int, seed: int) -> np.ndarray:
    """Return the ciphers, int64, of numbers of at most `bits` bits, rounded up to even."""
    half = (bits + 1) // 2
    mask = 2**half - 1

    def rotated(x: np.ndarray, by: int) -> np.ndarray:
        return (x << by | x >> half - by) & mask

    left, right = values >> half, values & mask
    for key in _round_keys(seed):  # a round encrypts one half and exchanges the halves
        mixed = rotated(right, 1) & rotated(right, 8) ^ rotated(right, 2)
        left, right = right, left ^ mixed ^ key & mask
    return left << half | right


@lru_cache(64)
def _round_keys(seed: int) -> tuple[int, ...]:
    """Return ROUNDS numbers of 32 bits, as C++'s `std::seed_seq{seed}` generates them."""
    n, word = ROUNDS, 2**32 - 1
    shift = (n - 1) // 2
    p, q = (n - shift) // 2, (n - shift) // 2 + shift
    keys = [0x8B8B8B8B] * n
    mixed = lambda x: x ^ x >> 27  # noqa: E731
    for k in range(n):
        a, b, c = k % n, (k + p) % n, (k + q) % n
        first = 1664525 * mixed(keys[a] ^ keys[b] ^ keys[k - 1]) & word
        second = first + (1, 1 + seed, *range(2, n))[k] & word
        keys[b], keys[c] = keys[b] + first & word, keys[c] + second & word
        keys[a] = second
    for k in range(n):
        a, b, c = k % n, (k + p) % n, (k + q) % n
        first = 1566083941 * mixed(keys[a] + keys[b] + keys[k - 1] & word) & word
        second = first - a & word
        keys[b], keys[c] = keys[b] ^ first, keys[c] ^ second
        keys[a] = second
    return tuple(keys)


def read_ahead(read: Callable[[int], T], numbers: range) -> Iterator[T]:
    """Yield read(number) for each number, in order, read by threads up to NUM_AHEAD ahead.

    An error of `read` is raised in its place. The threads stop when the iterator is dropped.
    """
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ppctl-read")
    try:
        rest = iter(numbers)
        pending = deque(threads.submit(read, n) for n in islice(rest, NUM_AHEAD))
        while pending:
            oldest = pending.popleft()
            pending.extend(threads.submit(read, n) for n in islice(rest, 1))
            yield oldest.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
