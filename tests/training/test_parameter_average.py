"""The average of the parameters, optim.ema: equal to the closed form in float64 on every engine, and
what evaluations, saved runs, exports and new runs use.
"""

from dataclasses import asdict

import jax
import numpy as np
import optax
import pytest
import yaml
from support import networks
from support.selection import full
from support.small_runs import ROWS

import ppctl
from ppctl import config
from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import names_of
from ppctl.language.language_model import open_language_model
from ppctl.model.lora import merged
from ppctl.model.mlp import mlp
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.optimizers import make_optimizer
from ppctl.training.run.loop import metadata

TOLERANCE = 1e-12
FLOAT64 = [*ROWS.split(), "run.dtype=float64", "optim.warmup_steps=0", "optim.lr=0.01"]


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, TOLERANCE, TOLERANCE), found, wanted)


def batch_of(inputs=6):
    draw = np.random.default_rng(0)
    return {"inputs": draw.standard_normal((8, inputs)), "targets": draw.standard_normal((8, 3))}


def make(model, optimizer, mesh, **how):
    how = {"num_microbatches": 2, "dtype": "float64", "clip_norm": 1.0, "ema": 0.9} | how
    sizes = {"num_layers": 4, "d_model": 8, "input_dim": 6, "target_dim": 3, "activation": "tanh"}
    model = mlp(**sizes, dtype="float64") if model == "stack" else networks.widths()
    return ppctl.pipeline(model, ppctl.mesh(**mesh), batch=batch_of(), optimizer=optimizer, **how)


LORA = config.Config(
    model=config.Transformer(num_layers=2, d_model=8, num_heads=2, seq_len=4),
    data=config.Synthetic(batch_size=8, vocab_size=8, num_sequences=64),
    optim=config.AdamW(train="lora", lora_rank=2, ema=0.9, warmup_steps=0),
    executor=config.Reference(),
    mesh=config.Mesh(1, 1),
    schedule=config.Schedule("gpipe", 2),
    run=config.Run(dtype="float64", num_steps=2),
)
ADAM = optax.adam(1e-2)
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=4)  # packs its state in a network's layers
CASES = [
    ("stack", ADAM, {"pp": 2}, {"schedule": "zb_h1", "executor": "mpmd", "partition": [3, 1]}),
    ("network", FACTORED, {"pp": 2}, {"schedule": "1f1b"}),
    full(
        (*("stack", FACTORED, {"pp": 2, "fsdp": 2}), {"schedule": "interleaved", "num_chunks": 2})
    ),
    full(
        (
            *("stack", ADAM, {"pp": 2}),
            {"schedule": "1f1b", "executor": ppctl.mpmd(post_validation=True), "clip_norm": 0.1},
        )
    ),
    full(("network", FACTORED, {"pp": 2}, {"schedule": "zb_v", "executor": "mpmd"})),
]


@pytest.mark.parametrize(("model", "optimizer", "mesh", "how"), CASES)
def test_the_average_equals_the_closed_form(model, optimizer, mesh, how):
    pipe, batch = make(model, optimizer, mesh, **how), batch_of()
    state = pipe.init()
    wanted = pipe.params(state)
    assert_close(pipe.params(pipe.averaged(state)), wanted)
    for _ in range(3):
        state, _ = pipe.step(state, batch)
        wanted = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, wanted, pipe.params(state))
    average = pipe.averaged(state)
    assert_close(pipe.params(average), wanted)
    again = pipe.init(params=wanted)
    for loss in (pipe.loss, lambda *given: pipe.evaluate(*given)["loss"]):
        np.testing.assert_allclose(loss(average, batch), loss(again, batch), TOLERANCE)
    assert_close(pipe.params(pipe.averaged(again)), wanted)  # it begins with given parameters
    pipe.step(again, batch)
    with pytest.raises(ConfigError, match=r"^The state is of pipe\.averaged.* Use the state"):
        pipe.step(average, batch)


