"""Custom models and data: they run, and misfits are refused in one line."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppctl import cli, config
from ppctl.config.code_digests import sources
from ppctl.config.groups.data_settings import CustomData
from ppctl.data.dataset import DataSet, fingerprint
from ppctl.errors import ConfigError
from ppctl.model.stack import init
from ppctl.training.pipeline.job import assemble, open_data
from ppctl.training.pipeline.user_code import custom_data, custom_stack

ROOT = Path(__file__).parents[2]
GOOD_MODEL = """
import jax, jax.numpy as jnp
from ppctl.model.stack import Stack

def model(*, num_layers, dtype, data, width=4, **changes):
    parts = {
        "init_embed_head": lambda key: {"w": jnp.ones((data.input_dim, width), dtype)},
        "init_layer": lambda key, index: jnp.ones((width, width), dtype),
        "embed": lambda w, inputs: inputs @ w["w"],
        "layer": lambda w, x: x @ w,
        "head": lambda w, x, targets: (jnp.sum(x), jnp.float32(x.size)),
    }
    BREAK
    return Stack(num_layers, *parts.values())
"""


FLAX_MODEL = """
import jax.numpy as jnp
from flax import nnx

import ppctl


class Rows(nnx.Module):
    def __init__(self, num_layers, data, param_dtype, rngs, width=4):
        how = {"rngs": rngs, "param_dtype": param_dtype}
        self.first = nnx.Linear(data.input_dim, width, **how)
        self.blocks = nnx.List([nnx.Linear(width, width, **how) for _ in range(num_layers)])
        self.last = nnx.Linear(width, data.target_dim, **how)

    def __call__(self, inputs):
        x = self.first(inputs)
        for number, block in enumerate(self.blocks):
            x = block(ppctl.stage_boundary(x) if number else x)
        return self.last(x)

    @staticmethod
    def loss(outputs, targets):
        return jnp.square(outputs - targets).sum(), jnp.asarray(outputs.size, outputs.dtype)


def made(rngs):
    return Rows(2, None, jnp.float32, rngs)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def rows(**changes):
    settings = {"batch_size": 4, "num_examples": 8, "input_dim": 3, "target_dim": 2, **changes}
    return DataSet(
        name="rows",
        source="",
        fingerprint=fingerprint(),
        seed=0,
        num_eval_examples=0,
        read=settings.pop(
            "read",
            lambda n: {
                "inputs": np.ones((len(n), 3), np.float32),
                "targets": np.ones((len(n), 2), np.float32),
            },
        ),
        **settings,
    )


def stack_of(here, broken="", **changes):
    name = f"m{len(list(here.iterdir()))}"
    (here / f"{name}.py").write_text(GOOD_MODEL.replace("BREAK", broken or "pass"))
    asked = {"num_layers": 8, "options": {}, **changes}
    return custom_stack(f"{name}.model", **asked, data=rows(), dtype=jnp.dtype("float32"))


def test_a_target_is_a_flax_module(here):
    """It gets rngs, sizes, data and dtypes; its parameters depend on the run's seed."""
    (here / "rows_in_flax.py").write_text(FLAX_MODEL)
    how = {"data": rows(), "dtype": jnp.dtype("float32")}
    stack = custom_stack("rows_in_flax.Rows", 3, {"width": 6}, **how)
    assert stack.num_layers == 3
    params = stack.options.network.parameters.from_parts(init(stack, 0))
    assert params["blocks"]["1"]["kernel"].shape == (6, 6)
    other = stack.options.network.parameters.from_parts(init(stack, 1))
    assert not np.array_equal(params["first"]["kernel"], other["first"]["kernel"])
    with pytest.raises(ConfigError, match=r"Rows does not accept the arguments .*depth"):
        custom_stack("rows_in_flax.Rows", 3, {"depth": 6}, **how)
    with pytest.raises(
        ConfigError, match=r"made takes no num_layers\. Leave model\.num_layers out"
    ):
        custom_stack("rows_in_flax.made", 3, {}, **how)


