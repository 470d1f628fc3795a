"""Every registered family: valid, complete, priced as published; and mutants of each are caught."""

import inspect
import random
from collections import Counter
from dataclasses import replace

import pytest
from support.all_families import (
    FUSED,
    GROUPED,
    KNOB_VALUES,
    REAL,
    UNIT,
    cases,
    make,
    num_chunks,
    settable,
    split_tasks,
)

from ppctl.cli.choices import schema_of
from ppctl.errors import ScheduleError
from ppctl.schedule.families.registry import FAMILIES, LOOPED_WHOLE, ON_RING, build
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Task, split_backward
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import ticks
from ppctl.schedule.validation import validate

CASES = cases()
families = pytest.mark.parametrize("family", FAMILIES)


def of(family, found=None):
    return [case for case in found or CASES if case[0] == family]


def kinds_of(schedule):
    return {task.kind for program in schedule.ranks for task in program}


@families
def test_every_size_is_valid_and_has_every_task_once(family):
    for case in of(family):
        _, p, m, knobs = case
        schedule, V = make(case), num_chunks(family, knobs)
        assert (schedule.name, schedule.num_ranks, schedule.num_stages, schedule.num_chunks) == (
            family,
            p,
            p * V,
            V,
        )
        found = Counter(split_tasks(schedule))
        assert found == Counter(
            Task(s, kind, i) for s in range(p * V) for kind in "FIW" for i in range(m)
        ), case
        # DualPipeV splits only next to another task
        assert kinds_of(schedule) == kinds_of(FAMILIES[family].sample) or p * m == 1


@families
def test_a_generator_takes_ints_and_returns_the_same_schedule_again(family):
    for case in of(family)[::7]:
        assert make(case) == make(case)


@families
def test_the_docstring_states_bubble_memory_and_source(family):
    text = " ".join(inspect.getdoc(FAMILIES[family].generate).lower().split())
    assert "source:" in text
    assert "peak activations" in text
    assert "bubble" in text or "makespan" in text


# --- schedules.md, section 3: p = 8, m = 32 -----------------------------------------------------

TABLE = [  # family, knobs, unit makespan, unit period, fused makespan, real makespan, peak
    ("gpipe", {}, 117, 117, 117, 110.6, 32),
    ("1f1b", {}, 117, 117, 117, 116.0, 8),
    ("eager_1f1b", {}, 117, 117, 117, 110.6, 15),
    ("eager_1f1b", {"warmup_hops": 1}, 117, 117, 117, 116.0, 8),
    ("interleaved", {"num_chunks": 2}, 106.5, 106.5, 106.5, 102.4, 11.5),
    ("interleaved", {"num_chunks": 4}, 101.25, 101.25, 101.25, 100.7, 9.75),
    ("looped_bfs", {"num_chunks": 2}, 106.5, 106.5, 106.5, 100.8, 32),
    ("looped_bfs", {"num_chunks": 4}, 101.25, 101.25, 101.25, 95.9, 32),
    ("zb_h1", {}, 103, 103, 117, 101.5, 8),
    ("zb_h2", {}, 103, 96, 117, 97.3, 15),
    ("interleaved_zb", {"num_chunks": 2}, 99.5, 99.5, 106.5, 97.75, 8),
    ("interleaved_zb", {"num_chunks": 4}, 97.75, 97.75, 101.25, 98.1, 8),
    ("zb_v", {}, 99.5, 96, 110, 96.6, 8),
    ("v_half", {}, 104.5, 104.5, 146, None, 5),
    ("v_min", {}, 109.5, 109.5, None, 132.6, 4),
    ("gis", {}, 105, 105, 126.5, 102.4, 6),
    ("dualpipe_v", {}, 99.5, 99.5, 109.5, 98.0, 8.5),
    (
        "hanayo",
        {"num_waves": 2},
        113.25,
        113.25,
        113.25,
        None,
        8,
    ),  # the page's own order: 117.75 at 9
]


