"""The search of layouts against predicting all of them: no better layout is missed, no bound is above
the exact value.
"""

import gc
import random
from dataclasses import replace
from functools import cache, partial
from itertools import islice, pairwise, product
from math import inf
from types import SimpleNamespace

import pytest
from support.selection import full_except

from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.planned_step import Machine, Microbatch, PlannedLayout, Step
from ppctl.executors.work.roofline import Link, ModelWork, Op, PieceWork, Speed
from ppctl.planner.search import layout_candidate as candidates
from ppctl.planner.search.layout_candidate import along
from ppctl.planner.search.layout_search import LayoutSearch, SearchProgress, ascending, uncollected
from ppctl.planner.search.layout_space import Space
from ppctl.planner.search.tune_layouts import Row, planned_layouts
from ppctl.schedule import placement_costs
from ppctl.schedule.costs import costs_of_stages
from ppctl.schedule.engine_traits import BY_TASKS, IN_TICKS
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.mesh_axes import STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat

EPSILON = 1 + 1e-9
ENGINES = {"spmd": IN_TICKS, "mpmd": BY_TASKS}


def some(seed, num_layers=None):
    """(space, step_of) of a small search; of every second one the devices share cores.

    Every third may divide stages over tp and cp: then a device has its part of the work, and sends.
    Of every odd one the vocabulary may be divided over ranks.
    """
    choose = random.Random(seed)

    def piece(factor):
        return PieceWork(
            *(
                (Op(factor * choose.uniform(50, 500), choose.uniform(1, 20), 30.0),)
                for _ in range(3)
            )
        )

    head = choose.choice([0.01, 1, 8])  # in layers
    work = ModelWork(
        piece(choose.choice([0.01, 2])),
        piece(1),
        piece(head),
        x_bytes=choose.randint(10, 50),
        stash_bytes={"none": choose.randint(100, 800), "layer": 40, "full": 40},
        pending_bytes={remat: choose.randint(50, 300) for remat in ("none", "layer", "full")},
    )
    params = ParamBytes(
        choose.randint(100, 3000), choose.randint(100, 9000), moments=2.0, compute_ratio=0.5
    )
    link = Link(choose.uniform(0, 0.2), choose.uniform(50, 5000))
    far = Link(2 * link.latency_s, link.bytes_per_s / 8)
    machine = Machine(
        Speed(choose.uniform(300, 3000), choose.uniform(500, 50_000)),
        link,
        far if seed % 3 else None,
        host_devices=4 if seed % 3 else None,
        task_s=choose.choice([0.0, 0.3]),
        cores=3 if seed % 2 else None,
    )
    size = choose.choice([4, 8])
    executor = choose.choice(["spmd", "mpmd"])
    num_layers = choose.randint(6, 9) if num_layers is None else num_layers
    space = Space(size, num_layers, 2 * size, example_bytes=8, engine=ENGINES[executor])
    models = {MeshSizes(): (work, params)}
    if seed % 3 == 0:
        models |= {
            MeshSizes(tp=tp, cp=cp): divided(models[MeshSizes()], tp, cp)
            for tp, cp in ((2, 1), (1, 2), (4, 2))
        }
    gather = "step" if seed % 2 else "layer"
    space = replace(
        space, divisions=tuple(models), vocab=("whole", "parallel") if seed % 2 else ("whole",)
    )

    def step_of(mesh, microbatch, vocab_parts):
        model, share = models[mesh.only(STAGE_AXES)], -(-space.num_layers // mesh.pp)
        model = in_parts(model, vocab_parts) if vocab_parts else model
        layout = PlannedLayout(mesh, share, share, vocab_parts)
        return Step(*model, layout, microbatch, machine, gather)

    return space, step_of


def divided(model, tp, cp):
    """Return the model of a device whose stage tp and cp divide."""
    part = 1 / (tp * cp)

    def shared(piece):
        sends = (Op(0.0, 20.0, axes=("tp" if tp > 1 else "cp",)),)
        return PieceWork(
            *(
                tuple(replace(op, flops=part * op.flops, bytes=part * op.bytes) for op in ops)
                + sends
                for ops in piece
            )
        )

    work, params = model
    pieces = {
        name: shared((piece.forward, piece.input_grad, piece.weight_grad))
        for name, piece in (("embed", work.embed), ("layer", work.layer), ("head", work.head))
    }
    params = replace(params, layer=params.layer // tp, embed_head=params.embed_head // tp)
    return replace(work, **pieces, x_bytes=work.x_bytes // cp), params


def in_parts(model, ranks):
    """The model as a rank has it that holds its part of embedding and head."""

    def part(piece):
        return PieceWork(
            *(
                tuple(replace(op, flops=op.flops / ranks, bytes=op.bytes / ranks) for op in ops)
                for ops in (piece.forward, piece.input_grad, piece.weight_grad)
            )
        )

    work, params = model
    work = replace(work, embed=part(work.embed), head=part(work.head))
    return work, replace(params, embed_head=-(-params.embed_head // ranks))


@cache
def all_of(seed):
    """Every layout of a search in its three forms: bounded, placed, simulated."""
    placed = [(layout, layout.placed()) for layout in LayoutSearch(*some(seed)).layouts]
    return [(layout, each, each.simulated()) for layout, each in placed if each is not None]


def simulated(seed):
    return [candidate for *_, candidate in all_of(seed)]


def first(search, number=10):
    return list(islice(search.fastest(), number))


seeds = pytest.mark.parametrize("seed", full_except(range(12), 0))


def assert_none_is_missed(best, layouts, keep=10):
    """`best` are the fastest of `layouts`, but for those that are no better than another schedule
    on the same mesh.
    """
    assert all(a.seconds <= b.seconds * EPSILON for a, b in pairwise(best))
    assert set(best) <= set(layouts)
    assert best[0].seconds == min(c.seconds for c in layouts)
    last_s = best[-1].seconds if len(best) == keep else inf
    for candidate in layouts:
        if candidate.seconds < last_s:
            faster = [c for c in best if c.seconds <= candidate.seconds * EPSILON]
            assert candidate in best or any(map(candidate.is_like, faster))


def test_items_come_in_order_and_only_the_used_ones_are_refined():
    refined = []

    def closer(item):
        refined.append(item)
        return item if isinstance(item, float) else None if item == 3 else 2.0 * item

    found = ascending([5, 1, 3, 2], lambda item: item, closer)
    assert [next(found), next(found)] == [2.0, 4.0]
    assert 5 not in refined


@seeds
def test_the_best_layouts_equal_an_exhaustive_searchs(seed):
    search, layouts = LayoutSearch(*some(seed)), simulated(seed)
    assert_none_is_missed(first(search), layouts)
    assert search.num_simulated < len(search.layouts)
    alone = next(search.fastest(with_pipeline=False), None)
    least_s = min((c.seconds for c in layouts if c.mesh.pp == 1), default=None)
    assert (alone and alone.seconds) == least_s


@pytest.mark.full
@seeds
def test_under_a_limit_too(seed):
    layouts = simulated(seed)
    sizes = sorted(c.least_bytes for c in layouts)
    best, *_ = first(LayoutSearch(*some(seed)))
    middle, last = sizes[len(sizes) // 2], best.least_bytes
    for limit in {sizes[0], sizes[len(sizes) // 8], middle, last, last - 1}:
        inside = [c for c in layouts if c.least_bytes <= limit]
        found = first(LayoutSearch(*some(seed), room_bytes=limit))
        if inside:
            assert_none_is_missed(found, inside)
        assert (best in found) == (best.least_bytes <= limit)


@seeds
def test_if_no_layout_fits_a_bound_states_the_needed_memory(seed):
    least = min(candidate.least_bytes for candidate in simulated(seed))
    search = LayoutSearch(*some(seed), room_bytes=least - 1)
    assert first(search) == []
    assert search.smallest_bytes <= least


@seeds
def test_bounds_are_at_most_the_exact_values(seed):
    for layout, placed, candidate in all_of(seed):
        assert layout.seconds <= candidate.seconds * EPSILON, candidate
        assert placed.seconds <= candidate.seconds * EPSILON, candidate
        assert layout.bounds.least_bytes <= candidate.least_bytes, candidate
        assert layout.least_bytes <= candidate.least_bytes, candidate


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_predicted_with_split_backwards_exactly_where_its_tasks_are_split(
    family, monkeypatch
):
    space, step_of = some(0, num_layers=16)
    space = replace(space, engine=ENGINES["mpmd"], families=(family,))
    microbatch = Microbatch(1, 8, space.example_bytes, Remat.LAYER)
    bounds = LayoutSearch(space, step_of).bounds(MeshSizes(1, 4, 1), microbatch)
    splits = []

    def recorded(*args, split, **kwargs):
        splits.append(split)
        return costs_of_stages(*args, split=split, **kwargs)

    monkeypatch.setattr(placement_costs, "costs_of_stages", recorded)
    for _, chunks in space.kinds(4):
        candidates.Layout(bounds, family, chunks).placed().simulated()
        schedule = build(family, 4, 8, **FAMILIES[family].knobs_for(chunks))
        assert splits.pop() == any(task.kind == "W" for tasks in schedule.ranks for task in tasks)
    assert not splits


# --- partitions found by simulation -------------------------------------------------------------


def what(candidate):
    """All of a candidate but its partition and what follows from it."""
    how = candidate.num_microbatches, candidate.remat, candidate.vocab
    return (candidate.mesh, candidate.family, candidate.num_chunks, *how)


@seeds
def test_partitions_by_simulation_are_no_slower_and_fit(seed):
    limit = max(candidate.least_bytes for candidate in first(LayoutSearch(*some(seed))))
    search = LayoutSearch(*some(seed), room_bytes=limit)
    for candidate in first(search):
        better = search.improved(candidate)
        assert what(better) == what(candidate)
        assert better.seconds <= candidate.seconds
        assert sum(better.partition) == search.space.num_layers
        assert better.least_bytes <= limit


@pytest.mark.full
def test_some_partitions_by_simulation_are_faster():
    gained = 0
    for seed in range(12):
        search = LayoutSearch(*some(seed))
        gained += sum(search.improved(c).seconds < 0.99 * c.seconds for c in first(search))
    assert gained >= 5


def test_the_collector_is_as_it_was():
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            with uncollected():
                assert not gc.isenabled()
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()


# --- long schedules -----------------------------------------------------------------------------


BOTH = ("spmd", "mpmd")
EXTRAPOLATED = ["1f1b", "interleaved", "zb_v", "gpipe", "looped_bfs", "zb_h2", "dualpipe_v"]


@pytest.mark.parametrize(
    ("family", "executor"),
    full_except(
        [*product(EXTRAPOLATED, BOTH)], ("1f1b", "spmd"), ("interleaved", "mpmd"), ("zb_v", "spmd")
    ),
)
def test_a_long_schedule_is_extrapolated_from_shorter_ones(family, executor, monkeypatch):
    space, step_of = some({"spmd": 4, "mpmd": 1}[executor], num_layers=9)
    space = replace(
        space, num_devices=4, batch_size=256, engine=ENGINES[executor], families=(family,)
    )
    search = LayoutSearch(space, step_of)
    layouts = [
        (mesh, m) for mesh, m in space.microbatches if mesh.pp > 1 and m.number > 6 * mesh.pp
    ]
    assert {m.remat for _, m in layouts} == set(space.remats)
    for number, (mesh, microbatch) in enumerate(layouts):
        vocab = ("whole", "parallel")[number % 2]
        bounds = search.bounds(mesh, microbatch, vocab)
        # how far forwards go ahead of their backwards, free-running ranks choose for each length
        # anew
        near = 0.1 if (vocab, executor) == ("parallel", "mpmd") else 0.01
        for _, chunks in space.kinds(mesh.pp):
            layout = candidates.Layout(bounds, family, chunks)
            monkeypatch.setattr(candidates, "MOST_TASKS", inf)
            whole = layout.placed()
            monkeypatch.setattr(candidates, "MOST_TASKS", 0)
            assert len(candidates.shorter(mesh.pp, microbatch.number, chunks)) == 2
            short = layout.placed()
            assert (short is None) == (whole is None)
            if whole is not None:
                found, exact = short.simulated(), whole.simulated()
                assert found.seconds == pytest.approx(exact.seconds, rel=0.01)
                assert found.least_bytes == pytest.approx(exact.least_bytes, rel=near)


def test_counts_that_grow_by_equal_steps_are_extrapolated():
    assert along([3], [{"a": 5.0}], 9) == {"a": 5.0}
    assert along([3, 5], [{"a": 5.0, "b": 1}, {"a": 9.0, "b": 1}], 9) == {"a": 17.0, "b": 1}


def test_devices_that_cannot_share_a_batch_get_sizes_that_can():
    """The nearest batch, and the most devices below; with layouts by enumeration."""
    rng = random.Random(0)
    for _ in range(60):
        space = Space(rng.randint(2, 70), rng.randint(1, 5), rng.randint(1, 40), 1)
        found = space.that_divide
        assert (found is None) == any(space.microbatches)
        if found is not None:
            assert any(replace(space, batch_size=found[0]).microbatches)
            below = range(1, space.num_devices)
            have = [n for n in below if any(replace(space, num_devices=n).microbatches)]
            assert found[1] == max(have)


def test_a_search_that_is_stopped_keeps_the_best_so_far():
    progress = SearchProgress(print)

    def planned(candidate, *, stops=False):
        progress.stopped_by = "SIGINT" if stops else None
        plan = SimpleNamespace(step_s=candidate.seconds, total_bytes=[0])
        return Row(candidate, plan, None)

    complete = planned_layouts(LayoutSearch(*some(0)), planned, 3, progress)
    assert (len(complete.best), complete.ended_by) == (3, None)
    search = LayoutSearch(*some(0))
    stopped = planned_layouts(search, partial(planned, stops=True), 3, progress)
    assert stopped.ended_by == "SIGINT"
    assert 1 <= len(stopped.best) < 3
    assert stopped.best[0].step_s in {row.step_s for row in complete.best}
    progress.stopped_by = "SIGTERM"  # before the first simulation
    none = planned_layouts(LayoutSearch(*some(0)), planned, 3, progress)
    assert (none.best, none.ended_by) == ((), "SIGTERM")
