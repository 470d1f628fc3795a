"""The train steps of `ppctl verify`: right ones pass, and a fault planted in any part of a step
does not.
"""

import json
import re
from dataclasses import replace

import jax
import optax
import pytest
from support.selection import full_except

from ppctl import config
from ppctl.cli.commands import verify
from ppctl.training.pipeline import optimizers, optimizers as optim
from ppctl.training.pipeline.engines.mpmd_engine import PostValidated
from ppctl.training.pipeline.engines.one_program import OneProgram
from ppctl.training.verification import verification

SPMD = config.Config(
    model=config.MLP(num_layers=3, d_model=4),
    mesh=config.Mesh(1, 2, 1),
    schedule=config.Schedule("1f1b", 2),
    executor=config.Spmd(),
    optim=config.AdamW(warmup_steps=3),
    data=config.Regression("regression", batch_size=4, num_features=3, num_targets=2, num_rows=400),
    run=config.Run(num_steps=20, eval_batches=2),
)
MPMD = replace(
    SPMD, schedule=config.Schedule("zb_h1", 2), executor=config.Mpmd(post_validation=True)
)
AVERAGED = replace(SPMD, optim=config.AdamW(warmup_steps=3, ema=0.9))


def verified(request, capsys):
    """Return (exit code, the comparison of the train steps)."""
    code = verify.verify(request, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    return code, found["training"]


def clipped_steps(found):
    return [step["is_clipped"] for step in found["steps"]]


@pytest.mark.full
def test_steps_without_a_barrier_are_undone_and_let_stand(capsys):
    assert verify.verify(MPMD, as_json=False) == 0
    shown = capsys.readouterr().out
    assert re.search(r"clipping  at \S", shown)
    assert re.search(r"step +loss +reference +error +grad_norm +error +lr +error +clipped", shown)
    assert re.search(
        r"eval      \S+, reference \S+, relative error \d\.\de[+-]\d\d, of 2 batches", shown
    )
    assert "equal within 1e-10 (float64)" in shown


PASSING = {
    "sgd": replace(SPMD, optim=config.SGD(momentum=0.9, warmup_steps=0)),
    "unclipped": replace(
        SPMD, optim=config.AdamW(clip_norm=None), run=config.Run(num_steps=20, eval_every=None)
    ),
    "float32": replace(
        SPMD,
        mesh=config.Mesh(2, 2, 1),
        run=config.Run(num_steps=20, dtype="float32", eval_batches=2),
    ),
    "bfloat16": replace(SPMD, run=config.Run(num_steps=20, dtype="bfloat16", eval_batches=2)),
    "reference": replace(
        SPMD, mesh=config.Mesh(), executor=config.Reference(), verify=config.Verify(steps=1)
    ),
    "average": replace(MPMD, optim=AVERAGED.optim, run=replace(SPMD.run, on_nonfinite="skip")),
    "longer than the run": replace(
        MPMD,
        executor=config.Mpmd(),
        verify=config.Verify(steps=5),
        run=config.Run(num_steps=2, eval_batches=2),
    ),
}


@pytest.mark.parametrize("request_", full_except(PASSING))
def test_right_steps_pass(request_, capsys):
    code, found = verified(request_, capsys)
    assert code == 0
    assert len(found["steps"]) == request_.verify.steps
    assert (found["eval_loss"] is None) == (request_.run.eval_every is None)
    assert any(clipped_steps(found)) == (request_.optim.clip_norm is not None)
    if request_.verify.steps > 1 and request_.optim.clip_norm is not None:
        assert not all(clipped_steps(found))  # both branches ran
    names = {leaf["name"] for leaf in found["state"]}
    assert {"params/layers/kernel", "params/embed_head/head/kernel", "step"} <= names
    if isinstance(request_.optim, config.AdamW):
        assert {"optimizer/0/mu/layers/kernel", "optimizer/0/nu/layers/kernel"} <= names
    assert ("average/layers/kernel" in names) == (request_.optim.ema is not None)


# --- faults -------------------------------------------------------------------------------------


def unclipped(monkeypatch):
    keep = lambda updates, state, params=None, **_: (updates, state)
    transformation = optax.GradientTransformationExtraArgs(optax.init_empty_state, keep)
    monkeypatch.setattr(optim, "clip_by_norm", lambda max_norm: transformation)


def clipped_a_little_late(monkeypatch):
    right = optim.clip_by_norm
    monkeypatch.setattr(optim, "clip_by_norm", lambda max_norm: right(max_norm * (1 + 1e-6)))


def steps_that_are_not_counted(monkeypatch):
    right = optimizers.apply_gradients

    def changed(optimizer, state, *rest, **how):
        return right(optimizer, state, *rest, **how) | {"step": state["step"]}

    monkeypatch.setattr(optimizers, "apply_gradients", changed)


def layers_of_a_rank_that_stay(monkeypatch):
    right = optimizers.apply_gradients

    def changed(optimizer, state, *rest, **how):
        found = right(optimizer, state, *rest, **how)
        before, after = (
            state["params"]["layers"],
            found["params"]["layers"],
        )  # staged: [V, P, K, ...]
        layers = jax.tree.map(lambda a, b: b.at[:, 1].set(a[:, 1]), before, after)
        return found | {"params": found["params"] | {"layers": layers}}

    monkeypatch.setattr(optimizers, "apply_gradients", changed)


def evaluation_of_other_parameters(monkeypatch):
    right = OneProgram.loss
    shrunk = lambda state: (
        state | {"params": jax.tree.map(lambda a: a * (1 - 1e-6), state["params"])}
    )
    monkeypatch.setattr(
        OneProgram, "loss", lambda self, state, batch: right(self, shrunk(state), batch)
    )


def evaluation_of_parameters_without_their_average(monkeypatch):
    monkeypatch.setattr(OneProgram, "averaged", lambda self, state: state)


def batches_that_are_not_evaluated(monkeypatch):
    right = verification.evaluate
    fewer = lambda engine, data, num_batches, state: right(engine, data, num_batches - 1, state)
    monkeypatch.setattr(verification, "evaluate", fewer)


def a_norm_of_layers_alone(monkeypatch):
    right = optimizers.global_norm
    monkeypatch.setattr(optimizers, "global_norm", lambda tree: right(tree["layers"]))


def never_undone(monkeypatch):
    monkeypatch.setattr(PostValidated, "clips", lambda self, norm: False)


def undone_from_the_next_state(monkeypatch):
    right = PostValidated.settled

    def changed(self, attempt):
        if attempt.before is not None:
            attempt.before = attempt.state
        return right(self, attempt)

    monkeypatch.setattr(PostValidated, "settled", changed)


def begun_from_the_wrong_state(monkeypatch):
    """The step after an undone one continues from the discarded update."""
    wrong = lambda self, state, batch: self.run_step(self.walk("try"), state.state, batch)
    monkeypatch.setattr(PostValidated, "step", wrong)


def a_rank_that_updates_twice(monkeypatch):
    right = optimizers.apply_gradients

    def changed(optimizer, state, grads, *rest, **how):
        once = right(optimizer, state, grads, *rest, **how)
        is_first = "embed" in state["params"]["embed_head"]
        twice = right(optimizer, once, grads, *rest, **how)["params"]
        return once | {"params": twice} if is_first else once

    monkeypatch.setattr(optimizers, "apply_gradients", changed)


FAULTS = [
    (SPMD, layers_of_a_rank_that_stay),
    (MPMD, never_undone),
    (SPMD, unclipped),
    (SPMD, clipped_a_little_late),
    (SPMD, steps_that_are_not_counted),
    (SPMD, evaluation_of_other_parameters),
    (AVERAGED, evaluation_of_parameters_without_their_average),
    (SPMD, batches_that_are_not_evaluated),
    (SPMD, a_norm_of_layers_alone),
    (MPMD, undone_from_the_next_state),
    (MPMD, begun_from_the_wrong_state),
    (MPMD, a_rank_that_updates_twice),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("request_", "fault"),
    full_except(
        {fault.__name__: (request, fault) for request, fault in FAULTS},
        "layers_of_a_rank_that_stay",
    ),
)
def test_a_planted_fault_is_found(request_, fault, monkeypatch, capsys):
    fault(monkeypatch)
    assert verified(request_, capsys)[0] == 1


@pytest.mark.full
def test_gradients_of_only_rounding_errors_are_equal(capsys):
    """Of one token attention is 1: the gradients of queries and keys are 0, over tp exactly."""
    model = config.Transformer(
        num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, seq_len=1, attention="chunked"
    )
    data = config.Synthetic(
        "synthetic", batch_size=8, vocab_size=13, num_sequences=64, eval_fraction=0.25
    )
    run = replace(SPMD.run, eval_batches=1)
    request = replace(SPMD, model=model, data=data, run=run, mesh=config.Mesh(1, 2, 1, tp=2))
    code = verify.verify(request, as_json=True)
    found = json.loads(capsys.readouterr().out)
    (query,) = (each for each in found["gradients"] if each["name"].endswith("query/kernel"))
    assert 0 < query["max_difference"] < 1e-15
    assert code == 0


@pytest.mark.full
def test_errors_above_the_tolerance_are_marked(monkeypatch, capsys):
    layers_of_a_rank_that_stay(monkeypatch)
    assert verify.verify(SPMD, as_json=False) == 1
    shown = capsys.readouterr().out
    assert re.search(
        r"worst params/layers/(kernel|bias), \d\.\de[+-]\d\d ! of its largest change in layer [12]",
        shown,
    )
    assert "NOT EQUAL within 1e-10 (float64)" in shown
