"""Steps without a barrier before the optimizer equal those with one, also where undone."""

import jax
import numpy as np
import pytest
from support.mpmd_cases import MpmdCase, make_engine

CASE = MpmdCase("zb_h1", (1, 2, 1), num_layers=2, model="mlp", batch_size=8, num_microbatches=4)
CLIP_NORM = 1e3  # between the norms of the two batches below


@pytest.fixture(scope="module")
def setting():
    """(engine, the same without a barrier, batches by whether their gradient is clipped, one that
    is not finite).
    """
    engine, batch = make_engine(CASE, CLIP_NORM)
    checked, _ = make_engine(CASE, CLIP_NORM, post_validation=True)
    changed = lambda factor: engine.batches.put(batch | {"targets": batch["targets"] * factor})
    return engine, checked, {False: changed(1.0), True: changed(1e4)}, changed(np.nan)


def assert_same_bits(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.full
@pytest.mark.parametrize(
    "clipped", [(True, True), (False, False), (False, True, False), (True, False, True)], ids=str
)
def test_steps_equal_those_with_a_barrier_bit_for_bit(setting, clipped):
    engine, checked, batches, _ = setting
    state, attempt = engine.new_state(), checked.new_state()
    for is_clipped in clipped:
        state, wanted = engine.step(state, batches[is_clipped])
        attempt, metrics = checked.step(attempt, batches[is_clipped])
        assert {name: float(value) for name, value in metrics.items()} == {
            k: float(v) for k, v in wanted.items()
        }
        assert (metrics["grad_norm"] >= CLIP_NORM) == is_clipped
    assert_same_bits(checked.to_natural(attempt), engine.to_natural(state))


def test_a_step_that_is_not_finite_leaves_the_exact_state_before_it(setting):
    engine, checked, batches, bad = setting
    attempt, _ = checked.step(checked.new_state(), batches[True])
    state, _ = engine.step(engine.new_state(), batches[True])
    attempt, metrics = checked.step(attempt, bad)
    assert not np.isfinite(metrics["grad_norm"])
    assert_same_bits(checked.to_natural(attempt), engine.to_natural(state))


def test_no_rank_waits_for_the_norm_before_its_update(setting):
    """In the plan: no input of an update depends on the norm, except its gradients and the number."""
    engine, *_ = setting

    def depends_on_norm(what):
        late, found = set(), []
        for op in engine.plans.plan(what)[0]:
            if (op.program and op.program.kind == "combine") or late & set(op.reads):
                late |= set(op.writes)
                found += [op] * (op.program is not None and op.program.kind in ("try", "update"))
        return len(found)

    assert depends_on_norm("step") == 2
    assert depends_on_norm("try") == 0