def test_targets_in_recipes_are_found_in_the_project_and_in_ppctl(here):
    (here / "recipes").mkdir()  # like in a project of `ppctl init`
    (here / "recipes/mine.py").write_text("def data(**given):\n    return [given]\n")
    with pytest.raises(ConfigError, match="returns a list, not a"):
        custom_data("recipes.mine.data", 4, 0.0, {}, seed=0)
    found = custom_data("recipes.documents.nabla.rows", 4, 0.0, {"num_layers": 2, "dim": 3}, seed=0)
    assert (found.num_examples, found.target_dim) == (4, 3)
    assert list(sources("recipes.documents.nabla.rows")) == ["recipes.documents.nabla"]
    with pytest.raises(ConfigError, match=r"there is no module recipes\.documents"):
        custom_data("recipes.documents.nothing.rows", 4, 0.0, {}, seed=0)


def test_init_layer_of_the_user_sets_the_parameters(here):
    weights = np.random.default_rng(0).standard_normal((3, 4, 4))
    stack = replace(
        stack_of(here, num_layers=3), init_layer=lambda key, index: jnp.asarray(weights)[index]
    )
    np.testing.assert_array_equal(init(stack, 5)["layers"], weights)
    broken = "parts['init_layer'] = lambda key, index: __import__('numpy').ones((8, 4, 4))[index]"
    with pytest.raises(ConfigError, match=r"init_layer fails: Tracer\w+ConversionError"):
        stack_of(here, broken)
    with pytest.raises(
        ConfigError, match=r"init_layer fails: TypeError: .* takes 1 positional argument but 2"
    ):
        stack_of(here, "parts['init_layer'] = lambda key: 0")


def test_options_reach_the_function(here):
    stack = stack_of(here, num_layers=3, options={"width": 7})
    assert stack.num_layers == 3
    assert stack.init_layer(None, 0).shape == (7, 7)


NETWORK = """
import jax.numpy as jnp
import ppctl

def model(*, num_layers, dtype, data, name="w"):
    def apply(params, x):
        x = ppctl.stage_boundary(x @ params[name])
        return x @ params["v"]
    init = lambda key: {"w": jnp.ones((3, 4), dtype), "v": jnp.ones((4, 2), dtype)}
    return ppctl.Network(init, apply, lambda y, targets: (jnp.sum(y), jnp.float32(y.size)))
"""


def test_a_function_with_marks_is_a_model(here):
    (here / "net.py").write_text(NETWORK)
    asked = {"data": rows(), "dtype": jnp.dtype("float32")}
    stack = custom_stack("net.model", 2, {}, **asked)
    assert (stack.num_layers, stack.are_alike) == (2, False)
    (here / "free.py").write_text(NETWORK.replace("num_layers, dtype", "dtype"))
    assert custom_stack("free.model", None, {}, **asked).num_layers == 2
    with pytest.raises(ConfigError, match=r"net.model takes model.num_layers layers, .* not set\."):
        custom_stack("net.model", None, {}, **asked)
    with pytest.raises(ConfigError, match=r"model.layers=auto cuts a Network into model.num_l"):
        custom_stack("free.model", None, {}, layers="auto", **asked)
    assert custom_stack("net.model", 1, {}, layers="auto", **asked).num_layers == 1
    with pytest.raises(
        ConfigError,
        match=r"model.target=net.model: apply has 1 stage_boundary marks, .* model.num_layers=3\. Leave",
    ):
        custom_stack("net.model", 3, {}, **asked)
    with pytest.raises(
        ConfigError, match=r"cutting it into layers fails: KeyError: 'u' \(net.py:7\)"
    ):
        custom_stack("net.model", 2, {"name": "u"}, **asked)
    with pytest.raises(
        ConfigError, match=r"returns a Stack, which already has layers: model.layers=auto is for"
    ):
        stack_of(here, layers="auto")
    (here / "net2.py").write_text(
        NETWORK.replace("(jnp.sum(y), jnp.float32(y.size))", "jnp.mean(y)")
    )
    with pytest.raises(
        ConfigError,
        match=r"the Network's loss, <lambda>, returns float32\[\]; it must return \(sum of",
    ):
        custom_stack("net2.model", 2, {}, **asked)


