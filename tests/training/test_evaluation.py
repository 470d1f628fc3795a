"""Losses are means over all that is predicted: in steps over microbatches and replicas, in
evaluations over batches.
"""

import jax
import numpy as np
import optax
import pytest
from support.selection import full

import ppctl
from ppctl.data import DataSet
from ppctl.errors import DataError
from ppctl.executors.reference import outputs_of
from ppctl.model.cross_entropy import NO_TOKEN
from ppctl.training.pipeline.job import evaluate

VOCAB_SIZE, SEQ_LEN, BATCH_SIZE, NUM_BATCHES = 11, 6, 8, 4
LEARNED = np.array(
    [6, 0, 0, 1, 6, 5, 6, 6] + [1, 0] * 4 + [0] * 8 + [6] * 8
)  # targets of each example; none in batch 2


def examples(numbers):
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCAB_SIZE, (len(LEARNED), SEQ_LEN + 1)).astype(np.int32)
    is_learned = np.arange(SEQ_LEN) >= SEQ_LEN - LEARNED[:, None]  # after a prompt
    targets = np.where(is_learned, ids[:, 1:], np.int32(NO_TOKEN))
    return {"inputs": ids[numbers, :-1], "targets": targets[numbers]}


def held_out(first, num_batches):
    """Return a data set that holds out these batches, in some order."""
    size = num_batches * BATCH_SIZE
    read = lambda numbers: examples(first * BATCH_SIZE + numbers)
    return DataSet("prompts", "", "", BATCH_SIZE, 0, 0, size, read, vocab_size=VOCAB_SIZE)


def pipeline_of(executor, schedule, axes, **how):
    stack = ppctl.transformer(
        num_layers=2,
        d_model=8,
        num_heads=2,
        vocab_size=VOCAB_SIZE,
        activation="swiglu",
        dtype="float64",
    )
    pipe = ppctl.pipeline(
        stack,
        mesh=ppctl.mesh(**axes),
        schedule=schedule,
        num_microbatches=4,
        batch=examples(np.arange(BATCH_SIZE)),
        optimizer=optax.sgd(0.1),
        executor=executor,
        dtype="float64",
        **how,
    )
    pipe.compile(evaluate=True)
    return pipe


def losses_of(pipe, state, batch):
    """The loss of each target, in numpy from the logits."""
    params = jax.device_get(pipe.to_natural(state)["params"])
    logits = np.asarray(outputs_of(pipe.stack, dtype="float64")(params, batch["inputs"]))
    likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    is_target = batch["targets"] != NO_TOKEN
    picked = np.take_along_axis(
        likelihoods, np.where(is_target, batch["targets"], 0)[..., None], -1
    )[..., 0]
    return -picked[is_target]


@pytest.mark.full
@pytest.mark.parametrize(
    ("executor", "schedule", "axes", "how"),
    [
        ("spmd", "1f1b", {"dp": 2, "pp": 2}, {}),
        full(("mpmd", "zb_h1", {"pp": 2}, {})),
        full(("reference", "gpipe", {}, {})),
        full(("mpmd", "1f1b", {"dp": 2, "pp": 2}, {"post_validation": True, "clip_norm": 1.0})),
    ],
)
def test_losses_are_means_over_all_targets(executor, schedule, axes, how):
    pipe = pipeline_of(executor, schedule, axes, **how)
    state, begun = pipe.init(seed=1), pipe.engine.new_state(1)
    whole = examples(np.arange(NUM_BATCHES * BATCH_SIZE))
    wanted = losses_of(pipe, state, whole).mean()
    assert evaluate(pipe.engine, held_out(0, NUM_BATCHES), NUM_BATCHES, begun) == pytest.approx(
        wanted, rel=1e-12
    )
    uneven = examples(np.arange(BATCH_SIZE))  # 6, 1, 11 and 12 targets in its microbatches
    wanted = losses_of(pipe, state, uneven).mean()
    _, metrics = pipe.step(state, uneven)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-12)

    state, empty = pipe.init(seed=1), examples(np.arange(2 * BATCH_SIZE, 3 * BATCH_SIZE))
    before = jax.device_get(pipe.to_natural(state)["params"])
    assert float(pipe.loss(state, empty)) == 0
    with pytest.raises(
        DataError, match="data=prompts has no targets in the 1 batches of an evaluation"
    ):
        evaluate(pipe.engine, held_out(2, 1), 1, begun)
    state, metrics = pipe.step(state, empty)
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (0, 0)
    after = jax.device_get(pipe.to_natural(state)["params"])
    jax.tree.map(np.testing.assert_array_equal, after, before)
