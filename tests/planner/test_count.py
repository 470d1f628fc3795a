"""Work counted in the jaxprs of single tasks, against the whole model's, against other sizes, and by hand."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from support.cases import MODELS, Case, make_batch, make_stack, staged_step
from support.selection import few

from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.reference import reference
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.executors.stage.flops import matmul_flops
from ppctl.model.attention import KERNELS
from ppctl.model.stack import Stack, init
from ppctl.model.transformer import transformer
from ppctl.planner.count import CountedModel, work_of
from ppctl.planner.op_times import OpTimes, PieceTimes, costs_of_stages, step_time
from ppctl.planner.roofline import Extent, Op, ProductShape
from ppctl.planner.traced_ops import ops_of
from ppctl.schedule.costs import Costs
from ppctl.schedule.ticks import ticks

VARIANTS = [*((name, jnp.float32) for name in MODELS), ("untied swiglu grouped", jnp.bfloat16), ("mlp", jnp.float64)]
variants = pytest.mark.parametrize(("name", "dtype"), few(VARIANTS[::-1], 4))


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def model_of(stack, microbatch, dtype=jnp.float32, remat="none"):
    params = jax.eval_shape(lambda: init(stack, 0))
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    return Model(stack, shapes(params["ends"]), layer, shapes(microbatch), 1, remat, 16, dtype)


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


WIDTHS = [(24, 6, 3, 1.5), (8, 1, 1, 4.0)]


@pytest.mark.parametrize("num_tokens", few([4, 32], 1))
@pytest.mark.parametrize(("d_model", "num_heads", "num_kv_heads", "mlp_ratio"), few(WIDTHS, 1))
def test_flops_of_a_transformer_of_other_sizes(num_tokens, d_model, num_heads, num_kv_heads, mlp_ratio):
    settings = {"activation": "swiglu", "vocab_size": 40, "tied": False, "rope_theta": 1e4, "dtype": jnp.float32}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    stack = transformer(num_layers=2, d_model=d_model, mlp_ratio=mlp_ratio, **heads, **settings)
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((5, num_tokens), jnp.int32))
    work = work_of(model_of(stack, batch))
    assert 5 * (flops(work.embed) + 2 * flops(work.layer) + flops(work.head)) == all_flops(stack, batch, jnp.float32)
    d, t, hidden = d_model, num_tokens, round(mlp_ratio * d_model)
    weights = 2 * d * d + 2 * d * d * num_kv_heads // num_heads + 3 * d * hidden
    assert flops(work.layer) == 3 * (2 * t * weights + 2 * 2 * t * t * d)  # scores of all pairs, masked or not
    assert flops(work.head) == 3 * 2 * t * d * 40


@variants
def test_work_grows_with_the_examples_as_it_was_counted(name, dtype):
    work = work_of_named(name, dtype)
    for examples in (1, 8, 64) if name == "mlp" else (8,):
        counted = CountedModel(named(name, examples, dtype), examples)
        for piece in ("embed", "layer", "head"):
            of_one = getattr(work, piece)
            parts = ("forward", "input_grad", "weight_grad", *(("redo",) if piece == "layer" else ()))
            for part, ops in zip(parts, getattr(counted, piece)(), strict=True):
                found = [(examples * op.flops, examples * op.bytes + op.fixed_bytes) for op in getattr(of_one, part)]
                assert found == [(op.flops, op.bytes) for op in ops if not op.is_nothing]


def test_a_backward_from_the_input_of_a_layer_runs_all_products_again_but_the_last():
    layer = work_of_named("tied swiglu", jnp.float32).layer
    assert layer.redo == tuple([op for op in layer.forward if op.flops][:-1])
    assert work_of(linear_model()).layer.redo == ()  # its backward needs its input alone


def test_examples_and_remat_of_the_request_do_not_matter():
    assert work_of_named("mlp", jnp.float32) == work_of(named("mlp", 8, remat="full"))


@variants
def test_what_is_kept_grows_with_the_examples_as_it_was_counted(name, dtype):
    work = work_of_named(name, dtype)
    for remat in ("none", "layer", "full"):
        model = named(name, 16, dtype, remat)
        w = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), model.layer)]
        assert 16 * work.x_bytes == tree_bytes(model.x)
        assert 16 * work.stash_bytes[remat] == tree_bytes(model.stage.stash_shapes(w))
        vectors = [a for a in jax.tree.leaves(w) if a.ndim == 1]  # their gradients may be handed on
        handed = tree_bytes(model.stage.pending_shapes(w)) - 16 * work.pending_bytes[remat]
        assert 0 <= handed <= tree_bytes(vectors)


# --- by hand ---------------------------------------------------------------------------------------------------------

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
        lambda key: {"head": jnp.zeros((D, OUT), jnp.float32), "table": jnp.zeros((9, D), jnp.float32)},
        lambda key, l: {"w": jnp.zeros(shape, jnp.float32)},
        lambda ends, inputs: ends["table"][inputs],
        layer,
        lambda ends, x, targets: ((x @ ends["head"]).sum(), jnp.float32(x.shape[0])),
    )


def linear_model(dtype=jnp.float32, **changes):
    return model_of(linear(**changes), dict.fromkeys(("inputs", "targets"), jnp.zeros((EXAMPLES,), jnp.int32)), dtype)


ONE, WIDTH = Extent(each=1.0), Extent(fixed=D)
FORTH = ProductShape(rows=ONE, columns=WIDTH, depth=WIDTH)  # a row for each example
ACROSS = ProductShape(rows=WIDTH, columns=WIDTH, depth=ONE)  # the sum over examples


def test_a_matrix_product_by_hand():
    layer = work_of(linear_model()).layer
    product = Op(2 * D * D, 2 * D * SIZE, fixed_bytes=D * D * SIZE, shape=FORTH)  # a row in, a row out; the matrix once
    assert layer.forward == layer.input_grad == (product,)
    added = 2 * D * D * SIZE  # to the sum, which is read and written
    assert layer.weight_grad == (replace(product, shape=ACROSS, sum_bytes=added),)


def test_sums_of_gradients_are_of_the_dtype_of_parameters():
    layer = work_of(linear_model(jnp.bfloat16)).layer
    assert layer.forward == (Op(2 * D * D, 2 * D * 2, fixed_bytes=D * D * 2, shape=FORTH),)
    assert [op.sum_bytes for op in layer.weight_grad] == [2 * D * D * 4]


def test_the_ends_by_hand():
    work = work_of(linear_model())
    products = [op for op in work.head.input_grad if op.flops]
    one = Op(2 * D * OUT, (D + OUT) * SIZE, fixed_bytes=D * OUT * SIZE)
    found = [replace(op, shape=None, sum_bytes=0.0) for op in products]
    assert found == [one] * 3  # logits, gradients of x and of the matrix
    assert [op.sum_bytes for op in products if op.sum_bytes] == [2 * D * OUT * SIZE]
    assert {op.shape.columns.fixed for op in products} == {D, OUT}
    assert not any(op.fixed_bytes == 2 * 9 * D * SIZE for op in work.head.input_grad)  # it does not touch the table
    assert work.embed.weight_grad[-1] == Op(0.0, 0.0, fixed_bytes=2 * 9 * D * SIZE)
    assert flops(work.embed) == 0


def test_a_scan_counts_once_an_iteration():
    scanned, one = work_of(linear_model(is_long=True)).layer, work_of(linear_model()).layer
    assert flops(scanned) == 3 * flops(one)
    traffic = lambda piece: sum(op.bytes for op in piece.forward if op.flops)  # noqa: E731
    assert traffic(scanned) == 3 * traffic(one)
    assert sum(op.fixed_bytes for op in scanned.forward if op.flops) == 3 * D * D * SIZE


# --- idle ranks that compute -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("family", few(["gpipe", "eager_1f1b"], 1))
def test_masked_ticks_have_the_flops_of_the_program(family, remat):
    """Every device runs the same program, so that its FLOPs are those of each tick's slowest rank."""
    case = Case(family, (1, 4, 1), 6, num_layers=8, batch_size=12, remat=remat, skip_idle=False)
    stack, layout = make_stack(case.model, 8), case.layout()
    params = jax.eval_shape(lambda: layout.to_staged(init(stack, 0)))
    program = matmul_flops(staged_step(case, stack), params, make_batch(case.model, 12))
    work, keeps = work_of(named(case.model, 2, jnp.float64)), remat == "full"
    of = lambda ops: 2 * sum(op.flops for op in ops)  # noqa: E731  2 examples
    forward = of(work.layer.forward)
    layer = PieceTimes(forward, of(work.layer.input_grad) + forward * keeps, of(work.layer.weight_grad))
    op_times = OpTimes(PieceTimes(0, 0, 0), layer, PieceTimes(0, of(work.head.input_grad), 0), 0.0, 0.0, 0.0)
    costs = costs_of_stages(op_times, (2,) * 4, keeps_input=keeps)
    table = ticks(case.program(), Costs(), case.options.remat)
    time = step_time(op_times, case.program(), table, costs, copies=1, masked=True)
    # the head stands in a branch of every tick that has its kind, and is counted there
    number = sum(len(which) for which, *has in table.segments(apart=True) if has[keeps])
    plain = costs_of_stages(replace(op_times, head=PieceTimes(0, 0, 0)), (2,) * 4, keeps_input=keeps)
    headless = step_time(op_times, case.program(), table, plain, copies=1, masked=True)
    assert headless.pipeline_s + number * op_times.head.all_s == program
    assert headless.pipeline_s < time.pipeline_s <= program


