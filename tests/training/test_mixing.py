"""Models that mix the examples of a batch are found by trying, and refused unless that is meant."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.flax_models import heads_of_flax
from support.networks import NETWORKS, normal, rows_of, squared_error
from support.selection import full, full_except

import ppctl
from ppctl import cli
from ppctl.errors import ConfigError
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.stack import Stack
from ppctl.training.pipeline import mixing, pipeline
from ppctl.training.pipeline.mixing import few_examples, refuse_mixing, rounded_dtype

WIDTH = 6
ROWS = {
    name: np.random.default_rng(i).standard_normal((8, WIDTH))
    for i, name in enumerate(("inputs", "targets"))
}


def stack(layer=jnp.tanh, head=squared_error, out=1.0):
    """Two layers x + layer(x W), and a head whose weights are `out` times random ones; no     option declares mixing."""
    return Stack(
        2,
        init_embed_head=lambda key: {"w": out * normal(WIDTH, WIDTH)},
        init_layer=lambda key, index: {"w": normal(WIDTH, WIDTH)},
        embed=lambda embed_head, inputs: inputs,
        layer=lambda params, x: x + layer(x @ params["w"]),
        head=lambda embed_head, x, targets: head(x @ embed_head["w"], targets),
    )


def batch_norm(x):
    return (x - x.mean(axis=0)) / jnp.sqrt(x.var(axis=0) + 1e-5)


def layer_norm(x):
    return (x - x.mean(axis=1, keepdims=True)) / jnp.sqrt(x.var(axis=1, keepdims=True) + 1e-5)


def masked(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0.0)


def contrastive(outputs, targets):
    scores = outputs @ targets.T
    return -jnp.trace(jax.nn.log_softmax(scores)), jnp.asarray(len(scores), jnp.float64)


def mean_of_some(outputs, targets):
    counts = targets > 0
    return jnp.sum(counts * jnp.square(outputs - targets)) / counts.sum(), jnp.ones(())


def sum_of_some(outputs, targets):
    counts = targets > 0
    return jnp.sum(counts * jnp.square(outputs - targets)), counts.sum().astype(jnp.float64)


def mean(outputs, targets):
    return jnp.mean(jnp.square(outputs - targets)), jnp.ones(
        ()
    )  # for microbatches of one size: equal to the whole batch's


MIXING = {
    "batch norm": stack(batch_norm),
    "a mask by shape": stack(masked),
    "batch norm before a head of zeros": stack(batch_norm, out=0.0),
    "places": stack(lambda x: x * jnp.arange(len(x))[:, None]),
    "sizes": stack(lambda x: x / len(x)),
    "a loss between examples": stack(head=contrastive),
    "means of what counts": stack(head=mean_of_some),
}
APART = {
    "layer norm": stack(layer_norm),
    "sums of what counts": stack(head=sum_of_some),
    "means": stack(head=mean),
    "zeros": stack(out=0.0),
}


@pytest.mark.parametrize(("name", "number"), [*((name, 4) for name in MIXING), ("batch norm", 2)])
def test_a_model_that_mixes_examples_is_refused(name, number):
    batch = {key: a[:number] for key, a in ROWS.items()}
    expected = (
        f"^mine mixes the examples of a batch: the mean loss of {number} examples is [-.0-9e]+, "
        r"but [-.0-9e]+ in two microbatches and another order, so .* or use mixes_examples=True of "
        r"the Network or StackOptions if mixing is intended\.$"
    )
    with pytest.raises(ConfigError, match=expected):
        refuse_mixing("mine", MIXING[name], batch, jnp.dtype("float64"))


@pytest.mark.parametrize("name", full_except([*APART], "layer norm", "sums of what counts"))
@pytest.mark.parametrize("dtype", ["float64", full("float32"), full("bfloat16")])
def test_a_model_that_computes_each_example_by_itself_passes(name, dtype):
    batch = {key: a[:4].astype(jnp.promote_types(dtype, "float32")) for key, a in ROWS.items()}
    assert refuse_mixing("mine", APART[name], batch, jnp.dtype(dtype)) is None


@pytest.mark.parametrize("name", full_except([*NETWORKS], "widths"))
def test_networks_pass(name):
    network, num_layers, _ = NETWORKS[name]
    batch = rows_of(name, 4)
    inputs = jax.ShapeDtypeStruct(batch["inputs"].shape, batch["inputs"].dtype)
    cut = TracedNetwork(
        network(), num_layers, auto=False, inputs=inputs, dtype="float64", compute="float64"
    )
    assert refuse_mixing(name, stack_of(cut), batch, jnp.dtype("float64")) is None


def test_a_loss_that_is_not_finite_is_no_verdict():
    found = refuse_mixing(
        "mine",
        stack(lambda x: jnp.log(-jnp.abs(x))),
        few_examples(ROWS, ROWS),
        jnp.dtype("float64"),
    )
    assert found == "mine was not checked for mixing examples: their loss is nan."


def test_an_error_in_the_users_model_is_named_in_one_line():
    def picky(x):
        if len(x) == 2:
            raise ValueError("two are too few")
        return x

    batch = {key: a[:4] for key, a in ROWS.items()}
    with pytest.raises(
        ConfigError,
        match=r"^mine: its loss of a few examples fails: ValueError: two are too few \(test_",
    ):
        refuse_mixing("mine", stack(picky), batch, jnp.dtype("float64"))


def test_tried_examples_are_from_the_batch_or_random():
    shapes = {key: jax.ShapeDtypeStruct(a.shape, a.dtype) for key, a in ROWS.items()}
    for batch in (ROWS, {key: jnp.asarray(a) for key, a in ROWS.items()}):
        np.testing.assert_array_equal(few_examples(batch, shapes)["targets"], ROWS["targets"][:4])
    made_up = few_examples(shapes, shapes | {"inputs": jax.ShapeDtypeStruct((7, 5), jnp.int32)})
    assert made_up["inputs"].shape == (4, 5)
    assert set(np.unique(made_up["inputs"])) == {0, 1}
    assert len(np.unique(made_up["targets"], axis=0)) == 4
    odd = {key: jax.ShapeDtypeStruct((3, WIDTH), a.dtype) for key, a in shapes.items()}
    assert few_examples(ROWS, odd)["inputs"].shape == (2, WIDTH)


# --- from Python --------------------------------------------------------------------------------


def pipe_of(model, **request):
    usual = {"mesh": ppctl.mesh(pp=2), "num_microbatches": 2, "batch": ROWS, "dtype": "float64"}
    return ppctl.pipeline(model, optimizer=optax.sgd(0.1), **(usual | request))


def network(**changes):
    def apply(params, x):
        return batch_norm(ppctl.stage_boundary(jnp.tanh(x @ params[0]))) @ params[1]

    init = lambda key: [normal(WIDTH, WIDTH), normal(WIDTH, WIDTH)]
    return ppctl.Network(init, apply, squared_error, **changes)


@pytest.mark.parametrize(
    "batch", [ROWS, {key: jax.ShapeDtypeStruct(a.shape, a.dtype) for key, a in ROWS.items()}]
)
def test_a_pipeline_refuses_before_its_first_state(batch):
    with pytest.raises(
        ConfigError,
        match=r"^The model mixes .* or use mixes_examples=True of the Network or StackOptions if",
    ):
        pipe_of(network(), batch=batch).init()


def test_models_that_declare_mixing_are_not_tried(monkeypatch):
    monkeypatch.setattr(pipeline, "refuse_mixing", None)
    for model in (
        network(mixes_examples=True),
        stack(batch_norm).with_options(mixes_examples=True),
    ):
        assert pipe_of(model).check_examples("mine", ROWS) is None
    for model in (
        ppctl.mlp(num_layers=2, d_model=4, input_dim=WIDTH, target_dim=WIDTH),
        ppctl.transformer(num_layers=2, d_model=4, num_heads=2, vocab_size=5),
    ):
        assert model.options.mixes_examples is False
    whole = pipe_of(stack(batch_norm), num_microbatches=1)  # its examples are computed together
    assert whole.check_examples("mine", ROWS) is None


def test_large_models_are_not_tried_with_a_note(monkeypatch):
    monkeypatch.setattr(pipeline, "MOST_BYTES", 100)
    text = "The model was not checked for mixing .* take 864 B, more than the 100 B allowed"
    with pytest.warns(UserWarning, match=text):
        pipe_of(stack()).init()


# --- from the command line ----------------------------------------------------------------------

MODEL = """
import jax, jax.numpy as jnp
import ppctl

