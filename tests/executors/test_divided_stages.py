"""Stages divided over tp and cp: the same loss and gradients as the reference's, in float64."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.equality import ODD, SMALL, TOLERANCE, difference, make, make_batch, make_pipe
from support.selection import full

import ppctl
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.hlo_text import computations
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import init
from ppctl.schedule.mesh_axes import MeshSizes

WIDE = {"head_dim": 6, "family": "gemma3"}
HALF = {"fraction": 0.5}  # share of a head's dims that rotate
CAPPED = {"attention_softcap": 1.5, "logit_softcap": 2.0, "family": "gemma2", "num_kv_heads": 1}
# every value of each setting, in both executors, and lengths and vocabularies that nothing divides
CASES = {
    "tp2 spmd": (
        {"tp": 2, "pp": 2},
        {
            "schedule": "zb_h1",
            "num_tokens": 17,
            "vocab_size": 33,
            "model": WIDE | {"num_layers": 2},
        },
    ),
    "tp2 cp2 ring odd tied": (
        {"tp": 2, "cp": 2, "pp": 2},
        ODD
        | {
            "executor": "mpmd",
            "context": "ring",
            "model": {"tied": True, "num_layers": 2, **CAPPED},
        },
    ),
    "tp4 kv2 fsdp2 layer": (
        {"tp": 4, "fsdp": 2},
        {
            "model": {"num_kv_heads": 2, "family": "qwen2", "window": 5, "window_pattern": "WWF"},
            "remat": "layer",
        },
    ),
    "cp2 full": (
        {"cp": 2, "dp": 2},
        ODD | {"executor": "mpmd", "remat": "full", "model": {"attention": "chunked"}},
    ),
    "tp4 kv2 norm of all heads, turned in part": (
        {"tp": 4},
        {
            "schedule": "zb_h1",
            "model": {"family": "olmoe", "num_kv_heads": 2, "num_layers": 2, "rope": HALF},
        },
    ),
    "tp2 cp2 norm of all heads, turned in part": (
        {"tp": 2, "cp": 2},
        ODD
        | {
            "executor": "mpmd",
            "sequence_parallel": False,
            "model": {"family": "olmoe", "num_layers": 2, "rope": HALF},
        },
    ),
}
BY_LAYER = {  # weights of a layer are gathered over fsdp, its activations over tp and cp
    "tp2 fsdp2 spmd": ({"tp": 2, "fsdp": 2, "pp": 2}, {"schedule": "zb_h1", "vocab_size": 33}),
    "tp2 fsdp2 mpmd": (
        {"tp": 2, "fsdp": 2, "pp": 2},
        {"executor": "mpmd", "remat": "full", "unroll": 0},
    ),
    "cp2 fsdp2 mpmd": (
        {"cp": 2, "fsdp": 2, "pp": 2},
        {"executor": "mpmd", "context": "ring", "remat": "layer"},
    ),
    "cp2 fsdp2 spmd": ({"cp": 2, "fsdp": 4}, {"remat": "none", "unroll": 0}),
}
MESHES = [
    {"pp": pp, "fsdp": fsdp, "tp": tp, "cp": cp}
    for pp, fsdp, tp, cp in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4))
    if tp * cp > 1 and pp * fsdp * tp * cp <= 8
]
SCHEDULES = (
    ("interleaved", {"num_chunks": 2}),
    ("zb_v", {}),
    ("eager_1f1b", {}),
    ("dualpipe_v", {}),
    ("zb_h1", {}),
)
MODELS = [  # remat, kv heads, tied, attention
    *(("none", 4, True, "auto"), ("layer", 2, False, "chunked")),
    *(("full", 1, True, "chunked"), ("none", 2, False, "auto")),
]


def every_mesh():
    """Each mesh in both executors; schedules, models and ways to divide take turns."""
    for i, (mesh, executor) in enumerate(product(MESHES, ("spmd", "mpmd"))):
        schedule, knobs = SCHEDULES[i % 5]
        remat, kv, tied, attention = MODELS[i % 4]
        model = {"num_kv_heads": kv, "tied": tied, "num_layers": 8, "attention": attention}
        how = {
            "schedule": schedule,
            "remat": remat,
            "sequence_parallel": i % 7 > 0,
            "model": model,
        } | ({"context": "ring"} if executor == "mpmd" and i % 3 else {})
        how["num_microbatches"] = (
            max(2, mesh["pp"]) if schedule == "interleaved" else 2
        )  # the device has whole groups of them
        name = " ".join(
            [*(f"{axis}{size}" for axis, size in mesh.items()), executor, schedule, remat]
        )
        yield pytest.param(mesh, ODD | how | {"executor": executor, **knobs}, id=name)


SLOW = (
    "tp2 spmd",
    "cp2 full",
    "tp4 kv2 fsdp2 layer",
    "tp2 cp2 norm of all heads, turned in part",
    "tp4 kv2 norm of all heads, turned in part",
)  # the others and the divided vocabulary's have its parts
SELECTED = [full(case) if name in SLOW else case for name, case in CASES.items()]


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), SELECTED, ids=CASES)
def test_loss_and_gradients_of_divided_stages_equal_the_reference(mesh, how):
    assert difference(mesh, **how) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), BY_LAYER.values(), ids=BY_LAYER)
def test_divided_stages_equal_the_reference_with_layers_gathered_one_by_one(mesh, how):
    assert difference(mesh, gather="layer", **how) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), [*every_mesh()])
def test_loss_and_gradients_are_the_references_everywhere(mesh, how):
    assert difference(mesh, **how) <= TOLERANCE


PATTERN = {
    "window": 3,
    "window_pattern": "WWF",
    "rope": {"local_theta": 100.0},
}  # the third of four layers has none
# two chunks of a rank with a switch between two functions; separate programs; the split
# backward
UNLIKE = [
    *map(
        full,
        [
            (
                {"pp": 2, "tp": 2},
                {"schedule": "interleaved", "num_chunks": 2, "model": PATTERN | WIDE},
            ),
            ({"pp": 2}, {"executor": "mpmd", "schedule": "1f1b", "remat": "layer"}),
            ({"pp": 2}, {"schedule": "interleaved", "num_chunks": 2}),
            ({"pp": 2}, {"schedule": "zb_v"}),
            ({"pp": 2, "tp": 2}, {"schedule": "zb_h1", "remat": "full"}),
        ],
    )
]


@pytest.mark.parametrize(("mesh", "how"), UNLIKE)
def test_layers_with_and_without_a_window_have_the_references_gradients(mesh, how):
    assert difference(mesh, **{"model": PATTERN} | how) <= TOLERANCE


def lines(text, kind):
    """The instructions of a kind, started asynchronously or not, in all computations of a compiled
    program.
    """
    _, found = computations(text)
    return [
        line
        for body in found.values()
        for line in body
        if f" {kind}(" in line or f" {kind}-start(" in line
    ]


def test_a_block_gathers_and_scatters_twice_and_no_weight_is_gathered_over_tp():
    stack, axes = make(d_model=32, num_layers=2), StageAxes(tp=2)
    divided = stack.options.divided(axes)
    mesh = make_mesh(MeshSizes(tp=2))
    params = jax.eval_shape(lambda: init(stack, 0))
    layer = jax.tree.map(lambda a: jnp.zeros(a.shape[1:]), params["layers"])
    specs = divided.sharding["layers"]
    rows = jax.sharding.PartitionSpec(None, "tp")
    forward = jax.shard_map(
        divided.layer, mesh=mesh, in_specs=(specs, rows), out_specs=rows, check_vma=False
    )
    text = jax.jit(forward).lower(layer, jnp.zeros((2, 8, 32))).compile().as_text()
    assert len(lines(text, "all-gather")) == 2
    assert len(lines(text, "reduce-scatter")) == 2
    assert not lines(text, "all-reduce")
    assert not lines(text, "all-to-all")

    batch = make_batch(24, 32)
    pipe = make_pipe(stack, batch, {"pp": 2, "tp": 2}, remat="full")
    (program,) = pipe.programs().programs
    sizes = {a.shape[1:] for a in jax.tree.leaves(params["layers"])} | {
        a.shape for a in jax.tree.leaves(params["embed_head"])
    }
    for line in lines(program.hlo, "all-gather"):
        shape = line.split("[", 1)[1].split("]")[0]
        assert tuple(map(int, filter(None, shape.split(",")))) not in sizes - {(32,)}, line


REFUSED = [
    ({"tp": 3}, {}, "num_heads=4 is not a multiple of tp=3"),
    (
        {"tp": 4},
        {"model": {"num_heads": 12, "d_model": 48, "num_kv_heads": 6}},
        "devices would share heads unevenly",
    ),
    (
        {"cp": 4},
        {"num_tokens": 7},
        r"7 tokens are fewer than the 2\*cp = 2\*4 = 8 pieces .* Use cp=3 at most",
    ),
    ({"cp": 2}, {"context": "ring"}, "context=ring does not apply to executor=spmd. Leave it out"),
    ({"cp": 2}, {"model": {"window": 4}}, "window=4 and cp=2: .* Use cp=1, and tp"),
    (
        {"cp": 2},
        {"model": {"attention": "pallas"}},
        "cp=2 merges parts of a softmax by their sums, which pallas does not return",
    ),
]


@pytest.mark.parametrize(("mesh", "how", "message"), REFUSED)
def test_stages_that_cannot_be_divided_are_refused(mesh, how, message):
    with pytest.raises(ConfigError, match=message):
        difference(mesh, **how)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_losses_of_ten_steps_in_float32_equal_the_references(executor):
    stack, batch = ppctl.transformer(**SMALL, vocab_size=33), make_batch(17, 33)

    def losses(**how):
        pipe = make_pipe(
            stack, batch, how.pop("mesh"), optimizer=optax.adamw(1e-2), dtype=jnp.float32, **how
        )
        state, found = pipe.init(seed=0), []
        for _ in range(10):
            state, metrics = pipe.step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    divided = losses(mesh={"pp": 2, "tp": 2, "cp": 2}, executor=executor)
    np.testing.assert_allclose(divided, losses(mesh={}, executor="reference"), rtol=1e-6)
    assert divided[-1] < divided[0]
