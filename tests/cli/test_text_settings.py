"""Text settings are kept as typed: on the command line, in sweeps, and in YAML files."""

from __future__ import annotations

import pytest

from ppctl.cli.choices import REQUIRED, all_settings
from ppctl.cli.compose import compose
from ppctl.cli.multirun import compose_sweep
from ppctl.cli.text_settings import as_typed, text_settings
from ppctl.errors import ConfigError

LOOKS_TYPED = ("12e4567", "2026_11_25", "1_0", "007", "true", "1.50", "nan", "-1e3", "+5")


@pytest.mark.parametrize("text", LOOKS_TYPED)
def test_a_name_is_the_text_that_was_typed(text):
    config = compose([f"run.name={text}"])
    assert (config.run.name, config.run.dir) == (text, f"runs/{text}")


def test_quotes_are_added_to_whole_texts_only():
    unchanged = [
        *("run.start_from=null", "run.name='1_0'", "run.name=a 1", "run.name=1_0x", "run.name="),
        *("run.coordinator=10.0.0.1:8476", "run.dir=${run.name}", "run.name=a\\,1"),
        *("run.seed=range(1,4)", "run.seed=1_0,2", "model.window=null", "run.timeline=true"),
    ]
    assert [*map(as_typed, unchanged)] == unchanged
    assert as_typed("tune.schedules=[1e5,gpipe, 1_0 ]") == "tune.schedules=['1e5',gpipe, '1_0' ]"
    assert as_typed("run.name=choice(1e5,a)") == "run.name=choice('1e5',a)"
    parts = as_typed("data.parts=[{path: 1_0, weight: 1_0}, {weight: 2, path: true}]")
    assert parts == "data.parts=[{path: '1_0', weight: 1_0}, {weight: 2, path: 'true'}]"


def test_every_setting_with_a_text_as_default_is_a_text_setting():
    texts = {
        key
        for key, each in all_settings().items()
        if type(each.default) is str and each.default != REQUIRED
    }
    assert texts <= text_settings() | {"partition.layers"}  # a list or text
    numbers = {
        key for key, each in all_settings().items() if type(each.default) in (int, float, bool)
    }
    assert not numbers & text_settings()


def test_texts_of_a_sweep_are_kept_as_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = compose_sweep(["data=text", "data.path=2026_11_25,12e4567,a"], None, ["train"]).jobs
    typed = ["2026_11_25", "12e4567", "a"]
    assert [job.config.data.path for job in jobs] == typed
    assert [job.values for job in jobs] == [{"data.path": text} for text in typed]
    assert [job.name for job in jobs] == [f"data.path={text}" for text in typed]
    assert [job.run_dir.name for job in jobs] == [f"data.path={text}" for text in typed]
    again = [compose([*job.words[1:]]).data.path for job in jobs]
    assert again == typed


def test_texts_of_a_recipe_are_kept_as_written(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(
        "defaults: [mixture]\nparts: [{path: 0123, weight: 1_0}]\n"
    )
    (tmp_path / "recipes/2026_11.yaml").write_text(
        "# @package _global_\ndefaults: [override /data: mine]\n"
        "run: {name: 2026_11_25, distributed: off, num_steps: 1_000, dir: '${run.name}'}\n"
        "data: {end_token: 12e4567, tokenizer: yes, cache_dir: 'quoted'}\n"
    )
    config = compose(["recipes=2026_11"], str(tmp_path))
    run, data = config.run, config.data
    assert (run.name, run.dir, run.distributed, run.num_steps) == (
        *("2026_11_25", "2026_11_25", "off", 1000),
    )
    assert (data.end_token, data.tokenizer, data.cache_dir) == ("12e4567", "yes", "quoted")
    assert (data.parts[0].path, data.parts[0].weight) == ("0123", 10.0)


def test_digits_of_numbers_are_grouped_as_in_python():
    config = compose(["optim.lr=1_000", "run.num_steps=2_000"])
    assert (config.optim.lr, config.run.num_steps) == (1000.0, 2000)


NINE = [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 12)]
TEN = [f"a{i}: " + "\n ".join([f"${{a{i - 1}}}"] * 10) for i in range(1, 12)]
ENDLESS = {
    "nested aliases": ["a0: &a0 [1, 2]", *NINE],
    "an alias in itself": ["a: &a [*a]"],
    "nested interpolations": ["a0: x", *TEN, "run: {name: '${a11}'}"],
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_recipe_that_expands_without_end_is_refused(case, tmp_path):
    (tmp_path / "recipes").mkdir()
    lines = ["# @package _global_", *ENDLESS[case]]
    (tmp_path / "recipes/large.yaml").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="its aliases and interpolations stand for"):
        compose(["recipes=large"], str(tmp_path))


def test_aliases_and_interpolations_of_a_recipe_are_replaced(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/short.yaml").write_text(
        "# @package _global_\nrun: {num_steps: &steps 7, seed: *steps, name: 'a${run.seed}-${run.seed}'}\n"
    )
    run = compose(["recipes=short"], str(tmp_path)).run
    assert (run.num_steps, run.seed, run.name) == (7, 7, "a7-7")
