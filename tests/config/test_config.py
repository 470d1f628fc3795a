"""Every choice composes to the settings of its class."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
from support.selection import full

from ppctl import config as c
from ppctl.cli.choices import (
    PARTS,
    all_settings,
    default_option,
    options,
    schema_of,
    schemas,
    settings_of,
)
from ppctl.cli.compose import compose
from ppctl.config.config_dirs import ROOT
from ppctl.config.groups.layout_settings import Explicit

# What an option needs besides its name, to be a request that can be served.
NEEDS = {
    ("model", "mlp"): ["data=regression"],
    ("data", "regression"): ["model=mlp"],
    ("model", "custom"): ["model.target=a.b", "data=regression"],
    ("data", "custom"): ["data.target=a.b", "model=mlp"],
    ("data", "text"): ["data.path=somewhere"],
    ("data", "mixture"): ["data.parts=[{path:somewhere}]"],
    ("data", "tokens"): ["data.path=somewhere"],
    ("executor", "reference"): ["mesh=1x1"],
    ("optim", "custom"): ["optim.target=a.b"],
    ("schedule", "csv"): [f"schedule.path={ROOT}/tests/golden/1f1b_p4_m8.csv"],
    ("partition", "explicit"): ["partition.layers=[1,1,1,1,1,1,1,1]"],
}
SIZES = [name for name in options("model") if "_" in name]  # sizes of well-known models
CHOICES = [
    (part, option)
    for part in PARTS
    for option in options(part)
    if part != "model" or option not in SIZES
]


def composed(*overrides: str) -> c.Config:
    config = compose(list(overrides))
    assert isinstance(config, c.Config)
    return config


@pytest.mark.parametrize(
    ("part", "option"), CHOICES, ids=[f"{part}={option}" for part, option in CHOICES]
)
def test_every_choice_composes_to_its_dataclass_and_defaults(part, option):
    chosen = getattr(composed(f"{part}={option}", *NEEDS.get((part, option), [])), part)
    assert type(chosen) is schema_of(part, option)
    if part == "mesh":
        assert chosen.text == option
        return
    assert chosen.name == option
    if part == "hardware" and option != "auto":
        return  # has no defaults: see test_hardware.py
    default = schema_of(part, option)()
    for field in dataclasses.fields(default):
        if (option, field.name) != ("csv", "num_microbatches") and field.name not in (
            "name",
            "path",
            "target",
            "layers",
            "parts",
        ):
            assert getattr(chosen, field.name) == getattr(default, field.name), field.name


@pytest.mark.parametrize("name", [SIZES[0], *map(full, SIZES[1:])])
def test_every_size_of_a_model_composes_and_states_its_source(name):
    model = composed(f"model={name}").model
    assert (type(model), model.name) == (c.Transformer, name)
    assert (
        "config.json of huggingface.co/"
        in (ROOT / "conf" / "model" / f"{name}.yaml").read_text().splitlines()[0]
    )


@pytest.mark.parametrize("recipe", options("recipes"))
def test_every_recipe_composes_and_has_its_header(recipe):
    assert isinstance(composed(f"recipes={recipe}").model, c.Transformer | c.MLP | c.CustomModel)
    header = (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    for word in ("# @package _global_", "# Claim: ", "# Hardware: ", f" recipes={recipe}"):
        assert word in header, word
    assert re.search("^# Command: ppctl (train|plan|verify|bench) ", header, re.MULTILINE)


def test_no_override_composes_to_the_defaults():
    config = composed()
    names = (
        config.model.name,
        config.mesh.text,
        config.schedule.name,
        config.executor.name,
        config.data.name,
    )
    assert names == ("transformer", "2x4", "interleaved", "spmd", "stdlib")
    assert config.run == c.Run(dir="runs/default")


def test_some_option_chooses_every_class_of_settings():
    shipped = {schema_of(part, option) for part, option in CHOICES}
    named = {
        cls for cls in schemas().values() if "name" in {f.name for f in dataclasses.fields(cls)}
    }
    bases = {base for cls in shipped for base in cls.__mro__[1:]}
    assert named - {c.Run} - bases <= shipped


@pytest.mark.parametrize(
    ("text", "sizes"), [("1x1", (1, 1, 1)), ("3x5", (3, 5, 1)), ("2x16x4", (2, 16, 4))]
)
def test_a_mesh_of_any_sizes_is_a_choice(text, sizes):
    config = composed(f"mesh={text}", "data.batch_size=480", "schedule.num_microbatches=4")
    assert (config.mesh.dp, config.mesh.pp, config.mesh.fsdp) == sizes


def test_axes_of_the_mesh_are_settings_too():
    assert composed("mesh=1x2", "mesh.pp=4").mesh.text == "1x4"


def test_the_command_line_wins_over_a_recipe():
    config = composed("recipes=tiny", "mesh=1x4", "run.num_steps=7")
    assert (config.mesh.text, config.run.num_steps, config.run.name) == ("1x4", 7, "tiny")


def test_the_run_directory_follows_the_name():
    assert composed("run.name=mine").run.dir == "runs/mine"
    assert composed("run.name=mine", "run.dir=/tmp/x").run.dir == "/tmp/x"


def test_values_keep_the_types_of_the_dataclass():
    config = composed(
        "optim.lr=1", "run.checkpoint.every=null", "optim.clip_norm=null", "run.name=2024"
    )
    assert isinstance(config.optim.lr, float)
    assert config.run.name == "2024"
    assert config.run.checkpoint.every is None
    assert config.optim.clip_norm is None


def test_the_layers_of_stages_are_a_list_or_text():
    for text, layers in (
        ("[3,2,2,3]", [3, 2, 2, 3]),
        ("[]", []),
        ("'Et*3|(tt|)*2,tL'", "Et*3|(tt|)*2,tL"),
        ("Et*3|t*2|L", "Et*3|t*2|L"),
        ("", ""),
    ):
        assert composed("partition=explicit", f"partition.layers={text}").partition == Explicit(
            layers=layers
        )


def test_settings_load_no_schedule_family():
    loaded = (
        "import sys, ppctl.config; print(*(name for name in sys.modules if "
        "name.startswith('ppctl.schedule')))"
    )
    command = [sys.executable, "-c", loaded]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rules = (
        "ppctl.schedule.ir",  # methods of ppctl itself: a schedule shows its chart in notebooks
        "ppctl.schedule.costs",  # their bounds
        "ppctl.schedule.remat",
        "ppctl.schedule.engine_traits",
        "ppctl.schedule.mesh_axes",
        "ppctl.schedule.axis_table",
    )
    assert {*done.stdout.split()} == {"ppctl.schedule", *rules}


def test_the_names_of_settings_are_unique_within_a_part():
    assert all_settings()["schedule.num_chunks"].about == "stages a rank"
    assert all_settings()["run.distributed"].about.startswith(
        "off: one process | explicit: several"
    )
    assert (
        all_settings()["model.d_model"].default == c.Transformer().d_model
    )  # the default option's, not the MLP's
    assert "model.name" not in settings_of("model", c.MLP)
    assert default_option("schedule") == "interleaved"
