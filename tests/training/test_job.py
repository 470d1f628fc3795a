"""The job of a run: what depends on the layout and what must not, what
is refused.
"""

import math
import os
import re
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.job_configs import BATCH_SIZE, SEQ_LEN, mlp_config, small, transformer_config
from support.remedies import suggestions, with_suggestion
from support.selection import full

from ppctl.cli.choices import request_words
from ppctl.cli.compose import compose
from ppctl.config import (
    MLP,
    AdamW,
    Csv,
    Interleaved,
    Mesh,
    Mpmd,
    Reference,
    Regression,
    Run,
    Schedule,
    Spmd,
    Transformer,
    Uniform,
)
from ppctl.config.groups.data_settings import Data
from ppctl.config.groups.layout_settings import Balanced, Explicit
from ppctl.config.groups.moe_settings import Experts
from ppctl.config.schedule_from_config import trained_share
from ppctl.errors import ConfigError, ScheduleError
from ppctl.model.stack import init
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.one_f_one_b import one_f_one_b
from ppctl.schedule.partition.partition import LETTERS, stages_text
from ppctl.schedule.schedule_text import to_csv
from ppctl.schedule.tick_lowering import in_shape, packings, ticks
from ppctl.training.pipeline.built_in_models import make_stack
from ppctl.training.pipeline.engines.train_states import PlacedBatches
from ppctl.training.pipeline.jax_start import CPU_FLAGS, DEFAULTS
from ppctl.training.pipeline.job import assemble, partition_text, plan, without_pipeline
from ppctl.training.pipeline.known_hardware import known
from ppctl.training.pipeline.mfu import model_flops
from ppctl.training.run.run_lines import describe

OTHER_LAYOUTS = [
    {"mesh": Mesh(2, 2, 2), "schedule": Interleaved(num_microbatches=2)},
    {"mesh": Mesh(), "executor": Reference()},
]


@pytest.mark.parametrize("parts", OTHER_LAYOUTS)
def test_flops_do_not_depend_on_the_layout(parts):
    here, there = assemble(transformer_config()), assemble(transformer_config(**parts))
    assert model_flops(here) == model_flops(there)


@pytest.mark.full  # tests/executors/test_layout.py: to the bit, compiled as a user has it
@pytest.mark.parametrize("parts", OTHER_LAYOUTS)
def test_the_initial_state_does_not_depend_on_the_layout(parts):
    here, there = assemble(transformer_config()), assemble(transformer_config(**parts))
    states = [built.pipe.to_natural(built.pipe.init()) for built in (here, there)]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_layers", [5, full(4)])  # 5: stages of unequal size
