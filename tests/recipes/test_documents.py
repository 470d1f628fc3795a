"""The recipes of documents: each number that a document states, against an oracle in plain JAX or NumPy in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.documents import answer, gradients
from support.selection import full_except

from ppctl import cli
from ppctl.config.config_dirs import ROOT
from ppctl.errors import ConfigError

BAR = 5e-4  # largest absolute difference for the documents on Nabla


# --- the commands of the table ------------------------------------------------------------------

README = (ROOT / "recipes/documents/README.md").read_text()
SHORT = dict(re.findall(r"`([A-Z]+)` (?:stands )?for `(.*?)`", README))
COMMANDS = sorted(set(re.findall(r"`(ppctl [^`]*)`", README)))
REFUSED = re.findall(r"`(ppctl [^`]*)` \| refused: ", README)


FIGURES = [each for each in COMMANDS if "schedule curves" in each]


@pytest.mark.parametrize("command", full_except(COMMANDS, *{*COMMANDS} - {*FIGURES[1:]}))
def test_commands_of_the_table_are_commands(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert SHORT.keys() == {"FB", "SMALL"}
    words = [each for word in command.split()[1:] for each in SHORT.get(word, word).split()]
    if words[0] == "schedule":
        assert cli.main(words) == 0
        if "--out" in words:  # items 10, 14; the curve of the loss is that of `ppctl report`
            assert (tmp_path / words[-1]).read_bytes().startswith(b"\x89PNG")
    elif words[0] != "report":
        expected = ConfigError.exit_code if command in REFUSED else 0
        assert cli.main([*words, "--cfg", "job"]) == expected
    capsys.readouterr()


# --- Nabla's examples 6 and 7 -------------------------------------------------------------------

NABLA = {  # recipe: microbatches of 4 rows; loss in float32 and float64; norms of the gradients
    "nabla_gpipe": (
        8,
        5540.2949,
        5540.294742,
        {"inputs": 1505.703604, "bias": 899.449464, "weight": 5672.052560},
    ),
    "nabla_2d": (
        4,
        3828.785,
        3828.784839,
        {"inputs": 1479.381130, "bias": 701.452819, "weight": 4618.127687},
    ),
}


def plain(num_microbatches):
    """Loss and gradients in float64 by the documents' own loop: numbers drawn, microbatches one
    after another.
    """
    random = np.random.RandomState(42)
    shapes = (4, 16, 16), (4, 16), (num_microbatches, 4, 16), (num_microbatches, 4, 16)
    w, b, x, y = (random.randn(*shape).astype(np.float32).astype(np.float64) for shape in shapes)

    def loss(x, w, b):
        predictions = []
        for microbatch in x:
            for s in range(4):
                microbatch = jax.nn.relu(microbatch @ w[s] + b[s])
            predictions.append(microbatch)
        return jnp.mean((jnp.stack(predictions) - y) ** 2)

    value, (dx, dw, db) = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w, b)
    return float(value), {"inputs": dx.reshape(-1, 16), "weight": dw, "bias": db}


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        pytest.param((), id="spmd"),
        pytest.param(("executor=mpmd", "schedule=1f1b"), id="mpmd", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("recipe", full_except([*NABLA], "nabla_gpipe"))
def test_the_gradients_of_a_nabla_example_equal_plain_jax(recipe, others):
    num_microbatches, _, stated, norms = NABLA[recipe]
    expected, grads = plain(num_microbatches)
    assert expected == pytest.approx(stated, abs=5e-7)
    loss, found = gradients(f"recipes={recipe}", *others)
    assert loss == pytest.approx(expected, rel=1e-12)
    for name, ours in (("inputs", found["embed_head"]["inputs"]), *found["layers"].items()):
        assert np.max(np.abs(ours - grads[name])) <= 1e-12 * np.max(np.abs(grads[name])), name
        assert np.linalg.norm(ours) == pytest.approx(norms[name], rel=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("recipe", NABLA)
def test_verify_finds_the_numbers_of_a_nabla_example(recipe, capsys):
    _, loss, _, norms = NABLA[recipe]
    found = answer(capsys, "verify", f"recipes={recipe}", "run.dtype=float32")
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert {leaf["name"].rpartition("/")[2] for leaf in found["gradients"]} == norms.keys()
    for leaf in found["gradients"]:
        assert leaf["max_difference"] < BAR
        assert leaf["error"] <= 1e-6
        assert leaf["norm"] == pytest.approx(norms[leaf["name"].rpartition("/")[2]], rel=1e-6)


@pytest.mark.full
def test_a_nabla_example_trains_to_the_loss_of_the_document(capsys, tmp_path):
    assert (
        cli.main(["train", "recipes=nabla_gpipe", "run.dtype=float32", f"run.dir={tmp_path}"]) == 0
    )
    printed = re.search(r"step 1/1  loss ([\d.]+)  grad_norm 5937.03", capsys.readouterr().out)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(
        NABLA["nabla_gpipe"][1], rel=1e-6
    )  # the last digit is the compiler's
