"""The Python API: pipelines of any model equal the reference, and what cannot be is refused in a
line.
"""

import base64
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp
from support.cases import difference
from support.selection import full, full_except

import ppctl
from ppctl.config import Config, Mesh, Run, Schedule, Synthetic, Transformer
from ppctl.training.pipeline.job import assemble

TOLERANCE = 1e-10
WIDTH = 8


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_default_dtype_is_float64_only_for_parameters_in_float64(dtype):
    mlp = ppctl.mlp(num_layers=2, d_model=WIDTH, input_dim=5, target_dim=3, dtype=jnp.dtype(dtype))
    init = lambda key: {"w": jnp.ones((5, 3), dtype)}
    loss = lambda y, t: (jnp.sum((y - t) ** 2), jnp.asarray(float(t.size)))
    network = ppctl.Network(init, lambda params, x: x @ params["w"], loss)
    how = {"num_microbatches": 2, "schedule": "gpipe", "optimizer": optax.sgd(0.1)}
    for model in (mlp, network):
        pipe = ppctl.pipeline(model, ppctl.mesh(), batch=batch_of(5, 3), **how)
        assert pipe.dtype == dtype


def batch_of(inputs, targets, size=16):
    rng = np.random.default_rng(0)
    return {"inputs": rng.normal(size=(size, inputs)), "targets": rng.normal(size=(size, targets))}


def network():
    """A residual network of four layers, whose parameters are a list."""

    def init(key):
        keys = jax.random.split(key, 5)
        layers = [0.3 * jax.random.normal(each, (WIDTH, WIDTH), jnp.float64) for each in keys[:4]]
        return {"layers": layers, "out": 0.3 * jax.random.normal(keys[4], (WIDTH, 3), jnp.float64)}

    def apply(params, x):
        for i, w in enumerate(params["layers"]):
            x = x + jnp.tanh(x @ w)
            if i < 3:
                x = ppctl.stage_boundary(x)
        return x @ params["out"]

    return ppctl.Network(
        init, apply, lambda y, t: (jnp.sum((y - t) ** 2), jnp.asarray(float(t.size)))
    )


MODELS = {
    "mlp": (
        lambda: ppctl.mlp(
            num_layers=4, d_model=WIDTH, input_dim=5, target_dim=3, dtype=jnp.float64
        ),
        5,
        {},
    ),
    "network": (network, WIDTH, {}),
}


def make(model="mlp", optimizer=None, **request):
    build, inputs, more = MODELS[model]
    usual = {
        "mesh": ppctl.mesh(pp=2),
        "schedule": "1f1b",
        "batch": batch_of(inputs, 3),
        "dtype": "float64",
    }
    usual |= {"optimizer": optimizer or optax.adam(1e-2)} | more
    if isinstance(request.get("schedule", "1f1b"), str):
        usual["num_microbatches"] = 4
    return ppctl.pipeline(build(), **(usual | request))


@pytest.mark.full
@pytest.mark.parametrize("model", full_except([*MODELS], "mlp"))
@pytest.mark.parametrize(
    "request_",
    [{"schedule": "zb_h1", "executor": "mpmd"}, full({"schedule": "interleaved", "num_chunks": 2})],
    ids=["mpmd", "spmd"],
)
def test_gradients_and_steps_equal_those_without_a_pipeline(model, request_):
    pipe = make(model, clip_norm=0.05, **request_)
    plain = make(model, clip_norm=0.05, executor="reference", mesh=ppctl.mesh())
    batch = batch_of(MODELS[model][1], 3)
    loss, grads = pipe.loss_and_grads(pipe.init(seed=3), batch)
    expected_loss, expected = plain.loss_and_grads(plain.init(seed=3), batch)
    assert abs(float(loss) - float(expected_loss)) <= TOLERANCE
    assert difference(grads, expected) <= TOLERANCE
    states = [each.init(seed=3) for each in (pipe, plain)]
    for _ in range(2):
        (states[0], metrics), (states[1], wanted) = (
            p.step(s, batch) for p, s in zip((pipe, plain), states, strict=True)
        )
        assert {*metrics} == {"loss", "grad_norm"}
        np.testing.assert_allclose(
            float(metrics["grad_norm"]), float(wanted["grad_norm"]), rtol=1e-9
        )
        assert metrics["grad_norm"] > 0.05  # clipping is active
    found = pipe.to_natural(states[0])["params"]
    assert (
        difference(jax.device_get(found), jax.device_get(plain.to_natural(states[1])["params"]))
        <= 1e-8
    )
    np.testing.assert_allclose(
        float(pipe.loss(states[0], batch)), float(plain.loss(states[1], batch)), rtol=1e-9
    )


