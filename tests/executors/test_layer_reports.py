"""Counts that layers report are those of the whole batch, once, whatever the layout."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import state_of
from support.selection import full

import ppctl
from ppctl.model.stack import init

NUM_LAYERS, WIDTH, EXPERTS, CHOSEN, RATE = 4, 6, 4, 2, 0.05
RNG = np.random.default_rng(0)


def balanced(bias, counts):
    """DeepSeek-V3's rule: to the mean of the counts."""
    return bias + RATE * jnp.sign(counts.mean() - counts)


def chosen_of(router, bias, x):
    scores = jax.nn.softmax(x @ router)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), CHOSEN)
    return scores, jax.nn.one_hot(chosen, EXPERTS, dtype=bias.dtype).sum(-2)


def layer(w, x):
    scores, hot = chosen_of(w["router"]["kernel"], w["router"]["bias"], x)
    bias = ppctl.report(w["router"]["bias"], hot.sum((0, 1)))
    y = jnp.tanh(jnp.einsum("bse,edf,bsd->bsf", scores * hot, w["experts"], x))
    return x + (y + 0 * bias.sum()).astype(x.dtype)


def routed(dtype=jnp.float64, **changes):
    def init_layer(key, l):
        k = jax.random.split(jax.random.fold_in(key, l), 3)
        router = {
            "kernel": jax.random.normal(k[0], (WIDTH, EXPERTS), dtype),
            "bias": 0.1 * jax.random.normal(k[1], (EXPERTS,), dtype),
        }
        experts = jax.random.normal(k[2], (EXPERTS, WIDTH, WIDTH), dtype)
        return {"router": router, "experts": experts / WIDTH}

    def init_embed_head(key):
        return {"embed": jax.random.normal(key, (3, WIDTH), dtype)}

    def head(embed_head, x, targets):
        return jnp.square(x.astype(dtype) - targets).sum(), jnp.asarray(targets.size, dtype)

    embed = lambda embed_head, inputs: (
        inputs.astype(embed_head["embed"].dtype) @ embed_head["embed"]
    )
    options = {"mixes_examples": False, "updates": {"router/bias": balanced}} | changes
    functions = init_embed_head, init_layer, embed, layer, head
    return ppctl.Stack(NUM_LAYERS, *functions, ppctl.StackOptions(**options))


def batch_of(size, length):
    return {
        "inputs": RNG.standard_normal((size, length, 3)),
        "targets": RNG.standard_normal((size, length, WIDTH)),
    }


BATCH = batch_of(16, 5)


def plain_counts(params, batch):
    """[layers, experts], of the whole batch, by NumPy."""
    x, counts = batch["inputs"] @ params["embed_head"]["embed"], []
    for l in range(NUM_LAYERS):
        w = jax.tree.map(lambda a, l=l: a[l], params["layers"])
        logits = x @ w["router"]["kernel"]
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        chosen = np.argsort(-(scores + w["router"]["bias"]), axis=-1)[..., :CHOSEN]
        hot = np.zeros_like(scores)
        np.put_along_axis(hot, chosen, 1, -1)
        counts.append(hot.sum((0, 1)))
        x = x + np.tanh(np.einsum("bse,edf,bsd->bsf", scores * hot, w["experts"], x))
    return np.array(counts)


def pipe_of(stack, *, mesh, schedule, batch=BATCH, dtype=jnp.float64, **how):
    given = {"schedule": schedule, "num_microbatches": 4, "dtype": dtype}
    given |= {"optimizer": optax.adamw(1e-2, weight_decay=0.5)} | how
    return ppctl.pipeline(stack, mesh=ppctl.mesh(**mesh), batch=batch, **given)


@cache
def initial():
    return jax.jit(lambda: init(routed(), 0))()


