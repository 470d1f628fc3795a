"""Messages on wrong keys, values, options and overrides, without composing a request."""

from __future__ import annotations

import re

import pytest

from ppctl.cli import choices
from ppctl.cli.compose import MESH_CHOICE
from ppctl.cli.fault_messages import parse_override, refuse
from ppctl.errors import ConfigError

UNKNOWN_KEYS = [
    ("", "modle.num_layers", "modle is not a part of the config. Did you mean model"),
    ("", "num_layers", "num_layers is not a part of the config. Did you mean model.num_layers"),
    (
        "",
        "schedule.num_layers",
        "schedule.num_layers is not a setting of .* Did you mean model.num_layers",
    ),
    (
        "",
        "run.checkpoint.evry",
        "run.checkpoint.evry is not a setting of run. Did you mean run.checkpoint.every",
    ),
    (
        "",
        "mesh.queue",
        "mesh.queue is not a setting of mesh=2x4.* .settings: dp, pp, fsdp, ep, tp, cp, order",
    ),
    (
        "schedule=gpipe",
        "schedule.num_chunks",
        "num_chunks is not .*=gpipe. It is a setting of schedule=interleaved",
    ),
    (
        "",
        "data.path",
        "data.path is not a setting of data=stdlib. It is a setting of data=text and data=tokens",
    ),
    (
        "",
        "partition.layers",
        "is not a setting of partition=uniform. It is a setting of partition=explicit. .settings: none",
    ),
    ("partition=explicit", "partition.lyrs", "Did you mean partition.layers. .settings: layers"),
    (
        "partition=balanced",
        "partition.x",
        "partition.x is not a setting of partition=balanced. .settings: none",
    ),
    ("", "recipe", "recipe is not a part of the config. Did you mean recipes"),
    (
        "",
        "launch.proceses",
        "launch.proceses is not a setting of launch. Did you mean launch.processes",
    ),
    (
        "",
        "hardware.peak_flops",
        "is not a setting of hardware=auto. It is a setting of hardware=.* and hardware=",
    ),
    (
        "hardware=h100",
        "hardware.peak_flops.float64",
        "has no float64 yet. Add it with a .: .hardware.peak_flops.f",
    ),
    (
        "",
        "run.peak_flops",
        "run.peak_flops is not a setting of run. Did you mean hardware.peak_flops",
    ),
    ("", "x", "x is not a part of the config"),
    (
        "",
        "hydra.launcher.x",
        "launcher.x is not a setting of hydra.launcher=ppctl. .settings: jobs",
    ),
    ("", "hydra.launcher.nodes", "It is a setting of hydra.launcher=submitit_slurm"),
    ("", "hydra.launcher._target_", "is not a setting of hydra.launcher=ppctl"),
]


@pytest.mark.parametrize(("options", "key", "message"), UNKNOWN_KEYS)
def test_an_unknown_key_names_similar_settings(options, key, message):
    names = {part: choices.default_option(part) for part in choices.PARTS}
    names |= dict(word.split("=") for word in options.split())
    parts = {part: (name, choices.schema_of(part, name)) for part, name in names.items()}
    parts |= {part: ("", cls) for part, cls in choices.PLAIN.items()}
    parts |= {part: ("ppctl", each["ppctl"]) for part, each in choices.SWEEP_PARTS.items()}
    assert re.search(message, choices.unknown_key(key, parts))


WRONG_OPTIONS = [
    (
        "partition=balancd",
        "partition=balancd is not an option of .* Did you mean partition=balanced",
    ),
    ("recipes=tinny", "recipes=tinny is not an option of recipes. Did you mean recipes=tiny"),
    ("hardware=h10", "hardware=h10 is not an option of hardware. Did you mean hardware=h100"),
    ("mesh=0x4", "mesh=0x4 is not a mesh. .*at least 1"),
    ("mesh=1x1x1x1x1x1x1", "mesh=1x1x1x1x1x1x1 is not a mesh"),
    ("mesh=4", "mesh=4 is not a mesh"),
]


@pytest.mark.parametrize(("word", "message"), WRONG_OPTIONS)
def test_a_wrong_option_names_the_others(word, message):
    group, _, option = word.partition("=")
    assert MESH_CHOICE.fullmatch(f"{group}/{option}") is None
    assert re.search(message, choices.wrong_option(group, option, choices.options(group)))


REFUSED = [
    ("tiny", "'tiny' is not KEY=VALUE. Did you mean recipes=tiny"),
    ("mlp", "'mlp' is not KEY=VALUE. Did you mean model=mlp"),
    ("model", "'model' is not KEY=VALUE. Did you mean model=transformer"),
    ("=3", "'=3' is not KEY=VALUE"),
    ("run.name=[1,", "cannot be read"),
    ("~run.seed", "~run.seed: settings cannot be removed"),
    ("schedule=null", "schedule=null is not an option of schedule"),
    ("model=[mlp,transformer]", "is not an option of model"),
    ("partition.layers=3,2,2,1", "gives several values. Add --multirun"),
    ("partition.layers=Et|(tt|)*2,tL", "cannot be read .*needs quotes that reach ppctl"),
    (
        "hydra.mode=MULTIRUN",
        "ppctl does not read this setting of Hydra's. Leave it out: a run writes",
    ),
    ("hydra.launcher.x=1", "hydra.launcher.x=1 is for the jobs of a sweep. Add --multirun"),
    ("hydra.launcher.jobs=2", "hydra.launcher.jobs=2 is for the jobs of a sweep. Add --multirun"),
    ("hydra/launcher=basic", "hydra/launcher=basic is not an option of hydra/launcher"),
]


@pytest.mark.parametrize(("word", "message"), REFUSED)
def test_an_override_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        refuse(parse_override(word), multirun=False, drawing=False)


OF_SWEEPS = [
    ("hydra/launcher=[a]", "is not an option of hydra/launcher"),
    ("hydra.launcher.jobs=1,2", "Give hydra.launcher.jobs one value"),
    ("hydra/sweeper=basic", "hydra/sweeper=basic is not an option of hydra/sweeper"),
]


@pytest.mark.parametrize(("word", "message"), OF_SWEEPS)
def test_an_override_of_a_sweep_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        refuse(parse_override(word), multirun=True, drawing=False)