def test_a_skipped_step_leaves_the_average():
    optimizer, _ = make_optimizer(config.SGD(lr=0.1, warmup_steps=0), 5, on_nonfinite="skip")
    pipe = make("stack", optimizer, {}, executor="reference", schedule="gpipe")
    bad = {name: np.full_like(a, np.nan) for name, a in batch_of().items()}
    state, _ = pipe.step(pipe.init(), batch_of())
    before = pipe.params(pipe.averaged(state))
    state, _ = pipe.step(state, bad)
    assert_close(pipe.params(pipe.averaged(state)), before)
    pairs = zip(*map(jax.tree.leaves, (before, pipe.params(state))), strict=True)
    assert all(np.abs(a - b).max() > 1e-6 for a, b in pairs), "a step towards them would show"


def test_the_average_of_a_pipeline_without_one_is_refused():
    pipe = make("stack", ADAM, {}, executor="reference", schedule="gpipe", ema=None)
    with pytest.raises(ConfigError, match=r"no average\. Use ppctl\.pipeline\(\.\.\., ema=0\.999"):
        pipe.averaged(pipe.init())


def test_evaluations_saved_runs_and_new_runs_use_the_average(train, tmp_path):
    words = [*FLOAT64, "optim.ema=0.5", "run.checkpoint.every=1", "run.checkpoint.keep=9"]
    words += ["data.eval_fraction=0.1", "run.eval_every=3", "run.eval_batches=2", "executor=mpmd"]
    code, out, _ = train(tiny=" ".join(words))
    assert code == 0
    assert "average   evaluations use the average of the parameters (optim.ema=0.5)" in out
    # 1. the checkpoints, by the closed form
    run = ppctl.load_run(tmp_path / "run")
    wanted = run.params(1)
    for step in run.steps[1:]:
        trained = run.params(step, average=False)
        wanted = jax.tree.map(lambda a, b: (a + b) / 2, wanted, trained)
    assert_close(run.params(), wanted)
    # 2. the evaluation
    losses = [run.loss(batch) for batch in run.data.eval_batches(2)]
    assert run.evaluations[-1]["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    # 3. a resume keeps both, and prints another decay; arrays that are missing are refused
    longer = "run.num_steps=7"
    _, out, _ = train("optim.ema=0.25", longer, tiny=" ".join(words))
    assert "changed   since step 6: optim.ema 0.5 -> 0.25" in out
    trained = run.params(7, average=False)
    assert_close(run.params(7), jax.tree.map(lambda a, b: a / 4 + 3 * b / 4, wanted, trained))
    code, _, err = train("optim.ema=null", "run.num_steps=8", tiny=" ".join(words))
    assert code == 2
    assert "holds other arrays: optim.ema: 0.25 then, null now" in err
    # 4. a new run starts from the average
    new = tmp_path / "new"
    start = f"run.start_from={tmp_path / 'run'}"
    train(start, "optim.lr=0", "run.num_steps=1", tiny=" ".join(FLOAT64), run_dir=new)
    assert_close(ppctl.load_run(new).params(), run.params())


def test_exports_use_the_average_of_adapters(tmp_path):
    # 1. a saved state whose average differs from its parameters
    job = assemble(LORA)
    state = job.pipe.to_natural(job.pipe.init())
    state["optimizer"]["average"] = jax.tree.map(lambda a: a + 1, state["optimizer"]["average"])
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, metadata(job, 1))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(job.config)))
    # 2. adapters, and the parameters with adapters merged in
    names = jax.tree.map_with_path(lambda path, _: names_of(path)[-1], state["params"])
    wanted = jax.tree.map(lambda name, a: a + name.startswith("lora"), names, state["params"])
    model = open_language_model(tmp_path)
    assert model.adapters is not None
    _, lora, found = model.adapters
    assert_close(found, wanted)
    assert_close(model.params, merged(wanted, scale=lora.scale))
