"""The search of layouts against predicting all of them: nothing better is missed, no bound is above
what it bounds.
"""

import gc
import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import pytest
from support.selection import full_except

from ppctl.planner.cost.array_sizes import Microbatch
from ppctl.planner.cost.counted_costs import Machine, ParamBytes
from ppctl.planner.cost.op_times import costs_of_stages
from ppctl.planner.cost.roofline import Link, ModelWork, Op, PieceWork, Speed
from ppctl.planner.search import layout_candidate as candidates
from ppctl.planner.search.layout_candidate import LayoutPredictor
from ppctl.planner.search.layout_search import LayoutSearch, uncollected
from ppctl.planner.search.layout_space import DeviceModel, Space
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.search.extrapolated_cost import along

EPSILON = 1 + 1e-9


def some(seed):
    """(space, models, machine) of a small search; of every second one the devices share cores.

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
    space = Space(
        size, choose.randint(6, 9), 2 * size, example_bytes=8, in_ticks=executor == "spmd"
    )
    models = {MeshSizes(): DeviceModel(work, params)}
    if seed % 3 == 0:
        models |= {
            MeshSizes(tp=tp, cp=cp): divided(models[MeshSizes()], tp, cp)
            for tp, cp in ((2, 1), (1, 2), (4, 2))
        }
    gather = "step" if seed % 2 else "layer"
    space = replace(
        space,
        divisions=tuple(models),
        gather=gather,
        vocab=("whole", "parallel") if seed % 2 else ("whole",),
    )
    by_parts = lambda division, ranks=None: (
        models[division] if ranks is None else in_parts(models[division], ranks)
    )
    return space, by_parts, machine


def divided(model, tp, cp):
    """The model as a device has it of whose stage tp and cp divide the work."""
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

    work = model.work
    pieces = {
        name: shared((piece.forward, piece.input_grad, piece.weight_grad))
        for name, piece in (("embed", work.embed), ("layer", work.layer), ("head", work.head))
    }
    params = replace(
        model.params, layer=model.params.layer // tp, embed_head=model.params.embed_head // tp
    )
    return DeviceModel(replace(work, **pieces, x_bytes=work.x_bytes // cp), params)


def in_parts(model, ranks):
    """The model as a rank has it that holds its part of embedding and head."""

    def part(piece):
        return PieceWork(
            *(
                tuple(replace(op, flops=op.flops / ranks, bytes=op.bytes / ranks) for op in ops)
                for ops in (piece.forward, piece.input_grad, piece.weight_grad)
            )
        )

    work = replace(model.work, embed=part(model.work.embed), head=part(model.work.head))
    return DeviceModel(work, replace(model.params, embed_head=-(-model.params.embed_head // ranks)))


@cache
def all_of(seed):
    """Every layout of a search with its prediction and its bounds."""
    predictor, found = LayoutPredictor(), []
    for layout in LayoutSearch(*some(seed)).layouts():
        candidate = predictor.candidate(*layout)
        if candidate is not None:
            found.append((candidate, layout.bounds))
    return found


seeds = pytest.mark.parametrize("seed", full_except(range(12), 0))


def assert_none_is_missed(found, layouts, keep=10):
    """`found` are the fastest of `layouts`, but for those that are no better than another schedule
    on the same mesh.
    """
    best = found.best
    assert [c.time.total_s for c in best] == sorted(c.time.total_s for c in best)
    assert set(best) <= set(layouts)
    assert best[0].time.total_s == min(c.time.total_s for c in layouts)
    last_s = best[-1].time.total_s if len(best) == keep else inf
    for candidate in layouts:
        if candidate.time.total_s < last_s:
            assert candidate in best or any(candidate.is_like(other) for other in best)
    alone = [c.time.total_s for c in layouts if c.mesh.pp == 1]
    assert (found.without_pipeline and found.without_pipeline.time.total_s) == min(
        alone, default=None
    )


@seeds
def test_the_best_are_those_of_all_layouts(seed):
    layouts = [candidate for candidate, _ in all_of(seed)]
    found = LayoutSearch(*some(seed)).run()
    assert_none_is_missed(found, layouts)
    assert found.num_simulated < found.num_layouts
    assert found.smallest is None


@seeds
def test_under_a_limit_too(seed):
    layouts = [candidate for candidate, _ in all_of(seed)]
    sizes = sorted(c.total_bytes for c in layouts)
    first = LayoutSearch(*some(seed)).run().best[0]
    for limit in {
        sizes[0],
        sizes[len(sizes) // 8],
        sizes[len(sizes) // 2],
        first.total_bytes,
        first.total_bytes - 1,
    }:
        inside = [c for c in layouts if c.total_bytes <= limit]
        found = LayoutSearch(*some(seed)).run(room_bytes=limit)
        if inside:
            assert_none_is_missed(found, inside)
        assert (first in found.best) == (first.total_bytes <= limit)


@seeds
def test_where_nothing_fits_the_smallest_is_named(seed):
    smallest = min(candidate.total_bytes for candidate, _ in all_of(seed))
    found = LayoutSearch(*some(seed)).run(room_bytes=smallest - 1)
    assert (found.best, found.without_pipeline) == ((), None)
    assert found.smallest is not None
    assert found.smallest.total_bytes == smallest


@seeds
def test_bounds_are_not_above_what_they_bound(seed):
    for candidate, bounds in all_of(seed):
        bound_s = bounds.step_s(is_whole=not FAMILIES[candidate.family].is_split)
        assert bound_s <= candidate.time.total_s * EPSILON, candidate
        assert sum(bounds.memory.values()) <= candidate.total_bytes, candidate
        knobs = candidates.knobs_of(candidate.family, candidate.num_chunks)
        peak = FAMILIES[candidate.family].peak_activations(
            candidate.mesh.pp, candidate.num_microbatches, **knobs
        )
        if peak is not None:
            share = candidates.least_share(bounds, candidate.family)
            assert sum(bounds.with_stashes(share * peak).values()) <= candidate.total_bytes, (
                candidate
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_predicted_with_split_backwards_exactly_where_its_tasks_are_split(
    family, monkeypatch
):
    space, models, machine = some(0)
    space = replace(space, num_layers=16, in_ticks=False, families=(family,))
    microbatch = Microbatch(1, 8, space.example_bytes, "layer")
    bounds = LayoutSearch(space, models, machine).bounds(MeshSizes(1, 4, 1), microbatch)
    splits = []

    def recorded(*args, split, **kwargs):
        splits.append(split)
        return costs_of_stages(*args, split=split, **kwargs)

    monkeypatch.setattr(candidates, "costs_of_stages", recorded)
    for _, chunks in space.kinds(4):
        assert LayoutPredictor().candidate(bounds, family, chunks) is not None
        schedule = build(family, 4, 8, **candidates.knobs_of(family, chunks))
        assert splits.pop() == any(task.kind == "W" for tasks in schedule.ranks for task in tasks)
    assert not splits


# --- partitions found by simulation -------------------------------------------------------------


def what(candidate):
    """All of a candidate but its partition and what follows from it."""
    how = candidate.num_microbatches, candidate.remat, candidate.vocab
    return (candidate.mesh.shape, candidate.family, candidate.num_chunks, *how)


@seeds
def test_partitions_by_simulation_are_no_slower_and_fit(seed):
    first = LayoutSearch(*some(seed)).run()
    limit = max(candidate.total_bytes for candidate in first.best)
    search = LayoutSearch(*some(seed))
    found = search.run(room_bytes=limit)
    better = search.improved(found)
    before = {what(candidate): candidate for candidate in found.best}
    assert sorted(map(what, better.best)) == sorted(before)
    assert [c.time.total_s for c in better.best] == sorted(c.time.total_s for c in better.best)
    for candidate in better.best:
        assert candidate.time.total_s <= before[what(candidate)].time.total_s
        assert sum(candidate.partition) == search.space.num_layers
        assert candidate.total_bytes <= limit
    assert better.without_pipeline == found.without_pipeline


@pytest.mark.full
def test_some_partitions_by_simulation_are_faster():
    gained = 0
    for seed in range(12):
        search = LayoutSearch(*some(seed))
        found = search.run()
        improved = {what(c): c.time.total_s for c in search.improved(found).best}
        gained += sum(improved[what(c)] < 0.99 * c.time.total_s for c in found.best)
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
    space, models, machine = some({"spmd": 4, "mpmd": 1}[executor])
    space = replace(
        space,
        num_devices=4,
        num_layers=9,
        batch_size=256,
        in_ticks=executor == "spmd",
        families=(family,),
    )
    search = LayoutSearch(space, models, machine)
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
            monkeypatch.setattr(candidates, "MOST_TASKS", inf)
            whole = LayoutPredictor().candidate(bounds, family, chunks)
            monkeypatch.setattr(candidates, "MOST_TASKS", 0)
            assert len(candidates.shorter(mesh.pp, microbatch.number, chunks)) == 2
            short = LayoutPredictor().candidate(bounds, family, chunks)
            assert (short is None) == (whole is None)
            if whole is not None:
                assert short is not None
                assert short.time.total_s == pytest.approx(whole.time.total_s, rel=0.01)
                assert short.total_bytes == pytest.approx(whole.total_bytes, rel=near)


def test_what_grows_by_equal_steps_is_continued():
    assert along([3], [{"a": 5.0}], 9) == {"a": 5.0}
    assert along([3, 5], [{"a": 5.0, "b": 1}, {"a": 9.0, "b": 1}], 9) == {"a": 17.0, "b": 1}
