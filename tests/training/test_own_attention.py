"""`ppctl.attention` in custom models: gradients in both executors, the device that chooses the
kernel, refusals.
"""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.selection import full

import ppctl
from ppctl.errors import ConfigError
from ppctl.model.attention import chunked_attention
from ppctl.model.attention.cudnn_attention import FORWARD
from ppctl.training.pipeline.user_code import custom_stack

H100 = SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0"
)
WIDTH, HEADS, LAYERS = 8, 2, 2


def plain(q, k, v):
    """Causal attention, as the formula has it."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[3] ** 0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def squared_error(outputs, targets):
    return jnp.square(outputs - targets).sum(), jnp.asarray(outputs.size, float)


def network(attend, mark=ppctl.stage_boundary):
    def init(key):
        shape = 4, WIDTH, WIDTH  # q, k, v, out
        return [
            jax.random.normal(jax.random.fold_in(key, i), shape, float) / WIDTH**0.5
            for i in range(LAYERS)
        ]

    def apply(params, x):
        for i, (q, k, v, out) in enumerate(params):
            heads = [(x @ w).reshape(*x.shape[:2], HEADS, -1) for w in (q, k, v)]
            x = x + attend(*heads).reshape(x.shape) @ out
            x = mark(x) if i < LAYERS - 1 else x
        return x

    return ppctl.Network(init, apply, squared_error)


@pytest.mark.full
@pytest.mark.parametrize(
    "how", [{"executor": "mpmd", "schedule": "zb_h1"}, full({"executor": "spmd"})], ids=str
)
def test_a_network_with_it_has_the_gradients_of_the_formula(how, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    draw = np.random.default_rng(0)
    batch = {name: draw.normal(size=(4, 10, WIDTH)) for name in ("inputs", "targets")}
    pipe = ppctl.pipeline(
        network(ppctl.attention("chunked")),
        **{"schedule": "1f1b", "num_microbatches": 2, **how},
        mesh=ppctl.mesh(pp=2),
        batch=batch,
        optimizer=optax.sgd(1e-2),
        dtype="float64",
    )
    state = pipe.init(seed=0)
    loss, grads = pipe.loss_and_grads(state, batch)
    whole = network(plain, mark=lambda x: x)

    def mean_loss(params):
        total, number = whole.loss(
            whole.apply(params, jnp.asarray(batch["inputs"])), batch["targets"]
        )
        return total / number

    of_author = lambda tree: pipe.stack.options.network.parameters.from_parts(
        jax.tree.map(np.asarray, tree)
    )
    wanted, wanted_grads = jax.jit(jax.value_and_grad(mean_loss))(
        of_author(pipe.to_natural(state)["params"])
    )
    assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
    for found, true in zip(*map(jax.tree.leaves, (of_author(grads), wanted_grads)), strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-10, atol=1e-12)


def test_attention_for_an_absent_gpu_is_cudnns():
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)

    def lowered(attend):
        traced = jax.jit(attend).trace(q, q, q)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert FORWARD in lowered(ppctl.attention(device=H100))
    assert FORWARD not in lowered(ppctl.attention(device=H100, window=8))  # unsupported by the call
    assert FORWARD not in lowered(ppctl.attention())


MODEL = """
import ppctl

def model(*, num_layers, dtype, data, {}):
    FOUND.append(device)
    return ppctl.mlp(num_layers=num_layers, d_model=4, input_dim=3, target_dim=2, dtype=dtype)

FOUND = []
"""


@pytest.mark.parametrize(
    ("named", "options", "gets"),
    [("device", {}, H100), ("device=None", {"device": "x"}, "x"), ("**rest", {}, None)],
)
def test_a_function_with_a_device_parameter_gets_the_device_unless_an_option_sets_it(
    named, options, gets, tmp_path, monkeypatch
):
    text = (
        MODEL.format(named)
        if "device" in named
        else MODEL.format(named).replace("(device)", "(rest.get('device'))")
    )
    (tmp_path / "model_of_gets.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"inputs": 3, "targets": 2}
    read = lambda numbers: {name: np.ones((len(numbers), n)) for name, n in sizes.items()}
    custom_stack(
        "model_of_gets.model",
        2,
        options,
        data=SimpleNamespace(read=read),
        dtype=jnp.dtype("float32"),
        device=H100,
    )
    (found,) = sys.modules["model_of_gets"].FOUND
    assert found == gets


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kernel": "flash"}, "kernel=flash is not one of auto, xla, chunked, cudnn, pallas"),
        ({"window": 0}, "window=0 is not a whole number from 1 to"),
        ({"softcap": -1.0}, r"softcap=-1.0 must be a finite number above 0"),
    ],
)
def test_impossible_arguments_of_attention_are_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        ppctl.attention(**asked)


def test_a_kernel_that_the_device_has_not_is_refused_where_it_is_called():
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(
        ConfigError, match=r"cudnn: cuDNN runs on NVIDIA GPUs, and the platform is cpu"
    ):
        ppctl.attention("cudnn")(q, q, q)
