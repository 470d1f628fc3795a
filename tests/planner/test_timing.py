"""Timed bodies are those of the executors, run as often as counted; no test here depends on how
fast they run.
"""

import time
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from support.cases import Case, difference, make_batch, make_params, make_stack
from support.selection import full, full_except

from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.model_shapes import Model
from ppctl.planner.cost import piece_timing as timing
from ppctl.planner.cost.piece_timing import LAYERS, RUNS, SLOTS, Timing
from ppctl.planner.cost.step_runs import run_steps

ROWS = 2
REMATS = ("none", "layer", "full")


@cache
def model_of(name, remat="none"):
    stack, batch = make_stack(name, LAYERS), make_batch(name, ROWS)
    shapes = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    params = shapes(make_params(stack))
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    return Model(stack, params["embed_head"], layer, shapes(batch), 1, remat, 16, jnp.float64)


def small_mesh(shape, axes):
    return Mesh(
        np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
    )


def at(slots, i):
    return jax.tree.map(lambda a: a[i % SLOTS], slots)


# --- turns --------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch):
    """(count, what goes round afterwards) of every run of a loop; each is said to take a
    microsecond a turn.
    """
    seen = []

    def recorded(run, count, stays, goes):
        goes = jax.block_until_ready(run(jnp.int32(count), stays, goes))
        seen.append((count, jax.tree.map(np.asarray, goes)))
        return goes, Timing(1e-6 * count, 3e-6 * count)

    monkeypatch.setattr(timing, "_timed", recorded)
    monkeypatch.setattr(timing, "LEAST_S", 1e-4)  # a hundred turns
    return seen


@pytest.mark.parametrize("turns", [1, 3])
def test_every_device_takes_as_many_turns_as_are_counted(runs, monkeypatch, turns):
    monkeypatch.setattr(timing, "TURNS", {"cpu": turns})
    mesh = small_mesh((2, 3), ("a", "b"))
    body = lambda i, stays, goes: (goes[0] + 1, goes[1] + i, goes[2] + stays)
    stays, goes = jnp.float32(0.5), (jnp.int32(0), jnp.int32(0), jnp.zeros((4,), jnp.float32))
    measured = timing.turn(body, stays, goes, mesh)
    assert measured == (pytest.approx(1e-6 / turns), pytest.approx(3e-6 / turns))  # of one turn
    total = numbers = 0
    for count, (turned, summed, added) in runs:
        taken = count * turns
        total, numbers = (
            total + taken,
            numbers + taken * (taken - 1) // 2,
        )  # turns are numbered from 0 in each run
        assert turned.shape == (2, 3)
        assert (turned == total).all()
        assert (summed == numbers).all()
        assert added.shape == (2, 3, 4)
        assert (added == 0.5 * total).all()
    counts = [count for count, _ in runs]
    assert counts[:2] == [1, 1]  # one to warm up; then until a run is long enough
    assert counts[-RUNS:] == counts[-1:] * RUNS
    assert counts[-1] > 100


def test_the_median_run_counts(monkeypatch):
    cpu_s = iter(
        [9.0, 1.0, *(5.0, 1.0, 4.0, 100.0, 2.0)]
    )  # warm-up, the one that is long enough, five that count

    def said(run, count, stays, goes):
        seconds = next(cpu_s)
        return goes, Timing(2 * seconds, seconds)

    monkeypatch.setattr(timing, "_timed", said)
    measured = timing.turn(
        lambda i, stays, goes: goes, (), jnp.zeros(()), small_mesh((1,), ("all",))
    )
    assert measured == (8.0, 4.0)


@pytest.mark.parametrize("goes", [(), jnp.zeros(3)], ids=["of nothing", "as it was"])
def test_a_body_that_computes_nothing_takes_no_time(goes):
    measured = timing.turn(lambda i, stays, goes: goes, (), goes, small_mesh((1,), ("all",)))
    assert 0 <= measured.wall_s < 1e-6


