"""A loss attached anywhere trains as one written into the loss, and is reported apart from it.

The oracle is a plain JAX model whose loss is written out, in float64.
"""

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
from ppctl.model.stack import init as ppctl_init

L, D, BATCH = 4, 6, 16
TOLERANCE = 1e-12


def spread(x):
    """The sum over examples of a loss of the activation."""
    return 0.1 * jnp.square(jax.nn.logsumexp(x, axis=-1)).sum()


def late(embed_head, x):
    return 0.2 * jnp.tanh(x @ embed_head["out"]).sum()


def size(w):
    return lambda x: 0.3 * jnp.abs(x @ w).sum()


def attaching_stack(attach=ppctl.attach_loss):
    """A stack whose layers attach two losses, one of them in an inner scan that JAX traces once.
    The embedding attaches one of these too, the head another one.
    """

    def init_embed_head(key):
        first, second = jax.random.split(key)
        return {"in": jax.random.normal(first, (3, D)), "out": jax.random.normal(second, (D, 2))}

    def layer(w, x):
        x = attach(x, spread(x), name="spread")
        turn = lambda x, part: (attach(x, size(part)(x), name="size"), None)
        x, _ = jax.lax.scan(turn, x, w["gate"].reshape(2, D, -1).transpose(0, 1, 2))
        return x + jnp.tanh(x @ w["up"])

    def init_layer(key, _):
        up, gate = jax.random.split(key)
        return {"up": jax.random.normal(up, (D, D)) / 3, "gate": jax.random.normal(gate, (2, D, 2))}

    def embed(embed_head, inputs):
        x = inputs @ embed_head["in"]
        return attach(x, spread(2 * x), name="spread")

    def head(embed_head, x, targets):
        x = attach(x, late(embed_head, x), name="late")
        errors = x @ embed_head["out"] - targets
        return jnp.square(errors).sum(), jnp.asarray(errors.size, errors.dtype)

    options = ppctl.StackOptions(mixes_examples=False)
    return ppctl.Stack(L, init_embed_head, init_layer, embed, layer, head, options)


def make_batch():
    rng = np.random.default_rng(0)
    return {"inputs": rng.standard_normal((BATCH, 3)), "targets": rng.standard_normal((BATCH, 2))}


@cache
def written_out():
    """(main loss, attached losses by name, gradients of their sum), each over the number of losses,
    and the parameters.
    """
    found, batch = {}, make_batch()

    def collect(x, loss, name):
        found[name] = found.get(name, 0) + loss
        return x

    def total(params):
        found.clear()
        embed_head, x = params["embed_head"], batch["inputs"] @ params["embed_head"]["in"]
        x = collect(x, spread(2 * x), "spread")
        for l in range(L):
            w = jax.tree.map(lambda a, l=l: a[l], params["layers"])
            x = collect(x, spread(x), "spread")
            for part in w["gate"]:
                x = collect(x, size(part)(x), "size")
            x = x + jnp.tanh(x @ w["up"])
        x = collect(x, late(embed_head, x), "late")
        errors = x @ embed_head["out"] - batch["targets"]
        main, number = jnp.square(errors).sum(), errors.size
        losses = {name: a / number for name, a in found.items()} | {"loss": main / number}
        return sum(losses.values()), losses

    params = jax.jit(lambda: ppctl_init(attaching_stack(), 0))()
    params = jax.tree.map(lambda a: a.astype(jnp.float64), params)
    grads, losses = jax.jit(jax.grad(total, has_aux=True))(params)
    return losses, grads, params


def error(found, expected):
    return max(
        float(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b)))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


def check(mesh, **how):
    losses, grads, params = written_out()
    how = {"num_microbatches": 4, "optimizer": optax.sgd(0.1), "dtype": jnp.float64} | how
    pipe = ppctl.pipeline(attaching_stack(), mesh=ppctl.mesh(**mesh), batch=make_batch(), **how)
    state = state_of(pipe, params)
    loss, found = pipe.loss_and_grads(state, make_batch())
    assert error((loss, found), (losses["loss"], grads)) <= TOLERANCE
    _, metrics = pipe.step(state, make_batch())
    assert {*metrics} == {"loss", "grad_norm", "spread", "size", "late"}
    assert error({name: metrics[name] for name in losses}, losses) <= TOLERANCE
    assert error(metrics["grad_norm"], np.asarray(optax.tree.norm(grads))) <= TOLERANCE


CASES = [
    ({"pp": 2}, {"schedule": "1f1b", "remat": "none"}),
    ({"dp": 2, "pp": 2}, {"schedule": "zb_h1", "remat": "layer", "partition": [3, 1]}),
    ({"pp": 2, "fsdp": 2}, {"schedule": "zb_h1", "executor": "mpmd", "remat": "full"}),
    ({}, {"schedule": "gpipe", "executor": "reference", "remat": "layer"}),
]
ALL = [
    ({"dp": dp, "pp": 2, "fsdp": fsdp}, {"schedule": s, "executor": e, "remat": r, "gather": g})
    for dp, fsdp, g in ((2, 1, "step"), (1, 2, "layer"))
    for s, e in (("1f1b", "spmd"), ("interleaved", "spmd"), ("zb_v", "spmd"), ("zb_h1", "mpmd"))
    for r in ("none", "layer", "full")
]


@pytest.mark.parametrize(("mesh", "how"), [CASES[0], *map(full, CASES[1:])])
def test_equals_the_loss_written_out(mesh, how):
    check(mesh, **how)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), ALL)
