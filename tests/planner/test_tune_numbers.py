"""tune.devices=[...]: the best layout of each number, in one table, and the number that is chosen."""

import json
from pathlib import Path

import pytest

from ppctl import cli

WORDS = [
    "hardware=h100",
    "data=synthetic",
    "data.batch_size=64",
    "model.num_layers=8",
    "model.d_model=1024",
    "model.num_heads=8",
    "model.seq_len=512",
    "tune.best=1",
    "run.dtype=bfloat16",
]


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """A function that tunes: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def tune(*words):
        code = cli.main(["tune", *WORDS, *words])
        return code, *capsys.readouterr()

    return tune


@pytest.mark.full
def test_each_row_equals_tunes_answer_for_its_number(tune):
    code, out, err = tune("tune.devices=[8,2,4]", "plan.tokens=1e9", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [each["num_devices"] for each in found["numbers"]] == [2, 4, 8]
    for each in found["numbers"][:2]:
        _, alone, _ = tune(f"tune.devices={each['num_devices']}", "plan.tokens=1e9", "--json")
        keys = ("best", "token_budget")
        assert {k: each[k] for k in keys} == {k: json.loads(alone)[k] for k in keys}
    seconds = {each["num_devices"]: each["best"][0]["step_time_s"] for each in found["numbers"]}
    assert found["chosen"] == min(seconds, key=lambda n: n * seconds[n])


@pytest.mark.full
def test_days_choose_the_fewest_that_finish_and_the_recipe_is_theirs(tune):
    few = "plan.tokens=1e9", "tune.schedules=[1f1b]", "tune.remat=[full]"  # a small search
    _, out, _ = tune("tune.devices=[2,4]", *few, "tune.recipe=null", "--json")
    days = {n["num_devices"]: n["token_budget"]["days"] for n in json.loads(out)["numbers"]}
    goal = (days[2] + days[4]) / 2
    code, out, _ = tune("tune.devices=[2,4]", *few, f"tune.days={goal}")
    assert code == 0
    assert f"4 devices are the fewest that train plan.tokens in {goal:g} days." in out
    assert "their layout is a recipe now, recipes/tuned.yaml" in out
    assert cli.main(["train", "--config-dir", ".", "recipes=tuned", "--cfg", "job"]) == 0
    code, out, _ = tune("tune.devices=[2]", *few, "tune.days=1e-6")
    assert code == 1
    assert "no number of devices trains plan.tokens in 1e-06 days. Use more devices." in out


@pytest.mark.full
def test_a_number_without_a_layout_is_named(tune):
    code, out, _ = tune("tune.devices=[1,4]", "plan.memory_gib=1.2", "tune.recipe=null")
    assert code == 0
    assert "no layout fits on 1 devices." in out
    assert not Path("recipes").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune.devices=[4,0]"], "tune.devices=0 must be a finite number of at least 1"),
        (["tune.devices=many"], "tune.devices=many is not a number of devices"),
        (["tune.devices=[]"], "tune.devices=[] leaves nothing to choose from"),
        (["tune.devices=4", "tune.days=3"], "tune.days=3 chooses among several numbers"),
        (["tune.devices=[2,4]", "tune.days=3"], "tune.days=3 needs the number of tokens"),
        (["tune.devices=[2,4]", "tune.measure=1"], "tune.measure=1 needs one number of devices"),
    ],
)
def test_requests_that_make_no_table_are_refused(tune, words, message):
    code, _, err = tune(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
