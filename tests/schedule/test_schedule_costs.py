"""What schedules cost: closed forms, published numbers, and a brute-force simulator.

p = ranks, m = microbatches, V = chunks a rank, c = seconds of a transfer; F, B = seconds of one
microbatch through 1/p of the model, forward and backward.
"""

import subprocess
import sys
from functools import cache
from itertools import pairwise

import pytest
from support.sizes import FAMILIES, SIZES, TINY, by_ranks, make, random_programs

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import reads, writes
from ppctl.schedule.placement_costs import peak_activations
from ppctl.schedule.simulator import simulate

# without transfers; F < B, F = B, F > B, and numbers that are no integers
COSTS = [
    Costs(),
    Costs(1, 0.5, 0.5),
    Costs(1, 1.05, 0.75),
    Costs(3, 0.25, 0.5),
    Costs(0.37, 0.41, 0.53),
]
TRANSFERS = [0.0625, 0.1, 0.3]


def near(value):
    return pytest.approx(value, rel=1e-12)


def bubble_s(family, p, m, V, costs):
    """The closed form of each family's docstring. A family without one fails here."""
    return {
        "gpipe": (p - 1) * (costs.forward_s + costs.backward_s),
        "1f1b": (p - 1) * (costs.forward_s + costs.backward_s),
        "eager_1f1b": (p - 1) * (costs.forward_s + costs.backward_s),
        "interleaved": (p - 1) * (costs.forward_s + costs.backward_s) / V,
    }[family]


def peaks(family, p, m, V):
    """Activations of each rank at its peak."""
    return {
        "gpipe": [m for r in range(p)],
        "1f1b": [min(m, p - r) for r in range(p)],
        "eager_1f1b": [min(m, 2 * (p - 1 - r) + 1) for r in range(p)],
        "interleaved": [min(m, p + (2 * (p - 1 - r) - (p - 1)) / V) for r in range(p)],
    }[family]


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bubble_is_the_closed_form(family, costs):
    for size in SIZES:
        if size[0] == family:
            timeline = simulate(make(*size), costs)
            busy = size[2] * (costs.forward_s + costs.backward_s)
            bubble = bubble_s(*size, costs)
            assert timeline.makespan_s == near(busy + bubble), size
            assert timeline.bubble_fraction == pytest.approx(
                bubble / (busy + bubble), rel=1e-12, abs=1e-12
            ), size


@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_peak_activations_are_the_closed_form(sizes):
    for size in sizes:
        assert list(peak_activations(make(*size))) == near(peaks(*size))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_any_rank_is_the_docstrings(family):
    p, m, V = 8, 64, 4
    promised = {"gpipe": m, "1f1b": p, "eager_1f1b": 2 * p - 1, "interleaved": p + (p - 1) / V}
    assert max(peak_activations(make(family, p, m, V))) == promised[family]


@pytest.mark.parametrize("c", TRANSFERS)
@pytest.mark.parametrize("costs", COSTS[:3], ids=str)
def test_transfers_lengthen_gpipe_and_eager_1f1b_by_one_round_trip(costs, c):
    costs = Costs(costs.forward_s, costs.input_grad_s, costs.weight_grad_s, c)
    task_s = costs.forward_s + costs.backward_s
    for p in range(1, 9):
        for m in (1, 2, p, 2 * p - 1, 2 * p, 4 * p):
            expected = near((m + p - 1) * task_s + 2 * c * (p - 1))
            assert simulate(make("gpipe", p, m, 1), costs).makespan_s == expected
            if m >= 2 * p - 1:
                assert simulate(make("eager_1f1b", p, m, 1), costs).makespan_s == expected


@pytest.mark.parametrize("c", TRANSFERS)
@pytest.mark.parametrize("costs", COSTS[:3], ids=str)
def test_transfers_lengthen_1f1b_once_more_in_every_round_of_p_microbatches(costs, c):
    costs = Costs(costs.forward_s, costs.input_grad_s, costs.weight_grad_s, c)
    task_s = costs.forward_s + costs.backward_s
    for p in range(1, 9):
        for m in (1, 2, p, p + 1, 2 * p, 3 * p + 1, 32):
            trips = (p - 1) + (m - 1) * (p - 1) // p
            assert simulate(make("1f1b", p, m, 1), costs).makespan_s == near(
                (m + p - 1) * task_s + 2 * c * trips
            )


# schedules.md, section 3: unit F=I=W=1; fused F=1, B=2; real F=1, I=1.05, W=0.75, c=0.1
UNIT, FUSED, REAL = Costs(), Costs(1, 2, 0), Costs(1, 1.05, 0.75, 0.1)


