"""Messages on wrong keys, values, options and overrides, without composing a request."""

from __future__ import annotations

import re

import pytest

from ppctl.cli import choices
from ppctl.cli.fault_messages import parse_override, refuse
from ppctl.cli.hydra_extensions import MESH_CHOICE
from ppctl.cli.sweep_options import wrong_sweep_setting
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
        "mesh.ep",
        "mesh.ep is not a setting of mesh=2x4.* .settings: dp, pp, fsdp, tp, cp, order",
    ),
    ("", "mesh.pp.x", "mesh.pp.x: mesh.pp is one value, with nothing below it"),
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
        "layers: partition=uniform has no settings of its own. Choose partition=explicit, and",
    ),
    ("partition=explicit", "partition.lyrs", "Did you mean partition.layers. .settings: layers"),
    (
        "partition=explicit",
        "partition.layers.a",
        "partition.layers is one value, with nothing below it",
    ),
    (
        "partition=balanced",
        "partition.x",
        "partition.x is not a setting of partition=balanced. .settings: none",
    ),
    ("", "recipe", "recipe is not a part of the config. Did you mean recipes"),
    ("", "hydra.foo", "hydra.foo is not a setting of Hydra's"),
    (
        "",
        "launch.proceses",
        "launch.proceses is not a setting of launch. Did you mean launch.processes",
    ),
    (
        "",
        "hardware.peak_flops",
        "hardware=auto has no settings of its own. Choose hardware=.* or one of .* others, and",
    ),
    ("", "hardware.memory_gib", "hardware.memory_gib: hardware=auto has no settings of its own"),
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
]


@pytest.mark.parametrize(("options", "key", "message"), UNKNOWN_KEYS)
def test_an_unknown_key_names_similar_settings(options, key, message):
    names = {part: choices.default_option(part) for part in choices.PARTS}
    names |= dict(word.split("=") for word in options.split())
    parts = {part: (name, choices.schema_of(part, name)) for part, name in names.items()}
    plain = {part: ("", cls) for part, cls in choices.PLAIN.items()}
    assert re.search(message, choices.unknown_key(key, parts | plain))


WRONG_VALUES = [
    ("mesh.pp=null", "mesh.pp=null: mesh.pp takes a whole number .default 1"),
    ("run.eval_every=often", "run.eval_every takes a whole number or null .default 100"),
    ("run.timeline=maybe", "run.timeline takes true or false .default false"),
    ("optim.lr=fast", "optim.lr takes a number .default 0.002"),
    ("run.name=[a]", "run.name takes text"),
    ("run=3", "run=3: run is a part. Set what is in it, for example run.name"),
    (
        "run.checkpoint=null",
        "run.checkpoint is a part. Set what is in it, for example run.checkpoint.enabled",
    ),
    ("model.num_layers=", "model.num_layers=: model.num_layers takes a whole number"),
    ("hydra.job.num=abc", "hydra.job.num=abc: hydra.job.num does not take such a value"),
    ("hardware.peak_flops=3", "hardware.peak_flops takes values by name .no default"),
    ("hardware.device_kinds=3", "hardware.device_kinds takes a list .no default"),
    ("hardware.memory_gib=x", "hardware.memory_gib takes a number or null .default null"),
    ("hardware.reached.flops=null", "hardware.reached.flops does not take such a value"),
    ("hardware.peak_flops.float32=x", "peak_flops.float32 does not take such a value"),
]


@pytest.mark.parametrize(("word", "message"), WRONG_VALUES)
def test_a_wrong_value_names_the_type(word, message):
    assert re.search(message, choices.wrong_value(word.partition("=")[0], word))


WRONG_OPTIONS = [
    (
        "partition=balancd",
        "partition=balancd is not an option of .* Did you mean partition=balanced",
    ),
    ("recipes=tinny", "recipes=tinny is not an option of recipes. Did you mean recipes=tiny"),
    ("hardware=h10", "hardware=h10 is not an option of hardware. Did you mean hardware=h100"),
    ("mesh=0x4", "mesh=0x4 is not a mesh. .*at least 1"),
    ("mesh=1x1x1x1x1x1", "mesh=1x1x1x1x1x1 is not a mesh"),
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
    ("~run.seed", "~run.seed: nothing can be removed"),
    ("+recipes=tiny", "recipes is there already. Drop the .: recipes=tiny"),
    ("++model.num_layers=2", "model.num_layers is there already. Drop the .: model.num_layers=2"),
    ("schedule=null", "schedule=null is not an option of schedule"),
    ("model=[mlp,transformer]", "is not an option of model"),
    ("partition.layers=3,2,2,1", "gives several values. Add --multirun"),
    ("partition.layers=Et|(tt|)*2,tL", "cannot be read .*needs quotes that reach ppctl"),
    ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: add --multirun for a sweep, or leave it out"),
    ("hydra.launcher.x=1", "hydra.launcher.x=1 is for the jobs of a sweep. Add --multirun"),
    ("hydra.launcher.jobs=2", "hydra.launcher.jobs=2 is for the jobs of a sweep. Add --multirun"),
    ("hydra/launcher=basic", "hydra/launcher=basic is not an option of hydra/launcher"),
]


@pytest.mark.parametrize(("word", "message"), REFUSED)
def test_an_override_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        refuse(parse_override(word), multirun=False, drawing=False)


OF_SWEEPS = [
    ("hydra.launcher.x=1", "launcher.x is not a setting of hydra/launcher=ppctl. .set"),
    ("hydra.launcher.nodes=2", "It is one of hydra/launcher=submitit_slurm"),
    ("hydra.launcher.jobs=abc", "hydra.launcher.jobs takes a whole number .default 1"),
    ("hydra.launcher.jobs=many", "hydra.launcher.jobs takes a whole number"),
    ("hydra/launcher=[a]", "is not an option of hydra/launcher"),
    ("hydra.launcher._target_=os.kill", "choose hydra/launcher=ppctl . submitit_slurm"),
    ("hydra.launcher.jobs=1,2", "Give hydra.launcher.jobs one value"),
    ("hydra/sweeper=basic", "hydra/sweeper=basic is not an option of hydra/sweeper"),
]


@pytest.mark.parametrize(("word", "message"), OF_SWEEPS)
def test_an_override_of_a_sweep_is_refused(word, message):
    try:
        refuse(parse_override(word), multirun=True, drawing=False)
        fault = wrong_sweep_setting(word.partition("=")[0], word, "ppctl")
    except ConfigError as error:
        fault = str(error)
    assert re.search(message, fault)