def test_more_work_takes_more_cpu_time(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_S", 0.01)
    body = lambda i, stays, goes: jnp.tanh(goes @ stays)
    cpu_s = []
    for n in (16, 512):
        square = jnp.full((n, n), 1 / n, jnp.float32)
        cpu_s.append(timing.turn(body, square, square, small_mesh((1,), ("all",))).cpu_s)
    assert cpu_s[1] > cpu_s[0] > 0  # 32768 times as many FLOPs, 1024 times as many numbers


class Unfinished:
    """A result of a device whose dispatch returns at once: a second later it is there."""

    def __init__(self, clock):
        self.clock, self.is_there = clock, False

    def block_until_ready(self):
        self.clock["s"] += 0.0 if self.is_there else 1.0
        self.is_there = True
        return self


def test_what_is_timed_is_finished_where_dispatch_returns_early(monkeypatch):
    clock = {"s": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["s"])
    _, measured = timing._timed(lambda count, stays, goes: Unfinished(clock), 1, (), ())
    assert measured.wall_s == 1.0

    engine = SimpleNamespace(
        compile=lambda **_: None,
        new_state=lambda: None,
        put=lambda batch: batch,
        step=lambda state, batch: (Unfinished(clock), Unfinished(clock)),
    )
    job = SimpleNamespace(
        pipe=SimpleNamespace(engine=engine), data=SimpleNamespace(batches=lambda: iter([None]))
    )
    assert run_steps(job, count=2).wall_s == 2.0  # both results are waited for, one after the other


# --- bodies -------------------------------------------------------------------------------------


def layers_of(model, w, x):
    for each in w:
        x = model.stack.layer(each, x)
    return x


@pytest.mark.parametrize("remat", full_except(REMATS, "none"))
@pytest.mark.parametrize("name", ["untied swiglu grouped", full("mlp")])
def test_a_forward_goes_through_the_layers_and_keeps_its_stash(name, remat):
    model = model_of(name, remat)
    body, w, goes = timing.layer_bodies(model, split=False)["F"]
    y, stashes = body(jnp.int32(SLOTS + 1), w, goes)
    assert difference(y, layers_of(model, w, goes[0])) < 1e-12
    expected = model.stage.forward(w, None, goes[0])[1]
    for slot in range(SLOTS):
        written = (
            slot == 1 and remat != "full"
        )  # full: the input is the stash, and stays where it arrived
        kept = expected if written else at(goes[1], slot)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (at(stashes, slot), kept)), strict=True)
        )


@pytest.mark.parametrize("remat", full_except(REMATS, "layer"))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["mlp", full("untied swiglu grouped")])
def test_a_backward_adds_the_gradient_of_the_layers(name, remat, split):
    model = model_of(name, remat)
    bodies = timing.layer_bodies(model, split=split)
    assert set(bodies) == ({"F", "I", "W"} if split else {"F", "B"})
    (_, (w, _), (gy, _)), slot = bodies["I" if split else "B"], 3
    x = (
        timing.random_like(model.x) * 40
    )  # norms and products of it are far from those of the zeros in other slots
    stash = model.stage.forward(w, None, x)[1]
    stashes = jax.tree.map(lambda a: jnp.zeros((SLOTS, *a.shape), a.dtype).at[slot].set(a), stash)
    dw, gx_expected = jax.vjp(lambda w, x: layers_of(model, w, x), w, x)[1](gy)
    if split:
        gx, pending = bodies["I"][0](jnp.int32(slot), (w, stashes), bodies["I"][2])
        body, stays, acc = bodies["W"][0], (w, pending), bodies["W"][2]
        once = body(jnp.int32(slot), stays, acc)
        twice = body(jnp.int32(slot), stays, once)
    else:
        gx, once = bodies["B"][0](jnp.int32(slot), (w, stashes), bodies["B"][2])
        _, twice = bodies["B"][0](jnp.int32(slot), (w, stashes), (gy, once))
    assert difference(gx, gx_expected) < 1e-12
    assert difference(once, dw) < 1e-12
    assert difference(twice, jax.tree.map(lambda a: 2 * a, dw)) < 1e-12  # sums go round


