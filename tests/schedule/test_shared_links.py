"""Hops that share links: closed forms, a second simulator, free links, bounds and the search."""

import random
from dataclasses import replace

import pytest
from support.sizes import random_programs

from ppctl.errors import ScheduleError
from ppctl.schedule import Schedule, Task, build
from ppctl.schedule.bounds import makespan_bound_s
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import reads, writes
from ppctl.schedule.search.auto import choose, published
from ppctl.schedule.shared_links import links_between
from ppctl.schedule.simulate import peak_activations, simulate

BUSY = Costs(transfer_s=0.1, transfer_bytes=2.0, transfer_bytes_per_s=1.0, link_hosts=())


def by_trial(schedule, costs):
    """End of each task, by a loop that asks all ranks again and again: slow, and written another way."""
    written, free, end, at, clock = {}, {}, {}, [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    arrived = {}
    running = {}
    while True:
        for rank, tasks in enumerate(schedule.ranks):
            if rank not in running and at[rank] < len(tasks):
                task = tasks[at[rank]]
                needs = reads(task, schedule.num_stages)
                if all((v, rank) in arrived for v in needs):
                    begin = max([clock[rank], *(arrived[v, rank] for v in needs)])
                    seconds = costs.seconds(task.kind, task.stage, schedule.num_chunks)
                    running[rank] = begin + seconds
        if not running:
            return end
        now, rank = min((t, r) for r, t in running.items())
        del running[rank]
        task = schedule.ranks[rank][at[rank]]
        end[task], clock[rank], at[rank] = now, now, at[rank] + 1
        for value in writes(task):
            arrived[value, rank] = now
            to = task.stage + 1 if value.name == "act" else task.stage - 1
            if value.name in ("act", "grad") and 0 <= to < schedule.num_stages and schedule.rank_of[to] != rank:
                other = schedule.rank_of[to]
                links = links_between(costs, rank, other)
                sent = max([now, *(free.get(link, 0.0) for link in links)]) + costs.link_busy_s
                free |= dict.fromkeys(links, sent)
                arrived[value, other] = sent + costs.transfer_s
    return written


def forwards(*ranks):
    """Forwards alone of stages on ranks 0 and up, each [(stage, microbatch), ...]."""
    return tuple(tuple(Task(s, "F", m) for s, m in tasks) for tasks in ranks)


def test_two_hops_at_once_on_a_link_take_twice_as_long():
    ranks = forwards([(0, 0), (0, 1)], [(1, 0), (1, 1)])
    schedule = Schedule("two", ranks, (0, 1), 2)
    costs = replace(BUSY, forward_s=(0.0, 1.0))  # both are written at 0
    ends = simulate(schedule, costs).end_s
    assert ends[Task(1, "F", 0)] == pytest.approx(0 + 2 + 0.1 + 1)
    assert ends[Task(1, "F", 1)] == pytest.approx(0 + 2 + 2 + 0.1 + 1)  # latency is not in the queue
    assert simulate(schedule, replace(costs, link_hosts=None)).end_s[Task(1, "F", 1)] == pytest.approx(2.1 + 1 + 1)


def test_ranks_of_a_host_share_its_link_to_another_and_none_inside():
    rank_of, ranks = (0, 2, 1, 3), forwards([(0, 0)], [(2, 0)], [(1, 0)], [(3, 0)])
    schedule = Schedule("hosts", ranks, rank_of, 1)
    apart, joined = (simulate(schedule, replace(BUSY, link_hosts=hosts)).makespan_s for hosts in ((), (0, 0, 1, 1)))
    assert apart == joined == pytest.approx(4 + 3 * 2.1)  # one after the other: nothing waits
    both = forwards([(0, 0), (0, 1)], [(2, 0), (2, 1)], [(1, 0), (1, 1)], [(3, 0), (3, 1)])
    schedule = Schedule("hosts", both, rank_of, 2)
    for hosts in ((), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)):
        costs = replace(BUSY, link_hosts=hosts, forward_s=0.5)
        assert simulate(schedule, costs).end_s == pytest.approx(by_trial(schedule, costs))
    assert links_between(replace(BUSY, link_hosts=(0, 0, 0)), 0, 2) == (("rank", 0, 2),)


@pytest.mark.parametrize("hosts", ["own", "pairs"])
def test_any_schedule_takes_what_another_simulator_says_and_no_less_than_free_links_and_the_bound(hosts):
    rng = random.Random(1)
    for schedule in [*random_programs(), build("zb_v", 4, 8), build("interleaved", 4, 8, num_chunks=2)]:
        where = tuple(r // 2 for r in range(schedule.num_ranks)) if hosts == "pairs" else ()
        of_stages = [tuple(rng.uniform(0.2, 2) for _ in range(schedule.num_stages)) for _ in range(3)]
        costs = Costs(*of_stages, 0.2, transfer_bytes=rng.uniform(0, 3), transfer_bytes_per_s=2.0, link_hosts=where)
        timeline, free = simulate(schedule, costs), simulate(schedule, replace(costs, link_hosts=None))
        assert timeline.end_s == pytest.approx(by_trial(schedule, costs))
        assert timeline.makespan_s >= free.makespan_s * (1 - 1e-12)
        assert makespan_bound_s(schedule, costs) <= timeline.makespan_s * (1 + 1e-12)
        assert timeline.critical_path[-1] in timeline.end_s
        idle = replace(costs, transfer_bytes=0.0)  # links are never busy
        apart = replace(idle, link_hosts=None)
        assert simulate(schedule, idle).end_s == pytest.approx(simulate(schedule, apart).end_s)


def test_a_link_that_carries_all_decides_how_long_a_step_takes():
    costs = replace(BUSY, transfer_bytes=50.0, link_hosts=(0, 1))
    schedule = build("1f1b", 2, 8)
    assert makespan_bound_s(schedule, costs) == 8 * 50
    assert simulate(schedule, costs).makespan_s > 8 * 50


def test_ranks_that_wait_for_each_other_are_named_as_on_free_links():
    schedule = Schedule("bad", forwards([(1, 0), (0, 0)], [(2, 0)]), (0, 0, 1), 1)
    with pytest.raises(ScheduleError, match="rank 0, step 0: 1F0 waits for act"):
        simulate(schedule, BUSY)


def test_the_search_counts_queues_and_is_never_worse_than_a_published_schedule():
    costs = Costs(1, 1, 1, 0.1, transfer_bytes=0.4, transfer_bytes_per_s=1.0, link_hosts=(0, 0, 1))
    choice = choose(3, 6, costs, 3, max_chunks=2)
    assert simulate(choice.best.schedule, costs).makespan_s == choice.best.length_s >= choice.lower_bound_s
    for _, schedule in published(3, 6, 2):
        if max(peak_activations(schedule)) <= 3:
            assert simulate(schedule, costs).makespan_s >= choice.best.length_s
