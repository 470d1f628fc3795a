"""Tokens reach their experts and results come back, by both ways; rows beyond a bound are dropped,
and counted, as NumPy drops them.
"""

from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ppctl.executors.device_mesh import make_mesh
from ppctl.model.experts.dispatch import WAYS, Group
from ppctl.schedule.mesh_axes import MeshSizes

EP, M, K, E, D = 4, 6, 2, 8, 3  # devices, tokens of each, experts of a token, experts, width
L = E // EP
GROUP = Group(("ep",), EP, L)
SPEC = P("ep")
LOADS = {
    "random": lambda rng: np.array([rng.permutation(E)[:K] for _ in range(EP * M)]),
    "one": lambda rng: np.tile([5, 0], (EP * M, 1)),  # expert 5 has every token, and expert 0
    "one device": lambda rng: np.tile([2, 3], (EP * M, 1)),
}


def numbers(load):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(EP * M, D)), rng.uniform(size=(EP * M, K))
    return x, LOADS[load](rng).astype(np.int32), weights, rng.normal(size=(E, D, D))


def compute(matrices, rows, sizes, weights):
    """Each row times its expert's matrix and its weight; rows after all groups give zeros."""
    expert = jnp.repeat(jnp.arange(L), sizes, total_repeat_length=len(rows))
    y = jnp.einsum("rd,rdf,r->rf", rows, matrices[expert], weights)
    return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], y, 0)


def computed(way, capacity, x, chosen, weights, matrices):
    """(y, rows dropped on all devices) of tokens on devices."""

    def on_device(x, chosen, weights, matrices):
        how = {"group": GROUP, "capacity": capacity, "compute": partial(compute, matrices)}
        y, dropped = WAYS[way](x, chosen, weights, **how)
        return y, jax.lax.psum(dropped, "ep")

    specs = {"in_specs": (SPEC,) * 4, "out_specs": (SPEC, P()), "check_vma": False}
    step = jax.shard_map(on_device, mesh=make_mesh(MeshSizes(ep=EP)), **specs)
    return jax.jit(step)(x, chosen, weights, matrices)


def kept_rows(way, capacity, chosen):
    """Whether each token's row for each of its experts is computed, [tokens, K]."""
    kept = np.ones(chosen.shape, bool)
    bound = ceil(capacity * M * K)
    senders = [range(EP * M)] if way == "gather" else np.arange(EP * M).reshape(EP, M).tolist()
    slots = min(bound, EP * M * min(K, L)) if way == "gather" else -(-bound // EP)
    for tokens in senders:
        for device in range(EP):
            rows = [(e, t, k) for t in tokens for k, e in enumerate(chosen[t]) if e // L == device]
            for _, t, k in sorted(rows)[slots:]:
                kept[t, k] = False
    return kept


def summed(x, chosen, weights, matrices, kept):
    rows = np.einsum("td,tkdf->tkf", x, matrices[chosen])
    return (rows * (weights * kept)[..., None]).sum(1)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("way", WAYS)
def test_no_row_is_dropped_without_a_capacity_under_any_load(way, load):
    x, chosen, weights, matrices = numbers(load)
    y, dropped = computed(way, None, x, chosen, weights, matrices)
    kept = np.ones(chosen.shape, bool)
    np.testing.assert_allclose(y, summed(x, chosen, weights, matrices, kept), rtol=1e-12)
    assert dropped == 0


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("way", "capacity"), [("gather", 1.3), ("alltoall", 1.3)])
def test_rows_beyond_the_bound_are_dropped_and_counted(way, capacity, load):
    x, chosen, weights, matrices = numbers(load)
    kept = kept_rows(way, capacity, chosen)
    y, dropped = computed(way, capacity, x, chosen, weights, matrices)
    assert 0 < (~kept).sum() == dropped
    np.testing.assert_allclose(y, summed(x, chosen, weights, matrices, kept), rtol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_padding_is_sent_to_no_expert_and_takes_no_room(way):
    x, chosen, weights, matrices = numbers("one")
    wanted = computed(way, 1.3, x, chosen, weights, matrices)
    # an equal number of padding tokens on each device, between its tokens
    place = (np.arange(EP)[:, None] * 2 * M + np.array([0, 1, 4, 5, 7, 10])).reshape(-1)
    padded = [np.full((2 * len(a), *a.shape[1:]), fill) for a, fill in ((x, 9.0), (weights, 5.0))]
    padded.insert(1, np.full((2 * len(chosen), K), E, np.int32))
    for a, of_tokens in zip(padded, (x, chosen, weights), strict=True):
        a[place] = of_tokens
    y, dropped = computed(way, 1.3, *padded, matrices)
    np.testing.assert_array_equal(y[place], wanted[0])
    np.testing.assert_array_equal(np.delete(y, place, 0), 0)
    assert dropped == wanted[1] > 0


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_of_the_kept_rows(way):
    x, chosen, weights, matrices = numbers("one")
    kept = kept_rows(way, 1.3, chosen)

    def of(function):
        squares = jax.grad(lambda *a: jnp.square(function(*a)).sum(), (0, 1, 2))
        return jax.jit(squares)(x, weights, matrices)

    found = of(lambda x, w, m: computed(way, 1.3, x, chosen, w, m)[0])
    wanted = of(lambda x, w, m: summed_by_jax(x, chosen, w, m, kept))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def summed_by_jax(x, chosen, weights, matrices, kept):
    return jnp.einsum("td,tkdf,tk->tf", x, matrices[chosen], weights * kept)