def constants(loss):
    """Return a model with a traced program that returns losses, counts, gradients and metrics."""
    scalar = {"unread": jnp.ones((), jnp.float64), "added": jnp.ones((), jnp.float64)}

    def layer(w, x):
        x = x + jnp.tanh(x @ w["kernel"]) + w["added"]
        return ppctl.attach_loss(x, 0.5 * len(x)) if loss else x

    def head(embed_head, x, targets):
        total = jnp.square(x - targets + embed_head["added"]).sum() if loss else 0.0
        return total, targets.size if loss else jnp.asarray(float(targets.size))

    return ppctl.Stack(
        2,
        lambda _: scalar,
        lambda key, _: scalar | {"kernel": jax.random.normal(key, (WIDTH, WIDTH), jnp.float64)},
        lambda _, x: x,
        layer,
        head,
    ).with_options(outputs=lambda _, x: x)


@pytest.mark.parametrize("loss", [full(True), False], ids=["counted", "constant"])
@pytest.mark.parametrize(
    ("executor", "schedule", "remat"),
    [*map(full, [("mpmd", "zb_h1", "none"), ("mpmd", "1f1b", "full")]), ("spmd", "1f1b", "layer")],
)
def test_values_that_are_constants_of_a_model_are_summed_as_arrays_are(
    executor, schedule, remat, loss
):
    batch, found = batch_of(WIDTH, WIDTH), []
    for how in ({"executor": "reference"}, {"executor": executor, "remat": remat}):
        is_plain = how["executor"] == "reference"
        pipe = ppctl.pipeline(
            constants(loss),
            ppctl.mesh(pp=1 if is_plain else 2),
            "gpipe" if is_plain else schedule,
            optax.adam(1e-2),
            batch=batch,
            num_microbatches=2,
            dtype="float64",
            metrics={"ones": lambda outputs, _: np.ones(len(outputs))},
            **how,
        )
        state = pipe.init(seed=1)
        first = pipe.loss_and_grads(state, batch), pipe.evaluate(state, batch)
        found.append(jax.device_get((first, pipe.step(state, batch)[1])))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE), *found)
    assert found[0][1]["ones"] == 1.0
    assert found[0][1].get("attached_loss") == (1.0 / WIDTH if loss else None)


@pytest.mark.full
def test_the_command_line_trains_by_the_same_call():
    config = Config(
        model=Transformer(num_layers=2, d_model=8, num_heads=2, seq_len=4),
        data=Synthetic(batch_size=4, vocab_size=16, num_sequences=512),
        mesh=Mesh(1, 2),
        schedule=Schedule(num_microbatches=2),
        run=Run(dtype="float32", seed=5),
    )
    job = assemble(config)
    stack = ppctl.transformer(num_layers=2, d_model=8, num_heads=2, vocab_size=16)
    batch = next(job.data.batches())
    pipe = ppctl.pipeline(
        stack,
        mesh=ppctl.mesh(pp=2),
        schedule="gpipe",
        num_microbatches=2,
        batch=batch,
        optimizer=optax.sgd(0.1),
    )
    loss, grads = pipe.loss_and_grads(pipe.init(seed=5), batch)
    expected_loss, expected = job.pipe.loss_and_grads(job.pipe.init(), batch)
    assert float(loss) == float(expected_loss)
    assert difference(jax.device_get(grads), jax.device_get(expected)) == 0


def test_a_state_is_a_pytree_that_orbax_saves(tmp_path):
    pipe = make(executor="mpmd")
    state, _ = pipe.step(pipe.init(seed=1), batch_of(5, 3))
    ocp.save(tmp_path / "state", state)
    restored = ocp.load(
        tmp_path / "state",
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state),
    )
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)
    pipe.step(restored, batch_of(5, 3))


def test_a_pipeline_reports_its_bubble_and_memory():
    pipe = make(schedule="interleaved", num_chunks=2)
    assert pipe.bubble() == pytest.approx(
        ppctl.simulate(pipe.schedule, ppctl.Costs()).bubble_fraction
    )
    assert len(pipe.memory()) == 2
    assert "temporaries" not in pipe.memory()[0]
    pipe.compile()
    assert pipe.memory()[0]["temporaries"] > 0
    (program,) = pipe.programs().programs
    assert any(each.kind == "collective-permute" for each in program.collectives)
    assert make(executor="reference", mesh=ppctl.mesh()).bubble() is None


def test_a_custom_schedule_is_validated_and_run():
    schedule = ppctl.build_schedule("eager_1f1b", num_ranks=2, num_microbatches=4)
    assert make(schedule=schedule).schedule == schedule
    broken = replace(schedule, ranks=(schedule.ranks[0][1:], schedule.ranks[1]))
    with pytest.raises(ppctl.PpctlError, match=r"[01]F0"):
        make(schedule=broken)


