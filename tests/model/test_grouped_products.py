"""Products of rows with their expert's matrix: every kernel against a loop over experts, and the
kernel of each device.
"""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P
from support.cuda_plugin import needs_cuda_plugin
from support.selection import full, full_except

from ppctl import cli, config
from ppctl.config.groups.moe_settings import PRODUCTS, Experts
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxpr_tools import demand, flatten
from ppctl.executors.stage.stage import Stage
from ppctl.model.attention.attention_kernels import kernel_named
from ppctl.model.experts import triton_products
from ppctl.model.experts.grouped_products import KERNELS, Kernel, choose, product
from ppctl.model.transformer import transformer
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.job import assemble

INTERPRETED = Kernel(
    partial(triton_products.rows, interpret=True), partial(triton_products.weights, interpret=True)
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Run Triton's kernels on the CPU."""
    monkeypatch.setitem(KERNELS, "triton", INTERPRETED)


CASES = {  # rows, D, F, rows of each expert
    "rows after all groups and an empty expert": (300, 40, 72, (100, 0, 57, 120)),
    "one expert has all rows": (70, 16, 33, (0, 70, 0)),
    "fewer rows than a block": (5, 17, 9, (1, 2)),
    "no row of any expert": (40, 8, 8, (0, 0, 0)),
    "more than a tile of columns": (150, 130, 140, (149, 1)),
    "more tiles than follow each other": (200, 8, 140, (17,) * 11 + (5,)),
}


def arrays(case, dtype):
    (R, D, F, sizes), draw = CASES[case], np.random.default_rng(0)
    some = lambda *shape: jnp.asarray(draw.standard_normal(shape), dtype)
    return some(R, D), some(len(sizes), D, F), jnp.asarray(sizes, jnp.int32), some(R, F)


def looped(x, w, sizes, g):
    """(product, gradient of x, gradient of w) in float64, expert by expert."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    y, dx, dw, first = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(first, first + size)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], g[rows] @ w[e].T, x[rows].T @ g[rows]
        first += size
    return y, dx, dw


def there_and_back(kernel, x, w, sizes, g):
    y, pull = jax.vjp(lambda x, w: product(KERNELS[kernel])(x, w, sizes), x, w)
    return y, *pull(g)


TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("scan", "float64"),
        ("ragged_dot", "float64"),
        ("triton", "float32"),
        full(("triton", "bfloat16")),
        full(("scan", "bfloat16")),
        full(("scan", "float32")),
        full(("ragged_dot", "bfloat16")),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_is_the_loop_over_experts(case, kernel, dtype):
    args = arrays(case, dtype)
    found = jax.jit(partial(there_and_back, kernel))(*args)
    for a, wanted in zip(found, looped(*args), strict=True):
        assert a.dtype == dtype
        size = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(
            np.asarray(a, float) / size, wanted / size, atol=TOLERANCES[dtype]
        )


def test_tiles_cover_all_rows_once_for_any_sizes():
    draw = np.random.default_rng(1)
    tiles_of = jax.jit(triton_products.tiles, static_argnums=(1, 2))
    for num_rows, block in ((59, 7), (8, 19), (33, 1)) * 7:
        ends = np.sort(draw.integers(0, num_rows + 1, size=4))
        sizes = np.diff(ends, prepend=0)
        group_of_row = np.full(num_rows, -1)
        tiles = tiles_of(jnp.asarray(sizes, jnp.int32), num_rows, block)
        for group, first, end in np.stack(tiles, 1):
            rows = slice(first, min(first + block, end))
            assert (group_of_row[rows] == -1).all()
            group_of_row[rows] = group
        wanted = np.repeat(np.arange(5), [*sizes, num_rows - ends[-1]])
        np.testing.assert_array_equal(group_of_row, wanted)


# --- the kernel of a device ---------------------------------------------------------------------

H100 = SimpleNamespace(
    platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100 80GB HBM3"
)
A100 = SimpleNamespace(platform="cuda", compute_capability="8.0", device_kind="NVIDIA A100")
V100 = SimpleNamespace(platform="gpu", compute_capability="7.0", device_kind="Tesla V100")
AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD MI300X")
CPU, TPU = SimpleNamespace(platform="cpu"), SimpleNamespace(platform="tpu")


def test_the_config_names_every_kernel():
    assert sorted(PRODUCTS) == sorted(("auto", *KERNELS))


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        (H100, "bfloat16", "triton"),
        (A100, "float32", "triton"),
        (H100, "float64", "scan"),
        (V100, "float16", "scan"),
        (AMD, "bfloat16", "scan"),
        (TPU, "bfloat16", "ragged_dot"),
        (CPU, "float32", "scan"),
    ],
)
def test_auto_takes_the_kernel_of_the_device(device, dtype, kernel):
    assert choose("auto", device, jnp.dtype(dtype)) == kernel
    assert choose(kernel, device, jnp.dtype(dtype)) == kernel


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        (CPU, "float32", "Triton's kernels run on NVIDIA GPUs, and the platform is cpu"),
        (V100, "float16", "Triton's kernels need compute capability 8.0, and Tesla V100 has 7.0"),
        (H100, "float64", "Triton's kernels compute in at most 32 bits, and dtype=float64"),
    ],
)
def test_a_kernel_that_device_or_dtype_has_not_is_refused(device, dtype, message):
    with pytest.raises(ConfigError) as caught:
        choose("triton", device, jnp.dtype(dtype))
    assert str(caught.value) == (
        f"kernel=triton: {message}. Use kernel=auto, which chooses a supported kernel."
    )


# --- Triton's kernels in a model ----------------------------------------------------------------


def block_of(device):
    """(a layer with 4 gated experts, its parameters' shapes, its input's)."""
    moe, sizes = Experts(num_experts=4, width=32), {"num_layers": 1, "d_model": 64, "vocab_size": 8}
    stack = transformer(
        Architecture(**sizes, num_kv_heads=2, activation="swiglu", tied=True, moe=moe),
        dtype=jnp.bfloat16,
        mix=lambda *_: kernel_named("xla"),
        device=device,
    )
    w = jax.eval_shape(stack.init_layer, jax.random.key(0), 0)
    return stack.layer_of(0), w, jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16)


def kernels(function, *shapes):
    """How often a function needs the kernel of rows, and that of weights; it lowers for GPUs."""
    traced = jax.jit(function).trace(*shapes)
    traced.lower(lowering_platforms=("cuda",))
    jaxpr = flatten(traced.jaxpr).jaxpr
    needed, _ = demand(jaxpr, [True] * len(jaxpr.outvars))
    names = [str(jaxpr.eqns[i].params.get("name")) for i in needed]
    return names.count("grouped_rows"), names.count("grouped_weights_adds_to_last")


@pytest.mark.parametrize("remat", [Remat.NONE, full(Remat.LAYER), Remat.FULL])
def test_a_stage_runs_each_product_once_and_weights_have_a_half_by_themselves(remat, monkeypatch):
    monkeypatch.undo()  # kernels as GPUs have them
    layer, w, x = block_of(H100)
    stage = Stage(layer, remat, w, x)
    forward = lambda w, x: stage.forward([w], None, x)
    _, stash = jax.eval_shape(forward, w, x)
    assert kernels(forward, w, x) == (3, 0)
    again = {"none": 0, "layer": 2, "full": 2}[remat.value]  # not `down`: nothing reads it
    backward = lambda w, stash, g: stage.backward([w], None, stash, lambda _: (g, None))[:2]
    assert kernels(backward, w, stash, x) == (3 + again, 3)
    input_grad = lambda w, stash, g: stage.input_grad([w], None, stash, lambda _: (g, None))[:2]
    assert kernels(input_grad, w, stash, x) == (3 + again, 0)
    pending = stage.programs.pending_shapes([w])
    assert kernels(lambda w, p: stage.weight_grad([w], None, p), w, pending) == (0, 3)


def test_kernels_lower_for_absent_devices_in_scans_branches_and_loops(monkeypatch):
    monkeypatch.undo()
    mesh = AbstractMesh((2, 2), ("pp", "ep"))
    times, sizes = product(KERNELS["triton"]), jnp.asarray([3, 2], jnp.int32)

    def gradients(x, w):
        y, pull = jax.vjp(lambda x, w: times(x, w, sizes), x, w)
        return pull(y)

    def step(w, x):
        keep = lambda x, w: (x, w)
        _, dw = jax.lax.cond(x.sum() > 0, gradients, keep, x, w)
        turns = jax.lax.axis_index("ep")
        return jax.lax.fori_loop(0, turns, lambda _, w: w + gradients(x, w)[1], dw), None

    def run(w, xs):
        return jax.lax.psum(jax.lax.scan(step, w, xs)[0], "ep")

    divided = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("pp", "ep")), out_specs=P(), check_vma=False
    )
    some = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    traced = jax.jit(divided).trace(some(2, 16, 16), some(4, 12, 16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 2 * 2  # in the branch, and in the loop


def test_gradients_of_equal_sizes_have_equal_code_whichever_line_calls_their_products(monkeypatch):
    monkeypatch.undo()
    limits = triton_products.limits_of((9, 0), "NVIDIA H100 80GB HBM3")
    products = (partial(each, limits=limits) for each in KERNELS["triton"])
    times = product(Kernel(*products))

    def gated(x, w, v, sizes):
        gate = times(x, w, sizes)
        up = times(x, v, sizes)
        return gate * up

    def gradients(x, w, v, sizes):
        y, pull = jax.vjp(partial(gated, sizes=sizes), x, w, v)
        return pull(y)

    some = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    shapes = some(4, 16), some(2, 16, 16), some(2, 16, 16), jax.ShapeDtypeStruct((2,), "int32")
    text = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    codes = re.findall(r' ir = "(.*?)", name = "grouped_', text)
    assert len(codes) == 6
    assert len(set(codes)) == 3  # rows, rows of the transposed matrix, weights


@needs_cuda_plugin
@pytest.mark.parametrize(
    ("executor", "mesh", "schedule"),
    full_except(
        [
            (config.Spmd(remat="none"), config.Mesh(1, 2, 1), "1f1b"),
            (config.Spmd(remat="layer"), config.Mesh(1, 2, 1, ep=2), "zb_h1"),
            (config.Mpmd(remat="none"), config.Mesh(1, 2, 1), "zb_h1"),
            (config.Mpmd(remat="full"), config.Mesh(1, 2, 1, ep=2, tp=2), "1f1b"),
        ],
        (config.Spmd(remat="none"), config.Mesh(1, 2, 1), "1f1b"),
    ),
)
@pytest.mark.parametrize("dispatch", ["gather", full("alltoall")])
def test_a_model_with_experts_compiles_for_h100s(executor, mesh, schedule, dispatch, monkeypatch):
    monkeypatch.undo()
    moe = Experts(num_experts=4, width=32, kernel="triton", dispatch=dispatch)
    request = config.Config(
        model=config.Transformer(num_layers=2, d_model=64, num_heads=2, seq_len=32, moe=moe),
        mesh=mesh,
        schedule=config.Schedule(schedule, 4),
        executor=executor,
        data=config.Synthetic(vocab_size=64, batch_size=16),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(compile=True, topology=f"h100:1x{mesh.num_devices}"),
    )
    engine = assemble(request).pipe.engine
    if isinstance(executor, config.Spmd):
        texts = [engine.compile(evaluate=False).text]
    else:
        texts = [each.hlo for each in engine.programs().programs]
    for kernel in ("grouped_rows", "grouped_weights"):
        assert any(kernel in text and "__gpu$xla.gpu.triton" in text for text in texts)


def test_a_kernel_that_the_cpu_has_not_is_refused_before_anything_is_compiled(capsys):
    words = "plan data=synthetic model.moe.num_experts=4 model.moe.kernel=triton plan.compile=true"
    assert cli.main(words.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "model.moe.kernel=triton: Triton's kernels run on NVIDIA GPUs" in line
    assert line.endswith(
        "the platform is cpu. Use model.moe.kernel=auto, which chooses a supported kernel."
    )
