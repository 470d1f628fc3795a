"""The partition that `ppctl plan` proposes: the fastest there is, by the seconds of plan."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from support.selection import full

from ppctl import config
from ppctl.planner import make_plan as advise
from ppctl.planner.cost.op_times import op_times
from ppctl.planner.cost.predict_step import job_costs, predict_job, step_of, time_of
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.known_hardware import known

REQUEST = config.Config(
    model=config.Transformer(num_layers=8, d_model=64, num_heads=4, seq_len=64),
    mesh=config.Mesh(1, 4, 1),
    schedule=config.Schedule("1f1b", 8),
    executor=config.Mpmd(remat="none"),
    data=config.Synthetic(batch_size=16, vocab_size=4096),  # a head that costs several layers
    hardware=known()["v5e"],  # whose devices share no cores
    run=config.Run(dtype="bfloat16"),
)


def built(asked):
    return assemble(asked, on_one_device=True, only_planned=True)


def proposed(job):
    return advise.propose(job.pipe, step_of(job))


def with_layers(asked, sizes):
    return replace(asked, partition=config.Explicit(layers=list(sizes)))


def partitions(num_layers, num_stages):
    """All of them: middle stages have a layer, the first and the last may have none."""
    for cuts in product(range(num_layers + 1), repeat=num_stages - 1):
        bounds = (0, *cuts, num_layers)
        sizes = [high - low for low, high in pairwise(bounds)]
        if min(sizes) >= 0 and min(sizes[1:-1]) >= 1:
            yield tuple(range(low, high) for low, high in pairwise(bounds))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_proposal_is_the_fastest_of_all_partitions(remat):
    asked = replace(REQUEST, executor=config.Mpmd(remat=remat))
    job = built(asked)
    step, found = step_of(job), proposed(job)

    def seconds(partition):
        sizes = [len(layers) for layers in partition]
        times = op_times(step.with_layers(max(sizes), max(sizes)))  # of mpmd: a stage a rank
        return time_of(job.pipe, times, job_costs(job.pipe, times, partition)).total_s

    fastest = min(map(seconds, partitions(8, 4)))
    assert found.time_ratio == pytest.approx(fastest / seconds(job.pipe.partition), rel=1e-12)
    assert found.time_ratio < 0.95
    assert proposed(built(with_layers(asked, found.partition))) is None


@pytest.mark.parametrize("executor", [config.Spmd(remat="none"), full(config.Mpmd(remat="none"))])
def test_its_ratio_is_that_of_both_plans(executor):
    schedule = config.Interleaved(num_microbatches=8, num_chunks=2)
    asked = replace(REQUEST, executor=executor, schedule=schedule)
    job = built(asked)
    found, planned = proposed(job), predict_job(job)
    better = predict_job(built(with_layers(asked, found.partition)))
    assert found.time_ratio == better.time.total_s / planned.time.total_s < 0.99


def test_devices_that_share_cores_are_counted_as_if_each_had_its_own():
    asked = replace(REQUEST, hardware=known()["host"])
    job = built(replace(asked, run=config.Run(dtype="float32")))
    assert proposed(job) is not None
    assert advise.propose(job.pipe, None) is None  # nothing is known of the devices
