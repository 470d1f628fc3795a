"""Predictions, losses and metrics of a pipeline equal plain JAX for any number of examples."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.selection import full

import ppctl

VOCAB, TOKENS = 16, 4
RNG = np.random.default_rng(0)
IDS = RNG.integers(VOCAB, size=(21, TOKENS + 1))
IDS[3, 2:] = IDS[20, 1:3] = -1  # padding of targets
BATCH = {"inputs": np.abs(IDS[:, :-1]), "targets": IDS[:, 1:]}


def are_right(logits, batch):
    """Tokens predicted right, of those with a target."""
    targets = batch["targets"]
    return logits.argmax(-1) == targets, targets >= 0


def make(model=None, **request):
    usual = {"mesh": ppctl.mesh(pp=2), "schedule": "1f1b", "num_microbatches": 2}
    usual |= {"batch": {name: a[:8] for name, a in BATCH.items()}, "dtype": "float64"}
    usual |= {"optimizer": optax.sgd(0.5), "metrics": {"accuracy": are_right}}
    sizes = {"num_layers": 4, "d_model": 8, "num_heads": 2, "vocab_size": VOCAB}
    stack = ppctl.transformer(dtype=jnp.float64, **sizes) if model is None else model
    return ppctl.pipeline(stack, **(usual | request))


def plain(stack, params):
    """Logits of BATCH, computed a layer at a time by hand."""
    x = stack.embed(params["embed_head"], BATCH["inputs"])
    for l in range(stack.num_layers):
        x = stack.layer_of(l)(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
    return stack.options.outputs(params["embed_head"], x)


def means(logits, number=21):
    """Mean loss and accuracy of the first examples."""
    logits, targets = logits[:number], BATCH["targets"][:number]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    counts = targets >= 0
    loss = (losses * counts).sum() / counts.sum()
    return loss, ((logits.argmax(-1) == targets) * counts).sum() / counts.sum()


@pytest.mark.parametrize(
    "request_",
    [
        full({"schedule": "zb_v", "executor": "mpmd", "mesh": {"pp": 2, "tp": 2}}),
        {"schedule": "interleaved", "num_chunks": 2, "mesh": {"dp": 2, "pp": 2}},
        full({"executor": "mpmd", "mesh": {"pp": 2, "fsdp": 2}, "post_validation": True}),
        full({"mesh": {"pp": 2, "tp": 2, "fsdp": 2}, "partition": [1, 3]}),
        full({"mesh": {"pp": 2, "cp": 2}}),
        full({"mesh": {"pp": 2, "tp": 2}, "vocab": "parallel"}),
        full({"mesh": {}, "executor": "reference"}),
    ],
    ids=str,
)
def test_predictions_losses_and_metrics_equal_plain_jax_for_any_number_of_examples(request_):
    pipe = make(**(request_ | {"mesh": ppctl.mesh(**request_["mesh"])}))
    state, compiled = pipe.init(seed=1), jax.jit(partial(plain, pipe.stack))
    first, params = {name: a[:8] for name, a in BATCH.items()}, jax.device_get(pipe.params(state))
    state, numbers = pipe.step(state, first)
    if request_.get("vocab") == "parallel":  # no rank has whole outputs
        assert "accuracy" not in numbers
    else:
        np.testing.assert_allclose(numbers["accuracy"], means(compiled(params), 8)[1], rtol=1e-12)
    params = jax.device_get(pipe.params(state))
    logits = compiled(params)
    loss, accuracy = means(logits)
    np.testing.assert_allclose(pipe.predict(state, BATCH["inputs"]), logits, atol=1e-12)
    found = pipe.evaluate(state, BATCH)
    assert {*found} == {"loss", "accuracy"}
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-12)
    np.testing.assert_allclose(found["accuracy"], accuracy, rtol=1e-12)
    for number in (3, 8, 21):
        part = {name: a[:number] for name, a in BATCH.items()}
        expected = means(logits, number)[0]
        np.testing.assert_allclose(pipe.loss(state, part), expected, rtol=1e-12)


@pytest.mark.full
def test_a_placed_batch_is_evaluated_as_one_on_the_host():
    pipe = make(mesh=ppctl.mesh(dp=2), schedule="gpipe")
    state, batch = pipe.init(seed=1), {name: a[:8] for name, a in BATCH.items()}
    placed = pipe.put(batch)
    assert placed["inputs"].shape[:2] == (2, 4), "microbatches, examples of each"
    outputs = pipe.predict(state, batch["inputs"])
    np.testing.assert_array_equal(pipe.predict(state, placed["inputs"]), outputs)
    assert pipe.evaluate(state, placed) == pipe.evaluate(state, batch)


def test_a_network_has_its_parameters_predictions_and_metrics_by_example():
    init = lambda key: {"w": jnp.eye(3), "b": jax.random.normal(key, (3,))}

    def apply(params, x):
        return jnp.tanh(ppctl.stage_boundary(x @ params["w"]) + params["b"])

    network = ppctl.Network(
        init, apply, lambda y, t: (((y - t) ** 2).sum(), jnp.asarray(1.0 * len(t)))
    )
    batch = {name: RNG.normal(size=(5, 3)) for name in ("inputs", "targets")}
    pipe = make(
        network,
        batch={name: np.zeros((4, 3)) for name in batch},
        metrics={"error": lambda y, batch: abs(y - batch["targets"]).max(axis=1)},
    )
    state = pipe.init(seed=2)
    params = pipe.params(state)
    assert {name: a.shape for name, a in params.items()} == {"w": (3, 3), "b": (3,)}
    y = apply(params, batch["inputs"])
    np.testing.assert_allclose(pipe.predict(state, batch["inputs"]), y, atol=1e-12)
    found = pipe.evaluate(state, batch)
    worst = np.abs(y - batch["targets"]).max(axis=1)
    np.testing.assert_allclose(found["error"], worst.mean(), rtol=1e-12)
    np.testing.assert_allclose(found["loss"], ((y - batch["targets"]) ** 2).sum() / 5, rtol=1e-12)


@pytest.mark.full
def test_parameters_of_a_stack_are_as_its_author_initialized_them():
    pipe = make(executor="mpmd", partition=[3, 1])
    first, second = jax.random.split(jax.random.key(3))
    expected = {
        "embed_head": pipe.stack.init_embed_head(first),
        "layers": jax.vmap(lambda l: pipe.stack.init_layer(jax.random.fold_in(second, l), l))(
            jnp.arange(4)
        ),
    }
    found = pipe.params(pipe.init(seed=3))
    assert jax.tree.all(jax.tree.map(partial(np.allclose, rtol=1e-12), found, expected))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": are_right}, "metrics has 'loss': function. Give functions by names other .*"),
        (
            {"mean": lambda y, b: are_right(y, b)[0].mean()},
            r"metric mean returns the shape \(\) .*",
        ),
        (
            {"wrong": lambda y, b: y["logits"]},
            r"metric wrong: metric\(outputs, {.targets.}\) fails: .*",
        ),
    ],
    ids=["reserved", "mean", "fails"],
)
def test_a_wrong_metric_is_refused_before_anything_is_compiled(metrics, message):
    with pytest.raises(ppctl.PpctlError, match=f"^{message}"):
        make(metrics=metrics)


@pytest.mark.full
def test_examples_of_other_shapes_are_refused():
    pipe = make()
    state = pipe.init()
    for inputs in (BATCH["inputs"][:, :2], BATCH["inputs"][:0], BATCH["inputs"][0]):
        with pytest.raises(
            ppctl.PpctlError, match=r"but the pipeline was made for .*, or another number"
        ):
            pipe.predict(state, inputs)
    with pytest.raises(ppctl.PpctlError, match="inputs hold 17, but token ids are"):
        pipe.predict(state, BATCH["inputs"] * 0 + 17)