def test_states_have_the_shapes_and_shardings_that_are_promised(num_layers):
    model = small(num_layers=num_layers)
    job = assemble(
        transformer_config(
            model=model, mesh=Mesh(1, 2, 2), schedule=Interleaved(num_microbatches=2)
        )
    )
    engine, states = job.pipe.engine, job.pipe.states
    staged = engine.new_state()
    for state, described in ((staged, states.staged), (engine.to_natural(staged), states.natural)):
        assert jax.tree.structure(state) == jax.tree.structure(described)
        for leaf, wanted in zip(*map(jax.tree.leaves, (state, described)), strict=True):
            assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    back = engine.from_natural(engine.to_natural(staged))
    for a, b in zip(*map(jax.tree.leaves, (staged, back)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_is_divided_over_rows_and_shards_and_whole_on_every_rank():
    job = assemble(transformer_config(mesh=Mesh(2, 2, 2), schedule=Schedule(num_microbatches=2)))
    batch = next(job.data.batches())
    placed = job.pipe.engine.batches.put(batch)
    for name, array in placed.items():
        np.testing.assert_array_equal(array.reshape(batch[name].shape), batch[name])
        assert {shard.data.shape for shard in array.addressable_shards} == {
            (2, BATCH_SIZE // 8, SEQ_LEN)
        }
        assert job.pipe.batch_shapes[name].dtype == array.dtype


def test_weights_are_float32_with_any_compute_dtype():
    for dtype in ("bfloat16", "float32"):
        job = assemble(transformer_config(run=Run(dtype=dtype)))
        assert job.pipe.dtype == dtype
        assert {leaf.dtype.name for leaf in jax.tree.leaves(job.pipe.states.natural["params"])} == {
            "float32"
        }
    job = assemble(transformer_config(run=Run(dtype="float64")))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(job.pipe.states.natural["params"])} == {
        "float64"
    }


def test_dtype_is_the_commands_default_unless_set():
    assert assemble(transformer_config(run=Run())).pipe.dtype == "float32"
    plain = transformer_config(run=Run(), hardware=known()["h100"])
    for how in ({}, {"only_planned": True}):  # an accelerator, if only described
        job = assemble(plain, **how)
        assert (str(job.pipe.dtype), job.settled.run.dtype) == ("bfloat16", "bfloat16")
    assert assemble(transformer_config(run=Run()), default_dtype="float64").pipe.dtype == "float64"
    assert assemble(transformer_config(), default_dtype="float64").pipe.dtype == "float32"


def test_the_flags_for_busy_machines_are_added_once_and_never_override(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {CPU_FLAGS[0].split('=')[0]}=7")
    for _ in range(2):
        assemble(transformer_config())
    assert (
        os.environ["XLA_FLAGS"] == f"--xla_dump_to=x {CPU_FLAGS[0].split('=')[0]}=7 {CPU_FLAGS[1]}"
    )


@pytest.mark.parametrize(("remat", "backward_s"), [("none", 2.0), ("layer", 3.0), ("full", 3.0)])
def test_recomputing_costs_a_forward(remat, backward_s):
    assert task_costs(remat).backward_s == backward_s
    assert task_costs("none") == Costs()


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "targets"),
    [
        full(({"activation": "swiglu", "num_kv_heads": 2, "head_dim": 6, "family": "qwen3"}, None)),
        ({"activation": "geglu", "family": "qwen2", "mlp_width": 40}, ["q", "down"]),
        ({"activation": "swiglu", "moe": Experts(4, shared_width=8, shared_gate=True)}, ["q", "o"]),
        full(({"moe": Experts(4, width=8, first_dense=1)}, None)),
        full(({}, None)),
    ],
)
def test_w_costs_the_trained_share_of_the_layers(sizes, targets):
    """The same share by the settings, which schedules are made by before JAX starts, and by the
    parameters.
    """
    optim = AdamW(train="lora", lora_rank=2, lora_targets=targets)
    request = transformer_config(model=small(**sizes), optim=optim, schedule=Schedule("zb_h1", 4))
    share, pipe = trained_share(request.model, optim), assemble(request).pipe
    assert 0 < share < 0.3
    assert pipe.scheduled.costs == Costs(weight_grad_s=share)
    assert (
        pipe.ticks
        == plan(request, request.model.num_layers).step.ticks
        == ticks(pipe.schedule, Costs(weight_grad_s=share), "none")
    )
    assert trained_share(request.model, AdamW()) == 1
    assert assemble(replace(request, optim=AdamW())).pipe.scheduled.costs == Costs()
    layers, free = (
        jax.eval_shape(lambda: init(pipe.stack, 0))["layers"],
        pipe.stack.trains("layers"),
    )
    sizes = {True: 0, False: 0}
    for leaf, is_trained in zip(jax.tree.leaves(layers), jax.tree.leaves(free), strict=True):
        sizes[is_trained] += math.prod(leaf.shape[1:]) if leaf.ndim > 2 else 0
    assert share == sizes[True] / (sizes[True] + sizes[False])


def test_without_w_zero_bubble_schedules_have_the_bubble_of_1f1b():
    ranks, number = 4, 8
    request = transformer_config(
        mesh=Mesh(1, ranks),
        schedule=Schedule("zb_h1", number),
        executor=Mpmd(),
        optim=AdamW(train="lora", lora_rank=1),
    )
    of_1f1b, whole = (
        (ranks - 1) / (number + ranks - 1),
        1 - 3 * number / (3 * number + ranks - 1),
    )  # the published share
    found, share = assemble(request).pipe.bubble(), trained_share(request.model, request.optim)
    assert assemble(replace(request, optim=AdamW())).pipe.bubble() == pytest.approx(whole)
    assert of_1f1b - share < found < of_1f1b


def test_without_a_pipeline_model_and_data_are_the_same():
    config = transformer_config(
        mesh=Mesh(2, 2), executor=Spmd(remat="full", unroll=3), partition=Explicit(layers=[3, 1])
    )
    plain = without_pipeline(config)
    assert (plain.mesh, plain.executor, plain.partition) == (Mesh(), Reference(), Uniform())
    for part in ("model", "schedule", "optim", "data", "run"):
        assert getattr(plain, part) == getattr(config, part)


def sizes_of(job):
    return [len(layers) for layers in job.pipe.partition]


@pytest.mark.parametrize(
    ("vocab_size", "remat", "sizes", "text"),
    [
        # FLOPs a token, forward: a layer 2*12*D^2 + 4*T*D = 6912, the head 2*D*V; forward and
        # backward are 3 of them, and recomputing makes 4 of a layer's
        (24, "none", [3, 3, 2, 2], "head 0.1 times a layer; largest stage 1.19 times the mean"),
        (648, "none", [4, 3, 3, 0], "head 3.0 times a layer; largest stage 1.23 times the mean"),
        (648, "full", [3, 3, 3, 1], "head 2.2 times a layer; largest stage 1.06 times the mean"),
        (6480, "layer", [4, 3, 3, 0], "head 22.5 times a layer; largest stage 2.77 times the mean"),
    ],
)
def test_balanced_counts_the_flops_of_the_head(vocab_size, remat, sizes, text):
    job = assemble(
        transformer_config(
            model=small(num_layers=10, vocab_size=vocab_size),
            mesh=Mesh(1, 4),
            partition=Balanced(),
            executor=Spmd(remat=remat),
        )
    )
    assert sizes_of(job) == sizes
    assert partition_text(job) == f"{stages_text(sizes)}; balanced (embedding 0.0, {text})"


def test_balanced_counts_an_embedding_that_multiplies():
    data = Regression(batch_size=BATCH_SIZE, num_features=80, num_targets=16, num_rows=512)
    job = assemble(
        mlp_config(
            model=MLP(num_layers=8, d_model=16), data=data, mesh=Mesh(1, 2), partition=Balanced()
        )
    )
    # in units of 2*B*D*D FLOPs: a layer 4, the head 3, the embedding 2 (the data need no
    # gradient) of 80/16 as many
    assert partition_text(job) == (
        f"Et*3|t*5L ({LETTERS}); balanced (embedding 3.3, head 1.0 times a layer; largest stage "
        "1.03 times the mean)"
    )


def test_partitions_are_shown_if_stages_differ_or_on_request():
    def shown(**parts):
        return partition_text(assemble(transformer_config(**parts)))

    assert shown() is None
    assert shown(model=small(num_layers=5)) == (
        f"Et*3|ttL ({LETTERS}); uniform (embedding 0.0, head 0.1 times a layer; largest stage "
        "1.17 times the mean)"
    )
    assert shown(model=small(vocab_size=648)) == (
        "2 of 2 layers each; uniform (embedding 0.0, head 3.0 times a layer; largest stage 1.43 "
        "times the mean, 1.14 with partition=balanced)"
    )
    assert shown(partition=Balanced()).startswith("2 of 2 layers each; balanced (")
    assert shown(partition=Explicit(layers="Et|t*3,L")).startswith(
        f"Et|t*3L ({LETTERS}); explicit ("
    )
    assert shown(mesh=Mesh(), executor=Reference(), model=small(vocab_size=648)) is None


def test_a_plan_needs_neither_data_nor_devices():
    model = Transformer(num_layers=2000)
    data = Data(name="tokens")
    schedule = Schedule(num_microbatches=4)
    request = transformer_config(model=model, data=data, mesh=Mesh(1, 256), schedule=schedule)
    planned = plan(request, model.num_layers).step
    assert planned.schedule.num_ranks == 256
    assert planned.ticks is not None
    assert planned.ticks.num_ticks >= 256


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            {"mesh": Mesh(1, 8), "partition": Balanced()},
            ConfigError,
            r"model.num_layers=4 is less than the number of stages between .* = 6: stage "
            r"5 would be empty",
        ),
        (
            {"partition": Explicit(layers=[2, 3])},
            ConfigError,
            r"partition.layers=\[2, 3\] has 2\+3 = 5 layers in stages 0 to 1, but "
            r"model.num_layers=4",
        ),
        (
            {"mesh": Mesh(1, 4), "partition": Explicit(layers="Ett||t|tL")},
            ConfigError,
            "stage 1 has 0 layers. Give it 1 or more",
        ),
        (
            {"mesh": Mesh(1, 5)},
            ConfigError,
            r"model.num_layers=4 is less than the number of stages, .* = 5",
        ),
        (
            {"schedule": Interleaved(num_microbatches=3)},
            ScheduleError,
            r"num_microbatches=3 is not a multiple of num_ranks=2 \(interleaved\)",
        ),
        (
            {"mesh": Mesh(1, 2, tp=3)},
            ConfigError,
            r"model.num_heads=4 is not a multiple of mesh.tp=3: .* Use mesh.tp=2, or other sizes",
        ),
        (
            {"mesh": Mesh(8, 2)},
            ConfigError,
            r"dp\*pp\*fsdp = 8\*2\*1 = 16 needs 16 devices, but there are \d+ \(cpu\)",
        ),
        (
            {"model": small(vocab_size=8)},
            ConfigError,
            r"model.vocab_size=8 is less than the 24 token ids of data=synthetic\. Use "
            r"model.vocab_size=null, which",
        ),
    ],
)
def test_impossible_jobs_are_refused_in_one_line(parts, error, message):
    with pytest.raises(error, match=message) as refused:
        assemble(transformer_config(**parts))
    assert not re.search("\n", str(refused.value))
    if "devices" not in message:  # those of this process
        for suggestion in suggestions(str(refused.value)):
            words = request_words(asdict(transformer_config(**parts)))
            assemble(compose(with_suggestion(words, suggestion)))