def test_executor_and_schedule_are_values_too():
    by_value = make(
        schedule=ppctl.family("interleaved", num_chunks=2),
        num_microbatches=4,
        executor=ppctl.mpmd(remat="layer", post_validation=True),
    )
    by_name = make(
        schedule="interleaved", num_chunks=2, executor="mpmd", remat="layer", post_validation=True
    )
    assert by_value.schedule == by_name.schedule
    assert by_value.execution == by_name.execution
    assert make(executor=ppctl.reference(), mesh=ppctl.mesh()).execution.executor == "reference"


def test_a_schedule_of_a_file_is_that_which_was_written(tmp_path):
    schedule = of(2)
    read = ppctl.read_schedule(ppctl.draw(schedule, tmp_path / "order.csv"))
    assert (read.ranks, read.rank_of) == (schedule.ranks, schedule.rank_of)
    with pytest.raises(ppctl.PpctlError, match=r"none\.csv cannot be read: No such file"):
        ppctl.read_schedule(str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda: ppctl.spmd(remt="layer"),
            "remt=layer is not an option of executor=spmd. Did you mean remat?",
        ),
        (
            lambda: ppctl.reference(gather="step"),
            "gather=step is not an option of executor=reference. It has remat, xla_flags.",
        ),
        (lambda: ppctl.spmd(remat="some"), "remat=some is not one of none, layer, full."),
        (
            lambda: ppctl.spmd(unroll="all"),
            "unroll='all' has another type than the default, unroll=16.",
        ),
        (lambda: ppctl.family("pipe"), "schedule=pipe is not one of gpipe, .*"),
        (
            lambda: ppctl.family("interleaved", num_chunk=2),
            "num_chunk=2 is no setting of schedule=interleaved .* Did you mean num_chunks?",
        ),
        (
            lambda: ppctl.family("interleaved", num_chunks=2.5),
            r"num_chunks=2.5 is not a whole number \(schedule=interleaved\). Use one.",
        ),
    ],
    ids=range(7),
)
def test_a_wrong_option_of_an_executor_value_is_refused_in_one_line(value, message):
    with pytest.raises(ppctl.PpctlError, match=f"^{message}$".replace("?$", r"\?$")):
        value()


@pytest.mark.full
def test_a_pipeline_is_verified_against_the_model_without_one():
    pipe = make("network", executor="mpmd", schedule="zb_h1")
    found = ppctl.verify(pipe, batch_of(WIDTH, 3))
    assert found.ok
    assert found.tolerance == 1e-10
    assert {leaf.name for leaf in found.gradients} >= {"layers/0", "out"}
    wrong = replace(pipe, engine=make("network", seed=1).engine)  # gradients of other parameters
    assert not ppctl.verify(wrong, batch_of(WIDTH, 3)).ok


def of(num_ranks):
    return ppctl.build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"schedule": "nope"}, "schedule=nope is not one of gpipe, .*"),
        ({"num_microbatches": None}, "schedule=1f1b needs num_microbatches, such as 4."),
        (
            {"num_microbatches": 5},
            r"batch size 16 is not a multiple of num_microbatches\*dp\*fsdp = 5\*1\*1 = 5. Use "
            r"15 or 20, .*",
        ),
        ({"num_chunks": 2}, r"num_chunks=2 is no setting of schedule=1f1b \(settings: none\)."),
        ({"schedule": of(4)}, "The mesh has pp=2, but the schedule has 4 ranks. Use pp=4."),
        (
            {"schedule": of(2), "num_microbatches": 8},
            "num_microbatches=8, but the schedule has 4. Leave it out.",
        ),
        ({"schedule": of(2), "num_chunks": 2}, "num_chunks: settings of a schedule family, .*"),
        ({"executor": "xla"}, "executor=xla is not one of spmd, mpmd, reference, or a value .*"),
        (
            {"executor": ppctl.spmd(), "remat": "layer"},
            r"remat=layer is an option of the executor. Use executor=ppctl.spmd\(remat='layer'\).",
        ),
        ({"remt": "layer"}, "remt=layer is not an option of executor=spmd .* Did you mean remat.*"),
        (
            {"schedule": 1},
            r"schedule=1 is not a schedule. Use the name of a family, ppctl.family\(.*",
        ),
        (
            {"schedule": ppctl.family("interleaved"), "num_microbatches": 4, "num_chunks": 2},
            r"num_chunks=2 is a setting of the schedule. Use schedule=ppctl.family\(.*num_chunks=2.*",
        ),
        (
            {"executor": "reference"},
            "executor=reference is the un-pipelined model on one device, but the mesh has 2. .*",
        ),
        ({"remat": "some"}, "remat=some is not .*none, layer, full.*"),
        (
            {"post_validation": True},
            "post_validation=True does not apply to executor=spmd. Leave it out.",
        ),
        (
            {"partition": [1, 2]},
            r"partition=\[1, 2\] has 1\+2 = 3 layers in stages 0 to 1, but num_layers=4. .*",
        ),
        (
            {"partition": "even"},
            "partition=even is not one of uniform, balanced, or the layers of each stage.",
        ),
        (
            {"schedule": "interleaved", "num_chunks": 4},
            r"num_layers=4 is less than the number of stages, .* = 8: .*",
        ),
        ({"batch": [1]}, "batch is list; it must be .*"),
        (
            {"batch": {"inputs": np.zeros((4, 5)), "targets": np.zeros((8, 3))}},
            "inputs .* and targets .* differ in batch size.",
        ),
    ],
    ids=str,
)
def test_impossible_arguments_of_pipeline_are_refused_by_their_names(request_, message):
    with pytest.raises(ppctl.PpctlError, match=f"^{message}$"):
        make(**request_)


