"""Parameters keep their bits through every layout, and every array is sharded over the axes it
should be.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import SAME_BITS, make_params, make_stack

from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import make_mesh
from ppctl.executors.layer_placement import Placement
from ppctl.executors.parameter_layout import Layout, RankLayout
from ppctl.model.stack import init
from ppctl.schedule.families.stage_placement import loop, v_shape
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.partition import explicit, uniform

LAYOUTS = [  # (num_layers, mesh, num_chunks); V: down the ranks and back up
    (8, (1, 4, 1), 1),
    (9, (2, 2, 2), 2),
    (10, (1, 4, 2), "V"),
    (7, (1, 3, 1), 1),
    (5, (1, 2, 4), 1),
    (33, (1, 8, 1), 4),
    (2, (2, 1, 1), "V"),
    (8, (1, 4, 1), 2),
    (7, (1, 4, 1), 1),
    (10, (1, 4, 2), 2),
    (6, (8, 1, 1), 1),
    (16, (1, 4, 1), "V"),
]
SIZES = [pytest.param(size, marks=[pytest.mark.full] * (size in LAYOUTS[7:])) for size in LAYOUTS]
layouts = pytest.mark.parametrize("size", SIZES, ids=str)


def layout_of(size):
    num_layers, mesh, num_chunks = size
    rank_of = v_shape(mesh[1]) if num_chunks == "V" else loop(mesh[1], num_chunks)
    return on_mesh(MeshSizes(*mesh), Placement(uniform(num_layers, len(rank_of)), rank_of))


def on_mesh(sizes, placement):
    return Layout(make_mesh(sizes), placement, RankLayout(sizes))


def bits(tree):
    return [(a.shape, np.asarray(a).tobytes()) for a in jax.tree.leaves(tree)]


def tree_of(num_layers):
    """A tree as training holds it: parameters, and an optimizer state that mirrors them."""
    params = make_params(make_stack("tied swiglu", num_layers))
    return {
        "params": params,
        "optimizer": (jax.tree.map(np.square, params), np.int32(3)),
        "step": np.int32(7),
    }


@layouts
def test_staging_and_back_keeps_every_bit(size):
    layout, tree = layout_of(size), tree_of(size[0])
    assert bits(layout.to_natural(layout.to_staged(tree))) == bits(tree)


@pytest.mark.parametrize("sizes", [(0, 5, 3, 0), (0, 1, 1, 6), (8, 0)], ids=str)
def test_staging_and_back_keeps_every_bit_where_a_stage_has_no_layer(sizes):
    num_ranks = len(sizes)
    placement = Placement(explicit(8, num_ranks, sizes), loop(num_ranks))
    layout, tree = on_mesh(MeshSizes(1, num_ranks, 1), placement), tree_of(8)
    staged = layout.to_staged(tree)
    assert jax.tree.leaves(staged["params"]["layers"])[0].shape[:3] == (1, num_ranks, max(sizes))
    assert bits(layout.to_natural(staged)) == bits(tree)


@layouts
def test_every_layer_lies_in_its_stage_and_the_padding_is_zero(size):
    num_layers, (_, num_ranks, _), shape = size
    layout = layout_of(size)
    num_chunks = 2 if shape == "V" else shape
    natural = np.arange(1.0, num_layers + 1)[:, None] * np.ones(3)
    staged = np.asarray(layout.to_staged({"layers": natural})["layers"])
    assert layout.placement.num_chunks == num_chunks
    assert layout.placement.is_even == (num_layers % (num_ranks * num_chunks) == 0)
    for stage, layers in enumerate(layout.placement.partition):
        chunk, rank = divmod(stage, num_ranks)
        if shape == "V" and chunk == 1:
            rank = num_ranks - 1 - rank
        held = staged[chunk, rank, :, 0].tolist()
        assert held == [l + 1 for l in layers] + [0.0] * (len(held) - len(layers))
        assert layout.placement.counts[chunk, rank] == len(layers)


@cache
def initial(num_layers, seed):
    stack = make_stack("mlp", num_layers)
    drawn = jax.jit(lambda: init(stack, seed), compiler_options=SAME_BITS)
    return jax.tree.map(np.asarray, drawn())


def test_initial_weights_of_a_layer_depend_only_on_the_seed_and_its_number():
    few, many, other = initial(3, 3), initial(8, 3), initial(3, 4)
    assert bits(few["embed_head"]) == bits(many["embed_head"])
    assert bits(few["layers"]) == bits(jax.tree.map(lambda a: a[:3], many["layers"]))
    assert bits(few["layers"]) != bits(other["layers"])
    assert (
        len({kernel.tobytes() for kernel in many["layers"]["kernel"]}) == 8
    )  # no two layers are alike


@pytest.mark.parametrize("size", [(8, (2, 2, 2), 2), (8, (1, 3, 1), 1)], ids=str)
def test_initial_weights_do_not_depend_on_the_layout(size):
    stack, layout = make_stack("mlp", 8), layout_of(size)
    make_staged = lambda: layout.to_staged(init(stack, 3))
    shardings = layout.shardings(layout.staged_specs(jax.eval_shape(make_staged)))
    # made like in a run: sharded from the start
    staged = jax.jit(make_staged, out_shardings=shardings, compiler_options=SAME_BITS)()
    assert bits(layout.to_natural(jax.tree.map(np.asarray, staged))) == bits(initial(8, 3))


@layouts
def test_layers_are_sharded_over_pp_and_fsdp_and_embed_head_over_both(size):
    _, (_, num_ranks, num_shards), _ = size
    layout = layout_of(size)
    staged = layout.to_staged(make_params(make_stack("untied gelu", size[0])))
    placed = jax.device_put(staged, layout.shardings(layout.staged_specs(staged)))
    for leaf in jax.tree.leaves(placed["layers"]):  # every dim after [V, P, K] is a multiple of 8
        assert leaf.shape[:2] == (layout.placement.num_chunks, num_ranks)
        assert leaf.addressable_shards[0].data.size * num_ranks * num_shards == leaf.size
        assert leaf.addressable_shards[0].data.shape[1] == 1
    for leaf in jax.tree.leaves(placed["embed_head"]):
        ways = (
            num_ranks * num_shards
            if any(n % (num_ranks * num_shards) == 0 for n in leaf.shape)
            else num_shards
        )
        assert leaf.addressable_shards[0].data.size * ways == leaf.size


@layouts
def test_natural_order_is_sharded_over_pp_where_it_divides(size):
    num_layers, (_, num_ranks, num_shards), _ = size
    layout = layout_of(size)
    tree = make_params(make_stack("untied gelu", num_layers))
    placed = jax.device_put(tree, layout.shardings(layout.natural_specs(tree)))
    ways = num_shards * (num_ranks if num_layers % num_ranks == 0 else 1)
    for leaf in jax.tree.leaves(placed["layers"]):
        assert leaf.addressable_shards[0].data.size * ways == leaf.size


def test_a_mesh_larger_than_the_attached_devices_is_refused_in_one_line():
    with pytest.raises(ConfigError) as error:
        make_mesh(MeshSizes(2, 4, 2))
    assert str(error.value) == (
        "mesh dp*pp*fsdp = 2*4*2 = 16 needs 16 devices, but there are 8 (cpu). "
        "Use a smaller mesh, such as ppctl.mesh(pp=8), or call ppctl.mesh before JAX makes arrays, "
        "such as those of a Flax module."
    )


def test_a_mesh_may_leave_devices_out():
    mesh = make_mesh(MeshSizes(1, 3, 1))
    assert dict(mesh.shape) == {"dp": 1, "pp": 3, "fsdp": 1, "ep": 1, "tp": 1, "cp": 1}
    assert mesh.devices.ravel().tolist() == jax.devices()[:3]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_staging_keeps_the_dtype(dtype):
    for size in ((8, (1, 4, 1), 1), (7, (1, 4, 1), 1)):
        layout = layout_of(size)
        staged = layout.to_staged({"layers": jnp.ones((size[0], 2), dtype)})
        assert staged["layers"].dtype == layout.to_natural(staged)["layers"].dtype == dtype