def test_a_vocabulary_may_be_larger_than_the_data_needs():
    job = assemble(transformer_config(model=small(vocab_size=32)))
    assert job.pipe.states.natural["params"]["embed_head"]["embedding"].shape == (32, 16)


@pytest.mark.parametrize("executor", [Spmd(), Mpmd()], ids=["spmd", "mpmd"])
@pytest.mark.parametrize(
    ("layers", "which"),
    [
        ((2, 2), "stage 0 (layers 0-1)"),
        ((0, 4), "stage 1 (layers 0-3)"),
        ((1, 3), "stage 0 (layer 0)"),
    ],
)
def test_a_backward_without_halves_is_refused_with_its_stage_before_anything_is_compiled(
    executor, layers, which, monkeypatch
):
    product = jax.custom_vjp(lambda w, x: x)
    scaled = lambda w, g, by: (jax.tree.map(lambda a: by * a * g[0, 0], w), by * g)
    product.defvjp(
        lambda w, x: (x, w),
        lambda w, g: jax.lax.cond(g[0, 0] > 0, lambda: scaled(w, g, 1), lambda: scaled(w, g, 2)),
    )
    monkeypatch.setattr(
        "ppctl.training.pipeline.job.make_stack",
        lambda *args, **how: replace(make_stack(*args, **how), layer=lambda w, x: product(w, x)),
    )
    split = mlp_config(
        schedule=Schedule(name="zb_h1", num_microbatches=2),
        partition=Explicit(layers=list(layers)),
        executor=executor,
    )
    with pytest.raises(ConfigError) as error:
        assemble(split)
    assert str(error.value).startswith(
        f"{which}: the backward of a layer cannot be split: cond, with results "
    )
    assert str(error.value).endswith(
        "use a schedule of unsplit backwards, such as schedule=interleaved."
    )
    assert "\n" not in str(error.value)
    assemble(replace(split, schedule=Schedule(num_microbatches=2)))  # whole backwards run


