"""Planned costs of stages divided by tp and cp: their share of the work, and sends of their
devices.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from support.selection import full
from support.steps import planned_step

import ppctl
from ppctl.executors.model_shapes import Model
from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.planned_step import Machine, PlannedLayout
from ppctl.executors.work.roofline import Link, Speed
from ppctl.executors.work.task_flops import work_of
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import init
from ppctl.planner.cost.step_time import op_times
from ppctl.schedule.mesh_axes import MeshSizes

WIDTH, TOKENS = 16, 8
SIZES = {
    "num_layers": 2,
    "d_model": WIDTH,
    "num_heads": 4,
    "mlp_width": 2 * WIDTH,
    "activation": "swiglu",
    "attention": "auto",
}


def shard(tp, first, a, spec):
    """The shape of one device's shard; first: the dims before those that the spec names."""
    names = [None] * first + [*spec] + [None] * a.ndim
    sizes = (n // tp if name == "tp" else n for n, name in zip(a.shape, names, strict=False))
    return jax.ShapeDtypeStruct(tuple(sizes), a.dtype)


def model_of(axes):
    stack = ppctl.transformer(**SIZES, vocab_size=32)
    divided = stack.options.divided(axes)
    params = jax.eval_shape(lambda: init(stack, 0))
    if divided.sharding is not None:
        params = {
            part: jax.tree.map(
                partial(shard, axes.tp, int(part == "layers")), params[part], divided.sharding[part]
            )
            for part in params
        }
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    return Model(
        stack.in_shards(divided),
        params["embed_head"],
        layer,
        {"inputs": tokens, "targets": tokens},
        1,
        "none",
        16,
        jnp.float32,
        axes,
    )


def sent(ops):
    return sorted(("+".join(op.axes), op.collective, op.bytes) for op in ops if op.axes)


@pytest.mark.full
def test_a_block_sends_its_rows_twice_each_way_and_does_its_share_of_the_products():
    whole, half = work_of(model_of(StageAxes())), work_of(model_of(StageAxes(tp=2)))
    rows = TOKENS * WIDTH * 4.0
    assert sent(whole.layer.once) == []
    assert sent(half.layer.forward) == [("tp", "gather", rows)] * 4
    assert sum(op.flops for op in half.layer.forward) * 2 == sum(
        op.flops for op in whole.layer.forward
    )
    plain = work_of(model_of(StageAxes(tp=2, sequence_parallel=False)))
    assert sent(plain.layer.forward) == [("tp", "sum", rows)] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("context", "collective", "share"), [("ring", "hop", 1 / 2), full(("gather", "gather", 1))]
)
def test_a_block_of_a_divided_sequence_sends_its_keys_and_values(context, collective, share):
    work = work_of(model_of(StageAxes(cp=2, context=context)))
    rows = TOKENS * WIDTH * 4.0
    assert sent(work.layer.forward) == [("cp", collective, share * rows)] * 2


def test_sends_take_the_time_of_the_link_of_their_axis():
    work = work_of(model_of(StageAxes(tp=2)))
    near = Link(latency_s=1.0, bytes_per_s=64.0)
    machine = Machine(Speed(1e30, 1e30), near, None, None, task_s=0.0)
    params = ParamBytes(layer=8, embed_head=8, moments=2.0, compute_ratio=1.0)
    layout = PlannedLayout(MeshSizes(tp=2), 2, 2)
    times = op_times(planned_step(work, params, machine, layout, examples=3))
    of_one = 1.0 + 3 * TOKENS * WIDTH * 4 / 2 / 64.0  # half of the rows goes to the other device
    assert times.layer.forward_s == pytest.approx(4 * of_one)
