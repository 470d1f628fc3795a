"""Functions cut into layers: loss and gradients are those of jax.grad of the whole function on one
device.
"""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import COMPILE_FAST, Case, difference, run_spmd
from support.mpmd_cases import MpmdCase, engine_of
from support.networks import NETWORKS, rows_of
from support.selection import full, full_except

from ppctl import Network, stage_boundary
from ppctl.errors import ConfigError
from ppctl.executors.reference import reference
from ppctl.executors.stage.jaxpr_flops import relative_costs
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.stack import init
from ppctl.schedule.families.registry import FAMILIES
from ppctl.training.pipeline.optimizers import decays

ROWS = 8


@cache
def made(name, auto=False):
    """(stack, its parameters, a batch, (pieces, loss, gradients in the author's form))."""
    make, *num_layers = NETWORKS[name]
    network, batch = make(marked=not auto), rows_of(name, ROWS)
    inputs = jax.ShapeDtypeStruct(batch["inputs"].shape, batch["inputs"].dtype)
    pieces = TracedNetwork(
        network, num_layers[auto], auto=auto, inputs=inputs, dtype="float64", compute="float64"
    )
    stack = stack_of(pieces)

    def mean_loss(params):
        loss, number = network.loss(
            network.apply(params, jnp.asarray(batch["inputs"])), batch["targets"]
        )
        return loss / number

    loss, grads = jax.jit(jax.value_and_grad(mean_loss), compiler_options=COMPILE_FAST)(
        network.init(jax.random.key(3))
    )
    return (
        stack,
        jax.jit(lambda: init(stack, 3))(),
        batch,
        (pieces, float(loss), jax.tree.map(np.asarray, grads)),
    )


@pytest.mark.parametrize(
    ("name", "auto"), full_except([*product(NETWORKS, (False, True))], ("widths", False))
)
def test_the_parts_together_are_the_function(name, auto):
    stack, params, batch, (_, loss, grads) = made(name, auto)
    step = reference(
        stack, num_microbatches=ROWS, remat="layer", unroll=0, dtype=jnp.float64
    )  # each of one row
    found, found_grads = jax.jit(step, compiler_options=COMPILE_FAST)(params, batch)
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-12)
    assert (
        difference(
            stack.options.network.parameters.from_parts(jax.tree.map(np.asarray, found_grads)),
            grads,
        )
        < 1e-12
    )