def test_attention_by_cudnn_is_the_work_of_the_plain_form_without_its_scores_in_memory():
    q, k = (jax.ShapeDtypeStruct((2, 256, number, 64), jnp.bfloat16) for number in (4, 2))

    def there_and_back(kernel):
        return ops_of(lambda q, k, v, g: jax.vjp(kernel, q, k, v)[1](g), q, k, k, q)

    cudnn, plain = there_and_back(KERNELS["cudnn"]), there_and_back(KERNELS["xla"])
    assert sum(op.flops for op in cudnn) == sum(op.flops for op in plain) == 3 * 4 * 2 * 256 * 256 * 4 * 64
    assert sum(op.bytes for op in cudnn) < 0.5 * sum(op.bytes for op in plain)
    kernels = {op.kernel: op.flops for op in cudnn if op.flops}
    assert kernels["attention_backward"] == 2 * kernels["attention_forward"]
    assert {op.kernel for op in plain} == {"product"}


def test_the_products_of_plain_attention_are_as_many_as_the_heads_of_keys_and_run_as_one():
    q, k = (jax.ShapeDtypeStruct((2, 256, number, 64), jnp.bfloat16) for number in (4, 2))
    shapes = [op.shape for op in ops_of(KERNELS["xla"], q, k, k) if op.shape]
    found = [tuple(n.of(0) for n in (s.rows, s.columns, s.depth, s.number)) for s in shapes]
    assert found == [(512, 256, 64, 4), (512, 64, 256, 4)]  # two heads of queries for one of keys


def test_attention_by_pallas_is_told_from_other_kernels():
    q = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    ops = ops_of(lambda q, k, v, g: jax.vjp(KERNELS["pallas"], q, k, v)[1](g), q, q, q, q)
    found = [op.kernel for op in ops if op.flops and op.kernel != "product"]
    assert found == ["attention_forward", "attention_backward", "attention_backward"]