@pytest.mark.parametrize(("family", "knobs", "unit", "period", "fused", "real", "peak"), TABLE)
def test_eight_ranks_and_32_microbatches_cost_the_published_numbers(
    family, knobs, unit, period, fused, real, peak
):
    schedule = build(family, 8, 32, **knobs)
    timeline = simulate(schedule, UNIT)
    assert (timeline.makespan_s, timeline.period_s, max(timeline.peak_activations)) == (
        unit,
        period,
        peak,
    )
    if fused is not None:
        assert simulate(schedule, FUSED).makespan_s == fused
    if real is not None:
        assert simulate(schedule, REAL).makespan_s == pytest.approx(
            real, abs=0.051
        )  # printed with one decimal


@pytest.mark.parametrize(
    ("warmup_hops", "num_chunks", "makespan"),
    [(1, 2, 119.1), (1.5, 2, 114.9), (2, 2, 109.5), (1, 4, 125.5), (2, 4, 107.5)],
)
def test_longer_warm_up_hides_the_latency_of_transfers(warmup_hops, num_chunks, makespan):
    schedule = build("interleaved", 8, 32, num_chunks=num_chunks, warmup_hops=warmup_hops)
    assert simulate(schedule, replace(UNIT, transfer_s=0.1)).makespan_s == pytest.approx(
        makespan, abs=0.051
    )


def test_a_shorter_warm_up_holds_p_activations_at_the_same_makespan():
    for V in (2, 4):
        timeline = simulate(build("interleaved", 8, 32, num_chunks=V, warmup_hops=1), UNIT)
        assert (timeline.makespan_s, max(timeline.peak_activations)) == (96 + 21 / V, 8)


# --- other closed forms -------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_looped_bfs_has_the_bubble_of_interleaved_and_the_memory_of_gpipe(p):
    for V in (1, 2, 3):
        for m in (p, p + 1, 2 * p, 5 * p):
            for costs in (UNIT, FUSED, REAL):
                free = replace(costs, transfer_s=0)
                timeline = simulate(build("looped_bfs", p, m, num_chunks=V), free)
                work = costs.seconds("F", 0, 1) + costs.backward_s
                assert timeline.makespan_s == pytest.approx(m * work + (p - 1) * work / V)
                assert set(timeline.peak_activations) == {m}


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_hanayo_has_its_published_bubble_where_a_backward_costs_a_forward(p):
    for w in (1, 2, 3):
        for m in (p, 2 * p, 5 * p):
            timeline = simulate(
                build("hanayo", p, m, num_waves=w),
                replace(UNIT, input_grad_s=0.5, weight_grad_s=0.5),
            )
            assert timeline.makespan_s == pytest.approx(2 * m + (p - 1) * 2 / (2 * w))
            assert max(timeline.peak_activations) == min(m, p)


@pytest.mark.parametrize("p", [4, 6, 8, 10, 12, 14, 16])
def test_gis_holds_three_quarters_of_p(p):
    timeline = simulate(build("gis", p, 4 * p), UNIT)
    assert max(timeline.peak_activations) == 0.75 * p
    if p % 4 == 0:
        assert timeline.makespan_s == 12 * p + 1.25 * p - 1


def test_whole_backwards_take_the_time_of_fused_costs():
    for family in (name for name, record in FAMILIES.items() if record.is_split):
        schedule = build(family, 4, 8)
        halves = {"I": "B"}
        programs = (
            tuple(Task(s, halves.get(kind, kind), m) for s, kind, m in tasks if kind != "W")
            for tasks in schedule.ranks
        )
        whole = replace(schedule, ranks=tuple(programs))
        assert simulate(validate(whole), UNIT).makespan_s == pytest.approx(
            simulate(schedule, FUSED).makespan_s
        )
        assert validate(split_backward(whole)).num_stages == schedule.num_stages


# --- executors ----------------------------------------------------------------------------


