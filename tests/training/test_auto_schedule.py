"""The costs of a model for schedule=auto, compared with the planner's and the engines' bytes."""

from dataclasses import replace

import pytest

from ppctl import config as c
from ppctl.config.groups.layout_settings import Balanced, Explicit
from ppctl.errors import ConfigError, ScheduleError
from ppctl.planner.cost.predict_step import memory_of, steps_of
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.job import assemble, divide
from ppctl.training.pipeline.pipeline_step import ModelCosts

GIB = 2**30
MODEL = c.Transformer(num_layers=10, d_model=32, num_heads=2, seq_len=32)
DATA = c.Synthetic(vocab_size=1024, batch_size=8)


def request(schedule, executor, **how):
    mesh = c.Mesh(pp=4)
    return c.Config(model=MODEL, data=DATA, mesh=mesh, schedule=schedule, executor=executor, **how)


def planned(config):
    return assemble(config, on_one_device=True, only_planned=True)


def costs_of(job):
    return ModelCosts(
        job.pipe,
        lambda rank_of: divide(
            job.config.partition, job.config.model.num_layers, rank_of, job.pipe.relative_costs
        ),
    )


def total(held):
    return sum(held.values())


MPMD = [("1f1b", "none"), ("zb_v", "none"), ("zb_v", "layer"), ("1f1b", "full"), ("zb_h1", "full")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "remat"),
    [MPMD[1], *(pytest.param(*each, marks=pytest.mark.full) for each in (MPMD[0], *MPMD[2:]))],
)
def test_bytes_of_ranks_equal_the_engines_count(family, remat):
    job = planned(request(c.Schedule(family, 8), c.Mpmd(remat=remat), partition=Balanced()))
    assert not job.pipe.layout.placement.is_even
    schedule, x = job.pipe.schedule, job.pipe.model.x
    placed = costs_of(job).layers(with_bytes=True).on(schedule.rank_of)
    # the planner counts inputs of stages; the first stage of remat=full makes its again from tokens
    spare = 7 if remat == "full" else 3
    arrays = replace(placed, temporary_bytes=()).ledger(schedule).peaks(schedule)
    for found, held in zip(arrays, job.pipe.memory(), strict=True):
        exact = sum(size for part, size in held.items() if part != "temporaries")
        assert found <= exact + spare * x.size * x.dtype.itemsize, held
        assert found >= exact or not held["weights"], (
            "only the update, after all tasks, may need more"
        )
    in_plan = memory_of(job.pipe, steps_of(job))
    for found, held in zip(placed.ledger(schedule).peaks(schedule), in_plan, strict=True):
        assert held["temporaries"] > 0
        assert found >= total(held), "the largest temporaries count at all times"


def test_in_lockstep_bytes_equal_the_programs():
    job = planned(request(c.Interleaved(num_microbatches=8), c.Spmd()))
    planned_bytes = memory_of(job.pipe, steps_of(job))[0]
    assert planned_bytes["temporaries"] > 0
    assert costs_of(job).in_ticks_bytes(job.pipe.ticks) == total(planned_bytes)


@pytest.mark.full
@pytest.mark.parametrize("executor", [c.Mpmd(), c.Spmd()])
def test_the_plan_keeps_a_cap_on_bytes_with_the_head_counted(executor):
    auto = c.Auto(num_microbatches=8, max_chunks=2)
    free = planned(request(auto, executor))
    most = max(map(total, memory_of(free.pipe, steps_of(free))))
    job = planned(request(replace(auto, max_memory_gib=0.9 * most / GIB), executor))
    held = max(map(total, memory_of(job.pipe, steps_of(job))))
    assert held <= job.choice.held_bytes <= 0.9 * most
    assert job.choice.best.schedule.ranks == job.pipe.schedule.ranks
    costs = costs_of(job).layers(with_bytes=False).on(job.pipe.schedule.rank_of).costs
    assert len(set(costs.forward_s)) > 1
    if not job.pipe.ticks:
        assert simulate(job.pipe.schedule, costs).makespan_s == pytest.approx(
            job.choice.best.length_s
        )
    if executor.name == "mpmd":
        with pytest.raises(
            ScheduleError, match=r"max_memory_gib=1e-05: no schedule of 4 ranks .* GiB\)\. Use"
        ):
            planned(request(replace(auto, max_memory_gib=1e-5), executor))


def test_an_explicit_partition_fixes_the_searched_number_of_stages():
    layers = [2, 2, 1, 1, 1, 1, 1, 1]
    auto = c.Auto(num_microbatches=4, max_chunks=2)
    job = planned(request(auto, c.Mpmd(), partition=Explicit(layers=layers)))
    assert job.pipe.schedule.num_stages == 8
    with pytest.raises(ConfigError, match="is for 3 stages, but pp"):
        planned(request(auto, c.Mpmd(), partition=Explicit(layers=[3, 3, 4])))


def test_only_the_found_schedule_needs_pairs_to_fuse():
    """The 1F1B of 8 microbatches, whose costs are searched with, has no pair."""
    config = request(c.Auto(num_microbatches=8), c.Mpmd(fuse="fb", unroll=8))
    assert planned(config).pipe.scheduled.num_fused > 0


def test_a_divided_vocabulary_is_counted_on_no_stage():
    """Every rank has a part: the bound is the work of 3 of 10 layers, after a forward of one."""
    auto = c.Auto(num_microbatches=8, vocab="parallel")
    choice = planned(request(auto, c.Mpmd(), partition=Balanced())).choice
    assert choice.lower_bound_s == pytest.approx(8 * 3 * 3 + 1)
