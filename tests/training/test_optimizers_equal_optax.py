"""Any optimizer that treats each parameter by itself trains as plain optax on the author's tree.

The oracle is the un-pipelined model and optax on the tree that its author knows: a Network's by the
names of `init`, a Stack's with a list of layers. The full product prints its table with

    pytest -m full -s tests/training/test_optimizers_equal_optax.py
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import muon
from support import networks
from support.selection import full, full_except

import ppctl
from ppctl import config, transformer
from ppctl.model.mlp import mlp
from ppctl.training.pipeline.optimizers import MAKERS, make_optimizer

NUM_STEPS = 3
RNG = np.random.default_rng(0)


def matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def kinds(params):
    return jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "vector", params)


def falling(step):
    return 1e-2 * 0.5 ** jnp.asarray(step, float)  # optax's schedules compute in float32


def adafactor():
    return optax.adafactor(1e-2, min_dim_size_to_factor=4)


def by_entry(update):
    """An optimizer that changes each parameter's gradient, and descends along it."""
    of_tree = optax.stateless(lambda grads, params: jax.tree.map(update, grads))
    return optax.chain(of_tree, optax.sgd(1e-2))


def positions(a):
    return a * (1 + jax.lax.broadcasted_iota(a.dtype, a.shape, a.ndim - 1))


OF_ENTRIES = {  # padding would change them, or the place of an entry in a packed array
    "positions": by_entry(positions),
    "constants": by_entry(lambda a: a * np.linspace(0.5, 2, a.size).reshape(a.shape)),
    "number": by_entry(lambda a: a * jnp.ones_like(a).sum()),
    "statistic": by_entry(lambda a: a / jnp.sqrt(jnp.mean(a * a) + 1e-3)),
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, mask=matrices),
    "sgd": optax.sgd(falling, momentum=0.9),
    "lion": optax.lion(1e-3, mask=matrices),
    "lamb": optax.lamb(1e-2, mask=matrices),
    "lars": optax.lars(1e-1, weight_decay_mask=matrices, trust_ratio_mask=matrices),
    "adafactor": adafactor(),
    "muon": muon(1e-2),
    "zero_nans": optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 5),
    "multi_transform": optax.multi_transform(
        {"matrix": muon(1e-2), "vector": optax.sgd(1e-2)}, kinds
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(falling),
    **OF_ENTRIES,
    # one of each kind, dealt to the parameters by their sizes: many in one program
    "each": optax.multi_transform(
        {
            "0": optax.lamb(1e-2, mask=matrices),
            "1": muon(1e-2),
            "2": adafactor(),
            "3": optax.apply_if_finite(optax.lars(1e-1), 5),
        },
        lambda params: jax.tree.map(lambda a: str(sum(a.shape) % 4), params),
    ),
}
REQUESTS = {  # settings, where the defaults have none or change nothing in models this small
    config.SGD: {"momentum": 0.9},
    config.CustomOptim: {"target": "optax.contrib.adopt", "options": {"b1": 0.8}},
}
NAMED = {  # every optimizer of optim=NAME
    f"optim={request.name}": make_optimizer(request, 5)[0]
    for request in (kind(**REQUESTS.get(kind, {})) for kind in MAKERS)
}
OPTIMIZERS |= NAMED


def stack_mlp(dtype):
    return mlp(num_layers=5, d_model=8, activation="tanh", input_dim=3, target_dim=2, dtype=dtype)


def stack_transformer(dtype):
    sizes = {"num_layers": 3, "d_model": 8, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 12}
    return transformer(**sizes, vocab_size=15, activation="swiglu", dtype=dtype, tied=True)


def numbers(num_in, num_out):
    return {
        "inputs": RNG.standard_normal((16, num_in)),
        "targets": RNG.standard_normal((16, num_out)),
    }


IDS = RNG.integers(15, size=(16, 5)).astype(np.int32)
MODELS = {
    "Stack": (stack_mlp, numbers(3, 2)),
    "transformer": (stack_transformer, {"inputs": IDS[:, :-1], "targets": IDS[:, 1:]}),
    "Network": (lambda _: networks.widths(), numbers(6, 3)),
}
MESHES = {
    "Stack": {"pp": 2, "fsdp": 2},
    "transformer": {"pp": 2, "fsdp": 2, "tp": 2},
    "Network": {"pp": 2, "fsdp": 2},
}


def by_layer(params):
    num_layers = len(jax.tree.leaves(params["layers"])[0])
    layers = [jax.tree.map(lambda a, l=l: a[l], params["layers"]) for l in range(num_layers)]
    return params | {"layers": layers}


def plain_loss(stack, params, batch):
    x = stack.embed(params["embed_head"], batch["inputs"])
    for layer in params["layers"]:
        x = stack.layer(layer, x)
    total, number = stack.head(params["embed_head"], x, batch["targets"])
    return total / number


def plain_steps(loss, params, batch, optimizer):
    """(parameters, losses) of plain optax after NUM_STEPS steps."""

    def step(params, state):
        loss_now, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss_now

    step, state, losses = jax.jit(step), jax.jit(optimizer.init)(params), []
    for _ in range(NUM_STEPS):
        params, state, loss_now = step(params, state)
        losses.append(float(loss_now))
    return params, losses


def difference(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    each = (np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-9) for a, b in pairs)
    return float(max(each))