def test_spmd_runs_every_family_and_pairs_looped_whole_backwards():
    assert tuple(FAMILIES) == ON_RING
    for name, record in FAMILIES.items():
        is_looped = record.sample.rank_of == loop(record.sample.num_ranks, record.num_chunks)
        assert (name in LOOPED_WHOLE) == (is_looped and not record.is_split)
    for family, p, m, knobs in cases(ranks=(1, 2, 3, 4), microbatches=lambda p: (p, 2 * p)):
        schedule = build(family, p, m, **knobs)
        lowered = ticks(schedule, UNIT)
        assert lowered.makespan_s(UNIT) >= simulate(schedule, UNIT).makespan_s - 1e-9
        if p > 1:  # a V of one rank is a loop too
            assert (lowered.program == "fb") == (family in LOOPED_WHOLE)


@families
def test_the_config_of_a_family_has_its_knobs_and_no_others(family):
    config = schema_of("schedule", family)()
    config.name = family
    config.check()
    assert config.knobs() == settable(family)


@families
def test_every_knob_has_values(family):
    """A new knob needs its line in KNOB_VALUES of tests/support/all_families.py."""
    assert settable(family).keys() <= KNOB_VALUES.keys()


@pytest.mark.parametrize(
    ("family", "m", "knobs", "message"),
    [
        *(
            (f, 6, {}, f"num_microbatches=6 is not a multiple of num_ranks=4 ({f}). Use a multiple "
                "of 4 that divides the batch, or schedule=1f1b.")
            for f in GROUPED
        ),
        ("looped_bfs", 4, {"num_chunks": 0}, "num_chunks=0 is below 1 (looped_bfs). Use num_chunks=1 or more."),
        ("hanayo", 4, {"num_waves": 0}, "num_waves=0 is below 1 (hanayo). Use num_waves=1 or more."),
        ("1f1b", 0, {}, "num_microbatches=0 is below 1 (1f1b). Use num_microbatches=1 or more."),
        (
            "eager_1f1b",
            4,
            {"warmup_hops": 2.5},
            "warmup_hops=2.5 is outside [1, 2] (eager_1f1b). "
            "Use 1 for the fewest activations, 2 to hide the latency of transfers.",
        ),
    ],
)  # fmt: skip
def test_an_unsupported_size_is_refused_in_one_line(family, m, knobs, message):
    with pytest.raises(ScheduleError) as error:
        build(family, 4, m, **knobs)
    assert str(error.value) == message


# --- mutants ------------------------------------------------------------------------------------


def mutants(schedule, rng):
    """Yield (change, the wrong schedule): a task dropped, run twice, moved to another rank, swapped."""

    def with_rank(rank, program):
        return replace(
            schedule,
            ranks=tuple(tuple(program) if r == rank else t for r, t in enumerate(schedule.ranks)),
        )

    rank = rng.randrange(schedule.num_ranks)
    program = list(schedule.ranks[rank])
    at = rng.randrange(len(program))
    yield "drop", with_rank(rank, program[:at] + program[at + 1 :])
    again = rng.randrange(len(program))
    yield "duplicate", with_rank(rank, [*program[:again], program[at], *program[again:]])
    other = (rank + 1) % schedule.num_ranks
    if other != rank:
        moved = replace(with_rank(rank, program[:at] + program[at + 1 :]))
        target = [*moved.ranks[other], program[at]]
        yield (
            "move",
            replace(
                moved,
                ranks=tuple(tuple(target) if r == other else t for r, t in enumerate(moved.ranks)),
            ),
        )
    # a forward after its backward
    stage, _, m = program[at]
    first = next(i for i, task in enumerate(program) if (task.stage, task.microbatch) == (stage, m))
    later = next(
        i for i, t in enumerate(program) if (t.stage, t.microbatch) == (stage, m) and t.kind in "BI"
    )
    program[first], program[later] = program[later], program[first]
    yield "swap", with_rank(rank, program)


@families
def test_a_task_dropped_repeated_moved_or_swapped_is_caught(family):
    rng = random.Random(family)
    for case in of(family, cases(ranks=(1, 2, 4), microbatches=lambda p: (p, 2 * p))):
        for _ in range(4):
            for what, mutant in mutants(make(case), rng):
                with pytest.raises(ScheduleError):
                    print(what, case, validate(mutant))
