"""Work counted in the jaxprs of single tasks, against the whole model's, against other sizes, and
by hand.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from support.cases import MODELS, make_batch, make_stack
from support.selection import full, full_except

from ppctl import transformer
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.reference import reference
from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.executors.work.counted_operations import ops_of
from ppctl.executors.work.roofline import Extent, Op, ProductShape
from ppctl.executors.work.task_flops import CountedModel, work_of
from ppctl.model.attention.attention_kernels import kernel_named
from ppctl.model.experts.grouped_products import KERNELS, product
from ppctl.model.stack import Stack, init

QUICK = [*(("mlp", jnp.float64), ("mlp", jnp.float32)), ("untied swiglu grouped", jnp.bfloat16)]
VARIANTS = [*QUICK, *((name, jnp.float32) for name in MODELS if (name, jnp.float32) not in QUICK)]
variants = pytest.mark.parametrize(("name", "dtype"), full_except(VARIANTS, *QUICK))


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def model_of(stack, microbatch, dtype=jnp.float32, remat="none"):
    params = jax.eval_shape(lambda: init(stack, 0))
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    return Model(
        stack, shapes(params["embed_head"]), layer, shapes(microbatch), 1, remat, 16, dtype
    )


def named(name, examples, dtype=jnp.float32, remat="none"):
    return model_of(make_stack(name, 3, jnp.float32), make_batch(name, examples), dtype, remat)


@cache
def work_of_named(name, dtype):
    return work_of(named(name, 3, dtype))


def flops(piece):
    return sum(op.flops for op in piece.once)


def all_flops(stack, batch, dtype):
    """Of a forward and its backward, nothing recomputed: `job.model_flops`."""
    whole = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=dtype)
    return matmul_flops(whole, jax.eval_shape(lambda: init(stack, 0)), shapes(batch))


@variants
def test_all_tasks_together_have_the_flops_of_the_model(name, dtype):
    work, batch = work_of_named(name, dtype), make_batch(name, 6)
    recomputed = sum(
        op.flops for op in work.embed.forward
    )  # by the backward of the embedding: that of mlp is a product
    found = 6 * (flops(work.embed) + 3 * flops(work.layer) + flops(work.head) - recomputed)
    assert found == all_flops(make_stack(name, 3, jnp.float32), batch, dtype)
    assert (recomputed > 0) == (name == "mlp")


WIDTHS = [(24, 6, 3, 36), (8, 1, 1, 32)]


@pytest.mark.parametrize("num_tokens", [4, full(32)])
@pytest.mark.parametrize(
    ("d_model", "num_heads", "num_kv_heads", "mlp_width"), full_except(WIDTHS, (24, 6, 3, 36))
)
def test_flops_of_a_transformer_of_other_sizes(
    num_tokens, d_model, num_heads, num_kv_heads, mlp_width
):
    settings = {"activation": "swiglu", "vocab_size": 40, "tied": False, "dtype": jnp.float32}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    stack = transformer(num_layers=2, d_model=d_model, mlp_width=mlp_width, **heads, **settings)
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((5, num_tokens), jnp.int32))
    work = work_of(model_of(stack, batch))
    assert 5 * (flops(work.embed) + 2 * flops(work.layer) + flops(work.head)) == all_flops(
        stack, batch, jnp.float32
    )
    d, t, hidden = d_model, num_tokens, mlp_width
    weights = 2 * d * d + 2 * d * d * num_kv_heads // num_heads + 3 * d * hidden
    assert flops(work.layer) == 3 * (
        2 * t * weights + 2 * 2 * t * t * d
    )  # scores of all pairs, masked or not
    assert flops(work.head) == 3 * 2 * t * d * 40


@variants
def test_work_grows_with_the_examples_as_it_was_counted(name, dtype):
    work = work_of_named(name, dtype)
    for examples in (1, 8, 64) if name == "mlp" else (8,):
        counted = CountedModel(named(name, examples, dtype), examples)
        for piece in ("embed", "layer", "head"):
            of_one = getattr(work, piece)
            parts = (
                "forward",
                "input_grad",
                "weight_grad",
                *(("redo",) if piece == "layer" else ()),
            )
            for part, ops in zip(parts, getattr(counted, piece)(), strict=True):
                found = [
                    (examples * op.flops, examples * op.bytes + op.fixed_bytes)
                    for op in getattr(of_one, part)
                ]
                assert found == [(op.flops, op.bytes) for op in ops if not op.is_nothing]


def test_a_backward_from_the_input_of_a_layer_runs_all_products_again_but_the_last():
    layer = work_of_named("tied swiglu", jnp.float32).layer
    assert layer.redo == tuple([op for op in layer.forward if op.flops][:-1])
    assert work_of(linear_model()).layer.redo == ()  # its backward needs only its input


def test_examples_and_remat_of_the_request_do_not_matter():
    assert work_of_named("mlp", jnp.float32) == work_of(named("mlp", 8, remat="full"))


@variants
def test_kept_bytes_grow_with_the_examples_as_counted(name, dtype):
    work = work_of_named(name, dtype)
    for remat in ("none", "layer", "full"):
        model = named(name, 16, dtype, remat)
        w = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), model.layer)]
        assert 16 * work.x_bytes == tree_bytes(model.x)
        assert 16 * work.stash_bytes[remat] == tree_bytes(model.stage.programs.stash_shapes(w))
        vectors = [a for a in jax.tree.leaves(w) if a.ndim == 1]  # their gradients may be handed on
        handed = tree_bytes(model.stage.programs.pending_shapes(w)) - 16 * work.pending_bytes[remat]
        assert 0 <= handed <= tree_bytes(vectors)


# --- by hand ------------------------------------------------------------------------------------

D, OUT, EXAMPLES, SIZE = 6, 5, 7, 4  # widths, examples, bytes of a number


def linear(*, is_long=False):
    """x @ w a layer, or three times in a scan; sum(x @ head) the loss."""

    def layer(w, x):
        if not is_long:
            return x @ w["w"]
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w["w"])[0]

    shape = (3, D, D) if is_long else (D, D)
    return Stack(
        1,
        lambda key: {
            "head": jnp.zeros((D, OUT), jnp.float32),
            "table": jnp.zeros((9, D), jnp.float32),
        },
        lambda key, l: {"w": jnp.zeros(shape, jnp.float32)},
        lambda embed_head, inputs: embed_head["table"][inputs],
        layer,
        lambda embed_head, x, targets: ((x @ embed_head["head"]).sum(), jnp.float32(x.shape[0])),
    )


def linear_model(dtype=jnp.float32, **changes):
    return model_of(
        linear(**changes),
        dict.fromkeys(("inputs", "targets"), jnp.zeros((EXAMPLES,), jnp.int32)),
        dtype,
    )


ONE, WIDTH = Extent(each=1.0), Extent(fixed=D)
FORTH = ProductShape(rows=ONE, columns=WIDTH, depth=WIDTH)  # a row for each example
ACROSS = ProductShape(rows=WIDTH, columns=WIDTH, depth=ONE)  # the sum over examples


def test_a_matrix_product_by_hand():
    layer = work_of(linear_model()).layer
    product = Op(
        2 * D * D, 2 * D * SIZE, fixed_bytes=D * D * SIZE, shape=FORTH
    )  # a row in, a row out; the matrix once
    assert layer.forward == layer.input_grad == (product,)
    added = 2 * D * D * SIZE  # to the sum, which is read and written
    assert layer.weight_grad == (replace(product, shape=ACROSS, sum_bytes=added),)


def test_sums_of_gradients_are_of_the_dtype_of_parameters():
    layer = work_of(linear_model(jnp.bfloat16)).layer
    assert layer.forward == (Op(2 * D * D, 2 * D * 2, fixed_bytes=D * D * 2, shape=FORTH),)
    assert [op.sum_bytes for op in layer.weight_grad] == [2 * D * D * 4]


def test_the_embed_head_by_hand():
    work = work_of(linear_model())
    products = [op for op in work.head.input_grad if op.flops]
    one = Op(2 * D * OUT, (D + OUT) * SIZE, fixed_bytes=D * OUT * SIZE)
    found = [replace(op, shape=None, sum_bytes=0.0) for op in products]
    assert found == [one] * 3  # logits, gradients of x and of the matrix
    assert [op.sum_bytes for op in products if op.sum_bytes] == [2 * D * OUT * SIZE]
    assert {op.shape.columns.fixed for op in products} == {D, OUT}
    assert not any(
        op.fixed_bytes == 2 * 9 * D * SIZE for op in work.head.input_grad
    )  # it does not touch the table
    assert work.embed.weight_grad[-1] == Op(0.0, 0.0, fixed_bytes=2 * 9 * D * SIZE)
    assert flops(work.embed) == 0


def test_a_scan_counts_once_an_iteration():
    scanned, one = work_of(linear_model(is_long=True)).layer, work_of(linear_model()).layer
    assert flops(scanned) == 3 * flops(one)
    traffic = lambda piece: sum(op.bytes for op in piece.forward if op.flops)
    assert traffic(scanned) == 3 * traffic(one)
    assert sum(op.fixed_bytes for op in scanned.forward if op.flops) == 3 * D * D * SIZE


def test_attention_by_cudnn_is_the_work_of_the_plain_form_without_its_scores_in_memory():
    q, k = (jax.ShapeDtypeStruct((2, 256, number, 64), jnp.bfloat16) for number in (4, 2))

    def there_and_back(kernel):
        return ops_of(lambda q, k, v, g: jax.vjp(kernel, q, k, v)[1](g), q, k, k, q)

    cudnn, plain = there_and_back(kernel_named("cudnn")), there_and_back(kernel_named("xla"))
    assert (
        sum(op.flops for op in cudnn)
        == sum(op.flops for op in plain)
        == 3 * 4 * 2 * 256 * 256 * 4 * 64
    )
    assert sum(op.bytes for op in cudnn) < 0.5 * sum(op.bytes for op in plain)
    kernels = {op.kernel: op.flops for op in cudnn if op.flops}
    assert kernels["attention_backward"] == 2 * kernels["attention_forward"]
    assert {op.kernel for op in plain} == {"product"}


def test_plain_attention_has_a_product_for_each_key_head_in_one_operation():
    q, k = (jax.ShapeDtypeStruct((2, 256, number, 64), jnp.bfloat16) for number in (4, 2))
    shapes = [op.shape for op in ops_of(kernel_named("xla"), q, k, k) if op.shape]
    found = [tuple(n.of(0) for n in (s.rows, s.columns, s.depth, s.number)) for s in shapes]
    assert found == [(512, 256, 64, 4), (512, 64, 256, 4)]  # two heads of queries for one of keys


def test_attention_by_pallas_is_distinguished_from_other_kernels():
    q = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    ops = ops_of(lambda q, k, v, g: jax.vjp(kernel_named("pallas"), q, k, v)[1](g), q, q, q, q)
    found = [op.kernel for op in ops if op.flops and op.kernel != "product"]
    assert found == ["attention_forward", "attention_backward", "attention_backward"]


def test_products_of_groups_count_each_row_once():
    """The product, and the gradients of matrices and of rows: rows are divided among the groups."""
    num_rows, sizes = 6, jnp.asarray([1, 4], jnp.int32)
    x, w, g = jnp.ones((num_rows, 3)), jnp.ones((2, 3, 4)), jnp.ones((num_rows, 4))

    def there_and_back(x, w, g):
        y, pull = jax.vjp(lambda x, w: product(KERNELS["ragged_dot"])(x, w, sizes), x, w)
        return y, pull(g)

    one = 2 * num_rows * 3 * 4
    assert matmul_flops(there_and_back, x, w, g) == 3 * one
    products = [op for op in ops_of(there_and_back, x, w, g) if op.flops]
    assert [op.flops for op in products] == [one] * 3
    shapes = [[size.fixed for size in vars(op.shape).values()] for op in products]
    assert shapes == [[3, 4, 3, 2], [3, 4, 3, 2], [3, 3, 4, 2]]  # rows, columns, depth, number
