"""Layers to stages by what they cost: the least largest stage under a memory limit, then the shortest step.

Standard library only. `ppctl.schedule.partition.partition.balanced` does the same for equal layers without a limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

from ppctl.errors import ConfigError
from ppctl.schedule.partition.coupled import CoupledSearch
from ppctl.schedule.partition.moves import climbed
from ppctl.schedule.partition.partition import Partition, balanced
from ppctl.schedule.partition.work import Layers, Memory, Work, bounds_of, partition_of

DETOURS = 4  # of `improved`; with 0 it is 0.5% to 1.6% from the fastest on average and up to 18%, with 8 up to 6%
MAX_EVENED = 20_000  # partitions looked at for more equal ranks; 128 stages have 16,256 neighbours


def cut(layers: Layers, rank_of: Sequence[int], memory: Memory | None = None) -> Partition:
    """Return contiguous layers of each stage so that the largest of `stage_s` is the least possible and all ranks fit.

    rank_of: the rank of each stage. A middle stage needs a layer, the first and the last one may have none. Where
    several partitions do that: with a stage for each rank the costs are as equal as possible, then the later stages
    are the smaller ones; with several stages for each rank the largest sum over the stages of a rank is small, then
    costs are nearly equal (no move of one layer makes them more so).

    Exact with a stage for each rank; with several, exact as long as a search looks at no more than
    `coupled.MAX_STATES` partial partitions, and past that the partition still fits (docs/derivations.md, "Cutting
    layers into stages"). ConfigError where nothing fits, or nothing was found.

    >>> layers = Layers((1.0, 1.0, 2.0, 4.0, 1.0), head_s=2.0)
    >>> [len(stage) for stage in cut(layers, (0, 1, 2))]
    [3, 1, 1]
    """
    balanced(layers.num_layers, rank_of, embed=0.0, head=0.0)  # refuses too few layers
    work = Work(layers, rank_of, memory)
    least = divided(work)[0]
    if least is None:
        raise _nothing_fits(work)
    even = divided(work, cap=work.max_s(least))[0]
    assert even is not None, "what costs least is under its own cost"
    if work.num_ranks == work.num_stages:
        return partition_of(even)
    found = next((bounds for bounds in (even, least) if work.fits(bounds)), None) or _coupled(work, work.max_s(least))
    return partition_of(climbed(found, work.unevenness, work.fits, work.least, MAX_EVENED))


def divided_evenly(layers: Sequence[float], rank_of: Sequence[int], *, embed: float, head: float) -> Partition:
    """`balanced`, of layers that may differ: what each costs, and what the ends cost, in one unit.

    >>> [len(stage) for stage in divided_evenly([1.0, 1.0, 2.0], (0, 1), embed=0.0, head=0.0)]
    [2, 1]
    """
    if len(set(layers)) == 1:
        one = layers[0]
        return balanced(len(layers), rank_of, embed=embed / one, head=head / one)
    return cut(Layers(tuple(layers), embed_s=embed, head_s=head), rank_of)


def improved(
    partition: Partition,
    step_s: Callable[[Partition], float],
    *,
    max_tried: int,
    fits: Callable[[Partition], bool] = lambda partition: True,
) -> Partition:
    """Return a partition that no move of one layer makes faster, or the fastest of `max_tried`, the start included.

    A move takes a layer from one stage to another one, and the layers between move on by one. step_s: seconds of a
    step, such as the simulator's makespan; asked only of partitions that fit. The same on every process.

    How near that comes to the fastest partition: docs/derivations.md, "Partitions improved by simulation".

    >>> [len(stage) for stage in improved((range(3), range(3, 4)), lambda p: float(len(p[0]) ** 2), max_tried=9)]
    [0, 4]
    """
    num_stages = len(partition)
    return partition_of(
        climbed(
            bounds_of(partition),
            lambda bounds: step_s(partition_of(bounds)),
            lambda bounds: fits(partition_of(bounds)),
            [min(1, s, num_stages - 1 - s) for s in range(num_stages)],
            max_tried,
            DETOURS,
        )
    )


def divided(work: Work, cap: float | None = None, excess: bool = False) -> tuple[list[int] | None, int]:
    """(bounds, states): the least largest stage where each stage alone fits, or None; how many (stage, a, b) were seen.

    cap: the least sum of squares instead, among those with no stage above it. excess: the least largest excess of
    bytes over the limit, with a stage for each rank, instead of seconds, whether it fits or not. The rooms of stages
    are what a rank's other stages leave at least.

    Starts are tried from the latest on: the stage only gets dearer, so the first one that is as dear as the best so far
    ends the search.
    """
    num_layers, last, states = work.num_layers, work.num_stages - 1, 0
    least = [0.0] + [inf] * num_layers if cap is not None else [-inf] + [inf] * num_layers
    starts: list[list[int]] = []
    before, after = 0, sum(work.least)
    for s in range(last + 1):
        sums, end = (work.byte_sums[s], work.end_bytes[s] - work.limit[s]) if excess else (work.s_sums, work.end_s[s])
        first = [0] * (num_layers + 1) if excess else work.first_start(s)
        before, after = before + work.least[s], after - work.least[s]
        best, start = [inf] * (num_layers + 1), [-1] * (num_layers + 1)
        for b in range(num_layers if s == last else before, num_layers - after + 1):
            best_b, sum_b, latest = inf, sums[b], b - work.least[s] if s else 0
            for a in range(latest, first[b] - 1, -1):
                states += 1
                value = sum_b - sums[a] + end
                if cap is not None:
                    if value > cap:
                        break
                    value *= value
                if value >= best_b:
                    break
                total = max(least[a], value) if cap is None else least[a] + value
                if total < best_b:
                    best_b, start[b] = total, a
            best[b] = best_b
        least = best
        starts.append(start)
    if least[num_layers] == inf:
        return None, states
    bounds = [num_layers]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    return bounds[::-1], states


def _coupled(work: Work, least_s: float) -> list[int]:
    """Bounds whose ranks fit, with the least largest stage, which is `least_s` or more."""
    found = CoupledSearch(work, least_s).found
    if found is not None:
        return found
    anyhow = CoupledSearch(work)
    if anyhow.found is None:
        raise _nothing_fits(work, is_proof=anyhow.is_proof)
    found = anyhow.found
    costs = work.costs_between(least_s, work.max_s(found))
    low, high = 0, len(costs) - 1  # costs[high] is that of `found`
    while low < high:
        middle = (low + high) // 2
        better = CoupledSearch(work, costs[middle]).found
        if better is None:
            low = middle + 1
        else:
            found = better
            high = bisect_left(costs, work.max_s(found))
    return found


def _nothing_fits(work: Work, *, is_proof: bool = True) -> ConfigError:
    """The error that names the rank that is over its limit in the partition that comes closest."""
    remedy = "Use more ranks (mesh.pp), more shards (mesh.fsdp), remat=full or a smaller microbatch."
    rank, needs = max(enumerate(work.least_bytes), key=lambda item: item[1] - work.limits[item[0]])
    if needs > work.limits[rank]:
        return ConfigError(
            f"rank {rank} needs {needs:,.0f} bytes at least, with the fewest and smallest layers, but its limit is "
            f"{work.limits[rank]:,.0f}. {remedy}"
        )
    if work.num_ranks == work.num_stages:
        bounds = divided(work, excess=True)[0]
        assert bounds is not None, "without a limit something fits"
    else:
        bounds = _closest(work)
    found = work.rank_bytes(bounds)
    rank = max(range(work.num_ranks), key=lambda r: found[r] - work.limits[r])
    num_layers = sum(bounds[s + 1] - bounds[s] for s in work.stages_of[rank])
    return ConfigError(
        f"{'No' if is_proof else 'Among those searched, no'} partition of {work.num_layers} layers fits: rank {rank} "
        f"needs {found[rank]:,.0f} bytes where the largest excess is least, for {num_layers} layers, but its limit is "
        f"{work.limits[rank]:,.0f}. {remedy}"
    )


def _closest(work: Work) -> list[int]:
    """Bounds whose largest excess of bytes is within 0.1% of the limit of the least possible."""
    bounds = bounds_of(balanced(work.num_layers, work.rank_of, embed=0.0, head=0.0))
    low, high = 0.0, work.excess(bounds)
    while high - low > 1e-3 * max(work.limits):
        found = CoupledSearch(work, excess=(low + high) / 2).found
        if found is None:
            low = (low + high) / 2
        else:
            bounds, high = found, work.excess(found)
    return bounds
