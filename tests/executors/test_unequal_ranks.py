"""Ranks of unequal sizes train like the un-pipelined model, in float64."""

import jax
import numpy as np
import optax
import pytest
from support.selection import full_except

import ppctl
from ppctl import config as c
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.crossings import recut, row_places, rows as route_of_rows
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.schedule_text import from_csv
from ppctl.training.pipeline.optimizers import make_optimizer

BATCH, SEQ_LEN, MICROBATCHES, TOLERANCE = 24, 8, 3, 1e-10
LORA = {"lora": ppctl.Lora(rank=2, alpha=4.0)}
EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "choice_bias": True, "balance_loss": 0.1}}
MUON = "muon"


def model_of(**sizes):
    default = {"num_layers": 4, "d_model": 16, "num_heads": 4, "vocab_size": 32, "mlp_width": 32}
    return ppctl.transformer(**(default | sizes), dtype="float64")


def batch_of(vocab_size):
    tokens = np.random.default_rng(0).integers(
        vocab_size, size=(BATCH, SEQ_LEN + 1), dtype=np.int32
    )
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def optimizer_of(name):
    return make_optimizer(c.Muon(lr=1e-2), 10)[0] if name == MUON else optax.adamw(1e-2)


def pipeline_of(mesh, sizes, executor="mpmd", schedule="1f1b", optimizer="adamw", **how):
    made = model_of(**sizes)
    how = {"num_microbatches": MICROBATCHES, "clip_norm": 0.5, "dtype": "float64"} | how
    batch = batch_of(sizes.get("vocab_size", 32))
    given = made, mesh, schedule, optimizer_of(optimizer)
    return ppctl.pipeline(*given, batch=batch, executor=executor, **how), batch


