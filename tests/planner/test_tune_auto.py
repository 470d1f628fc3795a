"""`tune.schedules=[...,auto]`: what schedule=auto finds for the best layouts is what `ppctl plan`
says.
"""

import json
import re
from pathlib import Path

import pytest
from support.selection import full

from ppctl import cli, config
from ppctl.cli.compose import compose
from ppctl.planner.cost.rank_memory import GIB
from ppctl.planner.search import tune_auto
from ppctl.planner.search.planned_layouts import predicted_of
from ppctl.schedule.schedule_text import from_csv
from ppctl.training.pipeline.job import assemble

WORDS = (  # a batch that leaves no layout without a pipeline
    "model=mlp model.num_layers=4 model.d_model=512 data=regression data.batch_size=315 "
    "data.num_rows=4096 data.num_features=8 data.num_targets=512 data.eval_fraction=0.1 "
    "run.eval_batches=1 run.dtype=float32 run.platform=cpu mesh=1x2 schedule.num_microbatches=5 "
    "tune.remat=[none] tune.max_chunks=1 tune.best=1 optim=sgd"
)


@pytest.fixture
def tuned(capsys, tmp_path, monkeypatch):
    """A function that tunes on two cores: (exit code, what was printed on stdout, on stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def run(*words):
        return cli.main(["tune", *WORDS.split(), *words]), *capsys.readouterr()

    return run


def test_the_schedule_that_wins_is_what_plan_says_and_the_recipe(tuned, capsys):
    code, out, _ = tuned(
        "tune.schedules=[gpipe,auto]", "executor=mpmd", "plan.memory_gib=1", "--json"
    )
    document = json.loads(out)
    (first, second), (searched,) = document["best"], document["searched_schedules"]
    assert (code, first["schedule"], second["schedule"]) == (0, "auto", "gpipe")
    saved_s = second["step_time_s"] - first["step_time_s"]
    assert searched["saved_s"] == pytest.approx(saved_s, rel=1e-9)
    assert searched["saved_fraction"] == pytest.approx(saved_s / second["step_time_s"], rel=1e-9)
    assert searched["saved_fraction"] > 0.03
    assert cli.main(["plan", "--config-dir", ".", "recipes=tuned", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["auto"] == searched["auto"]
    assert searched["gap_fraction"] == pytest.approx(0, abs=1e-9)
    assert "no shorter one is possible" in found["auto"]
    assert found["step_time_s"] == first["step_time_s"] == searched["found"]["step_time_s"]
    assert max(found["total_bytes"]) == first["total_bytes"]
    assert found["predicted_bubble_fraction"] == first["predicted_bubble_fraction"]
    assert (found["partition"], found["rank_of"]) == (first["partition"], first["rank_of"])
    stages = [[stage[f"{kind}_s"] for kind in ("forward", "backward")] for stage in found["stages"]]
    assert [of_stage[:2] for of_stage in first["stage_s"]] == stages
    recipe, typed = (
        compose(words, ["--config-dir", "."], ["tune"])
        for words in (["recipes=tuned"], asked(first))
    )
    assert isinstance(recipe, config.Config)
    assert isinstance(typed, config.Config)
    assert isinstance(recipe.schedule, config.Auto)
    assert recipe.schedule.max_memory_gib is not None
    assert 0.99 < recipe.schedule.max_memory_gib < 1
    parts = ("schedule", "partition", "mesh", "executor")
    assert [getattr(recipe, part) for part in parts] == [getattr(typed, part) for part in parts]


def asked(layout):
    return [*WORDS.split(), "executor=mpmd", *layout["overrides"]]


def test_a_line_says_what_was_found_within_the_memory_there_is(tuned, monkeypatch):
    """At the first cap, which leaves nothing for temporaries, the schedule is too large as it is
    planned.
    """
    caps = []

    def seen(request, stack):
        job, found = predicted_of(request, stack)
        caps.append((getattr(request.schedule, "max_memory_gib", None), max(found.total_bytes)))
        return job, found

    monkeypatch.setattr(tune_auto, "_temporaries", lambda *layout: 0)
    monkeypatch.setattr(tune_auto, "predicted_of", seen)
    code, out, _ = tuned("tune.schedules=[1f1b,auto]", "executor=mpmd", "plan.memory_gib=0.01283")
    (first_cap, too_much), *_, (cap, held) = caps
    assert code == 0
    assert held <= 0.01283 * GIB < too_much
    assert cap < first_cap <= 0.01283
    said = (
        r"^schedule=auto, mesh=1x2, \d+ microbatches, remat=none: [\d.]+ s, (no shorter|[\de.-]+ "
        r"s \([\d.]+%\) shorter) than the best layout of a family \(mesh=1x2 1f1b, \d+ "
        r"microbatches, remat=none\)\. It is .* a rank: (no shorter one is possible|[\d.]+% above "
        r"the bound); .*\.$"
    )
    assert re.search(said, out, re.MULTILINE), out


@pytest.mark.parametrize("executor", ["mpmd", full("spmd")])
def test_a_schedule_too_large_to_search_is_left_out_with_the_reason(executor, tuned, monkeypatch):
    monkeypatch.setattr("ppctl.schedule.search.auto_search.MOST_TASKS", 10)
    words = [
        "tune.schedules=[1f1b,auto]",
        f"executor={executor}",
        "tune.recipe=null",
        "plan.memory_gib=1",
        "--json",
    ]
    code, out, _ = tuned(*words)
    document = json.loads(out)
    (row,), (searched,) = document["best"], document["searched_schedules"]
    assert (code, row["schedule"], searched["found"]) == (0, "1f1b", None)
    assert re.search(r"tasks are more than the 10 that auto searches", searched["why_not"])


@pytest.mark.full
@pytest.mark.slow
def test_the_recipe_trains_and_the_run_keeps_its_schedule(tuned, capsys):
    words = ["tune.schedules=[gpipe,auto]", "plan.memory_gib=1", "executor=spmd", "run.num_steps=2"]
    assert tuned(*words, "run.trackers=[]")[0] == 0
    assert cli.main(["train", "--config-dir", ".", "recipes=tuned"]) == 0
    assert "finished at step 2" in capsys.readouterr().out
    (kept,) = Path().glob("runs/**/schedule.csv")
    planned = assemble(compose(["recipes=tuned"], ["--config-dir", "."], ["train"])).pipe.schedule
    assert from_csv(kept.read_text(), "kept").ranks == planned.ranks


@pytest.mark.full
def test_without_a_pipeline_there_is_nothing_to_search(tuned):
    code, out, _ = tuned("mesh=1x1", "tune.schedules=[1f1b,auto]", "tune.recipe=null")
    assert code == 0
    assert "schedule=auto: none of these layouts has a pipeline." in out


def test_auto_needs_the_memory_of_a_device(tuned, monkeypatch):
    monkeypatch.setattr("ppctl.planner.search.tune_layouts.device_limit", lambda *request: None)
    code, out, err = tuned("tune.schedules=[auto]")
    assert (code, out) == (2, "")
    assert (
        "tune.schedules: auto is searched for the memory of a device, which is not known of "
        "host. Use plan" in err
    )
    assert (
        "tune.schedules: executor=spmd cannot run schedule autos, only gpipe, "
        in tuned("tune.schedules=[autos]")[2]
    )


@pytest.mark.parametrize("number", [59.328173, 0.00123456789, 1.0, 79999.9])
def test_a_cap_is_rounded_down_to_a_few_digits(number):
    found = tune_auto._rounded_down(number)
    assert number * (1 - 1e-4) < found <= number
    assert tune_auto._rounded_down(-1.0) == 0
