"""Tiny models, and one step of each by the spmd executor and by the reference."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from ppctl import transformer
from ppctl.executors.compiler_options import cpu_options
from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import Layout, RankLayout, layer_specs, shapes_on_device
from ppctl.executors.reference import reference
from ppctl.executors.spmd.spmd_program import spmd
from ppctl.model.mlp import mlp
from ppctl.model.parallel import WHOLE
from ppctl.model.stack import in_microbatches, init
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.partition import explicit, uniform
from ppctl.schedule.tick_lowering import forward_only, ticks

COMPILE_FAST = {
    "xla_backend_optimization_level": 0
}  # the same program in slower machine code: most time is compiling
# XLA's older emitters, which compile faster, round a sum differently where it is fused with
# other work
SAME_BITS = COMPILE_FAST | {
    option: True for option in cpu_options("once") if option == "xla_cpu_use_fusion_emitters"
}
SEQ_LEN, VOCAB_SIZE = 8, 32
TRANSFORMER = {
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": None,
    "mlp_width": 32,
    "activation": "gelu",
    "vocab_size": VOCAB_SIZE,
    "tied": False,
}
MLP = {"d_model": 16, "activation": "tanh", "input_dim": 5, "target_dim": 3}
MODELS = {  # every pair of (tied, activation, grouped queries) occurs
    "untied gelu": {},
    "untied swiglu grouped": {"activation": "swiglu", "num_kv_heads": 2},
    "tied gelu grouped": {"tied": True, "num_kv_heads": 1},
    "tied swiglu": {"tied": True, "activation": "swiglu"},
    "mlp": None,
}


def make_stack(model, num_layers, dtype=jnp.float64):
    changes = MODELS[model]
    if changes is None:
        return mlp(num_layers=num_layers, **MLP, dtype=dtype)
    return transformer(num_layers=num_layers, **(TRANSFORMER | changes), dtype=dtype)


def make_params(stack, seed=0):
    """Random parameters of a model's shapes: initial norms and biases are all alike, which would
    hide mistakes.
    """
    rng = np.random.default_rng(seed)

    def random(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return (center + 0.25 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, jax.eval_shape(lambda: init(stack, seed)))


def state_of(pipe, params, step=0):
    """Return the state of a pipeline with these parameters: to compile what draws the initial ones
    takes longer.
    """
    params = jax.tree.map(jnp.array, params)  # copies: a step reuses the memory of its state
    optimizer = pipe.optimizer.init(params)
    return pipe.from_natural({"params": params, "optimizer": optimizer, "step": jnp.int32(step)})


def make_batch(model, batch_size, seed=1):
    rng = np.random.default_rng(seed)
    if MODELS[model] is None:
        inputs = rng.standard_normal((batch_size, MLP["input_dim"]))
        return {"inputs": inputs, "targets": rng.standard_normal((batch_size, MLP["target_dim"]))}
    tokens = rng.integers(0, VOCAB_SIZE, (2, batch_size, SEQ_LEN), np.int32)
    return {"inputs": tokens[0], "targets": tokens[1]}


@dataclass(frozen=True)
class Case:
    """One way to run one step. `mesh` is (dp, pp, fsdp)."""

    schedule: str = "gpipe"
    mesh: tuple[int, int, int] = (1, 4, 1)
    num_microbatches: int = 8
    num_chunks: int = 1
    num_layers: int = 8
    model: str = "untied gelu"
    batch_size: int = 64
    remat: str = "full"
    unroll: int = 16
    gather: str = "step"
    loops: bool = False
    layers: tuple[int, ...] | str | None = (
        None  # layers of each stage, for `explicit`; None: uniform
    )

    def program(self):
        knobs = FAMILIES[self.schedule].knobs_for(self.num_chunks)
        return build(self.schedule, self.mesh[1], self.num_microbatches, **knobs)

    def layout(self):
        schedule = self.program()
        size = (self.num_layers, schedule.num_stages)
        partition = uniform(*size) if self.layers is None else explicit(*size, self.layers)
        sizes = MeshSizes(*self.mesh)
        return Layout(make_mesh(sizes), Placement(partition, schedule.rank_of), RankLayout(sizes))


def model_of(case, layout, stack, params, batch, axes=WHOLE, parts=None):
    """The model as one device of a case computes it."""
    dp, _, fsdp = case.mesh
    rows = case.batch_size // (dp * fsdp * case.num_microbatches)
    shapes = shapes_on_device(params, layout.of_rank.shards)
    of = lambda first: lambda a: jax.ShapeDtypeStruct((*first, *a.shape[1:]), a.dtype)
    layer, microbatch = jax.tree.map(of(()), shapes["layers"]), jax.tree.map(of((rows,)), batch)
    specs = None
    if case.gather == "layer" and fsdp > 1:
        staged = jax.eval_shape(layout.to_staged, params)
        specs = layer_specs(layout.staged_specs(staged)["layers"])
    sizes = case.num_microbatches, case.remat, case.unroll, jnp.dtype("float64"), axes
    embed_head = shapes["embed_head"]
    shapes = stack, embed_head, layer, microbatch
    how = {"platform": "gpu" if case.loops else "cpu", "parts": parts}
    return Model(*shapes, *sizes, layout.of_rank.own_embed_head(embed_head), specs, **how)


def staged_step(case, stack=None, *, with_grads=True):
    """(loss, gradients) of staged parameters and a batch, by the spmd executor."""
    stack = stack or make_stack(case.model, case.num_layers)
    program = case.program() if with_grads else forward_only(case.program())
    layout, params = case.layout(), jax.eval_shape(lambda: init(stack, 0))

    def step(staged, batch):
        model = model_of(case, layout, stack, params, batch)
        step = spmd(model, layout, ticks(program, Costs(), case.remat))
        return step(staged, in_microbatches(batch, case.num_microbatches))

    return step


def run_spmd(case, stack, params, batch):
    """(loss, gradients) in natural order, by the spmd executor, from parameters and to gradients
    that are sharded.
    """
    layout = case.layout()
    staged = layout.to_staged(params)
    shardings = layout.shardings(layout.staged_specs(staged))
    step = jax.jit(
        staged_step(case, stack), in_shardings=(shardings, None), compiler_options=COMPILE_FAST
    )
    losses, grads = step(staged, batch)
    for grad, leaf, sharding in zip(*map(jax.tree.leaves, (grads, staged, shardings)), strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        assert grad.sharding.is_equivalent_to(sharding, grad.ndim)
    return losses["loss"], layout.to_natural(jax.tree.map(np.asarray, grads))


@cache
def run_reference(model, num_layers, batch_size):
    """(parameters, batch, loss, gradients) by the reference executor; the same for every way to run
    the step.
    """
    stack = make_stack(model, num_layers)
    params, batch = make_params(stack), make_batch(model, batch_size)
    step = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    losses, grads = jax.jit(step, compiler_options=COMPILE_FAST)(params, batch)
    return params, batch, float(losses["loss"]), jax.tree.map(np.asarray, grads)


def difference(found, expected):
    """The largest relative difference of any leaf: max |a - b| / max |b|. NaN counts as infinite."""
    worst = 0.0
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        error = np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(b))
        worst = max(worst, float(error) if np.isfinite(error) else np.inf)
    return worst
