"""The dynamic program of stages on unequal submeshes, against all cuts by brute force."""

import random
from math import inf

import numpy as np
import pytest

from ppctl.planner.search.unequal_groups import Submesh, fastest_stages


def some(seed):
    """(layers, devices, submeshes) with random costs, memory and places."""
    choose = random.Random(seed)
    num_layers, num_devices = choose.randint(1, 5), choose.randint(1, 6)

    def submesh(number):
        devices = choose.randint(1, num_devices)
        starts = range(num_devices - devices + 1)
        if choose.random() < 0.5:  # only whole hosts of two devices
            starts = range(0, num_devices - devices + 1, 2)
        shape = (num_layers + 1,) * 2
        way, rest = np.full(shape, inf), np.full(shape, inf)
        most = np.zeros(shape, int)
        for first in range(num_layers):
            for end in range(first + 1, num_layers + 1):
                if choose.random() < 0.9:
                    seconds = (end - first) / devices * choose.uniform(0.8, 1.5)
                    way[first, end] = seconds + choose.choice([0.0, 0.2])
                    rest[first, end] = seconds * 3 + choose.choice([0.0, 0.5])
                    most[first, end] = choose.randint(1, 4)
        return Submesh(number, devices, tuple(starts), way, rest, most)

    return num_layers, num_devices, [submesh(n) for n in range(choose.randint(1, 5))]


def brute_force(num_layers, num_devices, submeshes, idle):
    """Seconds of the fastest step, over all sequences of stages."""
    best = inf

    def extend(first, device, stages):
        nonlocal best
        if first == num_layers:
            fit = idle or device == num_devices
            if fit and all(most >= n for n, (_, _, most) in enumerate(reversed(stages), 1)):
                best = min(best, sum(s[0] for s in stages) + max(s[1] for s in stages))
            return
        for each in submeshes:
            if device in each.starts:
                for end in range(first + 1, num_layers + 1):
                    if np.isfinite(each.way_s[first, end]):
                        at = first, end
                        costs = each.way_s[at], each.rest_s[at], each.most_stages[at]
                        extend(end, device + each.devices, [*stages, costs])

    extend(0, 0, [])
    return best


@pytest.mark.parametrize("seed", range(80))
def test_no_cut_of_layers_and_devices_is_faster(seed):
    problem, idle = some(seed), seed % 2 == 0
    found, best = fastest_stages(*problem, idle=idle), brute_force(*problem, idle)
    assert (found is None) == (best == inf)
    if found is not None:
        assert found.fit
        assert found.seconds == pytest.approx(best, rel=1e-12)
        ends = [stage.end_layer for stage in found.stages]
        assert [0, *ends[:-1]] == [stage.first_layer for stage in found.stages]
        assert ends[-1] == problem[0]
        assert found.num_devices == problem[1] or idle
        # a limit at the best step excludes it; above it, the result is the same
        assert fastest_stages(*problem, below=best * (1 - 1e-9), idle=idle) is None
        assert fastest_stages(*problem, below=best * 1.01, idle=idle).seconds == found.seconds