def results(pipe, batch):
    """Gradients, the metrics of three steps, the state after them in natural order, a loss."""
    state = pipe.init(seed=3)
    loss, grads = pipe.loss_and_grads(state, batch)
    found = {"loss": loss, "grads": grads}
    for step in range(3):
        state, metrics = pipe.step(state, batch)
        found[f"metrics {step}"] = metrics
    natural = pipe.to_natural(state)
    found |= {"state": natural, "loss after": pipe.loss(state, batch)}
    again = pipe.to_natural(pipe.from_natural(natural))
    for a, b in zip(*map(jax.tree.leaves, (natural, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    return jax.tree.map(np.asarray, found)


def of_reference(sizes, optimizer="adamw", ema=None, **_):
    return results(*pipeline_of(ppctl.mesh(), sizes, "reference", optimizer=optimizer, ema=ema))


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(*map(jax.tree.leaves_with_path, (found, expected)), strict=True)
    for (path, a), (_, b) in pairs:
        error = np.max(np.abs(a - b), initial=0.0) / (np.max(np.abs(b), initial=0.0) or 1.0)
        assert error <= TOLERANCE, (jax.tree_util.keystr(path), error)


D1, F2, F4, T2, T4, E2, E4 = ({"dp": 1}, {"fsdp": 2}, {"fsdp": 4}, {"tp": 2}, {"tp": 4}, {"ep": 2}, {"ep": 4})  # fmt: skip
CSV = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1F2,1B2,1B1\n"
TIED = {"tied": True, "vocab_size": 31}
CASES = {  # ranks, sizes of the model, the rest
    "1+2+4 devices, tied, padded vocabulary": ([D1, F2, T4], TIED, {}),
    "zb_v, remat=full, uneven layers": (
        [{"dp": 2}, T4],
        {},
        {"schedule": "zb_v", "remat": "full", "partition": [1, 2, 1, 0]},
    ),
    "dualpipe_v, remat=layer": ([F4, D1], {}, {"schedule": "dualpipe_v", "remat": "layer"}),
    "interleaved, gather=layer, equal counts": (
        [F4, {"dp": 2, "tp": 2}],
        {},
        {"schedule": "interleaved", "num_chunks": 2, "num_microbatches": 2, "gather": "layer"},
    ),
    "3+4+1, scanned": ([{"dp": 3}, T4, D1], {}, {"unroll": 0, "num_microbatches": 2}),
    "a schedule of a CSV file": ([F2, T2], {}, {"schedule": from_csv(CSV, "a file")}),
    "muon": ([F4, T2, D1], {}, {"optimizer": MUON, "ema": 0.9}),
    "post-validated": ([F4, T2], TIED, {"post_validation": True, "schedule": "zb_h1"}),
    "fused": ([F2, T2], {}, {"fuse": "fb", "schedule": "eager_1f1b", "num_microbatches": 6}),
    "rows whole along tp": ([T2, {"tp": 2, "dp": 2}, T2], {}, {"sequence_parallel": False}),
    "cp": ([{"cp": 2, "tp": 2}, {"cp": 2}, {"cp": 2}], {}, {}),
    "ring": ([{"cp": 2, "tp": 2}, {"cp": 2}, {"cp": 2}], {}, {"context": "ring"}),
    "experts": ([E4, {"fsdp": 2, "tp": 2}], EXPERTS, {}),
    "experts over ep and tp": ([{"ep": 2, "tp": 2}, E2, D1], EXPERTS, {"num_microbatches": 4}),
    "dropout": ([F2, T4, D1], {"dropout": 0.3}, {"num_microbatches": 4}),
    "lora": ([T2, F4, D1], LORA, {"num_microbatches": 2}),
}
KEPT = "1+2+4 devices, tied, padded vocabulary"


@pytest.mark.parametrize(("ranks", "sizes", "how"), full_except(CASES, KEPT))
def test_ranks_of_unequal_sizes_equal_the_reference(ranks, sizes, how):
    found = results(*pipeline_of(ppctl.mesh(ranks=ranks), sizes, **how))
    assert_equal(found, of_reference(sizes, **how))


def test_ranks_of_equal_sizes_are_one_mesh():
    ranks, mesh = [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}], ppctl.mesh(dp=2, pp=2, tp=2)
    found = ppctl.mesh(ranks=[{"ranks": "0-1", "dp": 2, "tp": 2}])
    for each in (found, ppctl.mesh(ranks=ranks)):
        assert each.text is None
        assert each.storage.shape == mesh.shape
        assert [m.shape for m in each.by_rank] == [m.shape for m in RankMeshes.of(mesh).by_rank]


def test_natural_order_is_stored_over_all_devices():
    meshes = ppctl.mesh(ranks=[{"fsdp": 4}, {"dp": 1}, {"ranks": "2-2", "dp": 1}])
    assert (meshes.sizes, meshes.num_devices) == (MeshSizes(dp=3, fsdp=2), 6)
    assert meshes.group_of == (0, 1, 1)
    assert meshes.text == "[{fsdp:4},{ranks:1-2,dp:1}]"


@pytest.mark.parametrize("receiver", [{"dp": 3}, {"fsdp": 2, "tp": 2}, {"tp": 4}, {"dp": 1}])
@pytest.mark.parametrize("sender", [{"dp": 2, "tp": 3}, {"ep": 6}, {"dp": 1}])
def test_rows_are_cut_anew_in_the_order_of_devices(sender, receiver):
    devices, rows = jax.devices(), np.arange(24.0).reshape(12, 2)
    meshes = [
        RankMeshes.of_sizes(devices, [MeshSizes(**each)]).by_rank[0] for each in (sender, receiver)
    ]
    names = meshes[0].axis_names
    shardings = [jax.NamedSharding(mesh, jax.P(names)) for mesh in meshes]
    route = route_of_rows(*(row_places(mesh, divides_rows=True) for mesh in meshes))
    there = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=shardings[1])
    (found,) = recut(route, *meshes, there)(jax.device_put(rows, shardings[0]))
    assert found.sharding == shardings[1]
    np.testing.assert_array_equal(found, rows)


REFUSED = {
    "spmd": ({"executor": "spmd"}, [F2, T2], "executor=spmd is one program for equal ranks"),
    "vocab": ({"vocab": "parallel"}, [F2, T2], "vocab=parallel divides embedding and head"),
    "cp": ({}, [{"cp": 2}, D1], "ranks of other cp.*Use the same cp on all ranks"),
    "batch": (
        {},
        [{"dp": 5}, D1],
        r"batch size 24 is not a multiple of num_microbatches\*lcm\(1, 5\)",
    ),
    "rows": (
        {"sequence_parallel": False},
        [T2, D1],
        "tp of 2, 1, but with sequence_parallel=false",
    ),
}


@pytest.mark.parametrize(("how", "ranks", "message"), REFUSED.values(), ids=REFUSED)
def test_unequal_ranks_that_cannot_work_together_are_refused(how, ranks, message):
    with pytest.raises(ConfigError, match=message):
        pipeline_of(ppctl.mesh(ranks=ranks), {}, **how)


def test_sequences_that_ranks_would_pad_differently_are_refused():
    batch = {name: a[:, :5] for name, a in batch_of(32).items()}
    mesh = ppctl.mesh(ranks=[T2, D1])
    with pytest.raises(ConfigError, match=r"pad the tokens of a microbatch.*multiple of 2 tokens"):
        ppctl.pipeline(
            model_of(),
            mesh,
            "1f1b",
            optax.sgd(0.1),
            batch=batch,
            num_microbatches=3,
            executor="mpmd",
        )