def check(name, auto, loss_and_grads):
    stack, _, _, (pieces, loss, grads) = made(name, auto)
    found, found_grads = loss_and_grads
    assert float(found) == pytest.approx(loss, rel=1e-12)
    assert (
        difference(
            stack.options.network.parameters.from_parts(jax.tree.map(np.asarray, found_grads)),
            grads,
        )
        < 1e-10
    )
    for a, b in zip(
        *map(
            jax.tree.leaves,
            (pieces.parameters.to_parts(pieces.parameters.from_parts(found_grads)), found_grads),
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)  # constants have no gradient


SPMD = [
    ("widths", False, {"mesh": (1, 2, 2), "schedule": "zb_h1", "remat": "none"}),
    (
        "widths",
        True,
        {"mesh": (2, 3, 1), "schedule": "gpipe", "layers": (1, 2, 1), "remat": "full"},
    ),
    ("images", False, {"mesh": (1, 3, 1), "schedule": "eager_1f1b", "remat": "none"}),
    (
        "widths",
        False,
        {"mesh": (1, 2, 1), "schedule": "interleaved", "num_chunks": 2, "remat": "layer"},
    ),
    ("widths", False, {"mesh": (1, 2, 1), "schedule": "zb_v", "remat": "none", "unroll": 0}),
    ("tokens", False, {"mesh": (1, 3, 1), "schedule": "zb_h1", "remat": "full"}),
]
# a rank's chunks hold layers of other kinds, and more of them
DEEP = (
    "deep",
    True,
    {"mesh": (1, 2, 1), "schedule": "zb_v", "remat": "none", "layers": (2, 1, 1, 1)},
)


@pytest.mark.parametrize(
    ("name", "auto", "changes"), [SPMD[0], *map(full, [DEEP, *SPMD[1:]])], ids=str
)
def test_spmd_computes_the_networks_function(name, auto, changes):
    stack, params, batch, _ = made(name, auto)
    case = Case(
        **{"num_layers": stack.num_layers, "batch_size": ROWS, "num_microbatches": 4, **changes}
    )
    check(name, auto, run_spmd(case, stack, params, batch))


MPMD = [
    (
        "widths",
        True,
        {"mesh": (1, 2, 1), "schedule": "zb_v", "remat": "none"},
    ),  # one split gives both gradients
    ("widths", False, {"mesh": (1, 2, 2), "schedule": "interleaved", "remat": "full", "unroll": 0}),
    ("tokens", False, {"mesh": (1, 3, 1), "schedule": "zb_h1", "remat": "none"}),
    ("widths", False, {"mesh": (2, 2, 1), "schedule": "zb_h1", "remat": "none"}),
    ("images", True, {"mesh": (1, 2, 1), "schedule": "1f1b", "remat": "layer"}),
]


@pytest.mark.parametrize(
    ("name", "auto", "changes"),
    full_except(MPMD, ("widths", True, {"mesh": (1, 2, 1), "schedule": "zb_v", "remat": "none"})),
    ids=str,
)
def test_mpmd_computes_the_networks_function(name, auto, changes):
    stack, params, batch, _ = made(name, auto)
    case = MpmdCase(
        **{"num_layers": stack.num_layers, "batch_size": ROWS, "num_microbatches": 4, **changes}
    )
    engine = engine_of(case, stack, params, batch)
    check(name, auto, engine.loss_and_grads(engine.new_state(), engine.batches.put(batch)))


def sampled(names):
    """Every network with every schedule; of remat, executor and partition the next each time."""
    found = []
    for i, (name, schedule) in enumerate(product(names, FAMILIES)):
        num_layers = NETWORKS[name][1]
        chunks = FAMILIES[schedule].num_chunks
        ranks = min(2, num_layers // chunks)
        if not ranks:
            continue
        rest = num_layers - ranks * chunks
        layers = [1] * (ranks * chunks)
        layers[i % len(layers)] += rest  # not as alike as can be
        how = {
            "mesh": (1, ranks, 1),
            "schedule": schedule,
            "remat": ("none", "layer", "full")[i % 3],
        }
        how |= {"num_chunks": chunks, "unroll": (0, 16)[i // 2 % 2]}
        found.append((name, ("spmd", "mpmd")[(i + i // len(FAMILIES)) % 2], how, tuple(layers)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "executor", "how", "layers"), sampled(NETWORKS), ids=str)
def test_every_network_runs_in_every_schedule(name, executor, how, layers):
    stack, params, batch, _ = made(name)
    common = {"num_layers": stack.num_layers, "batch_size": ROWS, "num_microbatches": 4, **how}
    if executor == "spmd":
        check(name, False, run_spmd(Case(**common, layers=layers), stack, params, batch))
        return
    engine = engine_of(MpmdCase(**common, sizes=layers), stack, params, batch)
    check(name, False, engine.loss_and_grads(engine.new_state(), engine.batches.put(batch)))


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize(
    ("schedule", "remat", "unroll"), [("zb_h1", "none", 16), ("1f1b", "full", 0)]
)
def test_a_network_is_gathered_layer_by_layer(executor, schedule, remat, unroll):
    stack, params, batch, _ = made("widths")
    sizes = {"num_layers": stack.num_layers, "batch_size": ROWS, "num_microbatches": 2}
    how = sizes | {
        "mesh": (1, 2, 2),
        "schedule": schedule,
        "remat": remat,
        "unroll": unroll,
        "gather": "layer",
    }
    if executor == "spmd":
        check("widths", False, run_spmd(Case(**how, layers=(3, 1)), stack, params, batch))
        return
    engine = engine_of(MpmdCase(**how, sizes=(3, 1)), stack, params, batch)
    check("widths", False, engine.loss_and_grads(engine.new_state(), engine.batches.put(batch)))


def test_costs_of_layers_are_proportional_to_their_flops():
    stack, _, batch, _ = made("widths")
    flops = [
        6 * 24 + 24 * 8,
        8 * 16,
        16 * 8,
        8 * 3,
    ]  # halves of a row's, of the layers between marks
    found = relative_costs(stack, batch, "float64", recompute=False)
    assert found.layers == pytest.approx([each / sum(flops) * 4 for each in flops], rel=1e-12)
    assert (found.embed, found.head) == (0, 0)
    assert [len(layers) for layers in found.balanced((0, 1))] == [1, 3]


def test_the_operations_and_parameters_of_each_layer_are_listed():
    embedding, first, *_, last, head = made("images")[0].options.network.contents
    assert [(embedding.name, dict(embedding.params)), head.name] == [("embedding", {}), "head"]
    assert (first.name, last.name) == ("0", "2")
    assert any("conv" in name for name in first.operations)
    for name, auto in (("images", False), ("tokens", False), ("deep", True)):
        stack, *_, (pieces, _, _) = made(name, auto)
        shapes = dict(zip(pieces.leaves.names, pieces.leaves.shapes, strict=True))
        held = [dict(each.params) for each in stack.options.network.contents]
        assert {key: shape for each in held for key, shape in each.items()} == shapes
        for key, place in zip(pieces.leaves.names, pieces.parameters.places, strict=True):
            where = [i for i, each in enumerate(held) if key in each]
            assert where == [place + 1] if place is not None else set(where) <= {0, len(held) - 1}
        assert all(
            each.operations for each in stack.options.network.contents[2:-1]
        )  # the embedding may have taken all of the first


# --- what cannot be cut -------------------------------------------------------------------------


def network_of(apply, shapes=((4, 4), (4, 4)), dtype=jnp.float64):
    init = lambda key: {f"w{i}": jnp.ones(shape, dtype) for i, shape in enumerate(shapes)}
    return Network(init, apply, lambda outputs, targets: (outputs.sum(), jnp.float64(outputs.size)))


def batch_mean(p, x):
    x = x @ p["w0"]
    mean, x = stage_boundary((x.mean(axis=0), x))
    return (x - mean) @ p["w1"]


def other_rows(p, x):
    return stage_boundary(jnp.sin(x @ p["w0"]) if len(x) == 2 else x @ p["w0"]) @ p["w1"]


UNCUTTABLE = {
    "no marks": (
        lambda p, x: x @ p["w0"],
        {},
        r"apply has 0 stage_boundary .* make 1 layers, but num_layers=2",
    ),
    "unused mark": (
        lambda p, x: (stage_boundary(x), x @ p["w0"])[1],
        {},
        "apply has 0 stage_boundary|computes nothing",
    ),
    "two at once": (
        lambda p, x: stage_boundary(stage_boundary(x @ p["w0"])) @ p["w1"],
        {"num_layers": 3},
        "layer 1 of 3 computes nothing",
    ),
    "shared": (
        lambda p, x: stage_boundary(x @ p["w0"]) @ p["w0"],
        {},
        "parameter w0 is used by layer 0, layer 1, but",
    ),
    "integers": (
        lambda p, x: (lambda n, y: y @ p["w1"] + n)(*stage_boundary((jnp.argsort(x), x @ p["w0"]))),
        {},
        r"int64\[2, 4\] crosses the boundary before layer 1, but values between layers must be "
        r"floating",
    ),
    "batch mean": (
        batch_mean,
        {},
        r"float64\[4\] of 2 examples crosses the boundary before layer 1 and does not grow",
    ),
    "inside a loop": (
        lambda p, x: jax.lax.fori_loop(0, 3, lambda i, x: stage_boundary(x @ p["w0"]), x),
        {},
        "a stage_boundary is inside (while|scan), which is one operation",
    ),
    "other rows": (other_rows, {}, "apply runs other operations on 3 examples than on 2"),
    "too many": (
        lambda p, x: x @ p["w0"] @ p["w1"],
        {"num_layers": 3, "auto": True},
        r"layers=3, but there are only 2 groups of operations",
    ),
    "integer weights": (
        lambda p, x: x @ p["w0"],
        {"dtype": jnp.int32},
        "init makes w0 of int32, but parameters must be",
    ),
    "nothing of the inputs": (
        lambda p, x: stage_boundary(jnp.sin(x @ p["w0"])).sum() * 0 + p["w1"],
        {},
        r"does not grow|float64\[\] of 2 examples",
    ),
}


@pytest.mark.parametrize("case", UNCUTTABLE)
def test_a_network_that_cannot_be_cut_is_refused(case):
    apply, changes, said = UNCUTTABLE[case]
    asked = {"num_layers": 2, "auto": False, "dtype": jnp.float64, **changes}
    inputs = jax.ShapeDtypeStruct((8, 4), jnp.float64)
    with pytest.raises(ConfigError, match=said):
        TracedNetwork(
            network_of(apply, dtype=asked["dtype"]),
            asked["num_layers"],
            auto=asked["auto"],
            inputs=inputs,
            dtype="float64",
            compute="float64",
        )


def test_a_narrow_compute_dtype_keeps_wider_computations():
    def apply(p, x):
        x = stage_boundary((x @ p["w0"]).astype(jnp.float32) + 1e-4)
        return x.astype(jnp.bfloat16) @ p["w1"]

    inputs = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    settings = {"auto": False, "inputs": inputs, "dtype": "float32"}
    network = network_of(apply, dtype=jnp.float32)
    assert TracedNetwork(network, 2, **settings, compute="bfloat16").x == (4, jnp.float32)
    assert TracedNetwork(network, 2, **settings, compute="float32").x == (4, jnp.float32)


def test_decay_is_for_matrices():
    network = network_of(
        lambda p, x: stage_boundary(x @ p["w0"] + p["w1"]) @ p["w2"], ((4, 4), (4,), (4, 2))
    )
    inputs = jax.ShapeDtypeStruct((8, 4), jnp.float64)
    pieces = TracedNetwork(
        network, 2, auto=False, inputs=inputs, dtype="float64", compute="float64"
    )
    parts = pieces.initial(jax.random.key(0))
    assert decays(parts) == {
        "embed_head": {},
        "layers": {pieces.parameters.tag: {"kernel": True, "bias": False}},
    }
    assert {
        name: leaf.sum(axis=tuple(range(1, leaf.ndim))).tolist()
        for name, leaf in parts["layers"][pieces.parameters.tag].items()
    } == {"kernel": [16.0, 8.0], "bias": [4.0, 0.0]}
