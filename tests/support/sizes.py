"""Four schedule families over a grid of sizes, and programs in random order."""

import random
from itertools import groupby

import pytest

from ppctl.schedule.families.registry import build
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Schedule, Task, reads, writes

FAMILIES = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved",
)  # test_families.py and its siblings have them all


def knobs_of(family, num_chunks):
    return {"num_chunks": num_chunks} if family == "interleaved" else {}


def grid(ranks=range(1, 9), rounds=(1, 2, 3), chunks=(1, 2, 3, 4)):
    """(family, p, m, V) for each of them: m both below, at, above and next to the multiples of p."""
    found = []
    for family in FAMILIES:
        for p in ranks:
            if family == "interleaved":
                found += [(family, p, p * k, V) for k in rounds for V in chunks]
            else:
                found += [
                    (family, p, m, 1)
                    for m in sorted({1, 2, 3, 5, *(p * k for k in rounds), 3 * p + 1})
                ]
    return found


SIZES = grid()
TINY = grid(ranks=(1, 2, 3, 4), rounds=(1, 2), chunks=(1, 2))


def by_ranks(sizes):
    """The sizes of each family and number of ranks, as one parameter of a test; more than 4
    ranks only in `make test-full`.
    """
    groups = groupby(sizes, key=lambda size: size[:2])
    return [
        pytest.param(list(group), id=f"{family} p={p}", marks=[pytest.mark.full] if p > 4 else [])
        for (family, p), group in groups
    ]


def make(family, p, m, V):
    return build(family, p, m, **knobs_of(family, V))


def random_program(seed, *, num_ranks, num_chunks, num_microbatches, split):
    """A schedule in a random order of ranks: right by construction, and of no family."""
    rng = random.Random(seed)
    rank_of = loop(num_ranks, num_chunks)
    num_stages, kinds = len(rank_of), "FIW" if split else "FB"
    left = [
        Task(s, kind, m)
        for s in range(num_stages)
        for kind in kinds
        for m in range(num_microbatches)
    ]
    written, ranks = set(), [[] for _ in range(num_ranks)]
    while left:
        ready = [task for task in left if written.issuperset(reads(task, num_stages))]
        task = rng.choice(ready)
        left.remove(task)
        ranks[rank_of[task.stage]].append(task)
        written.update(writes(task))
    return Schedule("random", tuple(map(tuple, ranks)), rank_of, num_microbatches)


def random_programs():
    """Forty of them, half with the backward split into I and W."""
    return [
        random_program(
            seed,
            num_ranks=1 + seed % 4,
            num_chunks=1 + seed % 3,
            num_microbatches=1 + seed % 5,
            split=split,
        )
        for seed in range(20)
        for split in (False, True)
    ]
