"""Embedding and head on all ranks (schedule.vocab=parallel): the reference's loss and gradients, in
float64.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.equality import ODD, TOLERANCE, difference, make, make_batch, make_pipe
from support.selection import full

import ppctl
from ppctl.errors import ConfigError
from ppctl.model.packed_sequences import split_starts
from ppctl.schedule.families.registry import FAMILIES, ON_RING, build
from ppctl.schedule.vocabulary_parallel import with_vocabulary

PARTS = {"vocab": "parallel"} | ODD  # 257 words and 131 tokens, which nothing divides
CASES = {
    "fb ticks, tied, capped": (
        {"pp": 2, "dp": 2},
        {
            "schedule": "eager_1f1b",
            "model": {"tied": True, "logit_softcap": 2.0, "family": "gemma2"},
        },
    ),
    "split, remat=full, tp": (
        {"pp": 2, "tp": 2},
        {"schedule": "zb_h1", "remat": "full", "model": {"num_layers": 2}},
    ),
    "V-shaped, remat=layer, fsdp, tied, capped": (
        {"pp": 2, "fsdp": 2},
        {"schedule": "zb_v", "remat": "layer", "model": {"tied": True, "logit_softcap": 2.0}},
    ),
    "chunks, cp": (
        {"pp": 2, "cp": 2},
        {"schedule": "interleaved", "num_chunks": 2, "remat": "full"},
    ),
    "mpmd, tied, capped, fsdp": (
        {"pp": 2, "fsdp": 2},
        {"schedule": "zb_v", "executor": "mpmd", "model": {"tied": True, "logit_softcap": 2.0}},
    ),
    "mpmd, remat=full, tp": (
        {"pp": 2, "tp": 2},
        {"schedule": "eager_1f1b", "executor": "mpmd", "remat": "full", "model": {"num_layers": 2}},
    ),
}
SLOW = (
    "split, remat=full, tp",
    "fb ticks, tied, capped",
    "chunks, cp",
    "mpmd, tied, capped, fsdp",
    "mpmd, remat=full, tp",
)  # the others have its values, except cp


def every_case():
    """Every family that an executor runs, each mesh, remat and kind of embedding and head in turn."""
    meshes = [
        {"pp": 4},
        {"pp": 2, "tp": 2, "fsdp": 2},
        {"pp": 2, "cp": 2, "dp": 2},
        {"pp": 4, "fsdp": 2},
        {"pp": 8},
    ]
    remats = itertools.cycle(("none", "layer", "full"))
    families = [
        *((family, "spmd") for family in ON_RING),
        *((family, "mpmd") for family in FAMILIES),
    ]
    for i, ((family, executor), mesh) in enumerate(itertools.product(families, meshes)):
        remat = next(remats)
        model = {"num_layers": 16, "tied": bool(i % 2), "num_kv_heads": 4 >> i % 3}
        how = {
            "schedule": family,
            "num_microbatches": 2 * mesh["pp"],
            "remat": remat,
            "model": model,
        }
        how |= {"executor": executor}
        if mesh["pp"] * build(family, 4, 8).num_chunks <= 16:
            yield pytest.param(mesh, how, id=f"{executor} {family} {mesh} {remat}")


@pytest.mark.parametrize(
    ("mesh", "how"),
    [full(case) if name in SLOW else case for name, case in CASES.items()],
    ids=CASES,
)
def test_loss_and_gradients_with_a_divided_vocabulary_equal_the_reference(mesh, how):
    assert difference(mesh, **PARTS, **how) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), [*every_case()])
def test_loss_and_gradients_are_the_references_in_every_family(mesh, how):
    batch_size = 2 * how["num_microbatches"] * mesh.get("dp", 1) * mesh.get("fsdp", 1)
    assert difference(mesh, **PARTS, **how, batch_size=batch_size) <= TOLERANCE


def parallel_pipe(**changes):
    stack, batch = make(257, **changes), make_batch(16, 257)
    how = {"schedule": "eager_1f1b", "num_microbatches": 4, "vocab": "parallel"}
    return make_pipe(stack, batch, {"pp": 4}, **how), batch


def test_ranks_of_mpmd_get_their_parts_of_the_vocabulary():
    batch = make_batch(16, 257)
    pipe = make_pipe(
        make(257), batch, {"pp": 4}, schedule="zb_h1", executor="mpmd", vocab="parallel"
    )
    for of_rank in pipe.engine.new_state(0):
        embed_head = of_rank["params"]["embed_head"]
        assert (embed_head["embedding"].shape[0], embed_head["head"].shape[1]) == (65, 65)
    entries, _ = pipe.engine.plans.plan("step")
    values = pipe.engine.compiled.shapes(entries, pipe.engine.given_shapes)
    assert (
        max(size for a in jax.tree.leaves(values) for size in a.shape) < 257
    )  # nothing has all ids


@pytest.mark.full
def test_no_rank_ever_has_more_than_its_part():
    pipe, batch = parallel_pipe()
    state = pipe.init(seed=0)
    for name, dim in (("embedding", 0), ("head", 1)):
        leaf = state["params"]["embed_head"][name]
        assert leaf.shape[dim] == 260  # padded to 4 parts
        assert leaf.sharding.shard_shape(leaf.shape)[dim] == 65
    (program,) = pipe.programs().programs
    wide = [
        line
        for line in program.hlo.splitlines()
        if "all-gather" in line and ("[260," in line or ",260]" in line)
    ]
    assert wide == []
    gathered = {each.bytes for each in program.collectives if each.kind == "all-gather"}
    assert gathered <= {
        16 * 8,
        4 * 2 * 16 * 8,
    }  # the norm's scale; from 4 ranks log sums of 2 sequences
    losses = [float(pipe.step(state, batch)[1]["loss"])]
    assert losses[0] == pytest.approx(np.log(257), rel=0.01)


@pytest.mark.full  # three pipelines of adamw
@pytest.mark.parametrize(
    ("executor", "schedule"), [*itertools.product(("mpmd", "spmd"), ("1f1b", "zb_h1"))]
)
def test_evaluation_and_training_equal_those_with_a_whole_embed_head(executor, schedule):
    batch, found = make_batch(16, 257), []
    divided = {"executor": executor, "schedule": schedule, "vocab": "parallel"}
    for mesh, how in (({}, {"executor": "reference"}), ({"pp": 2}, divided)):
        pipe = make_pipe(make(257, num_layers=2), batch, mesh, optimizer=optax.adamw(1e-2), **how)
        state, losses = pipe.init(seed=0), []
        for _ in range(3):
            state, metrics = pipe.step(state, batch)
            losses += [float(metrics["loss"]), float(metrics["grad_norm"])]
        found.append(
            (
                losses,
                float(pipe.loss(state, batch)),
                jax.device_get(pipe.to_natural(state)["params"]),
            )
        )
    (one, loss, params), (other, other_loss, other_params) = found
    assert other == pytest.approx(one, rel=1e-10)
    assert other_loss == pytest.approx(loss, rel=1e-10)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other_params), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_models_and_schedules_without_a_vocabulary_to_divide_are_refused():
    batch = make_batch(16, 257)
    with pytest.raises(ConfigError, match=r"^vocab=some is not one of whole, parallel"):
        make_pipe(make(257), batch, {"pp": 2}, vocab="some")
    with pytest.raises(
        ConfigError, match=r"not for a custom Schedule. Use with_vocabulary\(schedule\)"
    ):
        make_pipe(
            make(257),
            batch,
            {"pp": 2},
            schedule=build("1f1b", 2, 2),
            num_microbatches=None,
            vocab="parallel",
        )
    rows = {"inputs": np.zeros((8, 4), np.float32), "targets": np.zeros((8, 4), np.float32)}
    mlp = ppctl.mlp(
        num_layers=4, d_model=4, activation="relu", input_dim=4, target_dim=4, dtype=jnp.float64
    )
    without_parts = ppctl.DividedStack(mlp.embed, mlp.layer, mlp.head)
    for model in (mlp, mlp.with_options(divided=lambda axes: without_parts)):
        with pytest.raises(
            ConfigError,
            match=r"over 2 ranks by their vocabulary, .* \(DividedStack.parts\). Use vocab",
        ):
            make_pipe(model, rows, {"pp": 2}, vocab="parallel")


@pytest.mark.full
def test_a_custom_schedule_divides_the_vocabulary_and_packed_documents_keep_their_starts():
    tokens = np.array(make_batch(16, 257)["inputs"])
    tokens[:, [0, 5, 9]] = ~tokens[:, [0, 5, 9]]
    batch = {"inputs": tokens, "targets": np.asarray(split_starts(jnp.asarray(tokens))[0])}
    stack, losses = make(257, packed=True), []
    for schedule in (build("1f1b", 2, 2), with_vocabulary(build("1f1b", 2, 2))):
        pipe = make_pipe(stack, batch, {"pp": 2}, schedule=schedule, num_microbatches=None)
        losses.append(float(pipe.loss_and_grads(pipe.init(seed=0), batch)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
