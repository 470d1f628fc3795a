"""Collectives counted in compiled programs: how often each runs, and how many bytes it moves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from ppctl.executors.hlo_text import Collective, axes_of, collectives

# As compilers write them: loops in loops, a branch, instructions that start, tuples.
TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %hop = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %two = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce(%x, %y), channel_id=2, to_apply=%add
}

%taken (p: f32[8]) -> f32[8] {
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), channel_id=3, dimensions={0}
  ROOT %d = f32[8]{0} all-gather-done(%g), metadata={op_name="jit(step)/cond/all_gather"}
}

%other (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %w = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %c = f32[8]{0} conditional(%i, %a, %b), branch_computations={%taken, %other}
}

%forever (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = f32[8]{0} collective-permute(%x), channel_id=4
}

%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %s = ((f32[8]{0}), f32[2]{0:T(128)}) reduce-scatter-start(%x), channel_id=5
  %w1 = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %w2 = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%forever
  %p = (u8[4]{0}, u8[4]{0}, u32[], u32[]) collective-permute-start(%b), channel_id=6
  ROOT %k = f32[8]{0} fusion(%x), kind=kLoop, calls=%kernel
}
"""


def test_loops_multiply_counts_branches_bound_them_and_loops_of_unknown_length_have_none():
    found = collectives(TEXT, {"x": 2})
    assert {
        (each.kind, each.times, each.is_at_most): (each.instructions, each.bytes) for each in found
    } == {
        ("collective-permute", 15, False): (1, 32),
        ("all-reduce", 15, False): (1, 32 + 16),
        ("all-gather", 5, True): (1, 32),
        ("collective-permute", None, False): (1, 32),
        ("reduce-scatter", 1, False): (1, 8),
        ("collective-permute", 1, False): (1, 4),
    }


@pytest.mark.parametrize("turns", [1, 7])
def test_collectives_of_a_compiled_program_are_counted(turns):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    ring = [(i, (i + 1) % 4) for i in range(4)]

    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def program(a):
        def turn(a, _):
            return jax.lax.ppermute(jnp.sin(a), "x", ring), None

        a, _ = jax.lax.scan(turn, a, None, length=turns)
        return a + jax.lax.psum(a, "x") + jax.lax.all_gather(a, "x").sum(0)

    shape = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    found = collectives(jax.jit(program).lower(shape).compile().as_text(), mesh.shape)
    assert {each.kind: (each.times, each.bytes, each.all_bytes) for each in found} == {
        "collective-permute": (turns, 24, 24 * turns),
        "all-reduce": (1, 24, 24),
        "all-gather": (1, 96, 96),
    }


def test_each_collective_names_the_axes_of_its_devices():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(("x", "y", "z")),
        out_specs=P(("x", "y", "z")),
        check_vma=False,
    )
    def program(a):
        a = jax.lax.ppermute(a, "y", [(0, 1), (1, 0)])
        return jax.lax.all_gather(a, "x").sum(0) * jax.lax.psum(a, ("x", "z")) + jax.lax.pmax(
            a, ("x", "y", "z")
        )

    text = jax.jit(program).lower(jax.ShapeDtypeStruct((8, 6), jnp.float32)).compile().as_text()
    assert {(each.kind, each.axes) for each in collectives(text, mesh.shape)} == {
        ("collective-permute", ("y",)),
        ("all-gather", ("x",)),
        ("all-reduce", ("x", "z")),
        ("all-reduce", ("x", "y", "z")),
    }


GROUPS = {  # groups as compilers write them; devices x=2, y=3
    "replica_groups={{0,3},{1,4},{2,5}}": ("x",),
    "replica_groups={{0,1,2},{3,4,5}}": ("y",),
    "replica_groups=[2,3]<=[6]": ("y",),
    "replica_groups=[3,2]<=[2,3]T(1,0)": ("x",),
    "replica_groups={}": ("x", "y"),
    "source_target_pairs={{0,1},{1,2},{3,4},{4,5}}": ("y",),
    "source_target_pairs={{0,4},{4,0}}": ("x", "y"),
    "replica_groups={{0},{1},{2},{3},{4},{5}}": (),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_are_read_as_they_are_written(groups):
    assert (
        axes_of(f"%c = f32[8]{{0}} all-reduce(%x), channel_id=1, {groups}", {"x": 2, "y": 3})
        == GROUPS[groups]
    )


def test_a_program_without_collectives_has_an_empty_list():
    assert collectives(jax.jit(jnp.sin).lower(1.0).compile().as_text(), {"x": 1}) == []


def test_bytes_of_an_unknown_number_of_turns_are_unknown():
    unknown = Collective("all-reduce", ("x",), 1, None, is_at_most=False, bytes=8, overlapped=0)
    assert unknown.all_bytes is None


# A gather during a product, one during a fusion without any, one in a loop during another's.
BESIDE = """\
%products (p: f32[8]) -> f32[8] {
  ROOT %d = f32[8]{0} dot(%p, %p)
}

%others (p: f32[8]) -> f32[8] {
  ROOT %d = f32[8]{0} add(%p, %p)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%others
  %h = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), dimensions={0}
  %c = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %e = f32[8]{0} all-gather-done(%h)
  %f = f32[8]{0} all-gather-done((f32[4]{0}, f32[8]{0}) %g)
  %i = (f32[4]{0}, f32[8]{0}) all-gather-start(%f), dimensions={0}
  %b = f32[8]{0} fusion(%x), kind=kLoop, calls=%others
  %j = f32[8]{0} all-gather-done(%i)
  %k = ((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%j)
  %l = f32[8]{0} fusion(%x), kind=kOutput, calls=%products
  ROOT %n = f32[4]{0} reduce-scatter-done(%k)
}
"""


def test_collectives_that_overlap_products_are_counted():
    found = {each.kind: each for each in collectives(BESIDE, {"x": 2})}
    counts = {kind: (each.instructions, each.overlapped) for kind, each in found.items()}
    assert counts == {"all-gather": (3, 2), "reduce-scatter": (1, 1)}
