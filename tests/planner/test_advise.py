"""The partition that `ppctl plan` proposes: the fastest there is."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from ppctl import config
from ppctl.planner import make_plan as advise
from ppctl.schedule.costs import Costs
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.job import assemble

REQUEST = config.Config(
    model=config.Transformer(num_layers=8, d_model=32, num_heads=4, seq_len=16),
    mesh=config.Mesh(1, 4, 1),
    schedule=config.Schedule("1f1b", 8),
    executor=config.Mpmd(remat="none"),
    data=config.Synthetic(batch_size=16, vocab_size=1024),  # a head that costs several layers
    run=config.Run(dtype="float32"),
)


def partitions(num_layers, num_stages):
    """All of them: middle stages have a layer, the first and the last may have none."""
    for cuts in product(range(num_layers + 1), repeat=num_stages - 1):
        bounds = (0, *cuts, num_layers)
        sizes = [high - low for low, high in pairwise(bounds)]
        if min(sizes) >= 0 and min(sizes[1:-1]) >= 1:
            yield tuple(range(low, high) for low, high in pairwise(bounds))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_proposal_is_the_fastest_of_all_partitions(remat):
    pipe = assemble(replace(REQUEST, executor=config.Mpmd(remat=remat))).pipe
    costs_of = pipe.relative_costs
    again = 1.0 + (remat == "full")  # I runs the forward again

    def seconds(partition):
        units = costs_of.of_stages(partition)
        costs = Costs(units, tuple(again * n for n in units), units)
        return simulate(pipe.schedule, costs).makespan_s

    found = advise.propose(pipe)
    fastest = min(map(seconds, partitions(8, 4)))
    assert found.time_ratio == pytest.approx(fastest / seconds(pipe.partition), rel=1e-12)
    assert found.time_ratio < 0.9
    best = assemble(
        replace(REQUEST, executor=config.Mpmd(remat=remat), partition=explicit(found.partition))
    )
    assert advise.propose(best.pipe) is None


def explicit(sizes):
    return config.Explicit(layers=list(sizes))


def test_lockstep_ticks_are_simulated_as_such():
    request = replace(
        REQUEST, executor=config.Spmd(remat="none"), schedule=config.Interleaved(num_microbatches=8)
    )
    pipe = assemble(request).pipe
    found = advise.propose(pipe)
    costs_of = pipe.relative_costs

    def seconds(sizes):
        bounds = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
        units = costs_of.of_stages(tuple(range(low, high) for low, high in pairwise(bounds)))
        return pipe.ticks.makespan_s(Costs(units, units, units))

    assert found.time_ratio == pytest.approx(
        seconds(found.partition) / seconds((1,) * 8), rel=1e-12
    )
    assert found.time_ratio < 0.95