def test_a_network_takes_only_its_named_arguments(here):
    given = "*, num_layers, dtype, data, name"
    (here / "free.py").write_text(NETWORK.replace(given, "name").replace(", dtype)", ")"))
    stack = custom_stack("free.model", 2, {}, data=rows(), dtype=jnp.dtype("float32"))
    assert {str(a.dtype) for a in jax.tree.leaves(jax.eval_shape(lambda: init(stack, 0)))} == {
        "float32"
    }
    (here / "stack.py").write_text(
        GOOD_MODEL.replace("BREAK", "pass").replace(" dtype,", "").replace(", dtype)", ")")
    )
    (here / "stack.py").write_text((here / "stack.py").read_text().replace(", **changes", ""))
    with pytest.raises(
        ConfigError,
        match=r"makes parameters of float64, not of float32, and takes no dtype\. Let it take dtype",
    ):
        custom_stack("stack.model", 2, {}, data=rows(), dtype=jnp.dtype("float32"))
    assert custom_stack("stack.model", 2, {}, data=rows(), dtype=jnp.dtype("float64"))


def test_arrays_are_data_and_a_data_set_takes_all_settings(monkeypatch):
    arrays = {"inputs": np.ones((40, 3)), "targets": np.arange(40)}
    monkeypatch.setattr(
        "ppctl.training.pipeline.user_code._function", lambda key, target: lambda: arrays
    )
    data = custom_data("a.b", 4, 0.25, {}, seed=7)
    assert (data.batch_size, data.num_eval_examples, data.seed, data.input_dim) == (4, 10, 7, 3)
    assert data.source.startswith("data.target=a.b: 40 examples")
    monkeypatch.setattr(
        "ppctl.training.pipeline.user_code._function", lambda key, target: lambda batch_size: rows()
    )
    with pytest.raises(
        ConfigError,
        match="returns a DataSet, but does not take seed, eval_fraction, which would be",
    ):
        custom_data("a.b", 4, 0.0, {}, seed=0)


WRONG_MODELS = {
    "return 3": "returns a int, not a ppctl.model.stack.Stack",
    "return": "returns nothing, not a ppctl.model.stack.Stack",
    "num_layers += 1": "returns a Stack of 9 layers, but model.num_layers=8",
    "raise ValueError('no\\nmore')": r"calling it fails: ValueError: no \(m0.py:13\)",
    "parts['init_layer'] = lambda key, index: jnp.ones(3, int)": "init_layer has dtype int\\d+",
    "parts['embed'] = lambda w, inputs: inputs @ inputs": r"embed fails: TypeError: .*\(m0.py:13\)",
    "parts['embed'] = lambda w, inputs: (inputs, inputs)": r"embed returns \(float32.* must ret",
    "parts['embed'] = lambda w, inputs: inputs.sum()": r"embed returns float32\[\] for 2 examples",
    "parts['layer'] = lambda w, x: x[:, :2]": r"layer returns float32\[2, 2\] for float32",
    "parts['layer'] = lambda w, x: x.astype('bfloat16')": r"layer returns bfloat16\[2, 4\] for float",
    "parts['head'] = lambda w, x, targets: x.sum()": r"head returns float32\[\]; it must return",
    "parts['head'] = lambda w, x, targets: (x, 1.0)": r"head returns \(float32\[2, 4\], .*; it",
}