def compared(name, model, executor, dtype=jnp.float64, **how):
    """The largest relative difference to plain optax in float64, of a parameter or a loss.

    In float32 plain optax is no oracle: AdamW divides gradients of rounding by their size.
    """
    make, batch = MODELS[model]
    stack, optimizer = make(dtype), OPTIMIZERS[name]
    mesh = ppctl.mesh(**how.pop("mesh", MESHES[model]))
    given = {"batch": batch, "optimizer": optimizer, "executor": executor, "dtype": dtype}
    order = {"schedule": "1f1b", "num_microbatches": 4}
    pipe = ppctl.pipeline(stack, mesh=mesh, **order, **given, **how)
    state, losses = pipe.init(seed=0), []

    def authors(state):
        params = jax.device_get(pipe.to_natural(state)["params"])
        return (
            pipe.stack.options.network.parameters.from_parts(params)
            if model == "Network"
            else by_layer(params)
        )

    params = jax.device_get(authors(state))
    wide = make(jnp.float64)
    if model == "Network":
        of_batch = lambda p, b: jnp.divide(*wide.loss(wide.apply(p, b["inputs"]), b["targets"]))
    else:
        of_batch = lambda p, b: plain_loss(wide, p, b)
    for _ in range(NUM_STEPS):
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    exact = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    expected, plain_losses = plain_steps(of_batch, exact, batch, optimizer)
    found = authors(state)
    assert difference(found, params) > 1e-5, "the steps moved nothing"
    of_losses = max(abs(a / b - 1) for a, b in zip(losses, plain_losses, strict=True))
    return max(difference(found, expected), of_losses)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "executor"),
    [
        full(("Stack", "mpmd")),
        full(("Stack", "spmd")),
        full(("transformer", "spmd")),
        full(("transformer", "mpmd")),
        full(("Network", "spmd")),
        ("Network", "mpmd"),
    ],
)
def test_an_optimizer_of_each_kind_equals_plain_optax(model, executor):
    assert compared("each", model, executor) < 1e-10


# in `make test` any new optimizer; "each" has muon
OLD = "adamw", "sgd", "lion", "adafactor", "lamb", "custom", "muon"
OLD = tuple(f"optim={name}" for name in OLD)


@pytest.mark.parametrize("name", [full(name) if name in OLD else name for name in NAMED])
@pytest.mark.parametrize("executor", ["spmd", full("mpmd")])
def test_optimizers_by_name_equal_plain_optax_on_pp_fsdp_and_tp(name, executor):
    assert compared(name, "transformer", executor) < 1e-10


@pytest.mark.parametrize("name", full_except([*OF_ENTRIES], "number"))
@pytest.mark.parametrize(
    ("model", "executor", "how"),
    [
        ("Network", "spmd", {"mesh": {"pp": 4, "fsdp": 2}}),  # 5 layers over 4 ranks
        full(("Stack", "spmd", {"mesh": {"pp": 4}})),
        full(("Stack", "mpmd", {"mesh": {"pp": 4}})),
        # 15 ids over 2 ranks, then over 4 devices
        full(("transformer", "spmd", {"mesh": {"pp": 2}, "vocab": "parallel"})),
        full(("transformer", "spmd", {"mesh": {"pp": 2, "tp": 2}, "vocab": "parallel"})),
    ],
)
def test_an_optimizer_that_counts_or_places_entries_knows_no_padding(name, model, executor, how):
    assert compared(name, model, executor, **how) < 1e-10


@pytest.fixture(scope="module")
def table():
    """Rows (optimizer, model, executor, dtype, difference), printed at the end."""
    rows = []
    yield rows
    for row in rows:
        print("{:20s} {:12s} {:5s} {:8s} {:.1e}".format(*row))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "model", "executor", "dtype"),
    [
        *product(OPTIMIZERS, MODELS, ("spmd", "mpmd"), ["float64"]),
        *product(("adamw", "each"), MODELS, ("spmd", "mpmd"), ["float32"]),
    ],
)
def test_every_optimizer_equals_plain_optax(name, model, executor, dtype, table):
    found = compared(name, model, executor, jnp.dtype(dtype))
    table.append((name, model, executor, dtype, found))
    assert found < {"float64": 1e-10, "float32": 1e-5}[dtype]


def refused(optimizer, match, **how):
    make, batch = MODELS["Stack"]
    given = {"batch": batch, "optimizer": optimizer, "schedule": "1f1b", "num_microbatches": 4}
    with pytest.raises(ppctl.PpctlError, match=match):
        ppctl.pipeline(make(jnp.float64), mesh=ppctl.mesh(pp=2), **given, **how)


def test_an_optimizer_of_whole_parameters_is_refused_where_each_rank_updates_its_part():
    with pytest.raises(ppctl.PpctlError, match=r"needs whole parameters .* Use vocab=whole, or"):
        compared("number", "transformer", "mpmd", mesh={"pp": 2}, vocab="parallel")


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_a_norm_of_all_gradients_is_refused_with_the_argument_for_it(executor):
    match = r"depends on other parameters.*Use clip_norm=NORM"
    refused(CLIPPED, match, executor=executor)


@pytest.mark.parametrize(
    "labels",
    [
        {"embed_head": "rest", "layers": {"kernel": "clipped", "bias": "rest"}},
        lambda p: jax.tree.map(lambda a: "clipped" if a.shape == (8, 8) else "rest", p),
    ],
    ids=["tree", "function"],
)
def test_a_norm_of_one_parameter_over_all_layers_is_refused(labels):
    both = {"clipped": CLIPPED, "rest": optax.sgd(0.1)}
    refused(optax.multi_transform(both, labels), r"layers\.\S*kernel\S* depends on layers")


def test_random_numbers_are_refused():
    noise = optax.noisy_sgd(0.1, key=jax.random.key(0))
    refused(noise, "draws random numbers")


def test_rules_for_nan_that_would_contradict_are_refused():
    optimizer = optax.apply_if_finite(optax.chain(optax.zero_nans(), optax.sgd(0.1)), 3)
    refused(optimizer, "apply_if_finite and optax.zero_nans in one optimizer")
