"""An mpmd engine for a `Case`, with parameters of the caller's."""

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from support.cases import (
    COMPILE_FAST,
    Case,
    difference,
    make_batch,
    make_params,
    make_stack,
    model_of,
    run_reference,
)

from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.layer_placement import Placement
from ppctl.executors.parameter_layout import Layout, RankLayout
from ppctl.model.parallel import StageAxes
from ppctl.schedule.costs import task_costs
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.partition import uniform
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.schedule.vocabulary_parallel import with_vocabulary
from ppctl.training.pipeline import optimizers as optim
from ppctl.training.pipeline.engines.mpmd_engine import Mpmd, PostValidated
from ppctl.training.pipeline.engines.rank_states import GroupModel
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.optimizers import init_state
from ppctl.training.pipeline.pipeline_request import divided_stack, shards_in_stages

LR_SCHEDULE = optim.learning_rates(lr=1e-2, min_lr_fraction=0.1, warmup_steps=2, num_steps=5)
CLIP_NORM = 0.05
TOLERANCE = 1e-10
REMAT = ("none", "layer", "full")
MESHES = ((1, 4, 1), (2, 4, 1), (2, 2, 2))


@dataclass(frozen=True)
class MpmdCase(Case):
    """One way to run a step by the mpmd executor."""

    num_chunks: int = 2
    sizes: tuple[int, ...] | None = None  # layers of each stage; None: as alike as can be
    has_parts: bool = False  # whether each rank has a part of embedding and head
    fuses: bool = False

    def partition(self):
        if self.sizes is None:
            return uniform(self.num_layers, self.program().num_stages)
        ends = np.cumsum((0, *self.sizes)).tolist()
        return tuple(range(low, high) for low, high in pairwise(ends))

    def program(self):
        schedule = super().program()
        return with_vocabulary(schedule) if self.has_parts else schedule


def make_optimizer(clip_norm=CLIP_NORM):
    return optim.clipped(
        optim.adamw(LR_SCHEDULE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1), clip_norm
    )


def make_engine(case, clip_norm=CLIP_NORM, **how):
    """An engine of float64 whose initial state has `make_params`, and a batch of the case."""
    stack = make_stack(case.model, case.num_layers)
    batch = make_batch(case.model, case.batch_size)
    return engine_of(case, stack, make_params(stack), batch, clip_norm, **how), batch


def engine_of(case, stack, params, batch, clip_norm=CLIP_NORM, *, post_validation=False):
    """The same of this stack, which starts with these parameters."""
    schedule = case.program()
    pp = case.mesh[1]
    axes = StageAxes(vocab_parts=pp if case.has_parts else 0)
    divided = divided_stack(stack, axes, batch)
    shards, _ = shards_in_stages(stack, divided, axes)
    sizes = MeshSizes(*case.mesh)
    placement = Placement(case.partition(), schedule.rank_of)
    layout = Layout(make_mesh(sizes), placement, RankLayout(sizes, shards))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    one = stack.in_shards(divided)
    model = model_of(case, layout, one, params, batch, axes, divided.parts)
    step = ScheduledStep(schedule, task_costs(case.remat), fuses=case.fuses)
    optimizer = make_optimizer(clip_norm)
    start = lambda seed: init_state(
        jax.tree.map(jnp.asarray, params), optimizer, stack.options.trainable
    )
    states = States(layout, start, jax.eval_shape(lambda: start(0)))
    groups = (GroupModel(tuple(range(pp)), layout, model),)
    arguments = states, shapes, groups, step, optimizer, LR_SCHEDULE, COMPILE_FAST
    if post_validation:
        return PostValidated(*arguments, max_norm=clip_norm)
    return Mpmd(*arguments)


def run_mpmd(case):
    """(loss, gradients) in natural order of `make_params` and `make_batch`."""
    engine, batch = make_engine(case)
    loss, grads = engine.loss_and_grads(engine.new_state(), engine.batches.put(batch))
    return float(loss), jax.tree.map(np.asarray, grads)


def name_of(case):
    mesh = "x".join(map(str, case.mesh))
    return (
        f"{case.schedule} {mesh} L{case.num_layers} {case.remat} {case.model}"
        + " scan" * (case.unroll == 0)
        + " layer" * (case.gather == "layer")
    )


def check(case):
    _, _, loss, grads = run_reference(case.model, case.num_layers, case.batch_size)
    found_loss, found_grads = run_mpmd(case)
    assert abs(found_loss - loss) <= TOLERANCE * abs(loss)
    assert difference(found_grads, grads) <= TOLERANCE
