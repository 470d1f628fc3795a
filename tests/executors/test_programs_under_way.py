"""Calls whose results nobody reads: on CPU, too many programs under way would wait forever."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import make_stack
from support.equality import make_pipe

import ppctl
from ppctl.executors.programs_under_way import MOST_STARTED, ProgramsUnderWay

CALLS = 2 * MOST_STARTED


class Result:
    """A program's result that remembers that somebody waited for it."""

    def __init__(self):
        self.is_awaited = False

    def block_until_ready(self):
        self.is_awaited = True


def test_the_oldest_of_too_many_programs_is_awaited():
    under_way, results = ProgramsUnderWay(ppctl.mesh(fsdp=2)), [Result() for _ in range(CALLS)]
    for number, result in enumerate(results, 1):
        under_way.add(result)
        running = [each for each in results[:number] if not each.is_awaited]
        assert running == results[max(0, number - MOST_STARTED // 2) : number]
    assert not ProgramsUnderWay(ppctl.mesh()).is_limited, "one device has no collective"


@pytest.fixture(scope="module")
def trained():
    """A pipeline of eight devices that is compiled, a state and a batch."""
    draw = np.random.default_rng(0).standard_normal
    batch = {"inputs": draw((8, 5)), "targets": draw((8, 3))}
    pipe = make_pipe(make_stack("mlp", 4), batch, {"dp": 2, "pp": 4}, optimizer=optax.sgd(0.01))
    return pipe, pipe.init(seed=0), batch


def test_steps_without_a_reader_end(trained):
    pipe, state, batch = trained
    state = pipe.from_natural(pipe.to_natural(state))  # a step reuses the memory of its state
    for _ in range(CALLS):
        state, metrics = pipe.step(state, batch)
    assert state["step"] == CALLS
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("name", ["loss", "loss_and_grads", "evaluate", "predict", "params"])
def test_results_without_a_reader_end(trained, name):
    pipe, state, batch = trained
    args = {"params": (state,), "predict": (state, batch["inputs"])}.get(name, (state, batch))
    found = [getattr(pipe, name)(*args) for _ in range(CALLS)]
    jax.tree.map(np.testing.assert_array_equal, found[0], found[-1])


def test_examples_of_many_groups_are_computed(trained):
    pipe, state, batch = trained
    many = {name: np.tile(a, (2 * CALLS, 1)) for name, a in batch.items()}
    outputs = pipe.predict(state, many["inputs"])
    assert outputs.shape == (len(many["inputs"]), 3)
    assert jnp.abs(outputs[-8:] - outputs[:8]).max() < 1e-12
    assert pipe.evaluate(state, many)["loss"] == pytest.approx(float(pipe.loss(state, batch)))
