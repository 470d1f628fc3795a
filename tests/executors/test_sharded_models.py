"""Custom models over tp: divided by hand, or (mpmd) by XLA from PartitionSpecs; equal to the
reference in float64.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.cases import state_of
from support.selection import full_except
from support.sharded_models import by_hand, rows, stack

import ppctl
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.hlo_text import collectives
from ppctl.executors.model_shapes import shard_bytes
from ppctl.executors.reference import reference
from ppctl.model.stack import init
from ppctl.schedule.mesh_axes import MeshSizes

TOLERANCE = 1e-10
NUM_LAYERS = 4


def make_pipe(model, mesh, **how):
    how = {
        "schedule": "gpipe",
        "num_microbatches": 2,
        "optimizer": optax.sgd(0.1),
        "dtype": jnp.float64,
    } | how
    return ppctl.pipeline(model, mesh=make_mesh(MeshSizes(**mesh)), batch=rows(), **how)


def difference(model, mesh, **how):
    """The largest relative difference of the loss, or of a leaf of the gradients, from the
    reference's.
    """
    pipe = make_pipe(model, mesh, **how)
    params = jax.jit(lambda: init(pipe.stack, 0))()
    loss, grads = pipe.loss_and_grads(state_of(pipe, params), rows())
    plain = reference(pipe.stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    expected = jax.jit(plain)(params, rows())
    pairs = zip(jax.tree.leaves((loss, grads)), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))) for a, b in pairs)


MODELS = {"stack": stack, "by hand": by_hand}
ALL_AXES = {"fsdp": 2, "tp": 2, "pp": 2}
MPMD = {"executor": "mpmd"}
QUICK = {
    "stack mpmd": (
        "stack",
        {"tp": 2, "pp": 2},
        MPMD | {"schedule": "zb_h1", "num_microbatches": 4},
    ),
    "by hand spmd": ("by hand", {"tp": 2, "pp": 2}, {"remat": "layer"}),
}
SETTINGS = [  # mesh, schedule and the like
    (ALL_AXES, {"schedule": "zb_h1", "num_microbatches": 4, "remat": "layer"}),
    (ALL_AXES, {"schedule": "interleaved", "num_chunks": 2, "remat": "none"}),
    (
        {"tp": 4, "pp": 2},
        {"schedule": "zb_v", "num_microbatches": 4, "partition": [1, 1, 1, 1], "remat": "full"},
    ),
    ({"tp": 2, "pp": 2, "dp": 2}, {"schedule": "eager_1f1b", "unroll": 0, "partition": [3, 1]}),
    ({"tp": 4}, {"remat": "full"}),
    (
        {"tp": 2, "pp": 2},
        {"schedule": "zb_h1", "num_microbatches": 4, "unroll": 0, "remat": "full"},
    ),
]
EVERY = [
    pytest.param(model, mesh, how | MPMD, id=f"{model} mpmd {i}")
    for model, (i, (mesh, how)) in product(MODELS, enumerate(SETTINGS))
]
EVERY += [
    pytest.param("by hand", mesh, how, id=f"by hand spmd {i}")
    for i, (mesh, how) in enumerate(SETTINGS)
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "mesh", "how"), full_except(QUICK, "stack mpmd", "by hand spmd"))
def test_loss_and_gradients_of_sharded_models_equal_the_reference(model, mesh, how):
    assert difference(MODELS[model](), mesh, **how) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("model", "mesh", "how"), EVERY)
def test_loss_and_gradients_are_the_references_everywhere(model, mesh, how):
    assert difference(MODELS[model](), mesh, **how) <= TOLERANCE


@pytest.mark.full
def test_fused_tasks_are_divided_by_xla():
    how = {"schedule": "interleaved", "num_chunks": 2, "num_microbatches": 8, "fuse": "fb"}
    assert difference(stack(), {"tp": 2, "pp": 2}, **MPMD, **how) <= TOLERANCE


@pytest.mark.full
def test_an_update_before_the_norm_is_known_changes_no_gradient():
    assert difference(stack(), ALL_AXES, **MPMD, post_validation=True, clip_norm=1.0) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "executor"), [("by hand", "spmd"), ("by hand", "mpmd"), ("stack", "mpmd")]
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_do_not_depend_on_the_sharding_between_layers(model, sequence_parallel, executor):
    how = {"sequence_parallel": sequence_parallel, "executor": executor}
    assert difference(MODELS[model](), {"tp": 2, "pp": 2}, **how) <= TOLERANCE


def over_tp(program):
    return [each for each in collectives(program.hlo, program.mesh) if "tp" in each.axes]


def test_tasks_sum_once_a_layer():
    pipe = make_pipe(stack(), {"tp": 2, "pp": 2, "fsdp": 2}, remat="layer", **MPMD)
    programs = {each.name: each for each in pipe.programs().programs}
    for name in ("fwd of stage 0", "bwd of stage 0"):
        (found,) = over_tp(programs[name])
        assert (found.kind, found.instructions) == ("all-reduce", 2)
    assert not over_tp(programs["prepare of rank 0"])
    assert not over_tp(programs["finish of rank 0"])


def test_a_device_holds_its_shards():
    pipes = [make_pipe(stack(), {"tp": tp, "pp": 2}, **MPMD) for tp in (2, 1)]
    shards, all_of_it = (shard_bytes(pipe.states.staged["params"]["layers"]) for pipe in pipes)
    halves, whole = (pipe.engine for pipe in pipes)
    undivided = 2 * 8 * 8  # 2 layers of a rank, a scale of 8 numbers, 8 bytes each
    assert shards - undivided == (all_of_it - undivided) // 2
    for engine in (halves, whole):
        engine.compile(evaluate=False)
    held, held_whole = halves.memory()[0], whole.memory()[0]
    assert held["gradients"] < held_whole["gradients"]


def cut(params, x):
    """Split a dim that tp divides: XLA has devices exchange halves."""
    a, b = jnp.split((x * params["scale"]) @ params["up"] + params["bias"], 2, axis=-1)
    return x + jnp.concatenate([jax.nn.gelu(a) * b, b], axis=-1) @ params["down"]


@pytest.mark.full
def test_a_layer_may_cut_a_divided_dim():
    assert difference(stack(layer=cut), {"tp": 2, "pp": 2}, **MPMD) <= TOLERANCE


def test_xla_does_not_divide_stages_of_spmd():
    with pytest.raises(
        ConfigError,
        match=r"^tp=2 divides a model by its PartitionSpecs .* Use executor=mpmd, or divide",
    ):
        make_pipe(stack(), {"tp": 2, "pp": 2})


OF_HEAD = (
    r"sharding of embed_head.head is P\(None, 'tp'\), but the sharded dim, 4 of \(8, 4\), is not a "
    r"multiple of tp=3 "
)
REFUSED = [
    (stack, {"tp": 3}, OF_HEAD + r"\(4 % 3 = 1\). Use tp=1, 2, 4, or other sizes"),
    (
        lambda: stack(sharding={"embed_head": None, "layers": P(None, "tp")}),
        {"tp": 2},
        r"of layers.bias is P\(None, 'tp'\), with 2 dims, but the parameter has the shape \(16,\)",
    ),
    (stack, {"tp": 2, "cp": 2}, r"cp=2 divides stages, but this model defines Part.* Use cp=1"),
    (
        lambda: stack(sharding={"embed_head": None}),
        {"tp": 2},
        "sharding is not a tree of PartitionSpecs like the param",
    ),
    (
        lambda: stack(sharding={"embed_head": None, "layers": P("fsdp")}),
        {"tp": 2},
        "may have only ep and tp, in one dim",
    ),
    (
        lambda: stack(sharding={"embed_head": None, "layers": 3}),
        {"tp": 2},
        "is 3; it must be a jax.sharding.PartitionSpec",
    ),
    (
        lambda: stack(sharding={"embed_head": None, "layers": None}),
        {"tp": 2},
        "sharding divides no parameter over tp",
    ),
    (
        lambda: stack().with_options(sharding=None),
        {"tp": 2},
        r"tp=2 divides stages, but this model does not define how \(StackOptions.divided, or shard",
    ),
]


@pytest.mark.parametrize(("model", "mesh", "message"), REFUSED)
def test_shardings_that_cannot_be_divided_are_refused(model, mesh, message):
    with pytest.raises(ConfigError, match=message):
        make_pipe(model(), mesh, **MPMD)


def test_layers_divided_by_xla_are_refused_with_gathers_by_layer():
    with pytest.raises(ConfigError, match=r"gather=layer with fsdp=2 and tp=2 .* Use gather=step"):
        make_pipe(stack(), {"tp": 2, "fsdp": 2}, gather="layer", **MPMD)


def losses(model, mesh, **how):
    pipe = make_pipe(model, mesh, optimizer=optax.adamw(1e-2), dtype=jnp.float32, **how)
    state, found = pipe.init(seed=0), []
    for _ in range(10):
        state, metrics = pipe.step(state, rows())
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "executor"), [(by_hand, "spmd"), (by_hand, "mpmd"), (stack, "mpmd")]
)
def test_losses_of_ten_steps_in_float32_equal_one_devices(model, executor):
    model = model(dtype=jnp.float32)
    divided = losses(model, ALL_AXES, executor=executor)
    np.testing.assert_allclose(divided, losses(model, {}, executor="reference"), rtol=1e-6)
    assert divided[-1] < divided[0]


@pytest.mark.full
def test_a_state_trained_with_tp_resumes_without_tp():
    model, batch = stack(), rows()
    meshes = {"tp": 2, "pp": 2}, {"pp": 4}
    two, one = (make_pipe(model, mesh, optimizer=optax.adamw(1e-2), **MPMD) for mesh in meshes)
    state, _ = two.step(two.init(seed=0), batch)
    natural = jax.device_get(two.to_natural(state))
    after_two, _ = two.step(state, batch)
    after_one, _ = one.step(one.from_natural(natural), batch)
    pairs = zip(
        *(jax.tree.leaves(p.to_natural(s)) for p, s in ((two, after_two), (one, after_one))),
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