def test_a_batch_of_other_shapes_is_refused():
    pipe = make()
    with pytest.raises(
        ppctl.PpctlError, match=r"The batch has shapes .*, but the pipeline was made for"
    ):
        pipe.step(pipe.init(), batch_of(5, 3, size=8))


def test_layers_of_a_network_are_by_its_marks_or_the_requested_number():
    assert make("network").stack.num_layers == 4
    assert make("network", layers=2).stack.num_layers == 2
    with pytest.raises(ppctl.PpctlError, match=r"^layers=9, but there are only 5 groups of .* Use"):
        make("network", layers=9)
    with pytest.raises(ppctl.PpctlError, match=r"^layers=0 is not a whole number from 1"):
        make("network", layers=0)
    with pytest.raises(ppctl.PpctlError, match=r"^layers=2 cuts a Network, but this Stack has 4"):
        make("mlp", layers=2)


def test_built_in_models_refuse_sizes_that_do_not_fit():
    with pytest.raises(
        ppctl.PpctlError,
        match=r"width is not a size of this model\. It has num_layers, d_model, .*",
    ):
        ppctl.transformer(vocab_size=8, width=4)
    with pytest.raises(
        ppctl.PpctlError, match=r"model\.d_model=10 is not a multiple of model\.num_heads=4"
    ):
        ppctl.transformer(vocab_size=8, d_model=10)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": "8"}, "model.num_layers=8 is of type str, not int"),
        ({"moe": 3}, "model.moe=3 is not a mapping of settings. It takes num_experts, top_k, "),
        ({"moe": {"num_experts": "8"}}, "model.moe.num_experts=8 is of type str, not int"),
        ({"moe": {"num_experts": 8.0}}, "model.moe.num_experts=8.0 is of type float, not int"),
        ({"moe": {"num_experts": True}}, "model.moe.num_experts=True is of type bool, not int"),
        ({"moe": {"experts": 8}}, "model.moe.experts is not a setting of .* It takes num_experts"),
    ],
)
def test_built_in_models_refuse_values_of_another_type(sizes, message):
    with pytest.raises(ppctl.PpctlError, match=message):
        ppctl.transformer(vocab_size=8, **sizes)


def test_numbers_of_numpy_are_sizes():
    moe = {"num_experts": np.int64(4), "z_loss": np.float32(0.5)}
    assert ppctl.transformer(vocab_size=8, num_layers=np.int32(2), moe=moe).num_layers == 2


@pytest.mark.parametrize("form", ["svg", "pdf", "png", "html", "json", "txt", "csv"])
def test_a_schedule_is_drawn_in_the_form_of_its_file(tmp_path, form):
    file = ppctl.draw(of(2), tmp_path / f"1f1b.{form}")
    assert file.stat().st_size > 50


def test_notebooks_show_a_schedule_and_a_pipeline():
    def svg(html):
        data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)[1]
        return base64.b64decode(data).decode()

    schedule = of(2)
    assert "1f1b: 2 ranks, 4 microbatches" in svg(schedule._repr_html_())
    pipe = make(schedule="zb_v", executor="mpmd")
    html = pipe._repr_html_()
    assert "zb_v: 2 ranks" in svg(html)
    assert '<th scope="row">0</th><td>0-0, 3-3</td>' in html
    assert "pp=2, cpu" in html
    assert "<img" not in make(executor="reference", mesh=ppctl.mesh())._repr_html_()


def test_a_drawing_of_no_known_form_is_refused(tmp_path):
    with pytest.raises(ppctl.PpctlError, match=r"unknown suffix. Use one of .*\.svg"):
        ppctl.draw(of(2), tmp_path / "x.gif")


def test_all_names_of_the_api_resolve():
    assert {name for name in ppctl.__all__ if not hasattr(ppctl, name)} == set()
