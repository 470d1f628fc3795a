"""Vocabulary parallelism: any schedule with E, S, T and G on every rank, and their dependencies."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppctl.config.groups.schedule_settings import Csv, Schedule
from ppctl.config.schedule_from_config import schedule_of
from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import KINDS, PART_KINDS, Task, writes
from ppctl.schedule.schedule_text import from_csv, to_csv
from ppctl.schedule.simulator import free_running, simulate
from ppctl.schedule.validation import validate
from ppctl.schedule.vocabulary_parallel import with_vocabulary

PART_S = 0.25 + 0.5  # S and T, in the units of papers


def of_stages(schedule):
    return tuple(tuple(t for t in tasks if t.kind in KINDS) for tasks in schedule.ranks)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 8), (4, 12)])
def test_every_family_has_every_part_once_within_the_stated_memory(
    family, num_ranks, num_microbatches
):
    whole = build(family, num_ranks, num_microbatches)
    for delay in (0, 1, 2):
        try:
            divided = with_vocabulary(whole, delay)
        except ScheduleError:
            assert (family, delay > 0) == ("hanayo", True)  # its ranks take turns
            continue
        validate(divided)
        for rank, tasks in enumerate(divided.ranks):
            parts = [task for task in tasks if task.kind in PART_KINDS]
            assert {task.stage for task in parts} == {rank}
            assert len(parts) == len(set(parts)) == 4 * num_microbatches
        assert list(map(sorted, of_stages(divided))) == list(map(sorted, whole.ranks))
        before, after = (
            simulate(whole, Costs()).peak_activations,
            simulate(divided, Costs()).peak_activations,
        )
        assert all(b <= a <= b + delay for b, a in zip(before, after, strict=True))


def test_no_delay_leaves_the_order_of_the_stages_tasks():
    whole = build("zb_v", 4, 8)
    assert of_stages(with_vocabulary(whole, 0)) == whole.ranks


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 16), (8, 32)])
def test_the_closed_forms(num_ranks, num_microbatches):
    """(m+p-1)(F+B) + m(S+T), with p-r+2 microbatches of 1F1B in flight on rank r; of ZB-H1 as many
    as before.
    """
    for family, peak in (
        ("1f1b", num_ranks + 2),
        ("eager_1f1b", 2 * num_ranks + 1),
        ("zb_h1", num_ranks),
    ):
        whole = build(family, num_ranks, num_microbatches)
        found = simulate(with_vocabulary(whole), Costs())
        expected_s = simulate(whole, Costs()).makespan_s + num_microbatches * PART_S
        assert found.makespan_s == pytest.approx(expected_s)
        assert max(found.peak_activations) == min(peak, num_microbatches)


def test_two_barriers_take_two_microbatches_in_flight():
    """Ranks of 1F1B that go no further ahead wait for both: for the sums of all, and for the
    gradients of all.
    """
    whole = build("1f1b", 8, 32)
    makespans_s = [
        simulate(with_vocabulary(whole, delay), Costs()).makespan_s for delay in (0, 1, 2, 3)
    ]
    assert makespans_s[0] > makespans_s[1] > makespans_s[2] == makespans_s[3]


def test_parts_wait_for_the_last_stage_and_for_each_other():
    timeline = simulate(
        with_vocabulary(build("interleaved", 4, 8, num_chunks=2)), Costs(transfer_s=0.1)
    )
    start_s, end_s, parts = timeline.start_s, timeline.end_s, range(4)
    for m in range(8):
        last_s = end_s[Task(7, "F", m)]
        assert start_s[Task(0, "F", m)] >= max(
            end_s[Task(r, "E", m)] + 0.1 * (r > 0) for r in parts
        )
        for r in parts:
            assert start_s[Task(r, "S", m)] >= last_s + 0.1 * (r < 3)
            assert start_s[Task(r, "T", m)] >= max(
                end_s[Task(q, "S", m)] + 0.1 * (q != r) for q in parts
            )
            assert start_s[Task(r, "G", m)] >= end_s[Task(0, "B", m)] + 0.1 * (r > 0)
        assert start_s[Task(7, "B", m)] >= max(
            end_s[Task(r, "T", m)] + 0.1 * (r < 3) for r in parts
        )
    task = max(end_s, key=end_s.__getitem__)
    while (before := timeline.waits_for(task)) is not None:
        task = before
    assert start_s[task] == 0


def test_ranks_that_share_cores_take_at_least_the_work():
    divided = with_vocabulary(build("1f1b", 4, 8))
    assert free_running(divided, Costs(), 1.0).makespan_s == pytest.approx(4 * 8 * (3 + PART_S))


def test_costs_of_parts_are_of_all_or_of_each():
    divided = with_vocabulary(build("1f1b", 2, 4))
    costs = Costs(logits_s=(1.0, 2.0))
    assert (costs.seconds("S", 1, 1), costs.seconds("T", 1, 1), costs.seconds("E", 0, 1)) == (
        2.0,
        0.5,
        0.0,
    )
    assert simulate(divided, costs).makespan_s > simulate(divided, Costs()).makespan_s
    with pytest.raises(
        ConfigError,
        match=r"^logits_s has 3 entries for 2 ranks, each with a part of the vocabulary",
    ):
        simulate(divided, Costs(logits_s=(1.0, 2.0, 3.0)))
    simulate(build("1f1b", 2, 4), Costs(logits_s=(1.0, 2.0, 3.0)))  # it has no parts


def test_a_schedule_with_a_divided_vocabulary_is_written_and_read():
    divided = with_vocabulary(build("1f1b", 2, 3))
    assert from_csv(to_csv(divided.ranks), "1f1b") == divided


def test_a_deadlock_of_vocabulary_parts_is_named():
    divided = with_vocabulary(build("1f1b", 2, 2))
    tasks = list(divided.ranks[1])
    tasks.insert(tasks.index(Task(1, "S", 0)), tasks.pop(tasks.index(Task(1, "T", 0))))
    with pytest.raises(
        ScheduleError, match=r"0T0 waits for sums\(1,0\).* Rank 1 has 1T0 before 1S0, on which it"
    ):
        validate(replace(divided, ranks=(divided.ranks[0], tuple(tasks))))
    left = tuple(task for task in divided.ranks[1] if task != Task(1, "G", 1))
    with pytest.raises(
        ScheduleError, match=r"the program ends without 1G1, which writes embedding_wgrad\(1,1\)"
    ):
        validate(replace(divided, ranks=(divided.ranks[0], left)))
    with pytest.raises(ScheduleError, match=r"0S0 is on rank 1, but part 0 is on rank 0"):
        validate(replace(divided, ranks=(divided.ranks[0], (*divided.ranks[1], Task(0, "S", 0)))))
    with pytest.raises(ScheduleError, match=r"0S0 is outside parts 0..-1 of the vocabulary"):
        validate(
            replace(
                build("1f1b", 1, 1), ranks=((Task(0, "F", 0), Task(0, "B", 0), Task(0, "S", 0)),)
            )
        )


def test_vocabularies_that_cannot_be_divided_are_refused(tmp_path):
    with pytest.raises(
        ScheduleError, match=r"^1f1b: vocab=parallel divides .* but num_ranks=1. Use vocab"
    ):
        with_vocabulary(build("1f1b", 1, 4))
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(with_vocabulary(build("1f1b", 2, 2)).ranks))
    with pytest.raises(
        ScheduleError, match=r"its tasks divide the vocabulary already .* Use vocab=whole"
    ):
        schedule_of(Csv(num_microbatches=2, path=str(path), vocab="parallel"), 2, Costs())
    with pytest.raises(ConfigError, match=r"schedule.vocab=some"):
        Schedule(vocab="some").check()


def test_a_request_with_a_divided_vocabulary_has_it_in_its_label():
    found = schedule_of(Schedule("zb_h1", 8, vocab="parallel"), 4, Costs())
    assert (found.label, found.schedule.vocab_parts > 0) == ("zb_h1, vocab=parallel", True)


RUNS = json.loads((Path(__file__).parents[1] / "golden" / "vocabulary_runs.json").read_text())[
    "rows"
]


@pytest.mark.parametrize("run", RUNS, ids=[run["id"] for run in RUNS])
def test_published_runs_take_the_time_simulated_from_their_task_times(run):
    """The step of 1F1B, whole within 2 % and divided within 5 %, from each rank's measured F, B,
    S+T, E and G.
    """

    def of_ranks(name, share=1.0):
        return tuple(1e-6 * share * each for each in run[name])

    whole, none = build("1f1b", 8, run["num_microbatches"]), (0.0,) * 8
    costs = Costs(of_ranks("forward_us"), of_ranks("backward_us"), none)
    if "head_us" not in run:
        assert simulate(whole, costs).makespan_s == pytest.approx(run["step_time_s"], rel=0.02)
        return
    ends = {
        "embedding_s": of_ranks("embedding_us"),
        "embedding_grad_s": of_ranks("embedding_grad_us"),
    }
    ends |= {"logits_s": of_ranks("head_us", 1 / 3), "logits_grad_s": of_ranks("head_us", 2 / 3)}
    costs = replace(costs, **ends)
    assert simulate(with_vocabulary(whole, costs=costs), costs).makespan_s == pytest.approx(
        run["step_time_s"], rel=0.05
    )


def test_tasks_sorted_by_start_follow_their_inputs_even_at_zero_cost():
    schedule, written = with_vocabulary(build("1f1b", 4, 8)), set()
    start_s = simulate(schedule, replace(Costs(), embedding_s=0.0, embedding_grad_s=0.0)).start_s
    for task in sorted(start_s, key=start_s.__getitem__):
        assert written >= set(schedule.reads(task)), task
        written |= set(writes(task))
