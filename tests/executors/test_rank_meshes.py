"""Ranks of mpmd with meshes of equal size but other factors train like the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import (
    COMPILE_FAST,
    difference,
    make_batch,
    make_params,
    make_stack,
    run_reference,
)
from support.mpmd_cases import LR_SCHEDULE, TOLERANCE, make_optimizer

from ppctl.executors.device_mesh import make_mesh, mesh_of
from ppctl.executors.layer_placement import Placement
from ppctl.executors.parameter_layout import Layout, RankLayout, with_layers
from ppctl.executors.reference import reference
from ppctl.model.parallel import StageAxes
from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.partition import explicit
from ppctl.schedule.remat import Remat
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.training.pipeline.engines.make_engine import model_of
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd
from ppctl.training.pipeline.engines.rank_states import GroupModel
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.execution import Execution
from ppctl.training.pipeline.optimizers import init_state, train_step
from ppctl.training.pipeline.pipeline_request import divided_stack, shards_in_stages

NUM_LAYERS, BATCH_SIZE, MICROBATCHES = 3, 16, 4
SIZES = MeshSizes(fsdp=2), MeshSizes(tp=2)  # rank 0, rank 1


def engine_of(name, batch):
    """An engine of two ranks, whose natural order is stored over pp=2 fsdp=2."""
    stack, optimizer = make_stack(name, NUM_LAYERS), make_optimizer()
    schedule = build("1f1b", 2, MICROBATCHES)
    placement = Placement(explicit(NUM_LAYERS, 2, (2, 1)), schedule.rank_of)
    storage = MeshSizes(pp=2, fsdp=2)
    params = jax.tree.map(jnp.asarray, make_params(stack))

    def start(seed, layers=None):
        state = init_state(params, optimizer)
        return state if layers is None else with_layers(state, layers)

    whole = Layout(make_mesh(storage), placement, RankLayout(storage))
    states = States(whole, start, jax.eval_shape(lambda: start(0)))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    groups = []
    for rank, sizes in enumerate(SIZES):
        axes = StageAxes.of(sizes.by_axis)
        divided = divided_stack(stack, axes, shapes)
        shards, _ = shards_in_stages(stack, divided, axes)
        devices = np.array(jax.devices()[2 * rank : 2 * rank + 2]).reshape(sizes.shape)
        layout = Layout(mesh_of(devices), placement.on((rank,)), RankLayout(sizes, shards))
        execution = Execution("mpmd", Remat.of("layer"), axes=axes)
        of_rank = States(layout, start, states.shapes)
        model = model_of(stack, divided, of_rank, shapes, MICROBATCHES, execution, jnp.float64)
        groups.append(GroupModel((rank,), layout, model))
    step = ScheduledStep(schedule, task_costs("layer"))
    return Mpmd(states, shapes, groups, step, optimizer, LR_SCHEDULE, COMPILE_FAST)


@pytest.mark.full
def test_ranks_of_other_factors_equal_the_reference():
    name = "untied gelu"
    batch = make_batch(name, BATCH_SIZE)
    engine = engine_of(name, batch)
    params, _, loss, grads = run_reference(name, NUM_LAYERS, BATCH_SIZE)
    state, placed = engine.new_state(), engine.batches.put(batch)
    first, last = (each["params"]["layers"] for each in state)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves((first, last))} == {2}
    # 1. the gradients
    found, of_layers = engine.loss_and_grads(state, placed)
    assert abs(float(found) - loss) <= TOLERANCE * abs(loss)
    assert difference(jax.tree.map(np.asarray, of_layers), grads) <= TOLERANCE
    # 2. a step, by way of natural order
    optimizer = make_optimizer()
    stack = make_stack(name, NUM_LAYERS)
    plain = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype="float64")
    step = jax.jit(train_step(plain, optimizer, LR_SCHEDULE), compiler_options=COMPILE_FAST)
    expected, wanted = step(init_state(params, optimizer), batch)
    state, metrics = engine.step(engine.from_natural(engine.to_natural(state)), placed)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {k: float(v) for k, v in wanted.items()}, rel=1e-9
    )
    pairs = zip(*map(jax.tree.leaves, (engine.to_natural(state), expected)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-8, atol=1e-12)