@pytest.mark.parametrize(
    ("family", "V", "unit", "fused", "real", "peak"),
    [
        ("gpipe", 1, 117, 117, 110.6, 32),
        ("1f1b", 1, 117, 117, 116.0, 8),
        ("eager_1f1b", 1, 117, 117, 110.6, 15),
        ("interleaved", 2, 106.5, 106.5, 102.4, 11.5),
        ("interleaved", 4, 101.25, 101.25, 100.7, 9.75),
    ],
)
def test_eight_ranks_and_32_microbatches_cost_the_published_numbers(
    family, V, unit, fused, real, peak
):
    schedule = make(family, 8, 32, V)
    assert simulate(schedule, UNIT).makespan_s == unit
    assert simulate(schedule, FUSED).makespan_s == fused
    assert simulate(schedule, REAL).makespan_s == pytest.approx(
        real, abs=0.051
    )  # printed with one decimal
    assert max(peak_activations(schedule)) == peak


@pytest.mark.parametrize(
    ("p", "m", "plain", "interleaved"),
    [(2, 4, 15, 13.5), (4, 4, 21, 16.5), (4, 8, 33, 28.5), (8, 16, 69, 58.5), (16, 64, 237, 214.5)],
)
def test_makespans_of_other_sizes_are_the_published_numbers(p, m, plain, interleaved):
    for family in ("gpipe", "1f1b", "eager_1f1b"):
        assert simulate(make(family, p, m, 1), UNIT).makespan_s == plain
    assert simulate(make("interleaved", p, m, 2), UNIT).makespan_s == interleaved


def longest_path(schedule, costs):
    """End of every task: the longest path to it over program order and over values, by recursion."""
    num_stages = schedule.num_stages
    writer = {v: task for program in schedule.ranks for task in program for v in writes(task)}
    before = {}
    for program in schedule.ranks:
        for previous, task in zip((None, *program), program, strict=False):
            before[task] = [(previous, 0.0)] if previous is not None else []
            for value in reads(task, num_stages):
                crosses = schedule.rank_of[writer[value].stage] != schedule.rank_of[task.stage]
                before[task].append((writer[value], costs.transfer_s if crosses else 0.0))

    @cache
    def end(task):
        start = max((end(source) + wait for source, wait in before[task]), default=0.0)
        return start + costs.seconds(task.kind, task.stage, schedule.num_chunks)

    return {task: end(task) for task in before}


ODD = Costs(1.25, 0.875, 1.5, 0.375)


@pytest.mark.parametrize("sizes", by_ranks(TINY))
def test_the_simulator_agrees_with_longest_paths(sizes):
    for size in sizes:
        schedule = make(*size)
        assert simulate(schedule, ODD).end_s == near(longest_path(schedule, ODD))


@pytest.mark.parametrize(
    "schedule", random_programs(), ids=lambda s: f"{s.num_ranks}x{s.num_microbatches}"
)
def test_the_simulator_agrees_with_longest_paths_on_any_order(schedule):
    timeline = simulate(schedule, ODD)
    assert timeline.end_s == near(longest_path(schedule, ODD))
    assert timeline.makespan_s == max(timeline.end_s.values())
    tasks_s = sum(
        ODD.seconds(task.kind, task.stage, schedule.num_chunks)
        for program in schedule.ranks
        for task in program
    )
    assert timeline.bubble_fraction == near(
        1 - tasks_s / (timeline.makespan_s * schedule.num_ranks)
    )
    for program in schedule.ranks:  # one task at a time
        for task, after in pairwise(program):
            assert timeline.end_s[task] <= timeline.start_s[after]


@pytest.mark.parametrize(
    "schedule", random_programs(), ids=lambda s: f"{s.num_ranks}x{s.num_microbatches}"
)
def test_peak_activations_count_the_stashes_between_forward_and_weight_gradient(schedule):
    for program, peak in zip(schedule.ranks, peak_activations(schedule), strict=True):
        steps = range(len(program))
        begin = {(t.stage, t.microbatch): i for i, t in enumerate(program) if t.kind == "F"}
        end = {(t.stage, t.microbatch): i for i, t in enumerate(program) if t.kind in "BW"}
        held = [sum(begin[cell] <= step <= end[cell] for cell in begin) for step in steps]
        assert peak * schedule.num_chunks == near(max(held))


@pytest.mark.parametrize(
    "module",
    [
        "ppctl.schedule",
        "ppctl.schedule.tick_lowering",
        "ppctl.schedule.simulator",
        "ppctl.schedule.partition.partition",
    ],
)
def test_schedules_need_the_standard_library_only(module):
    code = (
        f"import sys, {module}; "
        "roots = {name.split('.')[0] for name in sys.modules}; "
        "print(*sorted(roots & {'jax', 'jaxlib', 'numpy', 'hydra', 'omegaconf', 'flax', 'optax'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