@pytest.mark.parametrize("name", ["tied swiglu", "mlp", full("untied gelu")])
def test_the_embed_head_give_their_values_and_add_their_gradients(name):
    model = model_of(name)
    batch = make_batch(name, 2 * ROWS)
    stack, bodies = model.stack, timing.embed_head_bodies(model, batch)
    for part in ("inputs", "targets"):  # of the data, again from the first after the last
        two = jnp.reshape(batch[part], (2, ROWS, *batch[part].shape[1:]))
        assert np.array_equal(bodies["head"][1][1][part], jnp.concatenate([two, two]))
    body, (embed_head, slots), goes = bodies["embed"]
    assert np.array_equal(
        body(jnp.int32(1), (embed_head, slots), goes),
        stack.embed(embed_head, at(slots["inputs"], 1)),
    )
    body, stays, acc = bodies["embed_grad"]
    expected = acc
    for i in range(3):
        embedded = lambda embed_head, i=i: jnp.sum(
            stack.embed(embed_head, at(slots["inputs"], i)) * stays[2]
        )
        expected = jax.tree.map(jnp.add, expected, jax.grad(embedded)(embed_head))
    for i in range(3):
        acc = body(jnp.int32(i), stays, acc)
    _close(acc, expected)
    body, stays, (y, acc) = bodies["head"]
    gy, found = body(jnp.int32(SLOTS), stays, (y, acc))
    loss = lambda embed_head, y: stack.head(embed_head, y, at(slots["targets"], 0))[0]
    d_embed_head, dy = jax.grad(loss, (0, 1))(embed_head, y)
    assert difference(gy, dy) < 1e-12
    _close(found, d_embed_head)


def _close(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


# --- of the mesh --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_tick_moves_a_value_to_both_neighbours(runs, num_ranks):
    body, stays, _ = timing.tick_body(jax.ShapeDtypeStruct((3,), jnp.float32), num_ranks)
    mesh = make_mesh(2, num_ranks, 1)
    of_rank = lambda rank, slot: 100.0 * rank + slot

    def marked(i, stays, goes):
        """Fills the slots of each rank in turn 0, then runs ticks."""
        rank = jax.lax.axis_index("pp")
        slots = jnp.broadcast_to(
            of_rank(rank, jnp.arange(SLOTS, dtype=jnp.float32))[:, None], (SLOTS, 3)
        )
        fresh = jax.tree.map(lambda a: jnp.where(i == 0, slots, a), goes)
        return jax.lax.cond(i == 0, lambda goes: goes, lambda goes: body(i, stays, goes), fresh)

    zeros = jnp.zeros((SLOTS, 3), jnp.float32)
    timing.turn(marked, stays, (zeros, zeros), mesh)
    count, (forward, backward) = runs[-1]
    for moved, step in ((forward, 1), (backward, -1)):
        slots = np.array(
            [[of_rank(rank, slot) for slot in range(SLOTS)] for rank in range(num_ranks)]
        )
        for i in range(1, count):
            if i % 3 > 0:
                slots[:, i % SLOTS] = np.roll(slots[:, (i + 1) % SLOTS], step)
        assert (moved == slots[None, :, None, None, None, :, None]).all()


def test_starting_a_task_takes_some_time_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(timing, "DISPATCHES", 3)
    here, there = (
        Mesh(
            np.array(jax.devices()[first : first + 2]).reshape(2, 1),
            ("dp", "fsdp"),
            axis_types=(AxisType.Auto,) * 2,
        )
        for first in (0, 2)
    )
    measured = timing.dispatched(model_of("mlp"), here, there)
    assert 0 < measured.wall_s < 10
    assert 0 < measured.cpu_s < 10


def test_a_step_without_tasks_gathers_and_reduces_every_parameter():
    case = Case("gpipe", (2, 2, 2), 2, num_layers=4, model="tied gelu grouped", batch_size=8)
    layout = case.layout()
    params = layout.to_staged(make_params(make_stack(case.model, 4)))
    specs = layout.staged_specs(params)
    placed = jax.device_put(params, layout.shardings(specs))
    loss, grads = jax.jit(timing.without_tasks(layout, jnp.float64))(placed, {})
    assert loss == 8
    for part, number in (
        ("embed_head", 8),
        ("layers", 4),
    ):  # devices that each add a half of what they gathered
        for grad, leaf in zip(*map(jax.tree.leaves, (grads[part], placed[part])), strict=True):
            np.testing.assert_allclose(grad, 0.5 * number * np.asarray(leaf), rtol=1e-12)
            assert grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_random_arrays_are_small_and_have_their_shapes():
    tree = {
        "x": jax.ShapeDtypeStruct((50, 40), jnp.bfloat16),
        "tokens": jax.ShapeDtypeStruct((3,), jnp.int32),
    }
    found = timing.random_like(tree)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(
        lambda a: (a.shape, a.dtype), tree
    )
    assert 0.01 < float(jnp.std(found["x"].astype(jnp.float32))) < 0.03
    assert not found["tokens"].any()
