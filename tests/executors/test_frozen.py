"""Frozen parameters have no gradient, no sum, no optimizer state and no work in W; all others have
the reference's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import (
    COMPILE_FAST,
    MLP,
    TRANSFORMER,
    Case,
    difference,
    make_batch,
    make_params,
    staged_step,
    state_of,
)
from support.mpmd_cases import MpmdCase, engine_of
from support.selection import full, full_except

import ppctl
from ppctl import transformer
from ppctl.errors import ConfigError
from ppctl.executors.outer_layers import add_head_grads
from ppctl.executors.reference import reference
from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.executors.stage.layer_programs import LayerPrograms
from ppctl.model.lora import Lora
from ppctl.model.mlp import mlp
from ppctl.model.stack import init
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.remat import Remat

TOLERANCE = 1e-10
CLIP_NORM = 0.01
MLP_STACK = mlp(num_layers=4, **MLP, dtype=jnp.float64)
BLOCKS = {"activation": "swiglu", "num_kv_heads": 2, "lora": Lora(2, 8.0)}
STACKS = {
    "lora": transformer(num_layers=4, **(TRANSFORMER | BLOCKS), dtype=jnp.float64),
    "lora tied": transformer(
        num_layers=4,
        **(TRANSFORMER | {"tied": True, "lora": Lora(2, 8.0, ("q", "down"))}),
        dtype=jnp.float64,
    ),
    "biases": MLP_STACK.with_options(
        trainable={"embed_head": True, "layers": {"bias": True, "kernel": False}}
    ),
    "head": MLP_STACK.with_options(
        trainable={"embed_head": {"embed": False, "head": True}, "layers": False}
    ),
}
FEW = [  # stack, executor, schedule, (dp, pp, fsdp), remat, more
    ("biases", "mpmd", "zb_h1", (1, 2, 2), "layer", {}),
    ("head", "spmd", "zb_h1", (1, 2, 2), "none", {"gather": "layer"}),
    ("lora", "spmd", "zb_h1", (1, 2, 1), "none", {"unroll": 0}),
]
CASES = [
    *FEW,
    ("head", "mpmd", "1f1b", (1, 2, 1), "none", {}),
    ("biases", "spmd", "interleaved", (2, 2, 1), "full", {"num_chunks": 2}),
] + [
    (stack, executor, schedule, mesh, remat, more)
    for stack in STACKS
    for executor in ("spmd", "mpmd")
    for (schedule, mesh, more), remat in zip(
        (
            ("1f1b", (1, 4, 1), {}),
            ("zb_h1", (1, 2, 2), {"gather": "layer"}),
            ("interleaved", (2, 2, 1), {"num_chunks": 2}),
            ("zb_v", (1, 2, 2), {"num_chunks": 2, "unroll": 0}),
            ("interleaved_zb", (1, 2, 2), {"num_chunks": 2}),
            ("gpipe", (1, 2, 1), {}),
        ),
        ("none", "layer", "full", "none", "full", "layer"),
        strict=True,
    )
]


def loss_and_grads(stack, params, batch):
    step = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    losses, grads = jax.jit(step, compiler_options=COMPILE_FAST)(params, batch)
    return losses["loss"], grads


@pytest.mark.parametrize(
    ("name", "executor", "schedule", "mesh", "remat", "more"), full_except(CASES, *FEW[:2])
)
def test_gradients_of_trained_parameters_equal_the_whole_models(
    name, executor, schedule, mesh, remat, more
):
    stack = STACKS[name]
    params, batch = make_params(stack), make_batch("tied swiglu" if "lora" in name else "mlp", 64)
    loss, grads = loss_and_grads(stack.with_options(trainable=True), params, batch)
    wanted = jax.tree.map(np.asarray, trained_part(grads, stack.options.trainable))
    if executor == "spmd":
        case = Case(schedule, mesh, remat=remat, num_layers=4, **more)
        layout = case.layout()
        staged = layout.to_staged(params)
        shardings = layout.shardings(layout.staged_specs(staged))
        step = jax.jit(
            staged_step(case, stack), in_shardings=(shardings, None), compiler_options=COMPILE_FAST
        )
        losses, found = step(staged, batch)
        found_loss = losses["loss"]
        found = layout.to_natural(jax.tree.map(np.asarray, found))
    else:
        engine = engine_of(
            MpmdCase(schedule, mesh, remat=remat, num_layers=4, **more), stack, params, batch
        )
        found_loss, found = engine.loss_and_grads(engine.new_state(), engine.batches.put(batch))
        found = jax.tree.map(np.asarray, found)
    assert abs(found_loss - loss) <= TOLERANCE * abs(loss)
    assert difference(found, wanted) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize(
    "axes", [{"tp": 2}, {"tp": 4}, {"cp": 2}, {"tp": 2, "sequence_parallel": False}], ids=str
)
def test_adapters_of_divided_stages_have_the_gradients_of_whole_ones(executor, axes):
    stack = STACKS["lora"]
    batch = make_batch("tied swiglu", 16)
    how = {name: axes[name] for name in axes if name == "sequence_parallel"}
    mesh = ppctl.mesh(pp=2, **{name: size for name, size in axes.items() if name not in how})
    pipe = ppctl.pipeline(
        stack,
        mesh=mesh,
        schedule="zb_h1",
        num_microbatches=4,
        batch=batch,
        optimizer=optax.sgd(0.1),
        executor=executor,
        dtype=jnp.float64,
        **how,
    )
    params = make_params(stack)
    loss, grads = loss_and_grads(stack, params, batch)
    found_loss, found = pipe.loss_and_grads(state_of(pipe, params), batch)
    assert float(found_loss) == pytest.approx(float(loss), rel=TOLERANCE)
    assert difference(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, grads)) <= TOLERANCE


def pipe_of(stack, batch, **how):
    given = {
        "schedule": "1f1b",
        "num_microbatches": 4,
        "executor": "spmd",
        "mesh": ppctl.mesh(pp=2),
        **how,
    }
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    return ppctl.pipeline(
        stack, batch=batch, optimizer=optimizer, dtype=jnp.float64, clip_norm=CLIP_NORM, **given
    )


@pytest.mark.parametrize("executor", ["mpmd", full("spmd")])
def test_steps_keep_frozen_weights_and_clip_by_the_norm_of_trained_gradients(executor):
    stack, batch = STACKS["biases"], make_batch("mlp", 16)
    pipe = pipe_of(stack, batch, executor=executor)
    before = jax.tree.map(np.asarray, pipe.to_natural(pipe.init()))
    _, grads = loss_and_grads(stack, before["params"], batch)
    own = trained_part(before["params"], stack.options.trainable)
    assert len(jax.tree.leaves(before["optimizer"])) == 1 + 2 * len(
        jax.tree.leaves(own)
    )  # count, mu and nu
    state, metrics = pipe.step(pipe.init(), batch)
    norm = float(metrics["grad_norm"])
    assert norm == pytest.approx(float(optax.tree.norm(grads)), rel=1e-9)
    assert norm > CLIP_NORM
    plain = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(1e-2, weight_decay=0.1))
    updated = lambda g, w: optax.apply_updates(w, plain.update(g, plain.init(w), w)[0])
    wanted = jax.jit(updated)(grads, own)
    after = jax.tree.map(np.asarray, pipe.to_natural(state)["params"])
    assert difference(trained_part(after, stack.options.trainable), wanted) < 1e-9
    state, _ = pipe.step(state, batch)
    after = jax.tree.map(np.asarray, pipe.to_natural(state)["params"])
    np.testing.assert_array_equal(after["layers"]["kernel"], before["params"]["layers"]["kernel"])
    assert (after["layers"]["bias"] != before["params"]["layers"]["bias"]).any()


def test_w_runs_only_the_products_of_adapters():
    """Of every linear map [in, out] x^T (g B^T) and (x A)^T g: the frozen map's x^T g would be
    in*out of a row.
    """
    stack, rank, rows = STACKS["lora"], 2, 3 * 8
    layer = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), jax.eval_shape(lambda: init(stack, 0))
    )
    x = jax.ShapeDtypeStruct((3, 8, TRANSFORMER["d_model"]), jnp.float64)
    programs = LayerPrograms(stack.layer, Remat.NONE, layer["layers"], x, stack.trains("layers"))
    widths = [
        (16, 16),
        (16, 8),
        (16, 8),
        (16, 16),
        (16, 32),
        (16, 32),
        (32, 16),
    ]  # q k v o gate up down
    flops = matmul_flops(programs.weight_grad, layer["layers"], programs.pending)
    assert flops == sum(2 * rows * rank * (num_in + num_out) for num_in, num_out in widths)
    assert jax.tree.structure(
        jax.eval_shape(programs.weight_grad, layer["layers"], programs.pending)
    ) == (jax.tree.structure(trained_part(layer["layers"], stack.trains("layers"))))


@pytest.mark.full
def test_a_frozen_head_makes_no_gradient_of_its_matrix():
    stack, tokens = STACKS["lora"], 3 * 8
    embed_head = jax.eval_shape(lambda: init(stack, 0))["embed_head"]
    y = jax.ShapeDtypeStruct((3, 8, TRANSFORMER["d_model"]), jnp.float64)
    targets = jax.ShapeDtypeStruct((3, 8), jnp.int32)
    flops = [
        matmul_flops(
            lambda e, y, t, sums, which=which: add_head_grads(stack.head, e, y, t, sums, which)[:2],
            *(embed_head, y, targets, trained_part(embed_head, which)),
        )
        for which in (False, True)
    ]
    product = 2 * tokens * TRANSFORMER["d_model"] * TRANSFORMER["vocab_size"]
    assert flops == [2 * product, 3 * product]
    params, batch = make_params(stack), make_batch("tied swiglu", 4)
    _, grads = loss_and_grads(stack, params, batch)
    _, whole = loss_and_grads(stack.with_options(trainable=True), params, batch)
    assert difference(grads, trained_part(whole, stack.options.trainable)) <= TOLERANCE


@pytest.mark.full
def test_the_step_of_adapters_has_no_product_of_the_shape_of_a_frozen_weight():
    batch = make_batch("tied swiglu", 12)  # microbatches of 24 rows, a width that no weight has
    weights = {
        "16x16",
        "8x16",
        "16x32",
        "32x16",
    }  # matrices of a block, of embedding and head; keys transposed

    def made(stack):
        text = pipe_of(stack, batch, schedule="zb_h1").engine.lower_train_step().as_text()
        dots = [line for line in text.splitlines() if "dot_general" in line]
        return {line.rsplit("tensor<", 1)[1].split("xf64")[0] for line in dots}

    assert not made(STACKS["lora"]) & weights
    assert made(STACKS["lora"].with_options(trainable=True)) >= weights


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (False, "trainable leaves no parameter to train. Set it to True for some."),
        (
            {"embed_head": True},
            "trainable differs from the tree of the parameters: it is PyTreeDef",
        ),
        (
            {"embed_head": True, "layers": "kernel"},
            "trainable has 'kernel'. Give each parameter True or False.",
        ),
    ],
)
def test_impossible_values_of_trainable_are_refused(trainable, message):
    with pytest.raises(ConfigError) as error:
        pipe_of(MLP_STACK.with_options(trainable=trainable), make_batch("mlp", 16))
    assert message in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["mpmd", "spmd"])
def test_part_of_a_network_is_frozen(executor):
    """The first layer's matrix and the second's bias; the leaves of a layer are packed apart."""

    def initial(key):
        return {
            name: {
                "w": jax.random.normal(jax.random.fold_in(key, i), (4, 4)),
                "b": jnp.full(4, 0.1),
            }
            for i, name in enumerate(("first", "second"))
        }

    def apply(params, x):
        x = ppctl.stage_boundary(jnp.tanh(x @ params["first"]["w"] + params["first"]["b"]))
        return x @ params["second"]["w"] + params["second"]["b"]

    def loss(outputs, targets):
        return jnp.square(outputs - targets).sum(), jnp.asarray(outputs.size, outputs.dtype)

    frozen = {"first": {"w": False, "b": True}, "second": {"w": True, "b": False}}
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((8, 4)) for name in ("inputs", "targets")}
    pipe = ppctl.pipeline(
        ppctl.Network(initial, apply, loss, trainable=frozen),
        mesh=ppctl.mesh(pp=2),
        schedule="zb_h1",
        num_microbatches=2,
        batch=batch,
        optimizer=optax.sgd(0.1),
        executor=executor,
        dtype=jnp.float64,
    )
    export = pipe.stack.options.network.parameters.from_parts
    params = jax.tree.map(np.asarray, export(pipe.to_natural(pipe.init(0))["params"]))
    state, _ = pipe.step(pipe.init(0), batch)
    found = jax.tree.map(np.asarray, export(pipe.to_natural(state)["params"]))
    mean = lambda p: (lambda pair: pair[0] / pair[1])(
        loss(apply(p, batch["inputs"]), batch["targets"])
    )
    grads = jax.grad(mean)(params)
    for name, flags in frozen.items():
        for key, is_trained in flags.items():
            wanted = params[name][key] - 0.1 * grads[name][key] if is_trained else params[name][key]
            np.testing.assert_allclose(found[name][key], wanted, rtol=1e-9 if is_trained else 0)
