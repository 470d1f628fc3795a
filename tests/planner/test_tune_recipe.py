"""The recipe that `ppctl tune` writes is the request that it found, and replaces nothing of the
user's.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.selection import full_except
from support.tuning import WORDS, composed, request

from ppctl import cli, config
from ppctl.cli.commands.tune import tune
from ppctl.planner.search.tune_layouts import tune_layouts
from ppctl.planner.search.tuned_files import MARK, write_recipe

pytestmark = pytest.mark.usefixtures("machine")

RECIPES = {
    "uneven": "mesh=1x8 model.num_layers=9 hardware=h100",
    "mpmd": "mesh=1x2 executor=mpmd executor.unroll=0 tune.schedules=[interleaved,zb_v]",
    "examples": "model=mlp model.num_layers=4 model.d_model=16 data=regression data.batch_size=32 "
    "mesh=1x2",
    "settings": "mesh=1x2 optim.lr=1e-5 optim.clip_norm=null run.checkpoint.every=null run.name=mine "
    "run.seed=3",
    "options": "recipes=gpipe_notebook",  # names of a custom model's own
}


@pytest.mark.parametrize("words", full_except(RECIPES))
def test_the_recipe_is_the_request_found(words, tmp_path):
    shown = [*words.split(), f"tune.best={10 if 'num_layers=9' in words else 2}"]
    asked = composed(shown) if "mlp" in words or "recipes" in words else request(*shown)
    path = tmp_path / "recipes/tuned.yaml"
    assert tune(asked, as_json=True) == 0
    configs = [row.request.config for row in tune_layouts(asked).found.best]
    name = asked.run.name if asked.run.name != config.Run().name else "tuned"
    uneven = [i for i, found in enumerate(configs) if found.partition.name == "explicit"][:1]
    assert uneven or "num_layers=9" not in words
    for i in (0, len(configs) - 1, *uneven):
        written = write_recipe(path, configs[i], 1.0, None)
        found = composed([f"recipes={written.stem}"], str(tmp_path))
        of_run = written.stem if name == "tuned" else name
        run = replace(configs[i].run, name=of_run, dir=f"runs/{of_run}")
        assert found == replace(configs[i], run=run)


COUNTED = {
    "hardware": "hardware=h100 hardware.network.bytes_per_s=12e9 hardware.cuda.cores=99 "
    "run.dtype=bfloat16",
    "a dtype": "hardware=h100 +hardware.peak_flops.float64=67e12 run.memory_fraction=0.9",
    "order": "mesh=2x2 mesh.order=dp-pp-fsdp",
    "own": "hardware=mine hardware.memory_gib=33",
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_recipe_keeps_the_settings_of_its_plan(name, tmp_path):
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/mine.yaml").write_text("defaults: [h100]\nname: mine\n")
    asked = composed([*WORDS.split(), *COUNTED[name].split()], str(tmp_path))
    path = tmp_path / "recipes/tuned.yaml"
    write_recipe(path, asked, 1.0, None)
    found = composed(["recipes=tuned"], str(tmp_path))
    assert found == replace(asked, run=replace(asked.run, name="tuned", dir="runs/tuned"))
    text = path.read_text()
    assert ("# Needs: hardware/mine.yaml next to recipes/." in text) == (name == "own")
    (assumed,) = re.findall(r"^# Assumes: (.*)\.$", text, re.MULTILINE)
    assert assumed.startswith("data=regression data.")
    assert {"data.batch_size=32", "data.num_features=8"} <= {*assumed.replace(",", "").split()}
    assert f", hardware={asked.hardware.name}" in assumed


def test_a_recipe_keeps_a_setting_of_a_published_model_that_is_again_the_default(tmp_path):
    """The recipe named the model and left it out: it trained all 32 layers."""
    few = config.Transformer().num_layers
    words = ["model=llama3_8b", f"model.num_layers={few}", "mesh=1x4", "data=synthetic"]
    asked, path = composed(words), tmp_path / "recipes/tuned.yaml"
    write_recipe(path, asked, 1.0, None)
    assert composed(["recipes=tuned"], str(tmp_path)).model == asked.model
    assert asked.model.num_layers == few


def test_plan_of_the_recipe_prints_tunes_numbers(tuned, capsys):
    code, out, _ = tuned(
        "mesh=1x4", "hardware=h100", "run.dtype=bfloat16", "tune.schedules=[1f1b]", "--json"
    )
    first = json.loads(out)["best"][0]
    assert (code, cli.main(["plan", "--config-dir", ".", "recipes=tuned", "--json"])) == (0, 0)
    found = json.loads(capsys.readouterr().out)
    assert (found["hardware"], found["step_time_s"]) == ("h100", first["step_time_s"])
    assert max(found["total_bytes"]) == first["total_bytes"]
    assert cli.main(["verify", "--config-dir", ".", "recipes=tuned"]) == 2
    assert "Leave it out, or use hardware=auto." in capsys.readouterr().err


@pytest.mark.full
def test_adapters_are_all_that_has_gradients_and_moments_in_a_layout_found(tuned, capsys):
    words = [
        "model=transformer",
        "model.num_heads=2",
        "model.seq_len=16",
        "data=synthetic",
        "data.batch_size=16",
    ]
    words = [
        "tune",
        *words,
        "model.num_layers=4",
        "model.d_model=32",
        "mesh=1x4",
        "hardware=h100",
        "tune.best=1",
    ]
    words += [
        "tune.schedules=[zb_h1]",
        "tune.tp=[1]",
        "tune.cp=[1]",
        "optim.train=lora",
        "optim.lora_rank=2",
        "--json",
    ]
    assert cli.main(words) == 0
    first = json.loads(capsys.readouterr().out)["best"][0]
    assert cli.main(["plan", "--config-dir", ".", "recipes=tuned", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == first["step_time_s"]
    assert max(found["total_bytes"]) == first["total_bytes"]
    assert first["memory"]["optimizer"] < first["memory"]["parameters"]


def test_a_recipe_is_written_again_but_replaces_no_other(tuned, tmp_path):
    assert tuned("mesh=1x2")[0] == 0
    file = tmp_path / "recipes/tuned.yaml"
    first = file.read_text()
    assert tuned("mesh=1x2")[0] == 0
    assert file.read_text() == first
    code, out, _ = tuned("mesh=1x2", "optim.lr=0.5")
    assert code == 0
    assert "recipes/tuned_2.yaml: ppctl train --config-dir . recipes=tuned_2" in out
    assert file.read_text() == first
    assert composed(["recipes=tuned_2"], str(tmp_path)).run.name == "tuned_2"
    file.write_text(file.read_text().replace(MARK, "# mine"))
    before = file.read_text()
    code, out, err = tuned("mesh=1x2")
    assert (code, out, file.read_text()) == (2, "", before)
    assert err == (
        "ppctl: tune.recipe=tuned: recipes/tuned.yaml was not written by `ppctl tune` and is not "
        "overwritten. Use another name, or null.\n"
    )


def test_no_layout_is_searched_if_the_recipe_cannot_be_written(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ppctl.cli.commands.tune.tune_layouts", lambda config: pytest.fail("searched")
    )
    (tmp_path / "recipes/other.yaml").mkdir(parents=True)
    (tmp_path / "recipes/bytes.yaml").write_bytes(b"\xff\xfe")
    for name, why in (
        ("other", " cannot be written: it is a directory. Name a file in an existing"),
        ("bytes", ": recipes/bytes.yaml was not written by `ppctl tune` and is not overwritten."),
    ):
        code, _, err = tuned("mesh=1x2", f"tune.recipe={name}")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"ppctl: tune.recipe={name}{why}")
    monkeypatch.chdir(tmp_path / "recipes/other.yaml")
    Path("recipes").write_text("")
    assert "cannot be written: there is no directory recipes" in tuned("mesh=1x2")[2]
    Path("recipes").unlink()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written: permission denied" in tuned("mesh=1x2")[2]
