"""The MLP of Alpa's tutorial: parameters after a step, however it is cut and laid out, are those of
one device.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppctl
from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.planner.search.tune_layouts import tune_layouts
from ppctl.training.pipeline.job import assemble

ROOT = Path(__file__).parents[2]
SMALL = (
    "recipes=alpa_mlp",
    "run.eval_every=null",
    "data.options.dim=16",
    "data.batch_size=32",
    "schedule.num_microbatches=4",
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def plain_steps(job, count):
    """The author's parameters after steps of plain JAX and optax on one device, in the dtype of the
    job.
    """
    from recipes.documents.alpa import mlp

    network = mlp(num_layers=2, dtype=job.pipe.dtype, data=job.data)
    params, optimizer = network.init(jax.random.key(job.config.run.seed)), optax.adam(1e-3)
    state, batches = optimizer.init(params), job.data.batches()

    def mean_loss(params, batch):
        total, number = network.loss(
            network.apply(params, batch["inputs"].astype(job.pipe.dtype)), batch["targets"]
        )
        return total / number

    for _ in range(count):
        grads = jax.jit(jax.grad(mean_loss))(params, jax.tree.map(jnp.asarray, next(batches)))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def furthest(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def stepped(job, state, batch):
    """A state in natural order after one more step."""
    engine = job.pipe.engine
    engine.compile(evaluate=False)
    begun = engine.new_state() if state is None else engine.from_natural(state)
    return jax.device_get(engine.to_natural(engine.step(begun, engine.batches.put(batch))[0]))


@pytest.mark.full
def test_trained_weights_leave_a_run_as_its_author_wrote_them(tmp_path):
    assert (
        cli.main(
            [
                "train",
                "recipes=alpa_mlp",
                "run.num_steps=1",
                "run.eval_every=null",
                f"run.dir={tmp_path}",
            ]
        )
        == 0
    )
    job = assemble(compose(["recipes=alpa_mlp"]))
    found, expected = ppctl.load_run(tmp_path).params(), plain_steps(job, 1)
    start = plain_steps(job, 0)
    assert furthest(found, expected) < 1e-5  # Alpa's tutorial: 5e-3
    assert furthest(found, start) > 9e-4  # the step of Adam


@pytest.mark.full
def test_layers_by_clustering_and_another_mesh_in_the_middle():
    words = ("model.layers=auto", "model.num_layers=4", "run.dtype=float64")
    first = assemble(compose([*SMALL, *words]))
    second = assemble(compose([*SMALL, *words, "mesh=2x4", "executor=spmd", "schedule=gpipe"]))
    batches = first.data.batches()
    state = stepped(second, stepped(first, None, next(batches)), next(batches))
    assert (
        furthest(
            second.pipe.stack.options.network.parameters.from_parts(state["params"]),
            plain_steps(first, 2),
        )
        < 1e-10
    )


def test_a_checkpoint_of_another_cut_is_refused():
    cuts = [assemble(compose([*SMALL, f"model.layers={how}"])) for how in ("marks", "auto")]
    finer = assemble(compose([*SMALL, "model.layers=auto", "model.num_layers=4"]))
    marks, auto, four = (set(job.pipe.states.natural["params"]["layers"]) for job in (*cuts, finer))
    assert marks == auto != four  # by clustering into two the mark is found


@pytest.mark.full
def test_the_stages_that_the_planner_finds_train_the_same():
    words = [
        *SMALL,
        "model.layers=auto",
        "model.num_layers=4",
        "tune.devices=4",
        "tune.recipe=null",
    ]
    asked = compose(words)
    rows = tune_layouts(asked).found.best
    is_chosen = lambda found: found.mesh.pp > 1 and min(found.partition)
    chosen = next(row.request.config for row in rows if is_chosen(row.layout))
    job = assemble(replace(chosen, run=replace(chosen.run, dtype="float64")))
    state = stepped(job, None, next(job.data.batches()))
    assert (
        furthest(
            job.pipe.stack.options.network.parameters.from_parts(state["params"]),
            plain_steps(job, 1),
        )
        < 1e-10
    )


def test_plan_shows_each_stage_with_its_cost(capsys):
    assert cli.main(["plan", *SMALL, "mesh=2x2", "executor=spmd"]) == 0
    said = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(said) if "times of a microbatch" in line)
    rows = [line.split() for line in said[at + 3 : at + 5]]
    assert [row[:3] for row in rows] == [["0", "0", "0"], ["1", "1", "1"]]
    times = [
        (float(number), unit)
        for row in rows
        for number, unit in zip(row[3::2], row[4::2], strict=True)
    ]
    assert all(number > 0 and unit in ("us", "ms") for number, unit in times)
