"""The spmd executor refuses ticks that were not lowered for what it is to run, instead of returning
a wrong loss.
"""

import itertools

import jax
import numpy as np
import pytest
from support.cases import COMPILE_FAST, Case, make_stack, run_reference

from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import Layout
from ppctl.executors.spmd.spmd_program import spmd
from ppctl.schedule.costs import Costs
from ppctl.schedule.remat import Remat
from ppctl.schedule.tick_lowering import forward_only, ticks

CASE = Case("1f1b", (1, 2, 1), num_microbatches=4, num_layers=4, model="mlp", batch_size=8)


def step(lowered_for, run_with, *, with_grads=True):
    """The spmd step of ticks lowered for one remat, as options of another ask for it."""
    case = Case(**vars(CASE) | {"remat": run_with})
    schedule = case.program() if with_grads else forward_only(case.program())
    table = ticks(schedule, Costs(), lowered_for)
    return spmd(make_stack(case.model, case.num_layers), case.layout(), table, case.options)


@pytest.mark.parametrize(("lowered_for", "run_with"), [*itertools.product(Remat, Remat)])
def test_ticks_run_with_the_remat_that_they_were_lowered_for_alone(lowered_for, run_with):
    if lowered_for != run_with:
        for with_grads in (True, False):
            with pytest.raises(ConfigError) as error:
                step(lowered_for, run_with, with_grads=with_grads)
            assert str(error.value) == (
                f"the ticks were lowered for remat={lowered_for}, but options.remat={run_with}. "
                f'Lower the schedule with ticks(schedule, costs, remat="{run_with}"), or use '
                f'Options(remat="{lowered_for}").'
            )
        return
    params, batch, expected, _ = run_reference(CASE.model, CASE.num_layers, CASE.batch_size)
    losses, _ = jax.jit(step(lowered_for, run_with), compiler_options=COMPILE_FAST)(
        CASE.layout().to_staged(params), batch
    )
    assert float(losses["loss"]) == pytest.approx(expected, rel=1e-12)


def test_ticks_run_on_a_layout_of_their_own_placement_alone():
    case = Case(
        "interleaved",
        (1, 2, 1),
        num_microbatches=4,
        num_chunks=2,
        num_layers=4,
        model="mlp",
        batch_size=8,
    )
    layout = case.layout()
    turned = Layout(
        layout.mesh, layout.partition, tuple(np.array(layout.rank_of)[[0, 1, 3, 2]].tolist())
    )
    table = ticks(case.program(), Costs(), case.options.remat)
    with pytest.raises(ConfigError) as error:
        spmd(make_stack(case.model, case.num_layers), turned, table, case.options)
    assert str(error.value) == (
        "the ticks were lowered for stages on ranks 0 1 0 1, but the layout puts them on ranks 0 "
        "1 1 0. Use Layout(mesh, partition, schedule.rank_of) of the schedule that was lowered, "
        "interleaved."
    )
