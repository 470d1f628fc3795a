"""Simulated devices run the collectives of a program in one order: data orders each branch or loop
that has collectives with the collectives after it (`support/collective_order.py`).

A mesh over processes: tests/launch/test_faults_of_one.py.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.collective_order import assert_ordered, unordered
from support.equality import make, make_batch, make_pipe
from support.mixtures import MIXTURES
from support.selection import full, full_except

from ppctl import config as settings
from ppctl.training.pipeline.optimizers import make_optimizer

MODEL = {"num_layers": 4, "num_kv_heads": 2}
MOE = {"num_layers": 4, "moe": MIXTURES["sigmoid"] | {"dispatch": "alltoall"}}
SHORT = MODEL | {"num_layers": 2}
TP, EP = {"pp": 2, "tp": 2}, {"pp": 2, "ep": 2}
FSDP = {"pp": 2, "fsdp": 2}
CASES = {  # the first two ran in different orders, and hung
    "no stash": (TP, SHORT, {"schedule": "1f1b", "remat": "full"}),
    "vocabulary": (TP, MODEL, {"schedule": "dualpipe_v", "vocab": "parallel"}),
    "experts": (EP, MOE, {"schedule": "1f1b", "remat": "full"}),
}
LOOPED = {  # optimizers whose updates are loops with collectives
    "muon": make_optimizer(settings.Muon(), 10)[0],
    "lamb": make_optimizer(settings.Lamb(), 10)[0],
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


def check(mesh, model, how):
    how = {"num_microbatches": 4} | how
    how |= {"num_chunks": 2} if how["schedule"] == "interleaved" else {}
    batch = make_batch(16, 32, 32)
    pipe = make_pipe(make(**model), batch, mesh, **how)
    texts = [each.hlo for each in pipe.programs().programs]
    if how.get("executor") != "mpmd":
        pipe.engine.compile(evaluate=True)
        texts.append(pipe.engine.compiled["loss"].as_text())
    assert_ordered(texts)


@pytest.mark.parametrize(("mesh", "model", "how"), full_except(CASES, "no stash"))
def test_data_orders_the_collectives_of_a_step(mesh, model, how):
    check(mesh, model, how)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mesh", "executor"),
    [
        ("lamb", FSDP, "mpmd"),
        *(
            full((name, mesh, executor))
            for name in LOOPED
            for mesh in (FSDP, TP)
            for executor in ("spmd", "mpmd")
            if (name, mesh, executor) != ("lamb", FSDP, "mpmd")
        ),
    ],
)
def test_data_orders_the_loops_of_an_update(name, mesh, executor):
    check(mesh, SHORT, {"schedule": "1f1b", "optimizer": LOOPED[name], "executor": executor})


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "layer", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
@pytest.mark.parametrize(
    ("mesh", "model", "how"),
    [
        (TP, MODEL, {}),
        (TP, MODEL, {"vocab": "parallel"}),
        (TP, MODEL, {"executor": "mpmd"}),
        ({"pp": 2, "cp": 2}, MODEL, {}),
        ({"pp": 2, "fsdp": 2}, MODEL, {"gather": "layer"}),
        (EP, MOE, {}),
        ({"pp": 2, "tp": 2, "fsdp": 2}, MODEL | {"linear_dtype": "fp8"}, {}),
    ],
    ids=["tp", "vocabulary", "mpmd", "cp", "gather", "experts", "fp8"],
)
def test_collectives_are_ordered_for_every_schedule_and_remat(mesh, model, how, schedule, remat):
    check(mesh, model, how | {"schedule": schedule, "remat": remat})


def test_an_unordered_branch_is_found():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x, active):
        y = jax.lax.cond(active[0], lambda: jax.lax.psum(x @ x.T @ x, "a"), lambda: x)
        return y, jax.lax.ppermute(jnp.sin(x), "a", [(0, 1), (1, 0)])

    specs = P(), P()
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    args = jnp.ones((8, 8)), jnp.ones(1, bool)
    text = jax.jit(run).lower(*args).compile().as_text()
    flow = re.search(r"%(\S+) = \S+ conditional\(", text)[1]
    hop = re.search(r"%(\S+) = \S+ collective-permute\(", text)[1]
    in_order = text.index("conditional(") < text.index("collective-permute(")
    assert unordered(text) == ([(flow, hop)] if in_order else [])