@pytest.mark.parametrize(
    ("executor", "schedule", "remat", "mesh"),
    [
        full(("spmd", "1f1b", "full", {"pp": 2, "dp": 2})),
        full(("spmd", "1f1b", "none", {"pp": 2})),
        full(("spmd", "zb_h1", "layer", {"pp": 2, "fsdp": 2})),
        ("mpmd", "zb_h1", "layer", {"pp": 2, "fsdp": 2}),
        full(("mpmd", "zb_h1", "none", {"pp": 2, "dp": 2})),
        full(("mpmd", "1f1b", "full", {"pp": 2})),
        full(("reference", "1f1b", "none", {"pp": 1})),
    ],
)
def test_counts_are_of_the_whole_batch_and_update_their_parameters(executor, schedule, remat, mesh):
    pipe = pipe_of(
        routed(), executor=executor, schedule=schedule, remat=remat, mesh=mesh, clip_norm=1e3
    )
    state = state_of(pipe, initial())
    for _ in range(2):
        params = jax.device_get(pipe.to_natural(state)["params"])
        counts = plain_counts(params, BATCH)
        grads = jax.device_get(pipe.loss_and_grads(state, BATCH)[1])
        np.testing.assert_array_equal(grads["layers"]["router"]["bias"], counts)
        state, metrics = pipe.step(state, BATCH)
        np.testing.assert_array_equal(metrics["counts"]["router/bias"], counts)
        of_weights = [np.square(g).sum() for g in jax.tree.leaves(grads)]
        of_weights.append(-np.square(counts).sum())
        norm = float(metrics["grad_norm"])
        assert norm == pytest.approx(np.sqrt(sum(of_weights)), rel=1e-8)
        bias = params["layers"]["router"]["bias"]
        wanted = np.stack([balanced(b, c) for b, c in zip(bias, counts, strict=True)])
        found = pipe.to_natural(state)["params"]["layers"]["router"]["bias"]
        np.testing.assert_array_equal(found, wanted)


def seen(embed_head, x, name):
    """The parameter of this name, which counts positive entries by feature."""
    return ppctl.report(embed_head[name], (x > 0).sum((0, 1)).astype(embed_head[name].dtype))


def counting_outside():
    """The stack whose embedding and head report counts too."""
    stack = routed()
    names = {f"embed_head/{name}": lambda p, counts: p + counts for name in ("early", "late")}

    def init_embed_head(key):
        zeros = {name: jnp.zeros(WIDTH) for name in ("early", "late")}
        return stack.init_embed_head(key) | zeros

    def embed(embed_head, inputs):
        x = stack.embed(embed_head, inputs)
        return x + 0 * seen(embed_head, x, "early")

    def head(embed_head, x, targets):
        return stack.head(embed_head, x + 0 * seen(embed_head, x, "late"), targets)

    outside = replace(stack, init_embed_head=init_embed_head, embed=embed, head=head)
    return outside.with_options(updates=stack.options.updates | names)


@pytest.mark.full
@pytest.mark.parametrize(
    ("executor", "mesh"),
    [("mpmd", {"pp": 2, "fsdp": 2}), full(("spmd", {"pp": 2, "dp": 2})), full(("spmd", {"pp": 4}))],
)
def test_counts_of_embedding_and_head_are_the_references(executor, mesh):
    stack, found = counting_outside(), []
    for how in ({"executor": "reference", "mesh": {}}, {"executor": executor, "mesh": mesh}):
        pipe = pipe_of(stack, schedule="1f1b", **how)
        state = state_of(pipe, jax.jit(lambda: init(stack, 0))())
        for _ in range(2):
            state, metrics = pipe.step(state, BATCH)
        params = jax.device_get(pipe.to_natural(state)["params"]["embed_head"])
        found.append({**metrics["counts"], "late": params["late"], "norm": metrics["grad_norm"]})
    plain, pipelined = jax.device_get(found)
    assert plain["embed_head/early"].sum() > 0
    assert {*plain} == {*pipelined}
    for name, numbers in plain.items():
        np.testing.assert_allclose(pipelined[name], numbers, rtol=1e-10, err_msg=name)
    np.testing.assert_array_less(0, plain["late"])


