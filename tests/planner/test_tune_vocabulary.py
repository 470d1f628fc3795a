"""`ppctl tune` with embedding and head on all ranks: the layout is predicted as by `ppctl plan`."""

import json
import re
from dataclasses import replace

import jax
import pytest
from support.tuning import composed

from ppctl import cli, config, errors
from ppctl.planner.cost.predict_step import predict_job
from ppctl.planner.search import tune_layouts as tune_module
from ppctl.training.pipeline.job import assemble

pytestmark = pytest.mark.usefixtures("machine")

VOCABULARY = (  # a batch that leaves no layout without a pipeline
    "model.num_layers=4 model.d_model=128 model.num_heads=2 model.seq_len=128 data=synthetic "
    "data.vocab_size=32768 data.batch_size=6 schedule=1f1b schedule.num_microbatches=3 mesh=1x4 "
    "hardware=h100 run.dtype=bfloat16 run.platform=cpu tune.schedules=[1f1b] tune.remat=[none] "
    "tune.tp=[1] tune.recipe=null"
)


def planned_step(*words):
    """The seconds and the bytes that `ppctl plan` predicts of a request."""
    asked = composed([*VOCABULARY.split(), *words])
    found = predict_job(
        assemble(replace(asked, tune=config.Tune()), on_one_device=True, only_planned=True)
    )
    assert found.time is not None
    return found.time.total_s, max(found.total_bytes)


@pytest.mark.full
def test_a_layout_with_a_divided_vocabulary_is_predicted_as_by_plan(capsys):
    assert cli.main(["tune", *VOCABULARY.split(), "tune.best=1", "--json"]) == 0
    (first,) = json.loads(capsys.readouterr().out)["best"]
    assert (first["vocab"], first["schedule"]) == ("parallel", "1f1b, vocab=parallel")
    assert "schedule.vocab=parallel" in first["overrides"]
    assert planned_step(*first["overrides"]) == (
        pytest.approx(first["step_time_s"], rel=1e-9),
        first["total_bytes"],
    )


@pytest.mark.full
def test_a_recipe_states_that_the_vocabulary_is_divided(capsys, tmp_path):
    assert (
        cli.main(
            ["tune", *VOCABULARY.replace("recipe=null", "recipe=found").split(), "tune.best=2"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "1f1b, vocab=parallel" in out
    assert "vocab: parallel" in (tmp_path / "recipes" / "found.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune.vocab=[parallel]", r"this model has no functions for it \(DividedStack.parts\)"),
        (
            "schedule.vocab=parallel",
            r"`ppctl tune` chooses schedules. .* use tune.vocab=\[parallel\]",
        ),
        ("tune.vocab=[halved]", r"tune.vocab=halved is not one of whole, parallel"),
        ("tune.vocab=[]", r"tune.vocab=\[\] leaves nothing to choose from"),
    ],
)
def test_a_vocabulary_that_cannot_be_divided_is_refused(words, message, tuned):
    code, out, err = tuned(*words.split())
    assert (code, out) == (2, "")
    assert re.search(message, err)


def test_executors_that_cannot_divide_the_vocabulary_have_it_whole(monkeypatch):
    def refuses(*args):
        raise errors.ConfigError("not here")

    asked = composed([*VOCABULARY.split()])
    batch = {"inputs": jax.ShapeDtypeStruct((6, 128), "int32")}
    stack = assemble(
        replace(asked, tune=config.Tune()), on_one_device=True, only_planned=True
    ).pipe.stack
    assert tune_module._vocab(None, stack, batch) == ("whole", "parallel")
    monkeypatch.setattr(tune_module, "divided_stack", refuses)
    assert tune_module._vocab(None, stack, batch) == ("whole",)
    with pytest.raises(errors.ConfigError, match="not here"):
        tune_module._vocab(["parallel"], stack, batch)
