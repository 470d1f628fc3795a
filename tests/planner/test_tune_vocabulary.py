"""`ppctl tune` with embedding and head on all ranks: what it gains is what `ppctl plan` says of both."""

import json
import re
from dataclasses import replace

import jax
import pytest
from support.tuning import composed, layout

from ppctl import cli, config, errors
from ppctl.planner import tune as tune_module
from ppctl.planner import tune_terminal
from ppctl.planner.memory import DeviceLimit
from ppctl.planner.predict import predict_job
from ppctl.schedule.partition.partition import layout_text
from ppctl.training.job import assemble

pytestmark = pytest.mark.usefixtures("machine")

VOCABULARY = (  # a batch that leaves no layout without a pipeline
    "model.num_layers=4 model.d_model=128 model.num_heads=2 model.seq_len=128 data=synthetic data.vocab_size=32768 "
    "data.batch_size=6 schedule=1f1b schedule.num_microbatches=3 mesh=1x4 hardware=h100 run.dtype=bfloat16 "
    "run.platform=cpu tune.schedules=[1f1b] tune.remat=[none] tune.tp=[1] tune.recipe=null"
)


def planned_step(*words):
    """The seconds and the bytes that `ppctl plan` predicts of a request."""
    asked = composed([*VOCABULARY.split(), *words])
    found = predict_job(assemble(replace(asked, tune=config.Tune()), on_one_device=True, only_planned=True))
    assert found.time is not None
    return found.time.total_s, max(found.total_bytes)


def test_what_dividing_the_vocabulary_gains_is_what_plan_says_of_both(capsys):
    assert cli.main(["tune", *VOCABULARY.split(), "tune.best=1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (first,), gain = document["best"], document["gain_of_divided_vocabulary"]
    assert (first["vocab"], first["schedule"]) == ("parallel", "1f1b, vocab=parallel")
    assert "schedule.vocab=parallel" in first["overrides"]
    divided, whole = planned_step(*first["overrides"]), gain["whole"]
    assert divided == (pytest.approx(first["step_time_s"], rel=1e-9), first["total_bytes"])
    same = [word for word in first["overrides"] if not word.startswith(("schedule.vocab", "partition"))]
    layers = f"partition.layers=[{','.join(map(str, whole['partition']))}]"
    before = planned_step(*same, "partition=explicit", layers)
    assert gain["saved_s"] == pytest.approx(before[0] - divided[0], rel=1e-6)
    assert gain["saved_fraction"] == pytest.approx(1 - divided[0] / before[0], rel=1e-6)
    assert gain["saved_bytes"] == before[1] - divided[1] > 0
    assert document["with_whole_vocabulary"]["step_time_s"] <= before[0]


@pytest.mark.full
def test_a_recipe_says_where_the_vocabulary_is_divided(capsys, tmp_path):
    assert cli.main(["tune", *VOCABULARY.replace("recipe=null", "recipe=found").split(), "tune.best=2"]) == 0
    out = capsys.readouterr().out
    assert "1f1b, vocab=parallel" in out
    assert re.search(r"embedding and head on all ranks of the first: its step is .* s \([\d.]+%\) shorter than", out)
    assert "vocab: parallel" in (tmp_path / "recipes" / "found.yaml").read_text()


def gain_of(divided, whole, limit=None):
    return tune_terminal.VocabularyGain(divided, whole).text("the first", limit)


def test_a_line_says_what_dividing_the_vocabulary_gains():
    divided, whole = layout((1, 4, 1), 1.0), replace(layout((1, 4, 1), 1.25), memory={"parameters": 3 * 2**30})
    divided = replace(divided, vocab="parallel", memory={"parameters": 2 * 2**30})
    said = (
        "embedding and head on all ranks of the first: its step is 0.25 s (20.0%) shorter than that of the same layout "
        f"with both whole ({layout_text(whole.partition)}), and takes 1.0 GiB less memory"
    )
    assert gain_of(divided, whole) == f"{said}."
    assert gain_of(divided, whole, DeviceLimit(2 * 2**30, "here")) == f"{said}, which would not fit."
    assert " 0.25 s (25.0%) longer than" in gain_of(whole, divided)
    assert " 1.0 GiB more memory" in gain_of(whole, divided)
    assert gain_of(divided, None).endswith("with both whole there is no such layout.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune.vocab=[parallel]", r"this model does not say that it has \(Stack.has_vocabulary\)"),
        ("schedule.vocab=parallel", r"`ppctl tune` chooses schedules. .* alone with tune.vocab=\[parallel\]"),
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
    stack = assemble(replace(asked, tune=config.Tune()), on_one_device=True, only_planned=True).pipe.stack
    assert tune_module._vocab(asked, stack, batch) == ("whole", "parallel")
    monkeypatch.setattr(tune_module, "with_vocabulary_of", refuses)
    assert tune_module._vocab(asked, stack, batch) == ("whole",)
    with pytest.raises(errors.ConfigError, match="not here"):
        tune_module._vocab(replace(asked, tune=config.Tune(vocab=["parallel"])), stack, batch)