def model(*, num_layers, dtype, data, mixes):
    init = lambda key: [jax.random.normal(key, (3, n), dtype) for n in (3, 2)]
    norm = lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) if mixes else x
    apply = lambda params, x: ppctl.stage_boundary(norm(jnp.tanh(x @ params[0]))) @ params[1]
    loss = lambda y, t: (jnp.square(y - t).sum(), jnp.asarray(y.size, y.dtype))
    return ppctl.Network(init, apply, loss)
"""
ASKED = [
    *(
        "model=custom",
        "model.target=mixing_net.model",
        "model.num_layers=2",
        "mesh=2x2",
        "schedule=1f1b",
    ),
    *(
        "data=regression",
        "data.num_features=3",
        "data.num_targets=2",
        "data.num_rows=4000",
        "data.batch_size=8",
    ),
    *("schedule.num_microbatches=2", "run.platform=cpu"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mixing_net.py").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize("command", ["train", full("verify"), full("doctor")])
def test_a_model_that_mixes_examples_is_refused_in_one_line_without_files(command, here, capsys):
    code = cli.main([command, *ASKED, "+model.options.mixes=true"])
    captured = capsys.readouterr()
    line = " ".join((captured.out + captured.err).split())
    assert code == (1 if command == "doctor" else 2)
    assert (
        "model.target=mixing_net.model mixes the examples of a batch: the mean loss of 4 "
        "examples is" in line
    )
    if command != "doctor":
        assert captured.err.count("\n") == 1
        assert not (here / "runs").exists()


@pytest.mark.full
def test_declared_mixing_is_verified_on_the_devices_microbatches(here, capsys):
    """Also with data parallelism, which divides a batch too."""
    asked = [*ASKED, "+model.options.mixes=true", "model.mixes_examples=true", "verify.steps=1"]
    assert cli.main(["verify", *asked]) == 0
    assert "equal within 1e-10" in capsys.readouterr().out


@pytest.mark.full
def test_a_model_too_large_to_try_trains_with_a_note(here, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "MOST_BYTES", mixing.NUM_TRIED)
    asked = [
        *ASKED,
        "+model.options.mixes=false",
        "run.num_steps=1",
        "run.eval_every=null",
        "run.trackers=[]",
    ]
    for command in ("train", "verify", "doctor"):
        assert cli.main([command, *asked]) in (0, 1)  # doctor may find a machine too slow
        assert "model.target=mixing_net.model was not checked for mixing the examples" in " ".join(
            capsys.readouterr().out.split()
        )


def test_only_casts_of_flax_modules_widen_a_tolerance():
    """Products in 8 bits cast, too, but equally with and without a pipeline."""
    ids = {name: np.zeros((4, 6), np.int32) for name in ("inputs", "targets")}
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "vocab_size": 16, "dtype": "float64"}
    products = ppctl.transformer(**sizes, linear_dtype="fp8")
    assert rounded_dtype(products, ids, jnp.dtype("float64")) == jnp.float64

    assert rounded_dtype(heads_of_flax(), ids, jnp.dtype("float64")) == jnp.float32