@pytest.mark.parametrize("broken", WRONG_MODELS)
def test_a_model_that_does_not_fit_is_refused(here, broken):
    with pytest.raises(ConfigError, match="^model.target=m0.model:? " + WRONG_MODELS[broken]):
        stack_of(here, broken)


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("nowhere.model", {}, "there is no module nowhere, neither in"),
        ("broken.model", {}, r"importing broken fails: SyntaxError: .* \(broken.py:1\)"),
        (
            "needs.model",
            {},
            "importing needs fails: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("plain.wrong", {}, "plain has no function wrong. It has other."),
        ("plain.other", {}, "does not accept the arguments num_layers, dtype, data: "),
        ("plain.other", {"data": 3}, "model.options.data is set by ppctl"),
    ],
)
def test_a_target_that_cannot_be_called_is_refused(here, target, options, said):
    (here / "broken.py").write_text("def model(:\n")
    (here / "needs.py").write_text("import not_there\n")
    (here / "plain.py").write_text("def other(x): ...\n")
    with pytest.raises(ConfigError, match=said):
        custom_stack(target, 8, options, data=rows(), dtype=jnp.dtype("float32"))


WRONG_DATA = {
    "3": "returns a int, not a ppctl.data.dataset.DataSet or a dict of arrays with inputs and "
    "targets",
    "rows(batch_size=2)": "makes batches of 2, but data.batch_size=4",
    "rows(num_examples=3)": "has 3 examples to train on, fewer than data.batch_size=4",
    "rows(read=lambda n: n)": "reads a ndarray; it must read a dict with inputs and targets",
    "rows(read=lambda n: {'inputs': n})": "reads inputs; it must read a dict",
    "rows(read=lambda n: {'inputs': n, 'targets': [1, 2]})": "reads targets of 2 examples as a li",
    "rows(read=lambda n: {'inputs': n, 'targets': n[:1]})": r"reads targets of 2 examples as int",
    "rows(read=lambda n: {'inputs': n, 'targets': n - n[0]})": "targets of example 1 differ",
    "rows(read=lambda n: 1 / 0)": "reading examples 0 and 1 fails: ZeroDivisionError: division",
}


@pytest.mark.parametrize("made", WRONG_DATA)
def test_data_that_do_not_fit_are_refused(monkeypatch, made):
    monkeypatch.setattr(
        "ppctl.training.pipeline.user_code._function",
        lambda key, target: lambda **given: eval(made),
    )
    with pytest.raises(ConfigError, match="^data.target=a.b:? " + WRONG_DATA[made]):
        custom_data("a.b", 4, 0.0, {}, seed=0)


def test_custom_models_and_data_combine_with_built_in_ones(here, monkeypatch):
    (here / "my.py").write_text(GOOD_MODEL.replace("BREAK", "pass"))
    asked = config.Config(
        model=config.CustomModel(target="my.model", num_layers=4),
        data=config.Regression(batch_size=8),
        schedule=config.Schedule("1f1b", 4),
        mesh=config.Mesh(1, 2, 1),
    )
    job = assemble(asked)
    assert job.pipe.stack.num_layers == 4
    monkeypatch.setattr(
        "ppctl.training.pipeline.user_code._function", lambda key, target: lambda **given: rows()
    )
    own = replace(
        asked, data=CustomData(target="a.b", batch_size=4), model=config.MLP(num_layers=4)
    )
    own = replace(own, schedule=config.Schedule("1f1b", 2))
    assert assemble(own).data.name == "rows"
    with pytest.raises(
        ConfigError, match="model=transformer needs token ids, but data=rows states no vocab_size"
    ):
        assemble(replace(own, model=config.Transformer()))
    assert open_data(own).num_examples == 8


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model=custom", "model.target"),
        ("model=custom model.target=x", "model.target=x is not the dotted path of a function"),
        (
            "model=custom model.target=a.b",
            "data=stdlib is cut into sequences, but model.seq_len=null. Set model.seq",
        ),
        (
            "model=custom model.target=a.b data=regression model.seq_len=3",
            "data=regression has no sequences to be cut",
        ),
        ("data=custom data.target=a-b.c", "data.target=a-b.c is not the dotted path"),
    ],
)
def test_wrong_requests_for_user_code_are_refused_in_one_line(line, said, capsys):
    assert cli.main(["train", *line.split()]) == 2
    assert said in capsys.readouterr().err
