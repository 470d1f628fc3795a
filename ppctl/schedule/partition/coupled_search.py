"""Partitions under a limit that couples stages: an exact search for several stages a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, floor, inf

from ppctl.schedule.partition.layer_moves import climbed
from ppctl.schedule.partition.partition_costs import Work

MAX_STATES = 100_000  # partial partitions that one search looks at
MAX_REPAIRS = 2_000  # partitions looked at, by moves from the best of the multipliers
DETOURS = 4  # from the least over
ROUNDS = 40  # of the multipliers
ROUNDING = 1e-9  # relative; what is over by less may fit


@dataclass(frozen=True)
class _Step:
    """The consequences of placing one bound, which closes the stages between two known ones.

    closes: of ranks that get a stage (rank, its closed stages, the least bytes of its others).
    partly: of ranks with closed and open stages (rank, its closed ones).
    """

    bound: int
    sides: tuple[int, int]  # the known bounds around it
    closes: tuple[tuple[int, tuple[int, ...], float], ...]
    partly: tuple[tuple[int, tuple[int, ...]], ...]
    open_ranks: tuple[int, ...]
    stretches: tuple[tuple[int, int], ...]  # neighbouring known bounds with open stages between


class CoupledSearch:
    """One partition with no stage above `cap` seconds and no rank above its limit plus `excess`, or
    the proof that there is none.

    found: its bounds, or None. is_proof: whether None is certain, with less than MAX_STATES states
    looked at.

    First by multipliers (Lagrangian relaxation), then by moves of one layer from the bounds that
    were least over, then by trying bounds rank by rank: docs/derivations.md, "Partitions under a
    limit that couples stages".
    """

    def __init__(self, work: Work, cap: float = inf, excess: float = 0.0):
        self._work = work
        self._limits = [limit + excess for limit in work.limits]
        self._ends = [work.last_end(s, cap, work.room[s] + excess) for s in range(work.num_stages)]
        self._bounds = [0] * work.num_stages + [work.num_layers]
        self._failed: set[tuple[float, ...]] = set()
        self.num_states = 0
        self.found: list[int] | None = None
        if any(least > limit for least, limit in zip(work.least_bytes, self._limits, strict=True)):
            return
        if self._weigh():
            self._tables: dict[tuple[int, int], list[list[float]]] = {}
            self._most_layers = [self._most(rank) for rank in range(work.num_ranks)]
            self._steps = _steps(work)
            limits = work.least, MAX_REPAIRS, DETOURS
            self._guide = climbed(self._guide, self._over, lambda b: work.max_s(b) <= cap, *limits)
            if work.excess(self._guide) <= excess:
                self.found = self._guide
            elif self._place(0):
                self.found = list(self._bounds)

    @property
    def is_proof(self) -> bool:
        return self.num_states < MAX_STATES

    def _weigh(self) -> bool:
        """Return whether weights leave the question open.

        Sets the weights, `found`, and the guide: bounds with the least excess seen.
        """
        work = self._work
        scale = [max(limit, 1.0) for limit in self._limits]
        shares = [0.0 if limit == inf else 1.0 for limit in self._limits]
        least_excess, tightest, best = inf, -inf, [0.0] * work.num_ranks
        self._guide: list[int] = []
        for _ in range(ROUNDS):
            # 1. the lightest bounds under these weights: no bounds are lighter
            total = sum(shares) or 1.0
            self._set_weights([a / size / total for a, size in zip(shares, scale, strict=True)])
            bounds, weight = self._lightest()
            if not bounds:
                return False
            room = sum(w * limit for w, limit in zip(self._weights, self._limits, strict=True) if w)
            if weight > room + ROUNDING:
                return False
            if weight - room > tightest:
                tightest, best = weight - room, self._weights
            # 2. how far each rank is over its limit
            held = zip(work.rank_bytes(bounds), self._limits, scale, strict=True)
            over = [(have - limit) / size for have, limit, size in held]
            if max(over) < least_excess:
                least_excess, self._guide = max(over), bounds
            if max(over) <= 0:
                self.found = bounds
                return False
            # 3. more weight on the ranks that are over
            steps = [exp(min(1.0, max(-1.0, by))) for by in over]
            shares = [share and share * step for share, step in zip(shares, steps, strict=True)]
        self._set_weights(best)
        return True

    def _over(self, bounds: list[int]) -> float:
        """Return the bytes that ranks hold above their limits, all together."""
        held = self._work.rank_bytes(bounds)
        return sum(max(0.0, have - limit) for have, limit in zip(held, self._limits, strict=True))

    def _set_weights(self, weights: Sequence[float]) -> None:
        work, self._weights = self._work, weights
        stages = zip(work.rank_of, work.byte_sums, strict=True)
        self._sums = [[weights[rank] * n for n in sums] for rank, sums in stages]

    def _lightest(self) -> tuple[list[int], float]:
        """Return (bounds, bytes) with the least weighted bytes; ([], inf) without cap and room."""
        work = self._work
        levels = [[inf] * work.num_layers + [0.0]]
        for s in reversed(range(work.num_stages)):
            levels.append(self._level(s, levels[-1]))
        levels.reverse()
        if levels[0][0] == inf:
            return [], inf
        bounds = [0]
        for s, after in enumerate(levels[1:]):
            a = bounds[-1]
            options = range(a + work.least[s], self._ends[s][a] + 1)
            bounds.append(min(options, key=lambda b, s=s, after=after: self._sums[s][b] + after[b]))
        return bounds, levels[0][0]

    def _level(self, s: int, after: list[float]) -> list[float]:
        """Return the least weighted bytes from each start of stage s; after: from its ends."""
        sums, ends, least = self._sums[s], self._ends[s], self._work.least[s]
        found = [inf] * len(after)
        finite = [b for b, weight in enumerate(after) if weight < inf]
        if not finite:
            return found
        with_s = [weight + held for weight, held in zip(after, sums, strict=True)]
        end = self._weights[self._work.rank_of[s]] * self._work.end_bytes[s]
        for a in range(finite[-1] - least, -1, -1):
            if ends[a] < finite[0]:  # and so are those of the starts before
                break
            found[a] = min(with_s[a + least : ends[a] + 1], default=inf) - sums[a] + end
        return found

    def _between(self, left: int, right: int, at: int) -> list[float]:
        """Return the least weighted bytes between bounds for places of `left`; `right` is `at`."""
        if (right, at) not in self._tables:
            last = [inf] * (self._work.num_layers + 1)
            last[at] = 0.0
            self._tables[right, at] = [last]
        levels = self._tables[right, at]
        while len(levels) <= right - left:
            levels.append(self._level(right - len(levels), levels[-1]))
        return levels[right - left]

    def _most(self, rank: int) -> float:
        """Return a bound on a rank's layers: its stages' smallest, the lightest stage first."""
        work = self._work
        most, left = 0.0, self._limits[rank] - work.least_bytes[rank]
        for s in sorted(work.stages_of[rank], key=lambda s: work.lightest[s]):
            more = max(end - a for a, end in enumerate(self._ends[s])) - work.least[s]
            if work.lightest[s] > 0 and left < inf:
                more = min(more, floor(left / work.lightest[s] + ROUNDING))
            most += work.least[s] + max(0, more)
            left -= max(0, more) * work.lightest[s]
        return most

    def _place(self, i: int) -> bool:
        """Return whether the bounds from the i-th step on can be placed."""
        if i == len(self._steps):
            return True
        bounds, step = self._bounds, self._steps[i]
        k, (left, right) = step.bound, step.sides
        at, after = bounds[left], self._between(k, right, bounds[right])
        if k == left + 1:
            reached = range(at + self._work.least[left], self._ends[left][at] + 1)
            options = [b for b in reached if after[b] < inf]
        else:
            reached = range(at, bounds[right] + 1)
            options = [b for b in reached if after[b] < inf and self._between(left, k, b)[at] < inf]
        for b in sorted(options, key=lambda b: (abs(b - self._guide[k]), b)):
            if self.num_states >= MAX_STATES:
                return False
            self.num_states += 1
            bounds[k] = b
            if self._is_open(i, step) and self._place(i + 1):
                return True
        return False

    def _is_open(self, i: int, step: _Step) -> bool:
        """Return whether the placed bounds may be part of a partition.

        From now on they count as failed: success ends the search.
        """
        bounds = self._bounds
        for rank, stages, least in step.closes:
            if self._held(stages) + least > self._limits[rank]:
                return False
        held = [self._held(stages) for _, stages in step.partly]
        state = (i, *(bounds[k] for stretch in step.stretches for k in stretch), *held)
        if state in self._failed:
            return False
        self._failed.add(state)
        num_layers = sum(bounds[right] - bounds[left] for left, right in step.stretches)
        if num_layers > sum(self._most_layers[rank] for rank in step.open_ranks):
            return False
        weights, between = self._weights, self._between
        weight = sum(between(a, b, bounds[b])[bounds[a]] for a, b in step.stretches)
        room = sum(weights[r] * self._limits[r] for r in step.open_ranks if weights[r])
        used = sum(weights[r] * size for (r, _), size in zip(step.partly, held, strict=True))
        return weight + used <= room + ROUNDING

    def _held(self, stages: Sequence[int]) -> float:
        return sum(self._work.stage_bytes(s, self._bounds[s], self._bounds[s + 1]) for s in stages)


def _steps(work: Work) -> list[_Step]:
    """Return the order in which bounds are placed: those of rank 0's stages, then rank 1's, ..."""
    known, steps = {0, work.num_stages}, list[_Step]()
    for k in (k for stages in work.stages_of for s in stages for k in (s, s + 1)):
        if k in known:
            continue
        # 1. the known bounds around k, and the stages closed with it
        sides = max(n for n in known if n < k), min(n for n in known if n > k)
        known.add(k)
        closed = {s for s in range(work.num_stages) if s in known and s + 1 in known}
        # 2. of each rank the closed stages and the open ones
        parts = [
            (rank, tuple(s for s in stages if s in closed), [s for s in stages if s not in closed])
            for rank, stages in enumerate(work.stages_of)
        ]
        now = {work.rank_of[s] for s in (k - 1, k) if s in closed}
        least = work.least_stage_bytes
        closes = [(r, done, sum(least[s] for s in rest)) for r, done, rest in parts if r in now]
        partly = [(rank, done) for rank, done, rest in parts if done and rest]
        open_ranks = [rank for rank, _, rest in parts if rest]
        stretches = [(left, right) for left, right in pairwise(sorted(known)) if right > left + 1]
        steps.append(
            _Step(k, sides, tuple(closes), tuple(partly), tuple(open_ranks), tuple(stretches))
        )
    return steps