def test_integers_of_64_bits_are_placed_without_a_warning_where_jax_has_32():
    sharding = NamedSharding(jax.make_mesh((1,), ("dp",)), PartitionSpec())
    with jax.enable_x64(False):  # a warning is an error in tests
        shapes = {"inputs": jax.ShapeDtypeStruct((3,), "int64")}
        placed = PlacedBatches(shapes, {"targets": sharding}).put({"targets": np.arange(3)})
    assert placed["targets"].dtype == "int32"
    assert placed["targets"].tolist() == [[0, 1, 2]]


def test_a_run_prints_that_a_file_sets_its_sizes(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(one_f_one_b(2, 4).ranks))
    schedule = Csv(path=str(file), num_microbatches=4)
    job = assemble(mlp_config(mesh=Mesh(1, 2), schedule=schedule))
    assert f" live activations, ranks and microbatches of {file}" in "\n".join(describe(job, 0))


def test_the_width_of_jax_and_initial_weights_are_of_the_request_not_of_the_environment():
    assert os.environ["JAX_ENABLE_X64"] == "1"
    for dtype, rate in [("float32", "float32"), ("bfloat16", "float32"), ("float64", "float64")]:
        job = assemble(transformer_config(run=Run(dtype=dtype)))
        assert jax.config.jax_enable_x64 == (dtype == "float64")
        assert job.pipe.lr_schedule is not None
        assert job.pipe.lr_schedule(3).dtype == rate
    weights = init(job.pipe.stack, 2**31)
    others = "bfloat16", False, 7  # like JAX_DEFAULT_MATMUL_PRECISION
    for name, value in zip(DEFAULTS, others, strict=True):
        jax.config.update(name, value)
    again = assemble(transformer_config(run=Run(dtype="float64")))
    assert {name: getattr(jax.config, name) for name in DEFAULTS} == DEFAULTS
    jax.tree.map(np.testing.assert_array_equal, weights, init(again.pipe.stack, 2**31))
    with jax.default_prng_impl("rbg"):
        jax.tree.map(np.testing.assert_array_equal, weights, init(job.pipe.stack, 2**31))


@pytest.mark.parametrize("train", ["all", "lora"])
def test_the_schedule_of_a_job_is_lowered_once(train):
    # with lora, the config's and the model's costs of W differ
    config = replace(
        transformer_config(mesh=Mesh(pp=2), schedule=Interleaved(num_microbatches=4)),
        optim=AdamW(train=train),
    )
    packings.cache_clear()
    in_shape.cache_clear()
    assemble(config)
    lowered = packings.cache_info().misses, in_shape.cache_info().misses
    assert lowered == (2, 2)  # the step and the evaluation