@pytest.mark.parametrize("executor", ["spmd", full("mpmd")])
def test_counts_are_exact_in_bfloat16(executor):
    batch = batch_of(32, 50)  # 3200 choices: bfloat16 counts to 256
    batch = jax.tree.map(np.float32, batch)
    router = {"kernel": False, "bias": True}  # XLA has no weight gradients in bfloat16 on CPUs
    trainable = {"embed_head": False, "layers": {"router": router, "experts": False}}
    pipe = pipe_of(
        routed(jnp.float32, trainable=trainable),
        executor=executor,
        schedule="1f1b",
        mesh={"pp": 2},
        dtype=jnp.bfloat16,
        batch=batch,
    )
    _, grads = pipe.loss_and_grads(pipe.init(seed=0), batch)
    counts = np.asarray(grads["layers"]["router"]["bias"])
    np.testing.assert_array_equal(counts.sum(-1), [32 * 50 * CHOSEN] * NUM_LAYERS)
    np.testing.assert_array_equal(counts, np.round(counts))


@pytest.mark.parametrize(
    ("executor", "schedule", "remat"),
    [("mpmd", "zb_h1", "none"), ("spmd", "1f1b", "full"), full(("mpmd", "1f1b", "layer"))],
)
def test_counts_that_are_constants_are_summed_over_microbatches(executor, schedule, remat):
    """A constant is a number in a traced program, without astype."""

    def counted(w, x):
        return jnp.tanh(x @ w["kernel"]) + 0 * ppctl.report(w["seen"], jnp.asarray(float(len(x))))

    stack = ppctl.Stack(
        NUM_LAYERS,
        lambda key: {},
        lambda key, l: {"kernel": jnp.eye(WIDTH), "seen": jnp.zeros(())},
        lambda _, x: x,
        counted,
        lambda _, x, targets: (jnp.square(x - targets).sum(), jnp.asarray(float(targets.size))),
        ppctl.StackOptions(mixes_examples=False, updates={"seen": jnp.add}),
    )
    batch = {name: RNG.standard_normal((16, WIDTH)) for name in ("inputs", "targets")}
    how = {"executor": executor, "schedule": schedule, "remat": remat, "mesh": {"pp": 2}}
    pipe = pipe_of(stack, batch=batch, **how)
    state, _ = pipe.step(pipe.init(seed=0), batch)
    seen = pipe.to_natural(state)["params"]["layers"]["seen"]
    np.testing.assert_array_equal(seen, [16.0] * NUM_LAYERS)


def lost(w, x):
    _, hot = chosen_of(w["router"]["kernel"], w["router"]["bias"], x)
    ppctl.report(w["router"]["bias"], hot.sum((0, 1)))
    return x @ w["experts"].sum(0)


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (routed(updates={}), "declares no parameter for them"),
        (
            routed(updates={"bias": balanced}),
            "updates names bias, but a layer has experts, router/",
        ),
        (replace(routed(), layer=lost), "the counts would be lost"),
        (
            routed(trainable={"embed_head": True, "layers": {"router": False, "experts": True}}),
            "updates names router/bias, which trainable freezes",
        ),
    ],
)
def test_reports_that_would_not_count_are_refused(stack, message):
    with pytest.raises(ppctl.PpctlError, match=message):
        pipe_of(stack, mesh={"pp": 2}, schedule="1f1b")


def test_counts_of_another_shape_than_the_parameter_are_refused():
    with pytest.raises(ppctl.PpctlError, match=r"counts \[3\] for a parameter \[4\]"):
        ppctl.report(jnp.zeros(4), jnp.zeros(3))


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [
        {"executor": "reference", "schedule": "gpipe", "mesh": {}},
        {"executor": "mpmd", "schedule": "1f1b", "mesh": {"pp": 2}, "post_validation": True},
        full({"executor": "spmd", "schedule": "1f1b", "mesh": {"pp": 2}}),
    ],
)
def test_a_step_that_the_optimizer_skips_moves_no_counted_parameter(how):
    optimizer = optax.apply_if_finite(optax.adamw(1e-2), 9)
    pipe = pipe_of(routed(), optimizer=optimizer, **how)
    before, bad = jax.device_get(pipe.to_natural(state_of(pipe, initial()))), dict(BATCH)
    bad["targets"] = np.where(np.arange(16)[:, None, None] == 3, np.inf, BATCH["targets"])
    for batch, is_moved in ((bad, False), (BATCH, True)):
        state, metrics = pipe.step(pipe.from_natural(before), batch)
        assert metrics["counts"]["router/bias"].std() > 0
        after = pipe.to_natural(state)["params"]
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before["params"], after)
        assert {*jax.tree.leaves(same)} == {not is_moved}
