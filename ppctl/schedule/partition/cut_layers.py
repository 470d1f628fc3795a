"""Layers to stages by cost: the least largest stage under a memory limit, then the shortest step.

Standard library only. `ppctl.schedule.partition.partition.balanced` does the same for equal layers
without a limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

from ppctl.errors import ConfigError
from ppctl.schedule.partition.coupled_search import CoupledSearch
from ppctl.schedule.partition.layer_moves import climbed
from ppctl.schedule.partition.partition import Partition, balanced, least_layers
from ppctl.schedule.partition.partition_costs import Layers, Memory, Work, bounds_of, partition_of

# of `improved`: with 0 it is 0.5% to 1.6% from the fastest on average, up to 18%; with 8 up to 6%
DETOURS = 4
MAX_EVENED = 20_000  # partitions looked at for more equal ranks; 128 stages have 16,256 neighbours


def cut(layers: Layers, rank_of: Sequence[int], memory: Memory | None = None) -> Partition:
    """Return contiguous layers of each stage so that the largest of `stage_s` is the least possible
    and all ranks fit.

    rank_of: the rank of each stage. A middle stage needs a layer, the first and the last may have
    none. Ties: with one stage a rank the costs are as equal as possible, then later stages are
    smaller; with several the largest sum over a rank's stages is small, then costs are nearly equal
    (no move of one layer makes them more so).

    Exact with one stage a rank; with several, as long as a search looks at no more than
    `coupled_search.MAX_STATES` partial partitions; past that the partition still fits
    (docs/derivations.md, "Cutting layers into stages"). ConfigError if no partition was found.

    >>> layers = Layers((1.0, 1.0, 2.0, 4.0, 1.0), head_s=2.0)
    >>> [len(stage) for stage in cut(layers, (0, 1, 2))]
    [3, 1, 1]
    """
    # 1. the least largest stage where each stage alone fits, then the most equal such stages
    balanced(layers.num_layers, rank_of, embed=0.0, head=0.0)  # refuses too few layers
    work = Work(layers, rank_of, memory)
    least = divided(work)[0]
    if least is None:
        raise _nothing_fits(work)
    even = divided(work, cap=work.max_s(least))[0]
    assert even is not None, "what costs least is under its own cost"
    if work.num_ranks == work.num_stages:
        return partition_of(even)
    # 2. several stages a rank: bounds whose ranks fit, then more equal ranks
    bounds = next((each for each in (even, least) if work.fits(each)), None)
    bounds = bounds or _coupled(work, work.max_s(least))
    return partition_of(climbed(bounds, work.unevenness, work.fits, work.least, MAX_EVENED))


def divided_evenly(
    layers: Sequence[float], rank_of: Sequence[int], *, embed: float, head: float
) -> Partition:
    """Return `balanced` for layers that may differ; layers, embed, head: costs in one unit.

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
    """Return a partition that no move of one layer makes faster, or the fastest of `max_tried`.

    A move takes a layer from one stage to another, and the layers between move on by one.
    step_s: seconds of a step, such as the simulator's makespan; called only if `fits`. Distance
    from the fastest partition: docs/derivations.md, "Partitions improved by simulation".

    >>> [len(held) for held in improved((range(3), range(3, 4)), lambda p: len(p[0]), max_tried=9)]
    [0, 4]
    """
    bounds = climbed(
        bounds_of(partition),
        lambda bounds: step_s(partition_of(bounds)),
        lambda bounds: fits(partition_of(bounds)),
        least_layers(len(partition)),
        max_tried,
        DETOURS,
    )
    return partition_of(bounds)


def divided(
    work: Work, cap: float | None = None, excess: bool = False
) -> tuple[list[int] | None, int]:
    """Return (bounds, states): those of the least largest stage, each within its room, or None.

    states: how many (stage, a, b) were looked at.

    cap: the least sum of squares instead, with no stage above it. excess: the least largest excess
    of bytes over the limit instead of seconds, one stage a rank, fitting or not. A stage's room is
    the least that its rank's other stages leave.

    Starts are tried from the latest on: the stage only gets dearer, so the first that is as dear as
    the best so far ends the search.
    """
    num_layers, last, states = work.num_layers, work.num_stages - 1, 0
    least = [-inf if cap is None else 0.0] + [inf] * num_layers
    starts: list[list[int]] = []
    before, after = 0, sum(work.least)
    # 1. stage by stage: for each end the best start, by the least cost of the stages so far
    for s in range(last + 1):
        sums, end, first = work.s_sums, work.end_s[s], work.first_start(s)
        if excess:
            sums, end = work.byte_sums[s], work.end_bytes[s] - work.limit[s]
            first = [0] * (num_layers + 1)
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
    # 2. the starts of the best, from the last stage back
    bounds = [num_layers]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    return bounds[::-1], states


def _coupled(work: Work, least_s: float) -> list[int]:
    """Return bounds whose ranks fit, with the least largest stage, which is `least_s` or more."""
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
    """Return the error that names the rank over its limit in the partition that comes closest."""
    use = "Use more ranks (mesh.pp), more shards (mesh.fsdp), remat=full or a smaller microbatch."
    rank, needs = max(enumerate(work.least_bytes), key=lambda item: item[1] - work.limits[item[0]])
    if needs > work.limits[rank]:
        return ConfigError(
            f"rank {rank} needs {needs:,.0f} bytes at least, with the fewest and smallest "
            f"layers, but its limit is {work.limits[rank]:,.0f}. {use}"
        )
    is_single = work.num_ranks == work.num_stages
    bounds = divided(work, excess=True)[0] if is_single else _closest(work)
    assert bounds is not None, "without a limit something fits"
    found = work.rank_bytes(bounds)
    rank = max(range(work.num_ranks), key=lambda r: found[r] - work.limits[r])
    num_layers = sum(bounds[s + 1] - bounds[s] for s in work.stages_of[rank])
    return ConfigError(
        f"{'No' if is_proof else 'Among those searched, no'} partition of {work.num_layers} "
        f"layers fits: rank {rank} needs {found[rank]:,.0f} bytes where the largest excess is "
        f"least, for {num_layers} layers, but its limit is {work.limits[rank]:,.0f}. {use}"
    )


def _closest(work: Work) -> list[int]:
    """Return bounds whose largest excess of bytes is least, to 0.1% of the limit."""
    bounds = bounds_of(balanced(work.num_layers, work.rank_of, embed=0.0, head=0.0))
    low, high = 0.0, work.excess(bounds)
    while high - low > 1e-3 * max(work.limits):
        found = CoupledSearch(work, excess=(low + high) / 2).found
        if found is None:
            low = (low + high) / 2
        else:
            bounds, high = found, work.excess(found)
    return bounds