def test_equals_the_loss_written_out_everywhere(mesh, how):
    check(mesh, **how)


def as_network():
    """The same model as a function that is cut at marks."""
    stack = attaching_stack()

    def init(key):
        params = ppctl_init(stack, 0)
        return {"embed_head": params["embed_head"], "layers": unstacked(params["layers"])}

    def apply(params, inputs):
        x = stack.embed(params["embed_head"], inputs)
        for l, w in enumerate(params["layers"]):
            x = stack.layer(w, ppctl.stage_boundary(x) if l else x)
        x = ppctl.attach_loss(x, late(params["embed_head"], x), name="late")
        return x @ params["embed_head"]["out"]

    plain = attaching_stack(lambda x, loss, name: x)
    return ppctl.Network(
        init, apply, lambda y, targets: plain.head({"out": jnp.eye(2)}, y, targets)
    )


def unstacked(layers):
    return [jax.tree.map(lambda a, l=l: a[l], layers) for l in range(L)]


@pytest.mark.parametrize(
    "how", [full({"executor": "mpmd", "schedule": "zb_h1"}), full({"schedule": "1f1b"})]
)
def test_a_network_attaches_losses(how):
    losses, grads, _ = written_out()
    how = {"num_microbatches": 4, "optimizer": optax.sgd(0.1), "dtype": jnp.float64} | how
    pipe = ppctl.pipeline(as_network(), mesh=ppctl.mesh(pp=2), batch=make_batch(), **how)
    state = pipe.init()
    _, found = pipe.loss_and_grads(state, make_batch())
    found = pipe.stack.options.network.parameters.from_parts(found)
    expected = {"embed_head": grads["embed_head"], "layers": unstacked(grads["layers"])}
    assert error(found, expected) <= TOLERANCE
    _, metrics = pipe.step(state, make_batch())
    assert error({name: metrics[name] for name in losses}, losses) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("executor", [full("reference"), "mpmd", full("spmd")])
def test_attached_losses_are_means_over_the_units_of_a_network(executor):
    losses, _, params = written_out()
    twice = replace(as_network(), divisors=lambda inputs, targets: (targets.size, 2 * targets.size))
    pipe = one_step(twice, executor=executor, dtype=jnp.float64)
    state = pipe.init()
    _, grads = pipe.loss_and_grads(state, make_batch())
    _, metrics = pipe.step(state, make_batch())
    halves = {name: a if name == "loss" else a / 2 for name, a in losses.items()}
    assert error({name: metrics[name] for name in losses}, halves) <= TOLERANCE
    half = attaching_stack(lambda x, loss, name: ppctl.attach_loss(x, loss / 2, name=name))
    plain = one_step(half, executor="reference")
    _, wanted = plain.loss_and_grads(state_of(plain, params), make_batch())
    found = pipe.stack.options.network.parameters.from_parts(grads)
    expected = {"embed_head": wanted["embed_head"], "layers": unstacked(wanted["layers"])}
    assert error(found, expected) <= TOLERANCE


def one_step(stack, **how):
    how = {"num_microbatches": 4, "optimizer": optax.sgd(0.1), "schedule": "gpipe"} | how
    mesh = ppctl.mesh(pp=1 if how.get("executor") == "reference" else 2)
    return ppctl.pipeline(stack, mesh=mesh, batch=make_batch(), **how)


def test_a_metric_with_the_name_of_an_attached_loss_is_refused():
    stack = attaching_stack()
    named = {"metrics": {"size": lambda y, batch: y[:, 0]}}
    options = replace(stack.options, outputs=lambda e, x: x @ e["out"])
    with pytest.raises(ppctl.PpctlError, match="metrics has 'size', the name of an attached"):
        one_step(replace(stack, options=options), **named)


def test_ranks_that_divide_the_vocabulary_attach_losses_only_in_layers():
    stack = ppctl.transformer(num_layers=2, d_model=8, num_heads=2, vocab_size=8)
    head = lambda e, x, *rest: stack.head(e, ppctl.attach_loss(x, x.sum(), name="late"), *rest)
    divided = lambda axes: replace(stack.options.divided(axes), head=head)
    tokens = np.zeros((4, 8), np.int32)
    how = {"mesh": ppctl.mesh(pp=2), "optimizer": optax.sgd(0.1), "num_microbatches": 2}
    with pytest.raises(ppctl.PpctlError, match="they cannot attach losses or take a key"):
        ppctl.pipeline(
            replace(stack.with_options(divided=divided), head=head),
            batch={"inputs": tokens, "targets": tokens},
            schedule="1f1b",
            vocab="parallel",
            **how,
        )


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (
            lambda x: ppctl.attach_loss(x, x.sum(-1), name="rows"),
            r"needs a floating scalar, not float64\[4\]",
        ),
        (
            lambda x: ppctl.attach_loss(x, x.sum(), name="lr"),
            r"attach_loss\(lr\): the name is reserved",
        ),
        (
            lambda x: ppctl.attach_loss(x, x.sum(), name="a_s"),
            r"attach_loss\(a_s\): the name is reserved",
        ),
    ],
)
def test_a_wrong_attached_loss_is_refused_in_one_line(attach, message):
    stack = attaching_stack(lambda x, loss, name: x)
    with pytest.raises(ppctl.PpctlError, match=message) as error:
        one_step(replace(stack, layer=lambda w, x: attach(x)))
    assert "\n" not in str(error.value)
