"""The families of language models compared with what `transformers` computed of tiny ones:
tests/golden/models.
"""

from itertools import product

import jax
import numpy as np
import pytest
from support.golden_models import by_name, computed, expected_of, read_model
from support.oracle import ADAMW, CLIP_NORM, LR, MODELS, NUM_STEPS, cases, of_each, summary
from support.selection import full, full_except

import ppctl
from ppctl.training.pipeline import optimizers as optim
from ppctl.training.pipeline.optimizers import init_state

FIRST = ("llama3", "qwen2", "qwen3", "gemma2", "gemma3")  # the families that differ most
NAMES = sorted(MODELS, key=lambda name: name not in FIRST)


def compare(name, dtype, logits_within, loss_within, grads_within):
    expected = expected_of(name)
    inputs, targets = expected["ids"][:, :-1], expected["ids"][:, 1:]
    logits, loss, grads = computed(*read_model(name, dtype), inputs, targets, dtype)
    assert np.abs(logits - expected[f"logits_{dtype}"]).max() < logits_within
    assert np.std(logits) > 0.5  # absolute, of logits around 1
    assert loss == pytest.approx(float(expected[f"loss_{dtype}"]), rel=loss_within)
    assert_summaries(by_name(grads, name), expected, "grad", grads_within)


def assert_summaries(tensors, expected, kind, within):
    """All tensors of a model have the three numbers that are expected, relative to their norms."""
    assert len(tensors) == sum(key.startswith(f"{kind} ") for key in expected)
    for key, tensor in tensors.items():
        wanted = expected[f"{kind} {key}"]
        assert np.abs(summary(tensor) - wanted).max() < within * wanted[0], key


@pytest.mark.parametrize("name", full_except(NAMES, "llama3", "glm4_moe"))
def test_logits_loss_and_gradients_equal_transformers_in_float64(name):
    compare(name, "float64", 1e-9, 1e-10, 1e-8)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_equal_transformers_in_float32(name):
    compare(name, "float32", 1e-4, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("name", "case"), full_except([*product(MODELS, ("packed", "padded"))], ("gemma3", "packed"))
)
def test_packed_and_padded_sequences_have_the_logits_of_transformers(name, case):
    expected, given = expected_of(name), cases(name)[case]
    stack, params = read_model(name, "float64", packed=case == "packed")
    logits, loss, _ = computed(stack, params, given.inputs, given.targets, "float64")
    assert (
        np.abs(of_each(logits) - expected[f"{case}_logits"])[given.counts].max() < 1e-8
    )  # relative, of sums of 96 logits
    assert loss == pytest.approx(float(expected[f"{case}_loss"]), rel=1e-10)
    assert abs(loss - expected["loss_float64"]) > 1e-4


PIPELINES = {  # two stages or more, and four microbatches
    "llama3": {"mesh": (1, 2), "schedule": "1f1b"},
    "gemma3": {"mesh": (2, 3), "schedule": "zb_h1", "executor": "mpmd"},
    "qwen2": {"mesh": (1, 2), "schedule": "1f1b", "executor": "mpmd"},
    "gemma2": {"mesh": (2, 2), "schedule": "zb_h1"},
    **{
        name: {"mesh": (2, 2), "schedule": "1f1b"}
        for name in ("llama2", "mistral", "qwen3", "smollm2")
    },
    "mixtral": {"mesh": (1, 2, 2), "schedule": "1f1b"},
    "qwen3_moe": {"mesh": (1, 2, 2), "schedule": "zb_h1", "executor": "mpmd"},
    "olmoe": {"mesh": (1, 1, 2), "schedule": "gpipe"},
    "qwen2_moe": {"mesh": (2, 2, 1), "schedule": "1f1b", "executor": "mpmd"},
    "glm4_moe": {"mesh": (1, 3, 2), "schedule": "1f1b"},
}


def five_steps(name, mesh, dtype, **request):
    """Losses and gradient norms of five steps of a pipeline, and the parameters after them."""
    stack, params = read_model(name, dtype)
    ids = expected_of(name)["steps_ids"].astype(np.int32)
    batches = [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in ids]
    rate = optim.learning_rates(**LR)
    pipe = ppctl.pipeline(
        stack,
        mesh=ppctl.mesh(**dict(zip(("dp", "pp", "ep"), mesh, strict=False))),
        num_microbatches=4,
        batch=batches[0],
        optimizer=optim.adamw(rate, **ADAMW),
        clip_norm=CLIP_NORM,
        lr_schedule=rate,
        dtype=dtype,
        **request,
    )
    state, metrics = pipe.from_natural(init_state(params, pipe.optimizer)), []
    for batch in batches:
        state, found = pipe.step(state, batch)
        metrics.append((float(found["loss"]), float(found["grad_norm"])))
    return *np.array(metrics).T, jax.device_get(pipe.to_natural(state)["params"])


# PyTorch divides by the norm + 1e-6 where it clips, so that its steps in float64 are others by
# about 1e-8
@pytest.mark.parametrize("name", full_except([*PIPELINES], "llama3"))
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), full(("float64", 1e-6))])
def test_five_steps_of_a_pipeline_equal_a_pytorch_loop(name, dtype, within):
    expected = expected_of(name)
    losses, norms, params = five_steps(name, dtype=dtype, **PIPELINES[name])
    wanted = expected[f"steps_losses_{dtype}"]
    assert len(losses) == NUM_STEPS
    assert np.abs(losses - wanted).max() < within
    assert wanted[0] - wanted[-1] > 1  # it learns
    np.testing.assert_allclose(norms, expected[f"steps_norms_{dtype}"], rtol=within)
    assert norms.min() > CLIP_NORM  # clipping is active in every step
    # relative, of 5 steps of 0.01: where a gradient is near zero, its sign decides
    assert_summaries(by_name(params, name), expected, "steps_param", 10 * within)
