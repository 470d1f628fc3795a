"""Layers that each task gathers over fsdp, one ahead of use: the same gradients, two whole layers
at most, in time.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import Case, difference, make_params, run_spmd
from support.cuda_plugin import IS_NEWER, needs_cuda_plugin
from support.mpmd_cases import MpmdCase, check as check_mpmd, make_engine, name_of as name_of_mpmd
from support.selection import full
from support.spmd_cases import check as check_spmd, name_of as name_of_spmd

from ppctl import config
from ppctl.executors.hlo_text import computations, path_of
from ppctl.executors.reference import reference
from ppctl.model.mlp import mlp
from ppctl.planner.cost.predict_step import predict_job
from ppctl.training.pipeline.job import assemble

SMALL = {"gather": "layer", "model": "mlp", "num_microbatches": 2, "batch_size": 8}
SPMD = [
    Case("zb_h1", (1, 2, 2), num_layers=5, remat="full", **SMALL),  # unequal stages
    Case("interleaved", (2, 2, 2), num_chunks=2, num_layers=8, remat="none", unroll=0, **SMALL),
]
MPMD = [MpmdCase("zb_h1", (1, 2, 2), num_layers=5, sizes=(4, 1), unroll=2, remat="layer", **SMALL)]
BLOCKS = SMALL | {"model": "tied swiglu"}
MORE_SPMD = [
    Case("1f1b", (1, 2, 4), num_layers=4, remat="layer", **BLOCKS),
    Case("gpipe", (2, 2, 2), num_layers=4, remat="none", **SMALL),
    Case("zb_v", (1, 2, 2), num_layers=9, remat="layer", unroll=0, loops=True, **BLOCKS),
    Case("dualpipe_v", (1, 2, 2), num_layers=8, remat="full", **SMALL),
    Case("interleaved", (1, 2, 2), num_chunks=2, num_layers=8, remat="full", loops=True, **BLOCKS),
    Case("zb_h2", (1, 2, 4), num_layers=5, remat="none", **BLOCKS),
]
MORE_MPMD = [
    MpmdCase("interleaved", (2, 2, 2), num_layers=8, remat="none", **BLOCKS),
    MpmdCase("zb_v", (1, 2, 2), num_layers=9, remat="full", unroll=0, **BLOCKS),
    MpmdCase("1f1b", (1, 2, 4), num_layers=5, remat="layer", **SMALL),
    MpmdCase("gpipe", (1, 1, 4), num_layers=3, remat="none", unroll=0, **BLOCKS),
]


@pytest.mark.parametrize("case", SPMD, ids=name_of_spmd)
def test_spmd_with_gathers_by_layer_has_the_references_gradients(case):
    check_spmd(case)


@pytest.mark.parametrize("case", MPMD, ids=name_of_mpmd)
def test_mpmd_with_gathers_by_layer_has_the_references_gradients(case):
    check_mpmd(case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_SPMD, ids=name_of_spmd)
def test_spmd_with_gathers_by_layer_has_the_references_gradients_with_all_settings(case):
    check_spmd(case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_MPMD, ids=name_of_mpmd)
def test_mpmd_with_gathers_by_layer_has_the_references_gradients_with_all_settings(case):
    check_mpmd(case)


def squared_weights(num_layers):
    """A stack whose weight gradients read the weights, so that W gathers them too."""
    plain = mlp(
        num_layers=num_layers,
        d_model=8,
        activation="tanh",
        input_dim=5,
        target_dim=3,
        dtype=jnp.float64,
    )
    return replace(plain, layer=lambda w, x: jnp.tanh(x @ jnp.square(w["kernel"]) + w["bias"]))


@pytest.mark.parametrize("unroll", [16, pytest.param(0, marks=pytest.mark.full)])
def test_weight_gradients_gather_the_weights_they_read(unroll):
    stack, rng = squared_weights(6), np.random.default_rng(0)
    params, batch = (
        make_params(stack),
        {"inputs": rng.normal(size=(8, 5)), "targets": rng.normal(size=(8, 3))},
    )
    case = Case("zb_h1", (1, 2, 2), num_layers=6, remat="none", unroll=unroll, **SMALL)
    losses, grads = jax.jit(
        reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    )(params, batch)
    found_loss, found = run_spmd(case, stack, params, batch)
    assert abs(found_loss - losses["loss"]) <= 1e-10 * abs(losses["loss"])
    assert difference(found, jax.tree.map(np.asarray, grads)) <= 1e-10


def test_tasks_gather_layer_by_layer_and_a_second_step_compiles_nothing():
    engine, batch = make_engine(MpmdCase("zb_h1", (1, 2, 2), num_layers=6, remat="none", **SMALL))
    engine.compile(evaluate=False)
    gathers = {}
    for (program, _), compiled in engine.compiled.compiled.items():
        found = [line for body in computations(compiled.as_text())[1].values() for line in body]
        shapes = [line.split(" = ")[1].split("{")[0] for line in found if " all-gather(" in line]
        gathers.setdefault(program.kind, []).append(sorted(shapes))
    kernel, bias = "f64[16,16]", "f64[16]"
    assert all(shapes == sorted([kernel, bias] * 3) for shapes in gathers["F"])
    assert all(shapes == sorted([kernel, bias] * 3) for shapes in gathers["I"])
    assert all(shapes == [] for shapes in gathers["W"])
    assert kernel not in {shape for shapes in gathers["prepare"] for shape in shapes}
    before = dict(engine.compiled.compiled)
    state, placed = engine.new_state(), engine.batches.put(batch)
    for _ in range(2):
        state, _ = engine.step(state, placed)
    assert engine.compiled.compiled == before


def request(executor, gather, **changes):
    how = {"remat": "full", "gather": gather} | changes
    return config.Config(
        model=config.MLP(num_layers=16, d_model=256),
        mesh=config.Mesh(1, 2, 4),
        schedule=config.Schedule("1f1b", 4),
        executor=(config.Spmd if executor == "spmd" else config.Mpmd)(**how),
        data=config.Regression(batch_size=32),
    )


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", full("mpmd")])
def test_two_of_eight_layers_are_whole_in_memory_as_planned(executor):
    compiled, planned, held = {}, {}, {}
    for gather in ("step", "layer"):
        job = assemble(request(executor, gather))
        of_ranks = predict_job(job).memory
        planned[gather] = max(sum(of_rank.values()) for of_rank in of_ranks)
        held[gather] = max(sum(of_rank.values()) - of_rank["temporaries"] for of_rank in of_ranks)
        job.pipe.engine.compile(evaluate=False)
        compiled[gather] = max(sum(of_rank.values()) for of_rank in job.pipe.memory())
    layer = 4 * (256 * 256 + 256)
    assert compiled["step"] - compiled["layer"] > 5 * layer  # two of 8 layers are whole
    # a quarter of each is counted as copied, and two layers on top of all gradients before they are
    # added
    assert planned["step"] - planned["layer"] == pytest.approx((8 - 2 - 8 / 4) * layer, rel=0.02)
    assert planned["step"] == pytest.approx(compiled["step"], rel=0.1)
    # jaxlib 0.10 copies gradients in the update, 0.12 does not: temporaries are counted, and may be
    # less
    assert held["layer"] < compiled["layer"] < 1.1 * planned["layer"]


def compiled_for_gpus(**changes):
    """The computations of a train step compiled for H100s that are not here."""
    asked = replace(
        request("spmd", "layer", **changes),
        model=config.MLP(num_layers=16, d_model=1024),
        run=config.Run(dtype="bfloat16"),
        data=config.Regression(batch_size=1024),
        plan=config.Plan(compile=True, topology="h100:1x8"),
    )
    engine = assemble(asked).pipe.engine
    return computations(engine.compile_program(engine.lower_train_step()).as_text())[1]


@needs_cuda_plugin
@pytest.mark.parametrize("unroll", [16, 0])
def test_on_gpus_the_gather_of_the_next_layer_overlaps_the_current_one(unroll):
    bodies = {"tick_forward": 0, "tick_backward": 0}
    for body in compiled_for_gpus(remat="none", unroll=unroll).values():
        order = []  # instructions in the compiler's order
        for line in body:
            op = re.search(r" = .*? ([a-z-]+)\(", line)
            if op and op[1] in ("all-gather-start", "all-gather-done"):
                order.append(op[1].removeprefix("all-gather-"))
            elif op and op[1] == "all-gather":  # without a computation at the same time
                order += ["start", "done"]
            elif op and op[1] == "custom-call" and ("gemm" in line or "matmul" in line):
                order.append("product")
        scope = next(
            (scope for scope in bodies for line in body if f"/{scope}/" in path_of(line)), None
        )
        if scope is None or "start" not in order or "product" not in order:
            continue
        bodies[scope] += 1
        gathers = 1 if unroll == 0 else 8  # in the loop over layers
        assert order.count("start") == order.count("done") == gathers, order
        if unroll == 0 and scope == "tick_forward" and IS_NEWER:
            continue  # docs/limits.md, "On a GPU"
        if unroll == 0:
            assert order[0] == "start", order
            assert order[-1] == "done", order
            continue
        # the first is waited for; then each overlaps the products of a layer, and no earlier ones
        # the one before it
        for number in range(1, gathers):
            start, done = (
                [i for i, op in enumerate(order) if op == which][number]
                for which in ("start", "done")
            )
            assert "product" in order[start:done], order
            assert order[:start].count("done") == number, order
    assert bodies == {"tick_forward": 1, "tick_backward": 1}
