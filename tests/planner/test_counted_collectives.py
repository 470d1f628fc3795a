"""The collectives that `planner.analytic` counts for a step, compared with those in the traced spmd
program.
"""

from dataclasses import replace

import jax
import pytest
from support.cases import Case, make_batch, make_stack, staged_step
from support.steps import planned_step

from ppctl.executors.model_shapes import tree_bytes
from ppctl.executors.stage.jaxpr_flops import inner_jaxprs
from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.planned_step import Machine, PlannedLayout
from ppctl.executors.work.roofline import Link, ModelWork, PieceWork, Speed
from ppctl.model.stack import init
from ppctl.planner.cost.step_time import op_times, overhead_s
from ppctl.schedule.costs import costs_of_stages
from ppctl.schedule.mesh_axes import MeshSizes

LINK = Link(latency_s=0.0, bytes_per_s=3.0)
MACHINE = Machine(
    Speed(float("inf"), float("inf")), LINK, network=None, host_devices=None, task_s=0.0
)
NOTHING = PieceWork((), (), ())
NO_WORK = ModelWork(NOTHING, NOTHING, NOTHING, x_bytes=0, stash_bytes={}, pending_bytes={})
COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "ppermute")


def collectives(jaxpr, in_loop=False):
    """(primitive, axes, bytes of its largest side, whether in a loop) of each collective of arrays."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in COLLECTIVES and eqn.invars[0].aval.ndim:
            axes = eqn.params.get("axis_name") or eqn.params["axes"]
            num_bytes = max(
                v.aval.size * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars)
            )
            yield eqn.primitive.name, axes, num_bytes, in_loop
        is_scan = eqn.primitive.name == "scan"
        turns = (
            eqn.params["length"] if is_scan and in_loop else 1
        )  # turns of a loop over layers in the loop over ticks
        for inner in inner_jaxprs(eqn) * turns:
            yield from collectives(inner, in_loop or is_scan)


def traced(case):
    """(layout as the plan sees it, sizes of parameters, collectives) of a case."""
    stack, layout = make_stack(case.model, case.num_layers), case.layout()
    params = jax.eval_shape(lambda: layout.to_staged(init(stack, 0)))
    jaxpr = jax.make_jaxpr(staged_step(case))(params, make_batch(case.model, case.batch_size)).jaxpr
    layer_bytes = (
        tree_bytes(params["layers"])
        // layout.placement.counts.size
        // int(layout.placement.counts.max())
    )
    most = int(layout.placement.counts.max())
    plan = PlannedLayout(
        MeshSizes(*case.mesh), most * layout.placement.num_chunks, chunk_layers=most
    )
    sizes = ParamBytes(
        layer_bytes, tree_bytes(params["embed_head"]), moments=2.0, compute_ratio=1.0
    )
    return plan, sizes, list(collectives(jaxpr))


def ring_s(found, mesh):
    """Seconds of collectives on rings, each written out."""
    size_of = dict(zip(("dp", "pp", "fsdp"), mesh, strict=True))
    total = 0.0
    for name, axes, num_bytes, _ in found:
        size = 1
        for axis in axes:
            size *= size_of.get(axis, 1)  # tp and cp are 1
        rounds = {"all_gather": 1, "reduce_scatter": 1, "psum": 2}[name]
        total += rounds * (size - 1) * num_bytes / size / 3.0
    return total


CASES = [
    Case("gpipe", (2, 4, 1), 4, num_layers=8, model="untied gelu", batch_size=16),
    Case(
        "interleaved", (2, 2, 2), 4, num_chunks=2, num_layers=8, model="tied swiglu", batch_size=16
    ),
    Case(
        "1f1b",
        (1, 2, 4),
        4,
        num_layers=4,
        model="untied swiglu grouped",
        batch_size=16,
        remat="none",
    ),
    Case(
        "1f1b", (4, 2, 1), 4, num_layers=3, model="untied gelu", batch_size=16
    ),  # [2, 1] layers: one is padding
    Case("gpipe", (1, 1, 8), 2, num_layers=2, model="untied gelu", batch_size=16),
    Case("gpipe", (8, 1, 1), 2, num_layers=2, model="untied gelu", batch_size=16),
]
cases = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.schedule} {case.mesh} {case.num_layers}"
)


@cases
def test_planned_collectives_of_a_step_equal_the_programs(case):
    plan, sizes, found = traced(case)
    per_step = [each for each in found if each[0] != "ppermute"]
    assert not any(in_loop for *_, in_loop in per_step)
    step = planned_step(NO_WORK, sizes, MACHINE, plan)
    assert overhead_s(step) == pytest.approx(ring_s(per_step, case.mesh), rel=1e-12)


@pytest.mark.parametrize("remat", ["none", "layer", "full"])
@pytest.mark.parametrize("unroll", [16, 0])
def test_gathering_by_layer_moves_each_layer_in_each_task_that_reads_it(remat, unroll):
    case = Case(
        "1f1b",
        (2, 2, 2),
        4,
        num_layers=6,
        batch_size=16,
        gather="layer",
        remat=remat,
        unroll=unroll,
    )
    plan, sizes, found = traced(case)
    per_step = [each for each in found if each[0] != "ppermute" and not each[3]]
    how = {"remat": remat, "gather": "layer", "unroll": unroll}
    step = planned_step(NO_WORK, sizes, MACHINE, plan, **how)
    assert overhead_s(step) == pytest.approx(ring_s(per_step, case.mesh), rel=1e-12)
    gathers = ring_s([each for each in found if each[0] == "all_gather" and each[3]], case.mesh)
    costs = costs_of_stages(op_times(step), (3, 3), keeps_input=remat == "full")
    assert costs.forward_s[0] + costs.input_grad_s[0] == pytest.approx(gathers, rel=1e-12)


@pytest.mark.parametrize("family", ["1f1b", "zb_h1"])
def test_a_hop_sends_one_microbatch_between_layers(family):
    case = Case(family, (2, 2, 2), 4, num_layers=4, batch_size=32)
    plan, sizes, found = traced(case)
    x_bytes = 8 * 16 * 8  # bytes of an example: tokens, d_model, float64
    work, examples = replace(NO_WORK, x_bytes=x_bytes), 32 // 4 // 4
    found_times = op_times(planned_step(work, sizes, MACHINE, plan, examples=examples))
    hops = [num_bytes for name, _, num_bytes, _ in found if name == "ppermute"]
    assert set(hops) == {found_times.hop_s * 3.0}
